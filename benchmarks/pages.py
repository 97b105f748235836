"""`python -m benchmarks.pages`: what the page of runs costs the processor.

One page of a folder of 1,000 runs, and ten open pages that ask every two seconds: of such a folder, and of a run that
writes five lines a second. The runs are those of `benchmarks.listing`.
"""

from __future__ import annotations

import http.cookiejar
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psutil

from benchmarks.listing import copies, trained

PAGES, RUNS = 10, 1000
_TRAIN = (sys.executable, "-m", "train")
_LINE = '{{"step": {}, "epoch": 1, "loss": 0.5, "lr": 0.1, "samples_per_s": 1.5, "data_wait": 0.1, "step_time": 0.2}}\n'


def bench(folder: Path, seconds: int) -> str:
    """Let the pages ask for so many seconds for each row. Returns a table in Markdown."""
    rows = ["| what | of a processor |", "|---|---|"]
    one = trained(folder)
    with _Server(folder, copies(one, folder / "many", RUNS)).open() as server:
        first = server.used()
        server.get("")
        rows.append(f"| one page of {RUNS} runs | {1000 * (server.used() - first):.0f} ms |")
        rows.append(f"| {PAGES} pages of {RUNS} runs | {server.share(seconds, 'api/home?since=1'):.1%} |")
    with _Server(folder, one.parent).open() as server:
        (one / "metrics.jsonl").write_text("".join(map(_LINE.format, range(4000))))
        share = server.share(seconds, f"api/run/{one.name}?mark=", one / "metrics.jsonl")
        rows.append(f"| {PAGES} pages of a run that trains | {share:.1%} |")
    return "\n".join(rows)


class _Server:
    """`train web` with the login of a browser."""

    def __init__(self, folder: Path, runs: Path) -> None:
        self.folder, self.runs, self.log = folder, runs, folder / "web.log"
        self.cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())

    @contextmanager
    def open(self) -> Iterator[_Server]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [*_TRAIN, "web", "--port", str(port), "--runs", str(self.runs)]
        with self.log.open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"TRAIN_STATE": str(self.folder)}
            )
        try:
            while not (found := re.search(r"http://\S+", self.log.read_text())):
                assert process.poll() is None, "train web has ended"
                time.sleep(0.05)
            self.address, self.process = found[0].partition("?")[0], psutil.Process(process.pid)
            self.get(f"?{found[0].partition('?')[2]}&q=no-such-run")  # logs in
            yield self
        finally:
            process.terminate()
            process.wait()

    def get(self, path: str) -> bytes:
        content: bytes = urllib.request.build_opener(self.cookies).open(self.address + path).read()
        return content

    def used(self) -> float:
        """Return the seconds of a processor that the server has used."""
        return sum(self.process.cpu_times()[:2])

    def share(self, seconds: float, path: str, grows: Path | None = None) -> float:
        """Return the share of a core that the server uses while pages ask for this, and a file of metrics grows."""
        began, before = time.monotonic(), self.used()
        end = began + seconds

        def page(number: int) -> None:
            mark = ""
            time.sleep(2 * number / PAGES)
            while (now := time.monotonic()) < end:
                mark = json.loads(self.get(path + quote(mark) if grows else path)).get("mark", "")
                time.sleep(max(2 - (time.monotonic() - now), 0))

        threads = [threading.Thread(target=page, args=(number,)) for number in range(PAGES)]
        for thread in threads:
            thread.start()
        step = 4000
        while time.monotonic() < end:
            if grows:
                with grows.open("a") as file:
                    file.write(_LINE.format(step))
            step += 1
            time.sleep(0.2)
        for thread in threads:
            thread.join()
        return (self.used() - before) / (time.monotonic() - began)


if __name__ == "__main__":
    from benchmarks import command

    command.run(bench, seconds=30)
