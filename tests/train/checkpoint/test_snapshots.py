"""Ranks die, and their supervisor starts them again from memory: no step is made twice, and the bits are the same."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.train.parallel.test_strategies import ODD
from tests.train.tiers import later
from train.checkpoint.shared import ENVIRONMENT, Owned
from train.record import folders, store
from train.runs import admit
from train.runs.processes import Guard, forked
from train.runs.processes.forked import Forked
from train.runs.processes.kept import memory_of, write_lines
from train.runs.request import Request
from train.runs.supervise import Supervisor
from train.runs.verdict import Road
from train.signals import StopRequest

ADAMW = {"optim__name": "adamw", "optim__lr": 0.01}
LONGER = {"epochs": 10}  # forty steps


class Keeping(Forked):
    """Ranks from the warm server, with memory beside them, as an agent has it. The fault meets `times` attempts."""

    def __init__(
        self,
        run: store.Run,
        lock: store.Lock,
        ranks: int,
        fault: str,
        memory: Owned,
        times: int = 99,
        between: Callable[[store.Run], None] = lambda run: None,
    ) -> None:
        self.memory, self.times, self._between = memory, times, lambda: between(run)
        super().__init__(run, lock, ranks, {ENVIRONMENT: memory.address, "TRAIN_FAULT": fault})

    def start(self, attempt: int) -> Guard | None:
        self.memory.hush()
        if attempt > 1:
            self._between()
        if attempt > self.times:
            self._environment.pop("TRAIN_FAULT", None)
        super().start(attempt)
        return Patient(self)

    def kept(self) -> int:
        return self.memory.step

    def write_lines(self) -> None:
        write_lines(self.run, self.memory)


class Patient(forked._Peers):
    """Gives survivors time, on however slow a machine."""

    def __init__(self, processes: Keeping) -> None:
        super().__init__(processes)
        self._since = 0.0

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        if self._forked.exits():
            assert isinstance(self._forked, Keeping)
            self._forked.memory.ring()
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since > 10:
                self._forked.signal(signal.SIGKILL)


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
        between: Callable[[store.Run], None] = lambda run: None,
        say: Callable[[str], None] = lambda text: None,
        stop: StopRequest | None = None,
        **flags: Any,
    ) -> dict[str, Any]:
        """
        Args:
            begun: when the run says that it first started.
            between: is called before each attempt but the first.
            say: is called with each line for the terminal.
            stop: asks for one.
        """
        task = flags.pop("task", self.engine.task)
        merged = self.engine.flags | {key.replace("__", "."): value for key, value in flags.items()}
        if "steps" in flags:
            del merged["epochs"]
        prepared = admit.prepare(Request(str(task), {key: str(value) for key, value in merged.items()}, ranks=ranks))
        record = prepared.record | {"max_restarts": restarts, "started": begun}
        run = folders.create(self.engine.station.runs, name, prepared.files, record)
        (run.folder / "script").write_text("\n".join(script))
        lock, memory = run.acquire(), memory_of(run, ranks) or Owned()
        assert lock is not None
        try:
            processes = Keeping(run, lock, ranks, fault, memory, times, between)
            self.code = Supervisor(run, processes, Road.LAUNCHED, stop or StopRequest(()), say=say).keep()
        finally:
            lock.release()
            memory.close()
        return run.shown()

    def check(self, name: str, reference: str) -> list[dict[str, Any]]:
        """That it ended like the undisturbed one, and what it made: each step once. Its attempts."""
        assert self.engine.outcome(name) == self.engine.outcome(reference)
        attempts = self.engine.station.record(name)["attempts"]
        for one, other in itertools.pairwise(attempts):
            assert (one["end"], one["to_step"]) == ("died", other["from_step"]), attempts
        return list(attempts)


@pytest.fixture(scope="module")
def kept(steady: Any) -> Kept:
    for ranks in (2, 3):
        steady.run(f"kept-long{ranks}", ranks, **LONGER)
        steady.run(f"kept-norm{ranks}", ranks, task__batchnorm="true", **LONGER, **ADAMW)
    steady.run("kept-short2", 2)
    return Kept(steady)


@pytest.mark.parametrize(("ranks", "victim"), [(3, 2), *later((2, 0), (2, 1), (3, 0))])
@pytest.mark.parametrize("kind", ["long", "norm"])
def test_a_rank_killed_in_every_attempt_costs_no_step(kept: Kept, kind: str, ranks: int, victim: int) -> None:
    flags = LONGER if kind == "long" else LONGER | ADAMW | {"task__batchnorm": "true"}
    name = f"{kind}{ranks}-kept{victim}"
    kept.run(name, ranks, [f"11 {victim} SIGKILL"], **flags)
    attempts = kept.check(name, f"kept-{kind}{ranks}")
    # in the eleventh step of each attempt, of forty: more deaths than restarts without progress are allowed
    assert [attempt["from_step"] for attempt in attempts] == [0, 10, 20, 30]
    assert "continuing after step 20 as it was in memory" in kept.engine.said(name)


def test_averages_that_a_hook_of_the_optimizer_makes_are_a_part_of_the_state(kept: Kept) -> None:
    flags = ODD | {"task__kind": "averaged", "steps": 40, "checkpoint__every_steps": 15}
    kept.engine.run("averaged-whole", 2, **flags)
    record = kept.run("averaged-kept", 2, ["8 1 SIGKILL"], restarts=5, **flags)
    assert kept.engine.outcome("averaged-kept") == kept.engine.outcome("averaged-whole")
    lost = [one["to_step"] - other["from_step"] for one, other in itertools.pairwise(record["attempts"])]
    assert lost and not any(lost), record["attempts"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_inside_the_update_leaves_it_to_the_survivor(kept: Kept, victim: int) -> None:
    name = f"update{victim}"
    kept.run(name, 2, fault=f"update@{victim}:15", task__batchnorm="true", **LONGER, **ADAMW)
    attempts = kept.check(name, "kept-norm2")
    # the survivor makes the step that the dead one died in
    assert [attempt["from_step"] for attempt in attempts] == [0, 15, 30]


def test_lines_of_a_step_that_rank_0_did_not_live_to_write_are_there(kept: Kept) -> None:
    kept.run("mended", 2, fault="update@0:20", log__every_steps=20, **LONGER)
    kept.engine.run("mended-not", 2, log__every_steps=20, **LONGER)
    attempts = kept.check("mended", "mended-not")
    assert [attempt["from_step"] for attempt in attempts] == [0, 20, 40]
    assert 20 in [line["step"] for line in kept.engine.lines("mended") if "loss" in line]


def test_curves_have_the_steps_that_rank_0_took_along(kept: Kept) -> None:
    kept.run("curves", 2, ["11 0 SIGKILL"], log__tensorboard="true", **LONGER)
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


@pytest.mark.parametrize("point", ["written", *later("begin", "sealed")])
def test_a_rank_killed_while_it_writes_a_snapshot_costs_no_step(kept: Kept, point: str) -> None:
    kept.run(f"torn-{point}", 2, fault=f"snapshot.{point}@0:1", epochs=2.5)  # ten steps
    attempts = kept.check(f"torn-{point}", "kept-short2")
    assert len(attempts) > 2


def test_when_all_die_the_last_snapshot_serves(kept: Kept) -> None:
    kept.run("all", 2, fault="update@0:15,snapshot.begin@1:1", restarts=3, **LONGER)
    attempts = kept.engine.station.record("all")["attempts"]
    assert kept.engine.outcome("all") == kept.engine.outcome("kept-long2")
    assert all(other["from_step"] > one["from_step"] for one, other in itertools.pairwise(attempts))
    assert len(attempts) > 1


def test_without_snapshots_a_death_costs_what_the_disk_has_not(kept: Kept) -> None:
    record = kept.run("without", 2, ["12 1 SIGKILL"], checkpoint__snapshots="false", **LONGER)
    assert record["state"] == "failed" and kept.code == 3
    assert [attempt["from_step"] for attempt in record["attempts"]] == [0, 0]
    assert record["reason"].startswith("died 2 times without a new checkpoint: rank 1 died of SIGKILL")


def test_what_is_due_after_the_step_that_a_death_followed_is_made_up_for(kept: Kept) -> None:
    """The last step is made, its checkpoint and evaluation are not."""
    kept.run("end", 2, fault="save.begin@1:1", times=1, **LONGER)
    attempts = kept.check("end", "kept-long2")
    assert [attempt["from_step"] for attempt in attempts] == [0, 40]
    assert kept.engine.station.run("end").steps_saved() == [40]


def test_deaths_that_cost_no_step_do_not_put_off_a_checkpoint_that_is_due(kept: Kept) -> None:
    """No attempt lives as long as every_minutes, but the run has gone on for longer than that without a save."""
    kept.run(
        "due",
        2,
        ["12 1 SIGKILL"],
        begun="2020-01-01T00:00:00+00:00",
        checkpoint__keep=9,
        checkpoint__every_minutes=10,
        checkpoint__asynchronous="false",
        **LONGER,
    )
    assert [attempt["from_step"] for attempt in kept.check("due", "kept-long2")] == [0, 11, 22, 33]
    assert any(11 < step < 22 for step in kept.engine.station.run("due").steps_saved())


def test_memory_is_not_passed_over_for_a_checkpoint_that_is_damaged(kept: Kept) -> None:
    def spoil(run: store.Run) -> None:
        newest = run.steps_saved()[0]
        shutil.copytree(run.checkpoint(newest), run.checkpoint(newest + 9))
        shard = next(run.checkpoint(newest + 9).glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-1])

    kept.run(
        "passed-over",
        2,
        ["12 1 SIGKILL"],
        between=spoil,
        checkpoint__every_steps=10,
        checkpoint__asynchronous="false",
        **LONGER,
    )
    assert [attempt["from_step"] for attempt in kept.check("passed-over", "kept-long2")] == [0, 11, 22, 33]


def test_a_run_keeps_no_memory_when_it_has_ended(kept: Kept) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept.run("within", 2, ["3 1 SIGKILL"], epochs=2.5)
    assert len(os.listdir("/proc/self/fd")) <= before
