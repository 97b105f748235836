"""Where no zygote can be borrowed, a launch holds a lender that imports while it still reads its arguments."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.train.conftest import PATIENCE, lives
from tests.waiting import eventually
from train.run import states

if TYPE_CHECKING:
    from conftest import Station

ENDLESS = ["--steps", 10**6, "--cpu_threads", 1, "--log.tensorboard", "false"]


@pytest.fixture
def cold() -> Iterator[dict[str, str]]:
    """What makes a start cold, with a folder for temporary things of its own."""
    folder = tempfile.mkdtemp(prefix="ahead-")  # short: the name of a socket has little room
    yield {"TRAIN_WARM": "off", "TMPDIR": folder}
    shutil.rmtree(folder)


def waiting(folder: str) -> list[psutil.Process]:
    """Zygotes with a folder in this one that live and wait for an agent, or serve one."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, environ = process.info["cmdline"] or [], process.info["environ"] or {}
        if "train-zygote" in words and environ.get("TMPDIR") == folder and lives(process.pid):
            found.append(process)
    return found


def left_in(folder: str) -> list[Path]:
    """What lies in it but the folder of lenders' sockets."""
    return [path for path in Path(folder).rglob("*") if path.name != f"train-warm-{os.getuid()}"]


def zygote_of(station: Station, name: str) -> psutil.Process:
    """The process that has forked the ranks of this run."""
    station.wait(name, lambda record: bool(record["pids"].get("ranks")), "its ranks")
    parent = psutil.Process(station.record(name)["pids"]["ranks"][0]).parent()
    assert parent is not None
    return parent


@pytest.mark.minutes
def test_a_zygote_was_begun_ahead_and_leaves_nothing_behind(station: Station, cold: dict[str, str]) -> None:
    station.ok("launch", "digits", "--name", "one", *ENDLESS, env=cold)
    for attempt in (1, 2):
        zygote = zygote_of(station, "one")
        eventually("only it is left", lambda: [zygote.pid] == [one.pid for one in waiting(cold["TMPDIR"])])  # noqa: B023
        assert zygote.ppid() != station.record("one")["pids"]["agent"]  # the agent has not started one itself
        station.wait("one", lambda record, n=attempt: len(record["attempts"]) == n and record["step"] >= 3)
        station.ok("stop", "one", env=cold)
        if attempt == 1:
            station.ok("resume", "one", env=cold)
    eventually("the zygote has ended", lambda: not waiting(cold["TMPDIR"]))
    assert left_in(cold["TMPDIR"]) == []  # torch makes a folder as it is imported
    assert station.record("one")["state"] == states.STOPPED


@pytest.mark.minutes
def test_an_agent_that_has_other_limits_starts_its_own(station: Station, cold: dict[str, str]) -> None:
    station.ok("launch", "digits", "--name", "first", *ENDLESS, env=cold)  # its tmux server keeps its limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard) - 1, hard))

    command = [sys.executable, "-m", "train", "launch", "digits", "--name", "other", *map(str, ENDLESS)]
    subprocess.run(
        command, cwd=station.folder, env=station.environment() | cold, preexec_fn=lower, check=True, timeout=PATIENCE
    )
    zygote = zygote_of(station, "other")
    assert zygote.ppid() == station.record("other")["pids"]["agent"]
    assert zygote.rlimit(resource.RLIMIT_NOFILE)[0] == soft


def test_a_refusal_ends_what_was_begun(station: Station, cold: dict[str, str]) -> None:
    done = station("launch", "digits", "--batch_size", "many", env=cold)
    assert done.returncode == 2 and "batch_size" in done.stderr
    eventually("it has ended, with its socket", lambda: not (waiting(cold["TMPDIR"]) or left_in(cold["TMPDIR"])))


def test_it_ends_with_a_launch_that_is_killed(station: Station, cold: dict[str, str]) -> None:
    os.mkfifo(station.folder / "never.toml")
    command = [sys.executable, "-m", "train", "launch", "digits", "--config", "never.toml"]
    launch = subprocess.Popen(command, cwd=station.folder, env=station.environment() | cold)
    eventually("it is there", lambda: waiting(cold["TMPDIR"]) or launch.poll() is not None, every=0.02)
    assert launch.poll() is None
    launch.kill()
    launch.wait()
    eventually("it waits for no launch", lambda: not waiting(cold["TMPDIR"]))
