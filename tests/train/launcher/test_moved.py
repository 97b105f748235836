"""A run whose folder is renamed, by hand or by `train mv`, goes on there: real runs, real renames."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import Station
from tests.train.launcher.test_launch import QUICK, TASK, sessions
from tests.waiting import eventually
from train.errors import Refused
from train.launcher import tmux
from train.run import folders, ownership
from train.run.run_folder import Run

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

FLAGS = ["--steps", 50, "--checkpoint.every_steps", 2, "--checkpoint.keep", 3, "--log.samples", "true", *QUICK]


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    """With the task, and `still`: a run of it that was not moved."""
    station = Station(tmp_path_factory.mktemp("moving"))
    (station.folder / "slow.py").write_text(TASK)
    station.ok("run", "slow.py", "--name", "still", "--spawn", 2, "--task.pause", 0, *FLAGS)
    yield station
    station.close()


def outcome(station: Station, name: str) -> Any:
    record = station.wait_for_end(name)
    return record["state"], record["weights_sha256"], station.samples(name)


def test_a_folder_renamed_by_hand_is_followed_through_a_death_a_stop_and_a_resume(moving: Station) -> None:
    launch = moving.start(
        "launch", "slow.py", "--name", "byhand", "--nproc", 2, "--follow", "--task.pause", 0.05, *FLAGS
    )
    moving.wait_for_step("byhand", 4)
    (moving.runs / "byhand").rename(moving.runs / "moved")
    step = moving.record("moved")["step"]
    moving.wait_for_step("moved", step + 4)
    eventually("a checkpoint there", lambda: (moving.run("moved").steps_saved() or [0])[0] > step)
    assert moving.record("moved")["tmux_session"] == "train-moved" and "train-moved" in sessions(moving)
    os.kill(moving.record("moved")["pids"]["ranks"][1], signal.SIGKILL)
    moving.wait("moved", lambda record: len(record["attempts"]) == 2 and record["step"] > step + 6, "a step after it")
    assert "stopped after step" in moving.ok("stop", "moved").stderr
    said = launch.communicate()[0]  # it has followed, too
    assert launch.returncode == 75 and said.endswith("continue with: train resume moved\n"), said
    assert ownership.was_started_here(moving.runs / "moved", moving.record("moved"))  # it is no copy
    assert not (moving.runs / "byhand").exists()
    gone = moving("stop", "byhand")
    assert gone.returncode == 2 and "there is no run byhand" in gone.stderr and gone.stderr.count("\n") == 1
    moving.ok("resume", "moved")
    assert outcome(moving, "moved") == outcome(moving, "still")


def test_a_run_is_followed_that_is_renamed_all_the_time_while_it_saves(moving: Station) -> None:
    process = moving.start("run", "slow.py", "--name", "to", "--spawn", 2, "--task.pause", 0.01, *FLAGS)
    names = ["to", "fro"]
    moving.wait_for_step("to", 1)
    while process.poll() is None:
        (moving.runs / names[0]).rename(moving.runs / names[1])
        names.reverse()
    assert process.returncode == 0, process.stdout.read()
    assert outcome(moving, names[0]) == outcome(moving, "still")


def test_mv_renames_a_living_run_which_stays_its_stations_and_frees_its_name(moving: Station) -> None:
    moving.ok("launch", "slow.py", "--name", "lr-0.1", "--nproc", 2, "--task.pause", 0.05, *FLAGS)
    moving.wait_for_step("lr-0.1", 4)
    assert moving.ok("mv", "lr-0.1", "lr-0.2").stderr == "renamed lr-0.1 to lr-0.2\n"
    session = moving.record("lr-0.2")["tmux_session"]
    assert session == "train-lr-0,2" and session in sessions(moving) and session != tmux.session_of("lr-0_2")
    os.kill(moving.record("lr-0.2")["pids"]["agent"], signal.SIGKILL)
    assert moving.wait_for_end("lr-0.2")["state"] == "interrupted"
    moving.ok("launch", "slow.py", "--name", "lr-0.1", "--steps", 1, *QUICK)
    assert "lr-0.2\n" in moving.ok("resume", "--all").stdout
    assert outcome(moving, "lr-0.2") == outcome(moving, "still")


def test_mv_renames_a_finished_run(moving: Station) -> None:
    before = outcome(moving, "still")
    moving.ok("mv", "still", "quiet")
    assert outcome(moving, "quiet") == before and moving.record("quiet")["name"] == "quiet"
    moving.ok("mv", "quiet", "still")


@pytest.mark.parametrize(
    ("record", "arguments", "words"),
    [
        ({}, ("train-me", "b"), "did you mean trained?"),
        ({}, ("trained", "trained"), "a run named trained exists"),
        ({}, ("trained", "x/y"), "not a legal run name"),
        ({"cluster": {"least": 2, "most": 2, "node": 0, "rendezvous": "a:1"}}, ("trained", "b"), "know its name"),
        ({"submitted": {"engine": "slurm"}, "submission": "1"}, ("trained", "b"), "know its name"),
    ],
)
def test_what_mv_refuses_stays_as_it_is(
    station: Station, record: dict[str, Any], arguments: tuple[str, str], words: str
) -> None:
    run = folders.create(station.runs, "trained", files={}, record=record)
    lock = run.acquire()
    done = station("mv", *arguments)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert os.listdir(station.runs) == ["trained"] and lock is not None


def test_a_held_folder_has_its_files_and_its_present_path(tmp_path: Path) -> None:
    run = folders.create(tmp_path / "runs", "a", files={}, record={}).held()
    run.path.rename(tmp_path / "b")
    run.update(step=7)
    assert (Run(tmp_path / "b").read()["step"], run.name, run.path) == (7, "b", tmp_path / "b")
    (tmp_path / "b" / "run.json").unlink()
    with pytest.raises(Refused, match=f"cannot read {tmp_path}/b/run.json"):
        run.read()


def test_a_run_that_was_edited_is_not_made_the_stations_own_by_a_move(tmp_path: Path) -> None:
    run = folders.create(tmp_path, "a", files={"config.toml": "steps = 1\n"}, record={})
    (run.folder / "config.toml").write_text("steps = 2\n")
    moved = Run(run.folder.rename(tmp_path / "b"))
    assert tmux.note_move(moved, moved.read(), run.folder)
    assert not ownership.was_started_here(moved.folder, moved.read())
