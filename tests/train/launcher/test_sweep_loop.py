"""The loop of a sweep: what it launches, adopts and stops, and that it survives the death of everything."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from typing import Any

import pytest

from tests.train.conftest import Station
from tests.waiting import eventually
from train.launcher import tmux
from train.run.run_folder import Run

SMALL = ("--cpu_threads", 1, "--device", "cpu", "--eval.first", "false")


def kill_all(station: Station) -> None:
    """Kill loop, agents, ranks and tmux server by SIGKILL."""
    server = subprocess.run(
        tmux.tmux(station.runs, "display-message", "-p", "#{pid}"), capture_output=True, text=True, check=True
    )
    pids = [int(server.stdout)]
    for folder in station.runs.iterdir():
        known: dict[str, Any] = json.loads((folder / "run.json").read_text()).get("pids") or {}
        pids += [known.get("agent"), *known.get("ranks", ())]
    for pid in filter(None, pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually("all are dead", lambda: not any(Run(folder).alive() for folder in station.runs.iterdir()))


def rows(station: Station, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(station.ok("ls", name, "--json").stdout)
    return found


def ends(station: Station, name: str) -> list[str]:
    return [attempt["end"] for attempt in station.record(name)["attempts"]]


@pytest.mark.never_forgiven
def test_a_sweep_killed_whole_makes_each_trial_once(station: Station) -> None:
    station.ok("sweep", "digits", "--name", "lr", "--grid", "optim.lr=1e-2,3e-2", "--steps", 12, *SMALL)
    station.wait_for_step("lr-001", 1)
    kill_all(station)
    assert station.ok("ls", "--columns", "name,state", "--csv").stdout.splitlines()[1:] == ["lr,interrupted"]
    station.ok("resume", "lr")
    assert station.wait_for_end("lr")["state"] == "finished"
    assert sorted(folder.name for folder in station.runs.iterdir()) == ["lr", "lr-001", "lr-002"]
    assert ends(station, "lr-001")[-1] == "finished" and ends(station, "lr-002") == ["finished"]
    assert {row["best"] for row in rows(station, "lr")} == {"lr-001", "lr-002"}
    kept = json.loads((station.runs / "lr-002" / "environment.json").read_text())["values"]
    assert not {name for name in kept if name.startswith("TORCH_NCCL")}
    assert station.record("lr-002")["trial_of"] == station.record("lr")["sweep"]
