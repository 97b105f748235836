"""Ranks die, and are started again from the copies in memory: at most one finished step is made again, and the bits are
the same."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.tasks import TASKS
from tests.train.specs import with_spec
from tests.train.tiers import later
from train.checkpoint.buffers import SnapshotMemory
from train.launcher import checks
from train.launcher.request import Request
from train.programs import TASK
from train.run import folders, run_folder
from train.run.spec import Spec, read_spec
from train.signals import StopRequest
from train.supervise.attempts import Supervisor
from train.supervise.decide import LaunchMode
from train.supervise.ranks import TaskRanks
from train.trainer.load import load_trained
from train.zygote.client import Zygote

pytestmark = pytest.mark.never_forgiven

ADAMW = {"optim__name": "adamw", "optim__lr": 0.01}
LONGER = {"epochs": 10}  # forty steps
COPY = "1 0 copy"  # after every step: as where a copy costs less than a hundredth of one
SPREAD = {"parallel__strategy": "fsdp"}
HYBRID = {"parallel__strategy": "hsdp", "parallel__shard_size": 2}


class Keeping(TaskRanks):
    """Ranks as an agent has them, with memory beside them. The fault meets `times` attempts."""

    def __init__(
        self,
        run: run_folder.Run,
        lock: run_folder.Lock,
        ranks: int,
        zygote: Zygote,
        fault: str,
        times: int = 99,
        between: Callable[[run_folder.Run], None] = lambda run: None,
    ) -> None:
        super().__init__(run, read_spec(run), lock=lock, count=ranks, zygote=zygote, environ={"TRAIN_FAULT": fault})
        self.memory = self.memory or SnapshotMemory()
        self.times, self._between = times, lambda: between(run)

    def start(self, spec: Spec, attempt: int) -> None:
        if attempt > 1:
            self._between()
        if attempt > self.times:
            self.environ["TRAIN_FAULT"] = ""
        super().start(spec, attempt)


class Kept:
    """Runs whose ranks die and are started again."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def run(
        self,
        name: str,
        ranks: int,
        script: Iterable[str] = (),
        fault: str = "",
        times: int = 99,
        restarts: int = 1,
        begun: str | None = None,
        between: Callable[[run_folder.Run], None] = lambda run: None,
        **flags: Any,
    ) -> dict[str, Any]:
        """
        Args:
            begun: when the run says that it first started.
            between: is called before each attempt but the first.
        """
        task = flags.pop("task", self.engine.task)
        merged = self.engine.flags | {key.replace("__", "."): value for key, value in flags.items()}
        if "steps" in flags:
            del merged["epochs"]
        prepared = checks.prepare(
            Request(str(task), flags={key: str(value) for key, value in merged.items()}), ranks=ranks
        )
        record = prepared.record | {"max_restarts": restarts, "started": begun}
        run = folders.create(self.engine.station.runs, name, files=prepared.files, record=record)
        (run.folder / "script").write_text("\n".join(script))
        lock = run.acquire()
        assert lock is not None
        processes = Keeping(run, lock, ranks, self.engine.zygote, fault, times, between)
        try:
            self.code = Supervisor(
                run=run, spec=read_spec(run), program=TASK, ranks=processes, mode=LaunchMode.LAUNCHED,
                stop=StopRequest(()),
            ).keep()  # fmt: skip
        finally:
            lock.release()
            assert processes.memory is not None
            processes.memory.close()
        return run.read_effective()

    def check(self, name: str, reference: str) -> list[int]:
        """That it ended like the undisturbed one, and no death cost more than one finished step. Where its attempts
        began."""
        assert self.engine.outcome(name) == self.engine.outcome(reference)
        attempts = self.engine.station.record(name)["attempts"]
        for one, other in itertools.pairwise(attempts):
            assert one["end"] == "died" and 0 <= one["to_step"] - other["from_step"] <= 1, attempts
        return [attempt["from_step"] for attempt in attempts]


@pytest.fixture(scope="module")
def kept(steady: Any) -> Kept:
    steady.run("kept-long2", 2, **LONGER)
    return Kept(steady)


@pytest.mark.parametrize(
    ("way", "ranks", "victim"),
    [({}, 3, 2), (SPREAD, 2, 0), *later(({}, 2, 0), (SPREAD, 2, 1), (HYBRID, 4, 3))],
    ids=["ddp", "fsdp", "ddp-lead", "fsdp-other", "hsdp"],
)
def test_a_rank_killed_in_every_attempt_costs_at_most_one_step(
    kept: Kept, way: dict[str, Any], ranks: int, victim: int
) -> None:
    flags = LONGER | ADAMW | way | {"task__batchnorm": str(not way).lower(), "checkpoint__every_steps": 1000}
    name = f"{way.get('parallel__strategy', 'ddp')}{ranks}-{victim}"
    kept.engine.run(f"{name}-whole", ranks, **flags)
    kept.run(name, ranks, [COPY, f"11 {victim} SIGKILL"], **flags)
    begun = kept.check(name, f"{name}-whole")
    # in the eleventh step of each attempt, of forty: more deaths than restarts without progress are allowed
    assert len(begun) >= 4
    assert f"continuing after step {begun[-1]} as it was in memory" in kept.engine.said(name)


