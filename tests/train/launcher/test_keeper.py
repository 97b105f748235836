"""The keeper: interrupted runs come back by themselves, stopped ones rest, and SIGTERM loses no step."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import train
from tests.train.conftest import PATIENCE, Station
from train.errors import Refused
from train.launcher import resumable
from train.launcher.launches import Resume
from train.run import folders, run_folder, states

FIELDS = (
    "--epochs", 6, "--batch_size", 60, "--micro_batch_size", 20, "--checkpoint.every_steps", 5, "--log.every_steps", 1,
    "--log.samples", "true", "--log.tensorboard", "false", "--task.width", 8, "--cpu_threads", 1,
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(shared_station: Station) -> dict[str, Any]:
    """The record of a run that nobody kills."""
    shared_station.ok("run", "digits", "--name", "kept-base", "--spawn", 2, *FIELDS)
    return shared_station.record("kept-base")


@pytest.fixture
def keeper(station: Station) -> Iterator[subprocess.Popen[str]]:
    """A keeper that looks after the station's runs."""
    process = station.start("keeper")
    yield process
    process.kill()
    process.wait()


def kill_agent(station: Station, name: str) -> None:
    os.kill(station.record(name)["pids"]["agent"], signal.SIGKILL)


@pytest.mark.never_forgiven
def test_a_run_whose_agent_is_killed_comes_back_and_ends_with_the_same_weights(
    station: Station, keeper: subprocess.Popen[str], undisturbed: dict[str, Any]
) -> None:
    station.ok("launch", "digits", "--name", "a", "--nproc", 2, *FIELDS)
    station.wait_for_step("a", 12)
    kill_agent(station, "a")
    station.wait("a", lambda record: len(record["attempts"]) > 1, "a second attempt")
    record = station.wait_for_end("a")
    assert (record["state"], record["weights_sha256"]) == ("finished", undisturbed["weights_sha256"])


@pytest.mark.never_forgiven
def test_sigterm_saves_all_runs_and_a_keeper_brings_them_back_but_not_those_of_a_user(
    station: Station, keeper: subprocess.Popen[str], undisturbed: dict[str, Any]
) -> None:
    station.ok("launch", "digits", "--name", "rests", "--nproc", 2, *FIELDS)
    station.wait_for_step("rests", 3)
    station.ok("stop", "rests")
    station.ok("launch", "digits", "--name", "mine", "--nproc", 2, *FIELDS)
    station.wait_for_step("mine", 3)
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(PATIENCE) == 0
    stopped = station.record("mine")
    assert stopped["state"] == "stopped"
    assert station.run("mine").steps_saved()[0] == stopped["step"], "a polite stop loses no step"

    station.ok("keeper", "--once")
    record = station.wait_for_end("mine")
    assert (record["state"], record["weights_sha256"]) == ("finished", undisturbed["weights_sha256"])
    assert station.record("rests")["state"] == "stopped"
    assert len(station.record("rests")["attempts"]) == 1


@pytest.mark.minutes
def test_what_is_wrong_with_one_run_concerns_no_other(station: Station) -> None:
    (station.runs / "broken").mkdir(parents=True)
    (station.runs / "broken" / "run.json").write_text("{")
    task = station.folder / "task.py"
    text = (Path(train.__file__).parent / "tasks" / "digits.py").read_text()
    hang = f"    while __import__('os').path.exists('{station.folder}/hang'):\n        __import__('time').sleep(0.1)\n"
    head, rest = text.split("def datasets(", 1)
    signature, body = rest.split(":\n", 1)
    task.write_text(f"{head}def datasets({signature}:\n{hang}{body}")
    station.ok("launch", task, "--name", "hangs", *FIELDS)
    station.wait_for_step("hangs", 1)
    (station.folder / "hang").touch()
    kill_agent(station, "hangs")
    station.ok("launch", "digits", "--name", "mine", *FIELDS)
    station.wait_for_step("mine", 3)
    keeper = station.start("keeper")
    kill_agent(station, "mine")
    station.wait("mine", lambda record: len(record["attempts"]) == 2 and record["step"] > 3, "resumed beside the other")
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(PATIENCE) == 0
    assert station.record("mine")["state"] == "stopped"
    assert station.run("hangs").state() == "interrupted"
    assert not station.run("hangs").alive()
    station.ok("stop", "mine")  # it has been, and now it is its user who wants it so
    with pytest.raises(Refused, match="stopped by its user"):
        Resume(runs=str(station.runs), name="mine", by_keeper=True).start()


