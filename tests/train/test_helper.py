"""Processes beside another one: how they start, start again, and end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.train.conftest import PATIENCE
from tests.waiting import eventually
from train import helper
from train.helper import Helper

READS, SLEEPS = ("cat",), ("sleep", "1000")


def process(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("command", "by_itself"), [(READS, True), (SLEEPS, False)], ids=["polite", "deaf"])
def test_a_helper_ends_with_its_input_or_is_killed(command: tuple[str, ...], by_itself: bool) -> None:
    one = Helper(lambda: process(*command))
    assert one.end(0.0), "there is none yet"
    one.keep()
    assert one.is_alive and one.process is not None
    assert one.end(PATIENCE if by_itself else 0.2) is by_itself
    assert one.process.returncode == (0 if by_itself else -signal.SIGKILL) and not one.is_alive


def test_a_helper_that_is_left_ends_by_itself() -> None:
    one = process(*READS)
    helper.leave(one)
    eventually("its end", lambda: psutil.Process(one.pid).status() == psutil.STATUS_ZOMBIE)


def test_a_helper_that_has_ended_starts_again_after_longer_and_longer_pauses() -> None:
    starts: list[float] = []

    def start() -> subprocess.Popen[bytes] | None:
        starts.append(time.monotonic())
        return process("true") if len(starts) > 1 else None

    begun = time.monotonic()
    one = Helper(start, pause=0.1, longest=0.3, delay=0.2)
    eventually("six starts", lambda: one.keep() or len(starts) == 6)
    pauses = [after - before for before, after in zip([begun, *starts], starts, strict=False)]
    # not needed at first, then started and ended again and again
    assert all(pause >= least for pause, least in zip(pauses, (0.2, 0.1, 0.1, 0.2, 0.3, 0.3), strict=True)), pauses
    one.keep()
    assert len(starts) == 6
    eventually("its end", lambda: not one.is_alive)
    one.keep(at_once=True)
    assert len(starts) == 7 and one.end(PATIENCE)


def test_without_a_pause_it_is_started_once() -> None:
    starts: list[int] = []
    one = Helper(lambda: starts.append(1) or process("true"))  # type: ignore[func-returns-value]
    for _ in range(2):
        one.keep()
        eventually("its end", lambda: not one.is_alive)
    assert len(starts) == 1


SEEN = "import os; print([os.environ['CUDA_VISIBLE_DEVICES'], os.getcwd(), os.getsid(0) == os.getpid()], flush=True)"


def test_a_module_of_the_package_sees_no_gpu_has_a_session_and_ends_with_a_killed_owner(tmp_path: Path) -> None:
    # the module `code` executes what it reads, until its input ends
    owner = (
        "import sys, time; from pathlib import Path; from train import helper\n"
        "one = helper.start('code', log=Path(sys.argv[1]))\n"
        "one.stdin.write(sys.argv[2].encode() + b'\\n'); one.stdin.flush(); print(one.pid, flush=True)\n"
        "time.sleep(1000)"
    )
    log = tmp_path / "log"
    command = [sys.executable, "-c", owner, str(log), SEEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None
        pid = int(made.stdout.readline())
        eventually("its answer", lambda: log.exists() and "['', '/', True]" in log.read_text())
        made.kill()
    eventually("its end", lambda: not psutil.pid_exists(pid))
