"""Whatever a Slurm does to a job, its run ends as one that nobody disturbed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable

import pytest

from tests.train.conftest import PATIENCE
from tests.train.slurm.cluster import NODES
from tests.train.slurm.conftest import FIELDS, TASK, Cluster
from tests.waiting import eventually

Check = Callable[[str], None]
SUBMIT = ("submit", TASK, "--on", "slurm", "--name", "a", "--nodes", 2, "--nproc", 1, *FIELDS)

pytestmark = pytest.mark.minutes


def test_a_submission_is_followed_through_the_queue_to_its_end(cluster: Cluster, like_undisturbed: Check) -> None:
    login, slurm = cluster.login, cluster.slurm
    slurm.wait_idle()
    other = slurm("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 300").strip()
    with (login.folder / "out").open("w") as out, (login.folder / "err").open("w") as err:
        followed = login.start(*SUBMIT, "--follow", stdout=out, stderr=err)
    eventually("that it waits", lambda: "train: a is queued: slurm: job" in (login.folder / "err").read_text())
    assert login.ok("show", "a").stdout.startswith(f"a: queued: slurm: job {login.job('a')} is pending")
    again, removed = login("resume", "a"), login("rm", "a")
    assert again.returncode == removed.returncode == 2
    assert "already" in again.stderr and "train stop a" in removed.stderr
    slurm("scancel", other)
    assert followed.wait(PATIENCE) == 0, (login.folder / "err").read_text()
    like_undisturbed("a")
    said = (login.folder / "err").read_text()
    assert "train: a is running" in said and said.splitlines()[-1].startswith("a finished after 500 steps"), said
    assert (login.folder / "out").read_text() == "a\n" + login.ok("logs", "a").stdout
    assert login.ok("logs", "a", "--rank", 1).stdout == (login.node(1).runs / "a/logs/attempt-1/rank1.log").read_text()
    login.ok("rm", "a")
    assert not list(login.runs.glob("**/run.json"))


def test_a_stopped_run_rests_and_goes_on_in_one_job(cluster: Cluster, like_undisturbed: Check) -> None:
    login, slurm = cluster.login, cluster.slurm
    cluster.submit("a")
    cluster.wait_attempt("a", 1)
    assert " running " in login.ok("ls").stdout
    assert "train resume a" in login.ok("stop", "a").stderr
    assert login.states("a") == []
    record = login.record("a")
    assert (record["state"], record["stopped_by"]) == ("stopped", "user")
    assert max(login.run("a").steps_saved()) == record["step"] > 0
    both = [login.start("resume", "a") for _ in range(2)]
    said = [one.communicate(timeout=PATIENCE)[0] for one in both]
    assert sorted(one.returncode for one in both) == [0, 2], said
    assert len(login.states("a")) == 1
    # one that is submitted by hand besides waits for its end, and finds nothing left to do
    second = slurm("sbatch", "--parsable", str(login.runs / "a" / "job.sbatch")).strip()
    cluster.wait_attempt("a", 2)
    assert f"{second} PENDING" in slurm.jobs()
    cluster.hurry()
    like_undisturbed("a")
    record = login.record("a")
    assert [attempt["from_step"] for attempt in record["attempts"]] == [0, record["attempts"][0]["to_step"]]


def test_a_job_whose_submitter_was_killed_is_the_runs(cluster: Cluster, like_undisturbed: Check) -> None:
    """sbatch has made a job, and who called it never hears of it; Slurm does not take another one."""
    login, slurm = cluster.login, cluster.slurm
    done = login(*SUBMIT, "--partition", "nowhere")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "partition" in done.stderr and not (login.runs / "a").exists()
    deadly = login.folder / "deadly"
    deadly.mkdir()
    (deadly / "sbatch").write_text(f'#!/bin/sh\n{slurm.bin}/sbatch "$@" && kill -9 $PPID\n')
    (deadly / "sbatch").chmod(0o755)
    login.slow.touch()
    before = login.slurm.environment["PATH"]
    try:
        login.slurm.environment["PATH"] = f"{deadly}:{before}"
        assert login(*SUBMIT).returncode == -9
    finally:
        login.slurm.environment["PATH"] = before
    assert len(login.states("a")) == 1
    again = login("resume", "a")
    assert again.returncode == 2 and "already" in again.stderr, again.stderr
    login.ok("stop", "a")
    assert slurm.jobs() == [] and login.record("a")["state"] == "stopped"
    shutil.rmtree(deadly)
    login.ok("resume", "a")
    cluster.hurry()
    like_undisturbed("a")


def test_a_warned_and_a_preempted_job_save_and_come_back(cluster: Cluster, like_undisturbed: Check) -> None:
    """By the signal that comes before the time limit, and by SIGTERM, as Slurm preempts by default."""
    login, slurm = cluster.login, cluster.slurm
    cluster.submit("a")
    cluster.wait_attempt("a", 1)
    job = login.job("a")
    slurm("scancel", "--batch", "--signal=USR1", job)
    record = cluster.wait_stopped("a")
    assert (record["stopped_by"], record["attempts"][0]["end"]) == ("signal", "stopped")
    assert max(login.run("a").steps_saved()) == record["step"] > 0
    eventually("the job in the queue again", lambda: login.states("a") == ["PENDING"])
    assert login.ok("show", "a").stdout.startswith(f"a: queued: slurm: job {job} is pending")
    cluster.wait_attempt("a", 2)
    assert login.record("a")["attempts"][1]["from_step"] == record["step"]
    slurm("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
    record = cluster.wait_stopped("a")
    cluster.wait_attempt("a", 3)
    cluster.hurry()
    like_undisturbed("a")
    assert login.record("a")["attempts"][2]["from_step"] == record["step"]


def test_an_agent_and_a_node_die_and_the_job_goes_on(cluster: Cluster, like_undisturbed: Check) -> None:
    login, slurm = cluster.login, cluster.slurm
    cluster.submit("a")
    cluster.wait_attempt("a", 1)
    job = login.job("a")
    os.kill(login.node(1).record("a")["pids"]["agent"], signal.SIGKILL)
    cluster.wait_attempt("a", 2)
    slurm.kill(NODES[1], whole=True)
    eventually("Slurm to notice", lambda: "RUNNING" not in login.states("a"))
    slurm.start_node(NODES[1])
    cluster.wait_attempt("a", 3)
    assert login.job("a") == job
    cluster.hurry()
    like_undisturbed("a")