@pytest.mark.never_forgiven
@pytest.mark.minutes
def test_two_keepers_never_run_the_same_run_twice(station: Station, undisturbed: dict[str, Any]) -> None:
    keepers = [station.start("keeper") for _ in range(2)]
    try:
        station.ok("launch", "digits", "--name", "a", "--nproc", 2, *FIELDS)
        station.wait_for_step("a", 12)
        kill_agent(station, "a")
        record = {}
        station.wait("a", lambda record: record["state"] == "finished", "its end")
        record = station.wait_for_end("a")
        assert record["weights_sha256"] == undisturbed["weights_sha256"]
        assert len(record["attempts"]) == 2
    finally:
        for process in keepers:
            process.kill()
            process.wait()


@pytest.mark.minutes
def test_a_run_that_is_interrupted_again_and_again_without_progress_is_failed(
    station: Station,
) -> None:
    station.ok("launch", "digits", "--name", "a", *FIELDS, "--checkpoint.every_steps", 10**6)
    station.wait_for_step("a", 1)
    keeper = station.start("keeper")
    try:
        for attempt in range(1, 5):
            station.wait(
                "a", lambda record, n=attempt: len(record["attempts"]) == n and record["pids"].get("ranks"), "up"
            )
            kill_agent(station, "a")
            station.wait("a", lambda record: record["state"] != "running", "its death")
        station.wait("a", lambda record: record["state"] == "failed", "failed")
        assert "without a new checkpoint" in station.record("a")["reason"]
    finally:
        keeper.kill()
        keeper.wait()


def test_a_run_that_waits_for_the_engine_it_was_handed_to_is_left_alone(station: Station) -> None:
    run = folders.create(station.runs, "queued", files={}, record={"submitted": {"engine": "slurm", "at": None}})
    os.utime(run.folder / "run.json", (1, 1))  # long ago
    before = run.read()
    assert station.ok("keeper", "--once").stderr == ""
    with pytest.raises(Refused, match="was submitted to a cluster"):
        Resume(runs=str(station.runs), name="queued", by_keeper=True).start()
    assert run.read() == before and not run.alive()


@pytest.mark.never_forgiven
@pytest.mark.parametrize(("by_keeper", "is_taken_up"), [(True, True), (False, False)])
def test_a_run_whose_resume_was_taken_back_rests_if_it_was_its_users(
    by_keeper: bool, is_taken_up: bool, tmp_path: Path
) -> None:
    run = folders.create(
        tmp_path, "a", files={}, record={"world_size": 1, "state": states.STOPPED, "stopped_by": "user"}
    )
    lock = run.acquire()
    assert lock is not None
    Resume(runs=str(tmp_path), name="a", by_keeper=by_keeper).undo(run, lock)
    assert resumable.is_resumable(run.read_effective()) is is_taken_up and not run.alive()


def test_times_that_are_none_keep_no_run_from_coming_back(tmp_path: Path) -> None:
    run = folders.create(tmp_path, "a", files={}, record={"world_size": 1})
    attempt = {"number": 1, "started": "yesterday", "ended": "yesterday"}
    record = run.read() | {"script": "a.py", "attempts": [attempt], "kept": {"step": 0, "times": 1}}
    assert resumable.keeper_count(run, record)["times"] == 2


def test_waiting_for_other_machines_is_no_death_and_what_was_counted_before_stays(tmp_path: Path) -> None:
    cluster = {"least": 2, "most": 2, "node": 0, "rendezvous": "127.0.0.1:29400"}
    run = folders.create(tmp_path, "a", files={}, record={"world_size": 2, "cluster": cluster})
    waited = {"state": states.INTERRUPTED, "ended": run_folder.now(), "attempts": []}
    record = run.read() | waited
    for _ in range(6):  # nobody else has come
        record["kept"] = resumable.keeper_count(run, record)
        assert record["kept"]["times"] == 0
    record |= {"attempts": [{"number": 1, "started": run_folder.now()}], "ended": None}
    record["kept"] = resumable.keeper_count(run, record)  # they came, and it died
    assert record["kept"]["times"] == 1
    record |= waited | {"attempts": record["attempts"]}
    assert resumable.keeper_count(run, record)["times"] == 1  # it waits again
    assert resumable.keeper_count(run, record | {"ended": None})["times"] == 2  # and was killed meanwhile
