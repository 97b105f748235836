"""The loop of a sweep: what it launches, adopts and stops, and that it survives the death of everything."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import Station
from tests.waiting import eventually
from train.launcher import tmux
from train.launcher.sweep import launch_of
from train.run.run_folder import Run
from train.sweeps.kept import Sweep
from train.sweeps.space import Space

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


def test_a_value_that_names_another_parameter_is_no_place_for_it() -> None:
    launch = {"launch": "NewScript", "arguments": ["{x}", "--y={y}", "{z}"], "on_restart": None}
    space = Space({"x": ["{y}"], "y": ["{x}"]}, {}, {})
    trials = {"one-001": space.cells()[0]}
    made = Sweep(id="id", launch=launch, space=space, metric="", at_once=1, trials=trials)
    assert launch_of(made, Path("runs"), "one-001")["arguments"] == ["{y}", "--y={x}", "{z}"]


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


@pytest.mark.never_forgiven
def test_a_sweep_with_rungs_that_is_killed_chooses_as_its_metrics_say(station: Station) -> None:
    fields = ("--steps", 12, "--eval.every_steps", 2, "--schedule.decay", "constant", *SMALL)
    given = ("--name", "rung", "--metric", "max:accuracy", "--rungs", "4,8")
    station.ok("sweep", "digits", *given, "--grid", "optim.lr=3e-2,1e-2,1e-4", *fields)
    station.wait_for_end("rung-001")
    assert (station.record("rung-001")["stopped_by"], station.record("rung-001")["step"]) == ("rung", 4)
    kill_all(station)
    station.ok("resume", "rung")
    sweep = station.wait_for_end("rung")
    assert (sweep["state"], sweep["step"], sweep["reason"]) == ("finished", 3, "")
    found = rows(station, "rung")
    trials = {name: one for row in found for name, one in row["trials"].items()}
    at_rung = {}
    for name in trials:
        lines = map(json.loads, (station.runs / name / "metrics.jsonl").read_text().splitlines())
        at_rung[name] = max(line["eval"]["accuracy"] for line in lines if "eval" in line and line["step"] <= 4)
    best = max(at_rung, key=lambda name: at_rung[name])
    assert sweep["rungs"] == {"4": [best], "8": [best]}  # one of three continues, and the last one to the end
    assert {name: (one["state"], one["rung"]) for name, one in trials.items()} == {
        name: ("finished", None) if name == best else ("stopped", 4) for name in at_rung
    }
    assert all(one["value"] == at_rung[name] for name, one in trials.items() if name != best)
    assert found[0]["best"] == best
    refused = station("sweep", "rung", "--add", "optim.lr=1e-3")
    assert refused.returncode == 2 and "compares its trials at rungs" in refused.stderr
    rate = trials[best]["optim.lr"]
    station.ok("run", "digits", "--name", "calm", "--optim.lr", rate, *fields)
    assert station.record("calm")["weights_sha256"] == station.record(best)["weights_sha256"]
    left = next(name for name in trials if name != best)
    station.ok("resume", left)  # by hand: to its end, and the sweep stays as it was
    assert station.wait_for_end(left)["state"] == "finished"


@pytest.mark.minutes
@pytest.mark.never_forgiven
def test_a_sweep_of_six_killed_whole_twice_is_complete_and_each_trial_made_once(station: Station) -> None:
    words = ("--grid", "optim.lr=1e-3,1e-2,3e-2", "--repeat", "seed=0..1", "--metric", "accuracy", "--at-once", 2)
    station.ok("sweep", "digits", "--name", "six", *words, "--steps", 60, *SMALL)
    for trial in ("six-002", "six-004"):
        station.wait_for_step(trial, 1)
        kill_all(station)
        station.ok("resume", "six")
    record = station.wait_for_end("six")
    assert (record["state"], record["step"], record["total_steps"], record["reason"]) == ("finished", 6, 6, "")
    assert len([*station.runs.iterdir()]) == 7
    found = rows(station, "six")
    assert [row["n"] for row in found] == [2, 2, 2]
    assert sorted(name for row in found for name in row["trials"]) == [f"six-{number:03d}" for number in range(1, 7)]
    for row in found:
        lines = [
            [line["eval"]["accuracy"] for line in station.metrics(name) if "eval" in line] for name in row["trials"]
        ]
        values = [*map(max, lines)]
        assert row["mean"] == pytest.approx(sum(values) / 2)
        assert row["deviation"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert [row["mean"] for row in found] == sorted((row["mean"] for row in found), reverse=True)
    digests = {station.record(name)["weights_sha256"] for row in found for name in row["trials"]}
    assert len(digests) == 6
