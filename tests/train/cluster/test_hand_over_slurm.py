"""A run that is handed to Slurm whose commands are slow, or whose answers get lost: one job at most, and none unknown.

The Slurm is three shell scripts and a folder with a file for each job; see tests/train/slurm for a real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.train.cluster.conftest import wait_until
from tests.train.commands.test_bad_input import command, refused
from tests.train.conftest import PATIENCE
from train.cluster import slurm
from train.record import folders, store
from train.record.store import Run
from train.runs import placed

SBATCH = r"""
for word; do
    case $word in --comment=*) comment=${word#--comment=} ;; esac
done
job=$(($(ls "$jobs" "$gone" | grep -c '^[0-9]') + 7))
echo "$comment" >"$jobs/$job"
. "$0.then"
echo "$job"
"""
SQUEUE = r"""
. "$0.first"
case "$*" in *%k*) line='$job|$comment' ;; *) line='$job|PENDING|Priority' ;; esac
for job in $(ls "$jobs"); do
    comment=$(cat "$jobs/$job")
    eval "echo \"$line\""
done
"""
SCANCEL = 'mv "$jobs/$1" "$gone/"'


class Slurm:
    """Its commands, and what is in its queue."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.jobs, self.gone, self.runs = (folder / name for name in ("bin", "jobs", "gone", "runs"))
        for made in (self.bin, self.jobs, self.gone):
            made.mkdir()
        for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("scancel", SCANCEL)):
            tool = self.bin / name
            tool.write_text(f"#!/bin/sh\njobs={self.jobs}\ngone={self.gone}\n{text}")
            tool.chmod(0o755)
        self.sbatch()
        self.squeue()

    def sbatch(self, then: str = "") -> None:
        """What sbatch does after it has submitted, from now on."""
        (self.bin / "sbatch.then").write_text(then)

    def squeue(self, first: str = "") -> None:
        """What squeue does before it answers."""
        (self.bin / "squeue.first").write_text(first)

    def queue(self) -> list[str]:
        return sorted(path.name for path in self.jobs.iterdir())

    def record(self) -> dict[str, object]:
        return Run(self.runs / "a").read()

    def says(self, *arguments: object) -> tuple[int, str, str]:
        return command(*arguments, "--runs", self.runs)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAIN_RUNS", raising=False)
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    return made


SUBMIT = ("submit", "digits", "--on", "slurm", "--nproc", 1, "--name", "a")


