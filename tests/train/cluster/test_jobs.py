"""What a run folder and its engine say together, and who leaves such a run alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tasks import TASKS
from tests.train.conftest import PATIENCE, Station
from train.cluster.engine import JobStatus, seconds_of
from train.cluster.jobs import with_job_status
from train.launcher import resumable
from train.run import folders

WAITS, RUNS = JobStatus("queued", "job 7 is pending (Priority)"), JobStatus("running", "job 7 is running")


@pytest.mark.parametrize(
    ("state", "job", "effective", "words"),
    [
        ("created", WAITS, "queued", "slurm: job 7 is pending (Priority)"),
        ("created", RUNS, "running", "slurm: job 7 is running"),
        ("created", None, "interrupted", "submit it again: train resume a"),
        ("created", JobStatus("failed", "PodFailurePolicy"), "failed", "PodFailurePolicy"),
        ("stopped", WAITS, "queued", "pending"),  # warned, saved, and in the queue again
        ("stopped", RUNS, "stopped", "as it was"),
        ("stopped", None, "stopped", "as it was"),
        ("running", RUNS, "running", "as it was"),
        ("interrupted", RUNS, "running", "job 7 is running"),
        ("interrupted", None, "interrupted", "as it was"),
        ("finished", RUNS, "finished", "as it was"),
    ],
)
def test_a_state_is_what_folder_and_engine_say(state: str, job: JobStatus | None, effective: str, words: str) -> None:
    taken = {"submission": "x", "submitted": {"engine": "slurm", "at": None}}
    seen = with_job_status({"name": "a", "state": state, "reason": "as it was", **taken}, {"x": job} if job else {})
    assert seen["state"] == effective
    assert words in seen["reason"]


def test_nobody_but_its_engine_and_its_user_starts_it_again(tmp_path: Path) -> None:
    record = {"submitted": {"engine": "slurm", "at": None}, "submission": "x", "state": "running", "task": "digits"}
    run = folders.create(tmp_path, "a", files={}, record=record)
    run.begin_attempt(2, 0)
    assert run.state() == "interrupted"
    assert not resumable.is_resumable(run.read_effective())
    run.update(state="stopped", stopped_by="signal")
    assert not resumable.is_resumable(run.read_effective())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("2:30", 150), ("8:00:00", 28800), ("1-0", 86400), ("1-12:30", 131400), ("2-00:00:01", 172801)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


def test_what_was_submitted_is_what_is_trained(station: Station) -> None:
    """By an agent as an engine starts it on a node, whatever lies where it works."""
    task = (TASKS / "sine.py").read_text()
    (station.folder / "beside.py").write_text("")
    original = station.folder / "own.py"
    original.write_text("raise SystemExit('edited since')\n")
    (station.folder / "train.py").write_text("raise SystemExit('taken for the package')\n")
    handed = station.folder / "handed"
    handed.mkdir()
    (handed / "task.py").write_text(f"import beside\n{task}")
    (handed / "submission.json").write_text(json.dumps({
        "id": "x", "name": "a", "task": str(original), "task_copy": "task.py", "flags": {"epochs": "9"},
        "changes": {"steps": "1", "batch_size": "8"}, "config_file": None, "init": None, "cwd": str(station.folder),
        "nodes": 1, "nproc": 1, "wait_minutes": 1, "max_restarts": 0,
    }))  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-m", "train.module_runner", "train.cluster.node_agent", handed / "submission.json"],
        env=station.environment() | {"PET_NNODES": "1", "PYTHONHASHSEED": "0"},
        cwd=station.folder, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert station.record("a")["step"] == 1
