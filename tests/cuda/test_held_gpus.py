"""Runs hold their GPUs: no two runs get the same one, and a run that waits gets those that become free."""

from __future__ import annotations

import json

import pytest

from tests.cuda.cards import uuid
from tests.cuda.conftest import GpuStation

pytestmark = pytest.mark.minutes

LONG = ["--steps", 100000]
SHORT = ["--steps", 2, "--checkpoint.every_minutes", 0]


def test_runs_take_free_gpus_and_a_run_that_finds_none_is_refused_or_waits(machine: GpuStation) -> None:
    machine.ok("launch", "fake", "--name", "pair", "--nproc", 2, *LONG)
    machine.ok("launch", "fake", "--name", "third", "--gpus", "2,", *LONG)
    machine.cards.write(3, pid=4711, bytes=1 << 30)
    assert machine.record("pair")["gpus"] == "0,1" and machine.record("third")["gpus"] == "2"
    refused = machine("launch", "fake", "--name", "late", *SHORT)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    for told in ("GPU 0 is held by ", "(pair, since ", "GPU 3 is in use by process 4711, without a lease", "--queue"):
        assert told in refused.stderr, refused.stderr
    assert not (machine.runs / "late").exists()
    held = json.loads(machine.ok("gpus", "--json").stdout)
    assert [one["run"] for one in held] == ["pair", "pair", "third", ""] and held[3]["other"] == "process 4711"
    machine.ok("launch", "fake", "--name", "late", "--queue", *SHORT)
    machine.wait("late", lambda record: "first in the queue: GPU 0 is held" in record["reason"])
    behind = machine("launch", "fake", "--name", "hasty", "--gpus", "3,", *SHORT)
    assert behind.returncode == 2 and "process 4711" in behind.stderr, behind.stderr
    machine.cards.write(3, pid=0)
    assert machine.wait_for_end("late")["state"] == "finished"
    machine.ok("launch", "fake", "--name", "careless", "--no-lease", *SHORT, "--follow")
    assert machine.record("late")["gpus"] == "3"
    machine.ok("stop", "pair")
    machine.ok("launch", "fake", "--name", "another", "--gpus", "1,", *LONG)
    machine.ok("resume", "pair")  # two free ones, whichever they are
    assert machine.record("pair")["gpus"] == "0,3"
    for name in ("pair", "another"):
        machine.ok("stop", name)


def test_a_resume_takes_the_gpus_that_the_user_named_or_waits_for_them(machine: GpuStation) -> None:
    machine.ok("launch", "fake", "--name", "named", "--gpus", "1,", *LONG)
    machine.wait_for_step("named", 1)
    machine.ok("stop", "named")
    machine.ok("launch", "fake", "--name", "thief", "--gpus", "1,", *LONG)
    refused = machine("resume", "named")
    assert refused.returncode == 2 and "GPU 1 is held by" in refused.stderr and "thief" in refused.stderr
    machine.ok("resume", "named", "--queue")
    machine.ok("stop", "thief")
    machine.wait("named", lambda record: record["state"] == "running")
    assert machine.record("named")["gpus"] == "1"
    machine.ok("stop", "named")


def test_the_trials_of_a_sweep_share_the_free_gpus(machine: GpuStation) -> None:
    machine.ok("launch", "fake", "--name", "other", "--gpus", "0,1,", *LONG)
    machine.ok("sweep", "fake", "--name", "seeds", "--grid", "seed=0..3", "--at-once", 3, *SHORT)
    assert machine.wait_for_end("seeds")["state"] == "finished"
    assert {machine.record(f"seeds-00{number}")["gpus"] for number in range(1, 5)} == {"2", "3"}
    machine.ok("stop", "other")
    assert not machine.record("seeds")["wants"]["lease"]


def test_a_run_on_the_cpu_takes_no_gpu_also_if_a_file_or_the_forked_run_says_so(machine: GpuStation) -> None:
    machine.ok("launch", "fake", "--name", "every", "--nproc", 4, *LONG)
    (machine.folder / "cpu.toml").write_text('device = "cpu"\n')
    machine.ok("launch", "fake", "--name", "cores", "--config", "cpu.toml", "--nproc", "auto", *SHORT, "--follow")
    assert machine.record("cores")["world_size"] == 1
    machine.ok("fork", "cores", "--name", "forked", "--steps", 4, "--follow")
    (machine.folder / "own.py").write_text('from train.tasks.fake import *\n\nDEFAULTS = {"device": "cpu"}\n')
    machine.ok("launch", "own.py", "--name", "own", *SHORT, "--follow")
    assert {machine.record(name)["device"] for name in ("cores", "forked", "own")} == {"cpu"}
    machine.ok("stop", "every")


def test_a_run_with_as_many_ranks_as_gpus_waits_for_one_and_takes_all_that_are_free(machine: GpuStation) -> None:
    machine.ok("launch", "fake", "--name", "three", "--nproc", 3, *LONG)
    machine.ok("launch", "fake", "--name", "one", *LONG)
    machine.ok("launch", "fake", "--name", "auto", "--nproc", "auto", "--queue", *LONG)
    machine.wait("auto", lambda record: record["reason"].startswith("waits for 1 GPU, first in the queue: GPU 0"))
    machine.ok("stop", "three")
    machine.wait("auto", lambda record: record["state"] == "running")
    assert (machine.record("auto")["world_size"], machine.record("auto")["gpus"]) == (3, "0,1,2")
    for name in ("auto", "one"):
        machine.ok("stop", name)


def test_a_gpu_that_is_lost_hides_none_of_those_after_it(machine: GpuStation) -> None:
    machine.cards.write(1, answers=0)
    machine.ok("launch", "fake", "--name", "pair", "--gpus", 2, *SHORT, "--follow")
    assert machine.record("pair")["gpus"] == f"{uuid(0)},{uuid(2)}"
