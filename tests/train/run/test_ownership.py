"""What this station has not started, or not like this, is shown as a copy and rests until its user resumes it."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import train
from tests.train.conftest import PATIENCE, Station
from train import programs
from train.launcher import keeper_sign, resumable, stopping
from train.run import environment, folders, ownership, states
from train.run.run_folder import Run

pytestmark = pytest.mark.never_forgiven

FIELDS = (
    "--epochs", 1000, "--batch_size", 60, "--checkpoint.every_steps", 10**6, "--log.tensorboard", "false",
    "--task.width", 8, "--cpu_threads", 1,
)  # fmt: skip
FILES: dict[str, str | bytes] = {"task.py": "a = 1\n", "config.toml": "epochs = 1\n", environment.FILE: "{}\n"}
RECORD: dict[str, Any] = {
    "world_size": 1, "state": states.RUNNING, "task": "task.py", "task_source": "/where/task.py", "cwd": "/where",
}  # fmt: skip


def kill_agent(station: Station, name: str) -> None:
    os.kill(station.record(name)["pids"]["agent"], signal.SIGKILL)


def test_a_run_from_elsewhere_is_executed_by_no_keeper_until_its_user_resumes_it(station: Station) -> None:
    task, seen = station.folder / "task.py", station.folder / "seen"
    built_in = (Path(train.__file__).parent / "tasks" / "digits.py").read_text()
    task.write_text(built_in.replace("from ..", "from train."))
    station.ok("launch", task, "--name", "a", *FIELDS, env={"TRAIN_STATE": str(station.folder / "elsewhere")})
    station.wait_for_step("a", 1)
    kill_agent(station, "a")
    station.wait("a", lambda record: record["state"] not in ("created", "running"), "its death")
    copied = station.runs / "a" / "task.py"
    copied.write_text(copied.read_text() + f"open({str(seen)!r}, 'a').close()\n")

    assert "a: left alone" in station.ok("keeper", "--once").stderr
    assert "skipped a, which was not started here" in station.ok("resume", "--all").stderr
    assert not seen.exists() and len(station.record("a")["attempts"]) == 1
    (shown,) = json.loads(station.ok("ls", "--state", "copy", "--json").stdout)
    assert shown["name"] == "a" and "to adopt it: train resume a" in shown["reason"]
    assert station.ok("show", "a").stdout.startswith("a: copy: ")

    before = station.record("a")["wandb_id"]
    station.ok("resume", "a")
    adopted = station.record("a")["wandb_id"]
    assert adopted != before
    station.wait(
        "a", lambda record: len(record["attempts"]) == 2 and record["attempts"][1]["ready"], "its user's resume"
    )
    assert seen.exists()
    kill_agent(station, "a")
    station.wait("a", lambda record: record["state"] == "interrupted", "its death")
    station.ok("keeper", "--once")
    station.wait("a", lambda record: len(record["attempts"]) == 3, "its keeper's resume")
    assert station.record("a")["wandb_id"] == adopted


def test_a_keeper_lets_the_copy_of_a_living_run_and_runs_of_other_stations_be(station: Station) -> None:
    station.ok("launch", "digits", "--name", "theirs", *FIELDS, env={"TRAIN_STATE": str(station.folder / "other")})
    station.ok("launch", "digits", "--name", "mine", *FIELDS)
    for name in ("mine", "theirs"):
        station.wait_for_step(name, 1)
    shutil.copytree(station.runs / "mine", station.runs / "copied")
    assert station.run("copied").state() == "copy"
    unborn = folders.create(station.runs, "unborn", files={}, record={"world_size": 1})
    unborn.update(station_digest=None)
    os.utime(unborn.folder / "run.json", (1, 1))  # long ago
    process = station.start("keeper")
    assert "keeping the runs" in process.stdout.readline()
    first = "".join(process.stdout.readline() for _ in range(2))
    assert "copied: left alone" in first and "unborn: left alone" in first
    assert keeper_sign.last_seen() is not None
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=PATIENCE)[0]
    assert f"theirs: left alone, because it belongs to another station ({os.uname().nodename})" in said
    assert station.run("theirs").state() == "running"
    assert (station.record("mine")["state"], station.run("copied").state()) == ("stopped", "copy")
    assert len(station.record("copied")["attempts"]) == 1


def _edit(name: str) -> Callable[[Run], Run]:
    def edit(run: Run) -> Run:
        path = run.folder / name
        path.write_text((path.read_text() if path.exists() else "") + "\n")
        return run

    return edit


def _record(**values: Any) -> Callable[[Run], Run]:
    def record(run: Run) -> Run:
        run.update(**values)
        return run

    return record


@pytest.mark.parametrize(
    "change",
    [
        lambda run: Run(run.folder.rename(run.folder.with_name("renamed"))),
        lambda run: Run(shutil.copytree(run.folder, run.folder.with_name("copied"))),
        lambda run: Run(shutil.copytree(run.folder.parent, run.folder.parents[1] / "moved") / run.name),
        *map(_edit, ("task.py", "config.toml", environment.FILE)),
        *(_record(**{key: "/other"}) for key in ("task", "task_source", "script", "cwd")),
        _record(script_arguments=["/other"]),
        _record(station_digest=None),
        _record(station_digest="ü"),
        _record(state="stopped", stopped_by="keeper", station_digest="0"),
    ],
)
def test_a_run_that_is_not_as_it_was_started_rests_as_a_copy(change: Callable[[Run], Run], tmp_path: Path) -> None:
    run = folders.create(tmp_path / "runs", "a", files=FILES, record=RECORD)
    assert run.state() == "interrupted" and resumable.is_resumable(run.read_effective())
    run = change(run)
    assert run.state() == "copy" and resumable.is_resumable(run.read_effective()) is None
    assert stopping.stop(run, programs.TASK, now=False)[0] == 0 and run.state() == "stopped"
    assert resumable.is_resumable(run.read_effective()) is False


def test_without_a_state_folder_runs_begin_and_the_keeper_says_why_none_is_its_own(station: Station) -> None:
    env = {"TRAIN_STATE": "/dev/null"}
    station.ok("run", "fake", "--name", "a", "--steps", 1, env=env)
    assert station.record("a")["state"] == "finished" and station.record("a")["station"] is None
    station.run("a").update(state="running")
    said = station.ok("keeper", "--once", env=env).stderr
    assert said.count("warning: no run is resumed, because the state folder") == 1 and "a: left alone" in said


def _make(here: str, begin: Any, found: Any) -> None:
    os.environ["TRAIN_STATE"] = here
    begin.wait()
    found.put(ownership.station_id(make=True))


def test_processes_that_begin_at_once_make_one_key(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    begin, found = context.Barrier(8), context.SimpleQueue()
    processes = [context.Process(target=_make, args=(str(tmp_path / "state"), begin, found)) for _ in range(8)]
    for process in processes:
        process.start()
    ids = {found.get() for _ in processes}
    assert len(ids) == 1 and len(ids.pop()) == 12
    for process in processes:
        process.join()
    (folder,) = tmp_path.iterdir()
    (key,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, key.stat().st_mode & 0o777, key.stat().st_size) == (0o700, 0o600, 32)
