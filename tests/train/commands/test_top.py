"""`train top`: three real runs on a real terminal of 80 and of 60 columns, one of which dies while it is watched."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.train.terminal import Terminal
from train.gpus import Gpus, GpuState, sees_host_ids
from train.monitor.top import Page
from train.run import heartbeat
from train.run.record import FORMAT

if TYPE_CHECKING:
    from conftest import Station


class Screen:
    """A command in a tmux of its own, whose screen can be read as a person reads it."""

    def __init__(self, station: Station, columns: int, *arguments: str) -> None:
        self.socket = station.folder / f"screen-{columns}"
        self.command = ["tmux", "-f", os.devnull, "-S", str(self.socket)]
        inside = [sys.executable, "-m", "train", *arguments]
        subprocess.run(
            [*self.command, "new-session", "-d", "-x", str(columns), "-y", "24", "--", *inside], cwd=station.folder,
            env=station.environment() | {"TERM": "xterm-256color"}, check=True,
        )  # fmt: skip
        subprocess.run([*self.command, "set-option", "-g", "remain-on-exit", "on"], check=True)

    def lines(self) -> list[str]:
        done = subprocess.run([*self.command, "capture-pane", "-p"], capture_output=True, text=True, check=False)
        return [line.rstrip() for line in done.stdout.splitlines()]

    def wait_for(self, *texts: str) -> list[str]:
        deadline = time.monotonic() + 120
        while True:
            lines = self.lines()
            if all(any(text in line for line in lines) for text in texts):
                return lines
            assert time.monotonic() < deadline, "\n".join(lines)
            time.sleep(0.1)

    def wait_for_end(self) -> int:
        """The command's exit status. The pane is asked, for tmux 3.3 does not always write there that it is dead.

        Nor does it always hear of it, once in three times under load; the end of another child makes it look at all.
        """
        deadline = time.monotonic() + 120
        while True:
            command = [*self.command, "list-panes", "-F", "#{pane_dead} #{pane_dead_status}"]
            dead, _, status = subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition(" ")
            if dead == "1" and status.strip():
                return int(status)
            assert time.monotonic() < deadline, "\n".join(self.lines())
            subprocess.run([*self.command, "run-shell", "true"], capture_output=True, check=False)
            time.sleep(0.1)

    def press(self, key: str) -> None:
        subprocess.run([*self.command, "send-keys", key], check=True)

    def close(self) -> None:
        subprocess.run([*self.command, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def screens(station: Station) -> Iterator[list[Screen]]:
    made: list[Screen] = []
    yield made
    for screen in made:
        screen.close()


@pytest.mark.minutes
def test_three_runs_are_watched_and_one_dies(station: Station, screens: list[Screen]) -> None:
    station.ok("run", "digits", "--name", "over", "--steps", 4, "--cpu_threads", 1)
    endless = ["--epochs", 100000, "--log.every_steps", 1, "--cpu_threads", 1]
    runs = [station.start("run", "digits", "--name", name, *endless) for name in ("lives", "dies")]
    try:
        for name in ("lives", "dies"):
            station.wait_for_step(name, 2)
        screens += [Screen(station, columns, "top", "--every", "0.3") for columns in (80, 60)]
        for screen, columns in zip(screens, (80, 60), strict=True):
            lines = screen.wait_for("over", "lives", "dies", "rank 0", "training")
            assert max(map(len, lines)) <= columns
            assert "3 runs, 2 alive" in lines[0]
            (head,) = (line for line in lines if line.startswith("NAME"))
            assert {"STATE", "STEP", "LOSS"} <= set(head.split())
            (over,) = (line for line in lines if line.startswith("over "))
            assert "finished" in over and "4/4" in over
        once = station.ok("top", "--once").stdout  # without a look before, from which processor time could be counted
        assert len(re.findall(r"rank 0 .* cpu +[1-9]\d* %", once)) == 2, once
        before = next(line for line in screens[0].wait_for("lives ") if line.startswith("lives "))
        runs[1].send_signal(signal.SIGKILL)
        for screen in screens:
            lines = screen.wait_for("interrupted", "3 runs, 1 alive", "its processes died")
            assert next(line for line in lines if line.startswith("dies ")).split()[1] == "interrupted"
        deadline = time.monotonic() + 120
        while before in screens[0].wait_for("lives "):  # it goes on, and the page with it
            assert time.monotonic() < deadline, before
            time.sleep(0.1)
        screens[0].press("q")
        screens[1].press("C-c")
        for screen in screens:  # the screen before is back, with nothing of the page left on it
            assert screen.wait_for_end() == 0
            assert not any(line.startswith("NAME") for line in screen.lines())
    finally:
        for process in runs:
            process.kill()
            process.wait()


def test_without_a_terminal_it_prints_once(finished: Station) -> None:
    for arguments in (["top"], ["top", "--once", "done"]):
        done = finished.ok(*arguments)
        assert "\x1b" not in done.stdout
        assert "done" in done.stdout


def test_a_terminal_that_cannot_place_what_it_shows_gets_it_once(finished: Station) -> None:
    terminal = Terminal(finished, "top", environment={"TERM": "dumb"})
    try:
        assert terminal.end() == 0
    finally:
        terminal.process.kill()
    assert "done" in terminal.output and "\x1b" not in terminal.output


@pytest.mark.parametrize("arguments", [["--every", "0"], ["--every", "soon"], ["--every", "nan"], ["no-such-run"]])
def test_a_wrong_request_is_refused_in_a_line(arguments: list[str], finished: Station) -> None:
    done = finished.here("top", *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@contextlib.contextmanager
def at_work(runs: Path, name: str, line: str = "", ranks: tuple[int, ...] = (), **changed: Any) -> Iterator[None]:
    """A run that trains, without its processes: the lock is held, and ranks have shown a sign of life."""
    logs = runs / name / "logs" / "attempt-1"
    logs.mkdir(parents=True)
    now = "2026-01-01T00:00:00+00:00"
    record = {
        "format": FORMAT, "state": "running", "stopped_by": None, "step": 5, "epoch": 1,
        "attempts": [{"number": 1, "started": now, "end": None, "world_size": 1, "from_step": 0, "to_step": None}],
        "world_size": 1, "total_steps": 9, "started": now, "device": "cpu", "host": socket.gethostname(),
    }  # fmt: skip
    (runs / name / "run.json").write_text(json.dumps(record | changed))
    (runs / name / "metrics.jsonl").write_text(line)
    for rank in ranks:
        (logs / f"rank{rank}.beat").write_bytes(struct.pack("<qqqq", os.getpid(), heartbeat.TRAINING, 5, 9))
    with (runs / name / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("figure", ["NaN", "1e300", "1e-300"])
def test_a_figure_that_is_none_takes_no_other_run_off_the_page(figure: str, tmp_path: Path) -> None:
    keys = ("loss", "lr", "samples_per_s", "step_time", "data_wait")
    line = json.dumps({"step": 5, "epoch": 1} | dict.fromkeys(keys, 0.5)).replace("0.5", figure) + "\n"
    with at_work(tmp_path, "odd", line), at_work(tmp_path, "well", line.replace(figure, "0.5")):
        rows = [row.text for row in Page(tmp_path).rows(100, 50)]
    (odd,) = (row for row in rows if row.startswith("odd"))
    (well,) = (row for row in rows if row.startswith("well"))
    assert "running" in odd and "5/9" in odd and len(odd) <= 100
    assert well.split()[-1] == "0:00:02"


def test_of_a_run_on_several_machines_the_ranks_here_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(tmp_path)
    size = 8.0 * 2**30
    cards = [GpuState(n, f"GPU-{n}", "x", True, use, size / 2, size) for n, use in enumerate((0.11, 0.22))]
    monkeypatch.setattr(Gpus, "read", lambda _: cards)
    cluster = {"least": 2, "most": 2, "node": 1, "rendezvous": "10.0.0.1:29401"}
    with at_work(tmp_path, "one", "", (2, 3), cluster=cluster, world_size=4, nproc=2, gpus="0,1", device="cuda"):
        ranks = [row.text for row in page.rows(120, 50) if row.kind == "rank"]
    assert [rank.split()[1] for rank in ranks] == ["2", "3"], ranks
    assert "gpu  11 %    4.0 of 8 GiB in all" in ranks[0] and "gpu  22 %" in ranks[1], ranks


@pytest.mark.skipif(not sees_host_ids(), reason="process ids here are not the host's")
def test_a_rank_that_is_found_on_its_gpu_is_shown_with_its_own_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, size = Page(tmp_path), 8.0 * 2**30
    card = GpuState(0, "GPU-0", "x", True, 0.11, size / 2, size, processes={os.getpid(): size / 8})
    monkeypatch.setattr(Gpus, "read", lambda _: [card])
    with at_work(tmp_path, "one", ranks=(0,), device="cuda"):
        text = "\n".join(row.text for row in page.rows(120, 50))
    assert re.search(r"GPU 0 .*4\.0 of 8 GiB", text) and re.search(r"rank 0 .*gpu  11 %    1\.0 of 8 GiB$", text, re.M)


def test_an_empty_folder(tmp_path: Path, station: Station) -> None:
    assert "no runs in" in station.ok("top", "--runs", tmp_path / "none").stdout