@pytest.mark.minutes
def test_a_run_whose_slurm_does_not_answer_is_not_removed(there: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert there.says(*SUBMIT)[0] == 0
    there.squeue("exec sleep 600")
    monkeypatch.setattr(slurm, "_GLANCE", 0.3)
    refused(there.says("rm", "a"), "slurm does not answer here", "is job 7 of slurm")
    assert there.queue() == ["7"] and there.record()["state"] == store.CREATED
    Run(there.runs / "a").update(state=store.FINISHED)  # of this nothing begins any more
    assert there.says("rm", "a")[0] == 0
    assert not (there.runs / "a").exists()


@pytest.mark.parametrize("then", ["exit 1", "kill -9 $$", "echo Hello; exit 0"])
def test_a_job_whose_number_was_lost_is_found(there: Slurm, then: str) -> None:
    there.sbatch(then)
    code, out, err = there.says(*SUBMIT)
    assert (code, out) == (0, "a\n") and "job 7 of Slurm's" in err
    assert there.queue() == ["7"] and there.record()["submitted"] == {"engine": "slurm", "job": "7"}
    assert there.says("stop", "a")[0] == 0 and there.queue() == []
    assert there.says("resume", "a")[0] == 0
    assert there.queue() == ["8"] and there.record()["submitted"] == {"engine": "slurm", "job": "8"}


@pytest.mark.minutes
def test_a_job_that_nobody_could_ask_for_is_found_later(there: Slurm) -> None:
    """By whatever is done next with its run."""
    there.sbatch("exit 1")
    for names, words in ((["resume"], "job 7 of slurm (pending"), (["rm"], "job 8 of slurm still"), (["stop"], "")):
        there.squeue("exit 1")
        refused(there.says(*SUBMIT), "is not known", "train resume a")
        assert (there.runs / "a").exists() and len(there.queue()) == 1
        refused(there.says("rm", "a"), "does not answer here")
        there.squeue()
        code, _, err = there.says(*names, "a")
        assert (code, words in err) == (2 if words else 0, True), err
        there.says("stop", "a")
        assert there.queue() == []
        assert there.says("rm", "a")[0] == 0


def test_a_resume_whose_answer_is_lost_gives_one_job(there: Slurm) -> None:
    assert there.says(*SUBMIT)[0] == 0 and there.says("stop", "a")[0] == 0
    there.sbatch('echo exit 1 >"$(dirname "$0")/squeue.first"; exit 1')
    refused(there.says("resume", "a"), "is not known", "train resume a")
    assert there.record()["submitted"] == {"engine": "slurm", "job": None}  # the job that begins is not another one's
    there.squeue()
    refused(there.says("resume", "a"), "job 8 of slurm (pending, Priority) already")
    assert there.queue() == ["8"] and there.record()["submitted"] == {"engine": "slurm", "job": "8"}


def test_what_slurm_does_not_take_leaves_all_as_it_was(there: Slurm) -> None:
    assert there.says(*SUBMIT)[0] == 0 and there.says("stop", "a")[0] == 0
    before = there.record()
    there.sbatch('rm "$jobs/$job"; echo "no such partition" >&2; exit 1')
    refused(there.says("resume", "a", "--steps", 7), "no such partition")
    assert there.record() == before and '"steps"' not in (there.runs / "a" / "submission.json").read_text()
    refused(there.says(*SUBMIT[:-1], "b"), "no such partition")
    assert [path.name for path in there.runs.iterdir()] == ["a"]


@pytest.mark.minutes
def test_fields_of_a_resume_reach_every_node_whether_it_has_a_record_or_not(there: Slurm) -> None:
    assert there.says(*SUBMIT, "--nodes", 2, "--epochs", 3)[0] == 0
    nodes = [there.runs, there.runs / ".nodes/1"]
    folders.create(nodes[1], "a", {}, {})
    for has_begun, steps in ((0, 700), (1, 900)):
        for node, runs in enumerate(nodes):
            Run(runs / "a").update(total_steps=5 if node == has_begun else None)
        for name, value in (("epochs", 4), ("steps", steps)):  # of which the later one holds
            assert there.says("stop", "a")[0] == 0
            assert there.says("resume", "a", f"--{name}", value)[0] == 0
        content = json.loads((nodes[0] / "a/submission.json").read_text())
        for node, runs in enumerate(nodes):
            order = placed.order_of(content, nodes[0] / "a", runs, node, "a:1")
            assert order is not None and order.kind == ("resume" if node == has_begun else "new")
            assert (order.flags or order.request["flags"]) == {"steps": str(steps)}
    assert there.says("stop", "a")[0] == 0
    refused(there.says("resume", "a", "--steps", "x"), "steps")
    assert json.loads((nodes[0] / "a/submission.json").read_text()) == content


def test_a_hand_over_that_its_user_breaks_off_leaves_no_job(there: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    real = slurm._sbatch

    def broken_off(run: Run) -> str:
        real(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm, "_sbatch", broken_off)
    assert there.says(*SUBMIT)[0] == 130
    assert there.queue() == [] and list(there.gone.iterdir()) != [] and not (there.runs / "a").exists()


def test_a_comment_of_the_users_stays_and_is_told_from_the_mark(there: Slurm) -> None:
    assert there.says(*SUBMIT, "--sbatch", "comment='two words'")[0] == 0
    id_ = there.record()["submission"]
    assert (there.jobs / "7").read_text() == f"two words trainstation:{id_}\n"


def test_while_a_run_is_handed_over_nobody_else_does_that_nor_stops_nor_removes_it(there: Slurm) -> None:
    assert there.says(*SUBMIT)[0] == 0 and there.says("stop", "a")[0] == 0
    there.sbatch(f"while [ ! -e {there.runs}/gate ]; do /bin/sleep 0.05; done")
    line = [sys.executable, "-m", "train", "resume", "a", "--runs", str(there.runs)]
    first = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: there.queue() == ["8"], "the job of the first one")
        for name in ("resume", "stop", "rm"):
            refused(there.says(name, "a"), "a is being handed over just now")
    finally:
        (there.runs / "gate").touch()
        said, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == 0, said
    assert there.queue() == ["8"] and there.record()["submitted"] == {"engine": "slurm", "job": "8"}


# --- two jobs of one run, after all


def test_a_job_that_is_not_on_record_leaves_the_run_alone(there: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert there.says(*SUBMIT)[0] == 0
    run = Run(there.runs / "a")
    before, lock = run.read(), run.acquire()
    assert lock is not None  # as an agent of job 7 would have it
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setattr(placed, "_STALE", 0.0)
    for node, runs in ((0, there.runs), (1, there.runs / ".nodes/1")):
        given = placed._arguments([str(run.folder / "submission.json"), "--runs", str(runs), "--node", str(node)])
        with pytest.raises(SystemExit) as end:
            placed._carry_out(given, SimpleNamespace(asked=False))  # type: ignore[arg-type]
        assert end.value.code == 0
    assert run.read() == before and run.stop_asked() == ""  # nobody is driven out
    lock.release()
    run.update(submitted={"engine": "slurm", "job": None})  # it is being handed over: whoever begins first has it
    for job, other in (("8", ""), ("9", "the run of job 8"), ("8", "")):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        said = placed.of_another_job(run, SimpleNamespace(asked=False))  # type: ignore[arg-type]
        assert other in said if other else said == ""
    assert there.record()["submitted"] == {"engine": "slurm", "job": "8"}


@pytest.mark.parametrize(("job", "is_queued_again"), [("7", True), ("9", False)])
def test_a_job_that_is_not_on_record_is_not_queued_again(there: Slurm, job: str, is_queued_again: bool) -> None:
    assert there.says(*SUBMIT)[0] == 0
    said = there.bin / "said"
    for name, text in (("srun", "exit 75"), ("squeue", "echo RUNNING 0"), ("scontrol", f'echo "$@" >>{said}')):
        tool = there.bin / name
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o755)
    given = os.environ | {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "a"}
    done = subprocess.run(["/bin/bash", there.runs / "a" / "job.sbatch"], env=given, capture_output=True, check=False)
    assert done.returncode == 75, done.stderr
    assert (f"requeue {job}" in said.read_text()) == is_queued_again
