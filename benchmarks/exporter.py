"""`python -m benchmarks.exporter`: what a scrape by Prometheus costs the machine.

Some of the run folders look alive: this process holds their locks, and their lines and signs of life are as long as
real ones. A real exporter answers over HTTP, and its own `process_cpu_seconds_total` is the cost.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import command
from train.run import heartbeat, run_folder, states
from train.run.metrics import Training, metrics_text

COUNTS = (1, 10, 200)
EVERY = 15.0
"""Seconds between two scrapes, as in deploy/monitoring/prometheus.yml."""
_LINES = 2000
_LINE: Training = {
    "step": 1, "epoch": 1, "loss": 1.6393073509479392, "lr": 0.00023285134909173388, "samples_per_s": 1533.498535,
    "data_wait": 0.0010776060000807774, "step_time": 0.01891100600005302, "memory": 619069440,
}  # fmt: skip


def bench(folder: Path, times: int) -> str:
    """Measure with this many scrapes for each row. Returns a table in Markdown."""
    rows = [
        "| runs | ms of a processor | share of one, every 15 s | look ms | page kB | series |",
        "|---|---|---|---|---|---|",
    ]
    for state in (states.RUNNING, states.FINISHED):
        for count in COUNTS:
            with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as work, ExitStack() as held:
                for number in range(count):
                    _put(Path(work) / "runs" / f"run-{number}", state, held)
                cpu, look, page = _asked(Path(work), times)
            series = sum(not line.startswith("#") for line in page.splitlines())
            rows.append(
                f"| {count} {state} | {1000 * cpu:.1f} | {cpu / EVERY:.3%} | {1000 * look:.1f} | "
                f"{len(page) / 1000:.0f} | {series} |"
            )
    return "\n".join(rows)


def _put(folder: Path, state: str, held: ExitStack) -> None:
    logs = folder / "logs" / "attempt-1"
    logs.mkdir(parents=True)
    (folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    attempt = {"number": 1, "started": run_folder.now(), "ready": run_folder.now(), "end": None, "from_step": 0}
    record = {
        "state": state, "attempts": [attempt], "step": 10, "epoch": 1, "world_size": 2, "total_steps": 20, "loss": 1.5,
        "started": run_folder.now(), "ended": None if state == states.RUNNING else run_folder.now(), "task": "digits",
        "device": "cpu", "host": os.uname().nodename,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record, indent=1))
    (folder / "metrics.jsonl").write_text((metrics_text(_LINE) + "\n") * _LINES)
    for rank in range(2):
        heartbeat.Heart(logs / f"rank{rank}.beat").beat(heartbeat.TRAINING, 10)
    lock = held.enter_context((folder / "lock").open("w"))
    if state == states.RUNNING:
        fcntl.flock(lock, fcntl.LOCK_EX)


def _asked(work: Path, times: int) -> tuple[float, float, str]:
    """Return the seconds of a processor and of the clock that a scrape takes, and the last page."""
    with _exporter(work) as url:
        _get(url)  # the first one reads what later ones know
        before, begun = _number(_get(url), "process_cpu_seconds_total"), time.perf_counter()
        for _ in range(times):
            page = _get(url)
        looked = (time.perf_counter() - begun) / times
        return (_number(_get(url), "process_cpu_seconds_total") - before) / (times + 1), looked, page


@contextmanager
def _exporter(work: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "train", "exporter", "--runs", str(work / "runs"), "--port"]
    for port in range(49477, 49577):  # the first that is free
        process = subprocess.Popen(
            [*command, str(port)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        )  # fmt: skip
        assert process.stdout is not None
        if process.stdout.readline():
            break
        process.wait()
    try:
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(work / "runs", ignore_errors=True)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def _number(page: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


if __name__ == "__main__":
    command.run(bench, times=50)
