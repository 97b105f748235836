"""Where no keeper holds a warm process, the agent is begun while the launch still reads its arguments."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.train.conftest import PATIENCE, lives
from train.record import store

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
    """The processes that were begun ahead with a folder in this one, and live."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "train.runs.ahead" in words and any(word.startswith(folder) for word in words) and lives(process.pid):
            found.append(process)
    return found


def agent_and_pane(station: Station, name: str) -> tuple[psutil.Process, psutil.Process]:
    """The agent of this run, and the process that tmux has begun in its pane: the same one where it started cold."""
    station.wait(name, lambda record: "agent" in record["pids"], "its agent")
    agent = psutil.Process(station.record(name)["pids"]["agent"])
    terminal = Path(f"/proc/{agent.pid}/fd/0").stat().st_rdev
    (pane,) = [one for one in psutil.process_iter() if _led_by(one) == terminal]
    return agent, pane


def _led_by(process: psutil.Process) -> int:
    """The device number of the terminal whose session this process leads; 0 where it leads none (a rank of an agent
    that leads one has the same terminal)."""
    try:
        session, terminal = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[3:5]
    except (OSError, ValueError):
        return 0
    return int(terminal) if int(session) == process.pid else 0


@pytest.mark.minutes
def test_an_agent_was_begun_ahead_and_leaves_nothing_behind(station: Station, cold: dict[str, str]) -> None:
    station.ok("launch", "digits", "--name", "one", *ENDLESS, env=cold)
    for attempt in (1, 2):
        agent, pane = agent_and_pane(station, "one")
        assert pane.pid != agent.pid and "train.runs.pane" in pane.cmdline()
        assert "train.runs.agent" in agent.cmdline() and not waiting(cold["TMPDIR"])
        station.wait("one", lambda record, n=attempt: len(record["attempts"]) == n and record["step"] >= 3)
        station.ok("stop", "one", env=cold)
        if attempt == 1:
            station.ok("resume", "one", env=cold)
    agent.wait(PATIENCE)
    assert list(Path(cold["TMPDIR"]).iterdir()) == []  # torch makes a folder as it is imported
    assert station.record("one")["state"] == store.STOPPED


@pytest.mark.minutes
def test_an_agent_that_would_have_other_limits_starts_cold(station: Station, cold: dict[str, str]) -> None:
    station.ok("launch", "digits", "--name", "first", *ENDLESS, env=cold)  # its tmux server keeps its limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard) - 1, hard))

    command = [sys.executable, "-m", "train", "launch", "digits", "--name", "other", *map(str, ENDLESS)]
    subprocess.run(
        command, cwd=station.folder, env=station.environment() | cold, preexec_fn=lower, check=True, timeout=PATIENCE
    )
    agent, pane = agent_and_pane(station, "other")
    assert agent.pid == pane.pid and agent.rlimit(resource.RLIMIT_NOFILE)[0] == soft
    assert not waiting(cold["TMPDIR"])


def test_a_refusal_ends_what_was_begun(station: Station, cold: dict[str, str]) -> None:
    done = station("launch", "digits", "--batch_size", "many", env=cold)
    assert done.returncode == 2 and "batch_size" in done.stderr
    assert not waiting(cold["TMPDIR"]) and list(Path(cold["TMPDIR"]).iterdir()) == []


def test_it_ends_with_a_launch_that_is_killed(station: Station, cold: dict[str, str]) -> None:
    os.mkfifo(station.folder / "never.toml")
    command = [sys.executable, "-m", "train", "launch", "digits", "--config", "never.toml"]
    launch = subprocess.Popen(command, cwd=station.folder, env=station.environment() | cold)
    deadline = time.monotonic() + PATIENCE
    while not waiting(cold["TMPDIR"]):
        assert time.monotonic() < deadline and launch.poll() is None
        time.sleep(0.02)
    launch.kill()
    launch.wait()
    while waiting(cold["TMPDIR"]):
        assert time.monotonic() < deadline, "it waits for nobody"
        time.sleep(0.02)
