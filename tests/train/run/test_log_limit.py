"""A log has a limit: what a run prints without end fills neither the disk nor the time of its agent."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.launcher.live_view import LogTail
from train.run.log_limit import LogLimit
from train.scripts import health, lingering
from train.scripts.reader import OutputReader

WRITES = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for number in range(200_000):
    os.write(fd, f"step {number} loss 0.5\\n".encode())
"""


def test_the_middle_of_a_log_goes_while_a_rank_writes_and_readers_go_on(tmp_path: Path) -> None:
    log, most, printed = tmp_path / "rank0.log", 1_000_000, io.StringIO()
    log.touch()
    limit, tail = LogLimit([log, tmp_path / "none.log"], most), LogTail(log, printed)
    figures = OutputReader(log, r"step (?P<step>\d+) loss (?P<loss>\S+)")
    with subprocess.Popen([sys.executable, "-c", WRITES, str(log)]) as writer:
        while writer.poll() is None:
            limit.cut()
            tail.update()
            [*figures.lines(is_last=False)]
    limit.cut()
    lines = log.read_text().splitlines()
    assert log.stat().st_size <= most + 200 and lines[0] == "step 0 loss 0.5" and lines[-1] == "step 199999 loss 0.5"
    [note] = [line for line in lines if "removed" in line]
    assert note == "train: 4 MB of output were removed here (log.max)" or note.startswith("train: 3 MB")
    assert all(line.startswith("step ") for line in lines if line != note)
    with log.open("a") as file:
        file.write("step 200000 loss 0.25\n")
    tail.end()
    assert printed.getvalue().endswith("step 200000 loss 0.25\n")
    assert [*figures.lines(is_last=True)][-1] == {"step": 200000, "loss": 0.25}
    LogLimit([log], 0).cut()
    assert log.stat().st_size > 1000


def test_a_terminal_gets_the_end_of_much_output_at_once(tmp_path: Path) -> None:
    log, printed = tmp_path / "rank0.log", io.StringIO()
    log.write_text("x" * 79 + "\n" * 10_000 + "the end\n")
    LogTail(log, printed, every=None, most=1000).end()
    assert len(printed.getvalue()) < 1100 and printed.getvalue().endswith("the end\n")
    assert "KiB of output are not shown here; train logs shows them" in printed.getvalue()


@pytest.mark.parametrize(
    ("program", "words"),
    [("echo 'Permission Denied: try sudo' >&2; exit 1", "Permission Denied"), (None, "cannot be started")],
)
def test_a_stack_that_py_spy_may_not_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, words: str
) -> None:
    spy = tmp_path / "py-spy"
    if program is not None:
        spy.write_text(f"#!/bin/sh\n{program}\n")
        spy.chmod(0o755)
    monkeypatch.setattr(lingering.shutil, "which", lambda *_, **__: str(spy))
    watch = health.ScriptHealth.__new__(health.ScriptHealth)
    watch._logs = tmp_path
    watch._write_stacks({0: os.getpid()})
    text = (tmp_path / "rank0.stack.txt").read_text()
    assert text.startswith("no stack: py-spy ") and words in text and len(text.splitlines()) == 1
