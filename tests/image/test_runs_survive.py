"""Runs outlive their container: killed or stopped in the middle, they end with the weights of an undisturbed run."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import Station, metrics_lines

from tests.waiting import eventually

# Long enough to be hit in the middle, also on a fast machine; a checkpoint so often that some are hit while written.
FLAGS = "digits --epochs 30 --checkpoint.every_steps 5 --log.every_steps 1"


@pytest.fixture(scope="module")
def undisturbed(station: Station) -> dict[str, object]:
    """The record of a run that nothing happened to, on two ranks that `train run` starts by itself."""
    station.ssh(f"train run {FLAGS} --name undisturbed --spawn 2")
    return record(station, "undisturbed")


def record(station: Station, name: str) -> dict[str, object]:
    """What is on the host's disk, whether or not the container is up."""
    return json.loads((station.folder / "runs" / name / "run.json").read_text())


def saved(station: Station, name: str) -> int:
    """The step of the newest checkpoint."""
    return max(int(path.name.removeprefix("step-")) for path in checkpoints(station, name).glob("step-*"))


def checkpoints(station: Station, name: str) -> Path:
    return station.folder / "runs" / name / "checkpoints"


def launch(station: Station, name: str) -> None:
    """Launches a run over ssh, and waits until it is well under way."""
    station.ssh(f"train launch {FLAGS} --name {name} --nproc 2")
    eventually(f"{name} makes steps", lambda: metrics_lines(station, name) > 30)


def ends_as_if_nothing_had_happened(station: Station, name: str, undisturbed: dict[str, object]) -> None:
    ended = ("finished", "failed", "stopped")
    eventually(f"{name} goes on by itself and ends", lambda: station.show(name).get("state") in ended)
    # rank 0 says how the run ends, and its agent, a moment later, how the attempt did
    eventually("the last attempt is over", lambda: record(station, name)["attempts"][-1]["end"] is not None)
    run = record(station, name)
    assert run["state"] == "finished", run["reason"]
    assert run["weights_sha256"] == undisturbed["weights_sha256"]
    assert run["metrics"] == undisturbed["metrics"]
    assert [step for step, _ in losses(station, name)] == list(range(1, run["step"] + 1))
    assert losses(station, name) == losses(station, "undisturbed")


def losses(station: Station, name: str) -> list[tuple[int, float]]:
    lines = map(json.loads, (station.folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.mark.never_forgiven
@pytest.mark.turns
def test_a_run_in_a_killed_container_goes_on_by_itself(station: Station, undisturbed: dict[str, object]) -> None:
    launch(station, "killed")
    station.compose("kill", "--signal", "KILL")
    assert record(station, "killed")["state"] == "running"  # nobody was left to write anything else
    assert saved(station, "killed") < undisturbed["step"]
    station.make("up")
    ends_as_if_nothing_had_happened(station, "killed", undisturbed)
    assert [attempt["end"] for attempt in record(station, "killed")["attempts"]] == ["died", "finished"]


@pytest.mark.never_forgiven
@pytest.mark.turns
def test_a_stopped_container_saves_its_runs_and_they_go_on(station: Station, undisturbed: dict[str, object]) -> None:
    launch(station, "stopped")
    station.compose("stop", timeout=200)  # the grace period is 180 s; past it the engine kills, which is code 137
    assert station.inspect("{{.State.ExitCode}}") == "0"
    run = record(station, "stopped")
    assert run["state"] == "stopped"
    assert "(the keeper)" in run["reason"]
    assert 30 < run["step"] < undisturbed["step"]
    assert saved(station, "stopped") == run["step"]  # no step is lost
    station.make("up")
    eventually("the keeper brings it back", lambda: len(record(station, "stopped")["attempts"]) == 2)
    ends_as_if_nothing_had_happened(station, "stopped", undisturbed)
    first, second = record(station, "stopped")["attempts"]
    assert second["from_step"] == first["to_step"] == run["step"]


@pytest.mark.skipif(
    os.environ.get("TEST_ENGINE_RESTART") != "1",
    reason="restarts the engine with everything on it; to allow it: make test-image TEST_ENGINE_RESTART=1",
)
@pytest.mark.turns
def test_a_run_outlives_an_engine_that_crashes(station: Station, undisturbed: dict[str, object]) -> None:
    launch(station, "engine")
    crash_engine()
    eventually("the run goes on by itself", lambda: len(record(station, "engine")["attempts"]) == 2)
    ends_as_if_nothing_had_happened(station, "engine", undisturbed)
    # back again, the engine stops what has outlived it, and the keeper saves
    first, second = (attempt["end"] for attempt in record(station, "engine")["attempts"])
    assert second == "finished" and first in ("stopped", "died")


def crash_engine() -> None:
    """Kills the engine and starts it again, as its init system or make engine does."""
    old = subprocess.run(["pidof", "dockerd"], capture_output=True, text=True, check=True).stdout.split()
    if Path("/run/systemd/system").is_dir():
        subprocess.run(["systemctl", "kill", "--signal", "KILL", "docker"], check=True)
    else:
        subprocess.run(["kill", "-KILL", *old], check=True)
    eventually("the engine is gone", lambda: not any(Path("/proc", pid).exists() for pid in old))
    subprocess.run([Path(__file__).parents[2] / "scripts" / "engine.sh"], check=True, timeout=120)
