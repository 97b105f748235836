"""One job for each run, whatever became of sbatch's answer, and whoever else hands it over meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.conftest import PATIENCE
from tests.train.slurm.cluster import wait_until
from tests.train.slurm.conftest import FIELDS, TASK, Cluster

Check = Callable[[str], None]
ONE_NODE = ("--nodes", 1, "--nproc", 1)


@pytest.fixture
def deadly(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an sbatch that submits, and then kills who has called it: its answer is lost."""
    folder = cluster.login.folder / "deadly"
    folder.mkdir()
    sbatch = folder / "sbatch"
    sbatch.write_text(f'#!/bin/sh\n{cluster.slurm.bin}/sbatch "$@" >/dev/null && kill -9 $PPID\n')
    sbatch.chmod(0o755)
    ours = cluster.slurm.environment
    monkeypatch.setitem(ours, "PATH", f"{folder}:{ours['PATH']}")
    return folder


@pytest.mark.minutes
def test_a_job_whose_submitter_was_killed_is_the_runs(cluster: Cluster, deadly: Path, like_undisturbed: Check) -> None:
    login, slurm = cluster.login, cluster.slurm
    login.slow.touch()
    command = ("submit", TASK, "--on", "slurm", "--name", "a", "--nodes", 2, "--nproc", 1, *FIELDS)
    assert login(*command).returncode == -9
    assert login.record("a")["submitted"]["job"] is None
    (job,) = (line.split()[0] for line in slurm.jobs())
    again = login("resume", "a")
    assert again.returncode == 2 and ("already" in again.stderr or "is running" in again.stderr), again.stderr
    cluster.wait_attempt("a", 1)
    assert login.job("a") == job and [line.split()[0] for line in slurm.jobs()] == [job]
    login.ok("stop", "a")
    login.wait_gone("a")
    assert login("resume", "a").returncode == -9  # once more, with a job that nobody knows
    assert len(slurm.jobs()) == 1
    login.ok("stop", "a")
    assert slurm.jobs() == []
    shutil.rmtree(deadly)
    login.ok("resume", "a")
    cluster.hurry()
    like_undisturbed("a")


@pytest.mark.minutes
def test_of_two_who_resume_at_once_one_does(cluster: Cluster, like_undisturbed: Check) -> None:
    login = cluster.login
    cluster.submit("a")
    cluster.wait_attempt("a", 1)
    login.ok("stop", "a")
    both = [login.start("resume", "a") for _ in range(2)]
    said = [one.communicate(timeout=PATIENCE)[0] for one in both]
    assert sorted(one.returncode for one in both) == [0, 2], said
    assert len(cluster.slurm.jobs()) == 1
    cluster.hurry()
    like_undisturbed("a")


@pytest.mark.minutes
def test_a_job_too_many_ends_and_leaves_the_run_alone(cluster: Cluster) -> None:
    """As if a controller had acted on a request long after who made it had given up."""
    login, slurm = cluster.login, cluster.slurm
    slurm.wait_idle()
    login.slow.touch()
    login.ok("submit", TASK, "--on", "slurm", "--name", "a", *ONE_NODE, *FIELDS)
    cluster.wait_attempt("a", 1)
    other = slurm("sbatch", "--parsable", str(login.runs / "a" / "job.sbatch")).strip()
    wait_until(lambda: not any(line.startswith(f"{other} ") for line in slurm.jobs()), "the end of the other job")
    assert f"is the run of job {login.job('a')}" in (login.runs / "a" / f"slurm-{other}.log").read_text()
    assert "JobState=COMPLETED" in slurm("scontrol", "show", "job", other)
    record = login.record("a")
    assert (record["state"], len(record["attempts"])) == ("running", 1)
    cluster.hurry()
    login.wait("a", lambda record: record["state"] in ("finished", "failed"), "its end")
    assert len(login.record("a")["attempts"]) == 1
