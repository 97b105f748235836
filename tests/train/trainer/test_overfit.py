"""`--overfit N`: trains and evaluates on the same N samples of the training set."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.train.training import assert_same_training
from train.config import Config
from train.config.schema import Schedule
from train.data.plan import Plan, Sharing, choice, evaluation_micro_batches, micro_batches_of
from train.errors import Refused
from train.launcher.checks import overfitted
from train.tasks import load

pytestmark = pytest.mark.never_forgiven

FLAGS = {
    "overfit": 10, "batch_size": 4, "micro_batch_size": 1, "steps": 9, "eval__every_epochs": 0, "precision": "fp64",
    "task__evaluation": 55, "task__count_ids": "true",
}  # fmt: skip


def test_a_run_trains_and_evaluates_on_the_same_samples_on_any_number_of_ranks_and_over_a_kill(engine: Any) -> None:
    engine.run("same1", 1, **FLAGS)
    killed = engine.run("same3", 3, ["5 1 SIGKILL"], data__workers=1, checkpoint__every_steps=2, **FLAGS)
    assert killed["state"] == "interrupted"
    assert engine.resume("same3", 3)["state"] == "finished"
    assert_same_training(engine, "same3", "same1")
    samples = engine.station.samples("same1")
    first = sorted(index for step in (1, 2, 3) for index in samples[step])
    assert len({*first}) == 10 and first != list(range(10))  # the first ones of class folders are of one class
    for epoch in (4, 7):
        assert sorted(index for step in range(epoch, epoch + 3) for index in samples[step]) == first
    assert [samples[step] for step in (1, 2, 3)] != [samples[step] for step in (4, 5, 6)]
    (figures,) = engine.evaluations("same1")
    assert [index for index in range(55) if figures[f"id{index}"]] == first
    assert engine.station.metrics("same1")[-1]["samples"] == 10
    assert engine.station.record("same1")["samples"] == 10
    from train.data.fingerprint import FACTS

    (engine.station.runs / "same1" / FACTS).unlink()  # then a resume compares the number of samples alone
    assert engine.resume("same1", 1, steps=10)["step"] == 10


@pytest.mark.parametrize(
    ("schedule", "own", "typed", "kept", "warned"),
    [
        ({}, None, (), ("constant", 0.0), []),
        ({"decay": "wsd", "warmup_epochs": 2.0}, None, (), ("constant", 0.0),
         ["schedule.decay is constant; to change: --schedule.decay wsd",
          "schedule.warmup_epochs is 0.0; to change: --schedule.warmup_epochs 2.0"]),
        ({"decay": "linear"}, None, ("schedule.decay",), ("linear", 0.0), []),
        ({}, lambda step, total, config: 0.5, (), ("constant", 0.0), ["digits.py is not called"]),
    ],
)  # fmt: skip
def test_the_learning_rate_stays_constant_unless_its_user_types_another(
    schedule: dict[str, Any], own: Any, typed: tuple[str, ...], kept: tuple[str, float], warned: list[str]
) -> None:
    config = Config(overfit=8, schedule=Schedule(**schedule))
    task, warnings = overfitted(dataclasses.replace(load("digits"), schedule=own), config, typed)
    assert task.schedule is None and (config.schedule.decay, config.schedule.warmup_epochs) == kept
    assert len(warnings) == len(warned) and all(said in text for said, text in zip(warned, warnings, strict=True))
    assert all("--overfit 8 keeps the learning rate constant, so " in text for text in warnings)


@pytest.mark.parametrize("length", [1, 2, 13, 5000])
def test_every_epoch_has_each_chosen_sample_once(length: int) -> None:
    for count in {1, length // 2 or 1, length}:
        plan = Plan(length=count, batch_size=3, micro_batch_size=2, seed=5, part_of=length)
        evaluation = Plan(length=length, batch_size=3, micro_batch_size=2, seed=5, limit=count)
        (wanted,) = {
            tuple(np.sort(np.concatenate([m.indices for m in evaluation_micro_batches(evaluation, Sharing())])))
        }
        assert len({*wanted}) == count and {*wanted} <= {*range(length)}
        for epoch in range(2):
            steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
            micros = micro_batches_of(plan, Sharing(), first=steps.start, last=steps.stop)
            assert tuple(np.sort(np.concatenate([micro.indices for micro in micros]))) == wanted
        assert {*choice(5, max(count // 2, 1), length)} <= {*wanted}  # as eval.limit_batches makes it


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"overfit": 56}, "--overfit 56 is too large: the training set has 55 samples"),
        ({"overfit": 0}, "overfit.*greater than or equal to 1"),
        ({"overfit": -3}, "overfit.*greater than or equal to 1"),
        ({"overfit": 5, "data__drop_last": "true"}, "leaves nothing to train on"),
    ],
)
def test_what_cannot_be_overfitted_is_refused(engine: Any, flags: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        engine.run("refused", 1, **flags)


def test_a_task_without_an_evaluation_set_is_evaluated_and_named_sets_keep_their_names(engine: Any) -> None:
    flags = {key: value for key, value in FLAGS.items() if key != "task__count_ids"} | {"steps": 2}
    engine.run("made-up", 1, **flags | {"task__evaluation": 0})
    assert engine.evaluations("made-up")[0].keys() == {"loss", "accuracy"}
    with pytest.raises(Refused, match=r"--overfit.*--init made-up@2"):
        engine.fork("made-up", "never-more", 2, steps=4, overfit=5)
    with pytest.raises(Refused, match="overfit"):
        engine.resume("made-up", overfit=5)
