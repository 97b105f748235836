"""A run that is handed to Slurm whose commands are slow, or whose answers get lost: one job at most, and none unknown.

The Slurm is three shell scripts and a folder with a file for each job; see tests/train/slurm for a real one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.commands.test_bad_input import command, refused
from train.cluster import slurm
from train.record import store
from train.record.store import Run

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


def test_a_run_whose_slurm_does_not_answer_is_not_removed(there: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert there.says(*SUBMIT)[0] == 0
    there.squeue("exec sleep 600")
    monkeypatch.setattr(slurm, "_GLANCE", 0.3)
    refused(there.says("rm", "a"), "slurm does not answer here", "is job 7 there")
    assert there.queue() == ["7"] and there.record()["state"] == store.CREATED
    Run(there.runs / "a").update(state=store.FINISHED)  # of this nothing begins any more
    assert there.says("rm", "a")[0] == 0
    assert not (there.runs / "a").exists()