@pytest.mark.parametrize("point", ["written", *later("begin", "sealed", "update")])
@pytest.mark.parametrize("way", [{}, *later(SPREAD)], ids=["ddp", "fsdp"])
def test_a_rank_killed_while_it_copies_leaves_the_copy_before(kept: Kept, point: str, way: dict[str, Any]) -> None:
    name, victim = f"torn-{point}{len(way)}", int(point == "written")
    reference = "kept-long2"
    if way:
        reference = "kept-parts2"
        if not (kept.engine.station.runs / reference).exists():
            kept.engine.run(reference, 2, **LONGER, **way)
    fault = f"{point if point == 'update' else f'snapshot.{point}'}@{victim}:15"
    kept.run(name, 2, [COPY], fault=fault, **LONGER, **way)
    assert len(kept.check(name, reference)) > 2


@pytest.mark.parametrize("way", [{}, *later(SPREAD)], ids=["ddp", "fsdp"])
def test_what_a_task_keeps_and_the_average_of_the_weights_are_copied_too(kept: Kept, way: dict[str, Any]) -> None:
    flags = LONGER | way | {"task": TASKS / "moving.py", "ema__decay": 0.9}
    reference, name = f"moving-whole{len(way)}", f"moving-died{len(way)}"
    kept.engine.run(reference, 2, **flags)
    kept.run(name, 2, [COPY, "11 1 SIGKILL"], **flags)
    assert len(kept.check(name, reference)) > 2
    runs = [kept.engine.station.run(one) for one in (reference, name)]
    averages = [load_trained(*with_spec(run))[4] for run in runs]
    assert all(torch.equal(value, averages[1][key]) for key, value in averages[0].items())


def test_when_all_die_the_last_copy_serves(kept: Kept) -> None:
    kept.run("all", 2, [COPY, "15 0 SIGKILL", "15 1 SIGKILL"], **LONGER)
    assert kept.check("all", "kept-long2") == [0, 14, 28]


def test_curves_have_the_steps_that_rank_0_took_along(kept: Kept) -> None:
    kept.run("curves", 2, [COPY, "11 0 SIGKILL"], log__tensorboard="true", **LONGER)
    kept.check("curves", "kept-long2")
    shown = EventAccumulator(str(kept.engine.station.runs / "curves" / "tensorboard")).Reload()
    lines = kept.engine.lines("curves")
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert sorted((event.step, event.value) for event in shown.Scalars("train/loss")) == [
        (step, pytest.approx(loss)) for step, loss in losses
    ]
    evaluations = [(line["step"], line["eval"]["loss"]) for line in lines if "eval" in line]
    assert len(evaluations) > 5
    assert sorted((event.step, event.value) for event in shown.Scalars("eval/loss")) == [
        (step, pytest.approx(loss)) for step, loss in evaluations
    ]


def test_without_snapshots_a_death_costs_what_the_disk_has_not(kept: Kept) -> None:
    record = kept.run("without", 2, ["12 1 SIGKILL"], checkpoint__snapshots="false", **LONGER)
    assert record["state"] == "failed" and kept.code == 3
    assert [attempt["from_step"] for attempt in record["attempts"]] == [0, 0]
    assert record["reason"].startswith("died 2 times without a new checkpoint: rank 1 died of SIGKILL")


def test_what_is_due_after_the_step_that_a_death_followed_is_made_up_for(kept: Kept) -> None:
    """The last step is made, its checkpoint and evaluation are not."""
    kept.run("end", 2, [COPY], fault="save.begin@1:1", times=1, **LONGER)
    assert kept.check("end", "kept-long2") == [0, 40]
    assert kept.engine.station.run("end").steps_saved() == [40]


def test_deaths_do_not_put_off_a_checkpoint_that_is_due(kept: Kept) -> None:
    """No attempt lives as long as every_minutes, but the run has gone on for longer than that without a save."""
    kept.run(
        "due",
        2,
        [COPY, "12 1 SIGKILL"],
        begun="2020-01-01T00:00:00+00:00",
        checkpoint__keep=9,
        checkpoint__every_minutes=10,
        checkpoint__asynchronous="false",
        **LONGER,
    )
    _, one, two, *_ = kept.check("due", "kept-long2")
    assert any(one < step < two for step in kept.engine.station.run("due").steps_saved())


def test_memory_is_not_passed_over_for_a_checkpoint_that_is_damaged(kept: Kept) -> None:
    def spoil(run: run_folder.Run) -> None:
        newest = run.steps_saved()[0]
        shutil.copytree(run.checkpoint(newest), run.checkpoint(newest + 9))
        shard = next(run.checkpoint(newest + 9).glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-1])

    kept.run(
        "passed-over",
        2,
        [COPY, "12 1 SIGKILL"],
        between=spoil,
        checkpoint__every_steps=10,
        checkpoint__asynchronous="false",
        **LONGER,
    )
    assert len(kept.check("passed-over", "kept-long2")) >= 4


def test_a_run_keeps_no_memory_when_it_has_ended(kept: Kept) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept.run("within", 2, ["3 1 SIGKILL"], epochs=2.5)
    assert len(os.listdir("/proc/self/fd")) <= before
