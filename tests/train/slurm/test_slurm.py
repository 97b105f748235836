"""Whatever a Slurm does to a job, its run ends as one that nobody disturbed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.conftest import PATIENCE, Station
from tests.train.slurm.cluster import NODES, wait_until
from tests.train.slurm.conftest import FIELDS, TASK, Cluster

Check = Callable[[str], None]


@pytest.mark.minutes
def test_a_run_is_submitted_seen_and_finished(cluster: Cluster, like_undisturbed: Check) -> None:
    login = cluster.login
    done = cluster.submit("a")
    assert done.stdout == "a\n"
    assert f"job {login.job('a')} of Slurm's" in done.stderr
    listed = login.ok("ls").stdout
    assert " queued " in listed or " running " in listed
    assert f"job {login.job('a')} of slurm" in login.ok("show", "a").stdout
    again = login("resume", "a")
    assert again.returncode == 2 and "already" in again.stderr and len(again.stderr.splitlines()) == 1
    refused = login("rm", "a")
    assert refused.returncode == 2 and "train stop a" in refused.stderr
    cluster.wait_attempt("a", 1)
    assert " running " in login.ok("ls").stdout
    cluster.hurry()
    like_undisturbed("a")
    assert login.ok("logs", "a").stdout == (login.runs / "a/logs/attempt-1/rank0.log").read_text() != ""
    assert login.ok("logs", "a", "--rank", 1).stdout == (login.node(1).runs / "a/logs/attempt-1/rank1.log").read_text()
    login.ok("rm", "a")
    assert not list(login.runs.glob("**/run.json"))


@pytest.mark.minutes
def test_two_ranks_on_one_node_end_as_without_slurm(cluster: Cluster, undisturbed: Station) -> None:
    login = cluster.login
    login.ok("submit", TASK, "--on", "slurm", "--name", "a", "--nproc", 2, *FIELDS, "--data.root", login.folder)
    login.wait("a", lambda record: record["state"] in ("finished", "failed"), "its end")
    assert login.record("a")["weights_sha256"] == undisturbed.record("one")["weights_sha256"], login.output("a")
    assert login.samples("a") == undisturbed.samples("one")
    # what only the node finds wrong is told where the user looks
    login.ok("submit", "images", "--on", "slurm", "--name", "b", "--nproc", 1, "--data.root", login.folder / "none")
    login.wait("b", lambda record: record["state"] == "failed", "its refusal")
    login.wait_gone("b")
    assert str(login.folder / "none") in login.ok("show", "b").stdout


@pytest.mark.minutes
def test_a_stop_saves_and_is_no_reason_to_queue_it_again(cluster: Cluster, like_undisturbed: Check) -> None:
    login = cluster.login
    cluster.submit("a")
    cluster.wait_attempt("a", 1)
    said = login.ok("stop", "a").stderr
    assert "train resume a" in said
    assert login.states("a") == []
    record = login.record("a")
    assert (record["state"], record["stopped_by"]) == ("stopped", "user")
    assert max(login.run("a").steps_saved()) == record["step"] > 0
    first = login.job("a")
    login.ok("resume", "a")
    assert login.job("a") != first
    cluster.wait_attempt("a", 2)
    cluster.hurry()
    like_undisturbed("a")
    assert login.record("a")["attempts"][1]["from_step"] == record["step"]


@pytest.mark.minutes
def test_a_run_that_waits_in_the_queue_is_stopped_there(cluster: Cluster, like_undisturbed: Check) -> None:
    login, slurm = cluster.login, cluster.slurm
    other = slurm("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600").strip()
    wait_until(lambda: f"{other} RUNNING" in slurm.jobs(), "the other job")
    login.ok("submit", TASK, "--on", "slurm", "--name", "a", "--nodes", 2, "--nproc", 1, *FIELDS)
    shown = login.ok("show", "a").stdout
    assert shown.startswith(f"a: queued: job {login.job('a')} of slurm: pending")
    assert [line.split()[:2] for line in login.ok("ls", "--state", "queued").stdout.splitlines()[1:]] == [
        ["a", "queued"]
    ]
    waits = login("logs", "a")
    assert waits.returncode == 2 and len(waits.stderr.splitlines()) == 1
    login.ok("stop", "a")
    assert login.states("a") == []
    assert login.record("a")["state"] == "stopped"
    slurm("scancel", other)
    login.ok("resume", "a")
    like_undisturbed("a")


@pytest.mark.minutes
def test_a_submission_is_followed_through_the_queue_to_its_end(cluster: Cluster, like_undisturbed: Check) -> None:
    login, slurm = cluster.login, cluster.slurm
    slurm.wait_idle()
    other = slurm("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 300").strip()
    with (login.folder / "out").open("w") as out, (login.folder / "err").open("w") as err:
        command = ("submit", TASK, "--on", "slurm", "--name", "a", "--nodes", 2, "--nproc", 1, *FIELDS, "--follow")
        followed = login.start(*command, stdout=out, stderr=err)
    wait_until(lambda: "train: a is queued: job" in (login.folder / "err").read_text(), "that it waits")
    slurm("scancel", other)
    assert followed.wait(PATIENCE) == 0, (login.folder / "err").read_text()
    like_undisturbed("a")
    said = (login.folder / "err").read_text()
    assert "train: a is running" in said and said.splitlines()[-1].startswith("a finished after 500 steps"), said
    assert (login.folder / "out").read_text() == "a\n" + login.ok("logs", "a").stdout
    login.ok("rm", "a")  # its job is gone, too


@pytest.mark.minutes
def test_who_follows_may_leave_and_hears_of_a_stop(cluster: Cluster) -> None:
    login = cluster.login
    login.slow.touch()
    cluster.slurm.wait_idle()
    command = ("submit", TASK, "--on", "slurm", "--name", "a", "--nodes", 2, "--nproc", 1, *FIELDS, "--follow")
    followed = login.start(*command)
    login.wait("a", lambda record: record["step"] >= 5, "some steps")
    followed.send_signal(signal.SIGINT)
    said, _ = followed.communicate(timeout=PATIENCE)
    assert followed.returncode == 130 and "a goes on; follow it again with: train logs a --follow" in said, said
    before = login.record("a")["step"]
    login.wait_for_step("a", before + 5)
    login.ok("stop", "a")
    followed = login.start("resume", "a", "--follow")
    login.wait("a", lambda record: len(record["attempts"]) == 2 and record["step"] >= before + 7, "attempt 2")
    login.ok("stop", "a")
    said, _ = followed.communicate(timeout=PATIENCE)
    assert followed.returncode == 75 and "continue with: train resume a" in said.splitlines()[-1], said


@pytest.mark.minutes
def test_before_the_time_limit_all_ranks_save_and_the_job_is_queued_again(
    cluster: Cluster, like_undisturbed: Check
) -> None:
    login = cluster.login
    cluster.submit("a", "--time", 2, "--warn", 20)
    record = cluster.wait_stopped("a")
    assert (record["stopped_by"], record["attempts"][0]["end"]) == ("signal", "stopped")
    assert max(login.run("a").steps_saved()) == record["step"] > 0
    job = login.job("a")
    wait_until(lambda: login.states("a") == ["PENDING"], "the job in the queue again")
    assert login.ok("show", "a").stdout.startswith(f"a: queued: job {job} of slurm: pending")
    cluster.wait_attempt("a", 2)
    cluster.hurry()
    like_undisturbed("a")
    assert login.job("a") == job
    assert login.record("a")["attempts"][1]["from_step"] == record["step"]


@pytest.mark.minutes
@pytest.mark.parametrize("is_warned", [True, False])
def test_preemption_saves_and_the_job_comes_back(cluster: Cluster, like_undisturbed: Check, is_warned: bool) -> None:
    """By the warning signal, as an administrator may set it up, and by SIGTERM, as it is by default."""
    login, slurm = cluster.login, cluster.slurm
    urgent = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
    with contextlib.ExitStack() as held:
        if not is_warned:
            held.enter_context(slurm.without("SlurmctldParameters=preempt_send_user_signal"))
        cluster.submit("a")
        cluster.wait_attempt("a", 1)
        slurm("sbatch", *urgent)
        record = cluster.wait_stopped("a")
    assert record["stopped_by"] == "signal"
    assert max(login.run("a").steps_saved()) == record["step"] > 0
    cluster.wait_attempt("a", 2)
    cluster.hurry()
    like_undisturbed("a")
    assert login.record("a")["attempts"][1]["from_step"] == record["step"]


@pytest.mark.minutes
def test_scancel_saves_and_ends_the_job_for_good(cluster: Cluster, like_undisturbed: Check) -> None:
    login = cluster.login
    cluster.submit("a")
    cluster.wait_attempt("a", 1)
    cluster.slurm("scancel", login.job("a"))
    login.wait_gone("a")
    record = cluster.wait_stopped("a")
    assert max(login.run("a").steps_saved()) == record["step"] > 0
    assert " stopped " in login.ok("ls").stdout
    login.ok("resume", "a")
    cluster.wait_attempt("a", 2)
    cluster.hurry()
    like_undisturbed("a")


@pytest.mark.minutes
def test_a_node_is_lost_and_the_job_goes_on(cluster: Cluster, like_undisturbed: Check) -> None:
    """By SIGKILL of its slurmd alone, then of all that is on it."""
    login, slurm = cluster.login, cluster.slurm
    cluster.submit("a")
    cluster.wait_attempt("a", 1)
    slurm.kill(NODES[1])
    slurm.start_node(NODES[1])
    cluster.wait_attempt("a", 1, 40)
    slurm.kill(NODES[1], whole=True)
    wait_until(lambda: "RUNNING" not in login.states("a"), "Slurm to notice")
    slurm.start_node(NODES[1])
    cluster.wait_attempt("a", 2)
    cluster.hurry()
    like_undisturbed("a")


@pytest.mark.minutes
def test_the_controller_dies_and_comes_back(cluster: Cluster, like_undisturbed: Check) -> None:
    login, slurm = cluster.login, cluster.slurm
    cluster.submit("a")
    cluster.wait_attempt("a", 1)
    slurm.kill("slurmctld-wlm")
    before = login.record("a")["step"]
    login.wait_for_step("a", before + 10)
    assert " running " in login.ok("ls").stdout  # by the folder alone
    slurm.start_controller()
    cluster.hurry()
    like_undisturbed("a")
    assert len(login.record("a")["attempts"]) == 1


@pytest.mark.minutes
def test_an_agent_is_killed_and_all_begin_again_in_the_same_job(cluster: Cluster, like_undisturbed: Check) -> None:
    login = cluster.login
    cluster.submit("a")
    cluster.wait_attempt("a", 1)
    os.kill(login.node(1).record("a")["pids"]["agent"], signal.SIGKILL)
    cluster.wait_attempt("a", 2)
    cluster.hurry()
    like_undisturbed("a")


def test_what_slurm_does_not_take_leaves_nothing_behind(cluster: Cluster) -> None:
    login = cluster.login
    done = login("submit", TASK, "--on", "slurm", "--name", "a", "--nproc", 1, "--partition", "nowhere", *FIELDS)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "sbatch: " in done.stderr and "partition" in done.stderr
    assert not Path(login.runs / "a").exists()
