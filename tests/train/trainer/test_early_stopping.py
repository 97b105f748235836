"""A run ends when a figure of its evaluations improves no more: after the same step on any ranks, through any kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from train.errors import Refused
from train.run.best import Aim
from train.trainer.early_stopping import without_improvement

pytestmark = pytest.mark.never_forgiven

EARLY = {
    "early_stopping__metric": "max:loss", "early_stopping__patience": 2, "eval__every_epochs": 0.25,
    "schedule__decay": "constant",
}  # fmt: skip
"""The loss falls, so the first evaluation has the largest: it ends after the third."""


@pytest.mark.parametrize(
    ("scores", "aim", "min_delta", "count"),
    [
        ([], Aim("f1", False), 0, 0),
        ([0.5, 0.6, 0.6, 0.59], Aim("f1", False), 0, 2),
        ([0.5, 0.6, 0.7, 0.8], Aim("f1", False), 0.15, 1),  # 0.7 is more than 0.5 by more than that
        ([3.0, 2.0, 2.5, 1.0], Aim("loss", True), 0, 0),
        ([None, None, 3.0, None], Aim("loss", True), 0, 1),
        ([None, None], Aim("loss", True), 0, 2),
    ],
)
def test_evaluations_without_an_improvement_are_counted(
    scores: list[float | None], aim: Aim, min_delta: float, count: int
) -> None:
    assert without_improvement(enumerate(scores), aim, min_delta)[0] == count


@pytest.fixture(scope="session")
def early(engine: Any) -> Any:
    """With the run `early3`, of three ranks, that nobody disturbed."""
    record = engine.run("early3", 3, **EARLY)
    assert (record["state"], record["step"], engine.code) == ("finished", 3, 0)
    assert record["reason"].startswith("early stopping: loss did not improve in 2 evaluations since step 1 (")
    return engine


def test_it_ends_after_the_same_step_on_one_rank_and_says_so(early: Any) -> None:
    record = early.run("early1", 1, **EARLY)
    assert (record["state"], record["step"]) == ("finished", 3) and record["weights_sha256"]
    assert early.station.run("early1").steps_saved() == [3]
    assert "finished after 3 steps (early stopping: loss did not improve in 2 evaluations since" in early.said("early1")
    done = early.station("resume", "early1")
    assert done.returncode == 0 and "has already finished (early stopping" in done.stdout + done.stderr


@pytest.mark.parametrize(("fault", "every"), [("evaluate@0:3", 1), ("save.published@0", None)])
def test_killed_at_its_end_it_ends_there_bit_for_bit(early: Any, fault: str, every: int | None) -> None:
    name = f"early-{fault.partition('@')[0].replace('.', '-')}"
    assert early.run(name, 3, fault=fault, checkpoint__every_steps=every, **EARLY)["state"] == "interrupted"
    assert early.resume(name, 3)["reason"] == early.station.record("early3")["reason"]
    assert early.outcome(name) == early.outcome("early3")


def test_with_more_patience_it_goes_on_as_if_it_had_not_ended(early: Any) -> None:
    early.run("more", 1, **EARLY)
    for begin in (("fork", "more", "--name", "none"), ("resume", "more", "--early_stopping.patience", "2")):
        refused = early.station.here(*begin)
        assert refused.returncode == 2 and "give --early_stopping.patience 3 or more" in refused.stderr
    assert not (early.station.runs / "none").exists()
    record = early.resume("more", 1, early_stopping__patience=4)
    assert record["state"] == "finished" and record["step"] > 3
    early.run("more-patient", 1, **EARLY | {"early_stopping__patience": 4})
    assert early.outcome("more") == early.outcome("more-patient")


def test_a_metric_that_no_evaluation_gives_ends_the_run_with_the_nearest_name(engine: Any) -> None:
    misspelt = EARLY | {"early_stopping__metric": "acuracy"}
    with pytest.raises(Refused, match=r"--early_stopping.metric acuracy: no evaluation gives acuracy; did you"):
        engine.run("never", **misspelt)
    record = engine.run("early-misspelt", 2, eval__first="false", **misspelt)
    assert (record["state"], engine.code) == ("failed", 3)
    assert "no evaluation gives acuracy, which early_stopping.metric names; did you mean accuracy?" in record["reason"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"task__evaluation": 0}, "returns None for the evaluation set"),
        ({"eval__every_epochs": 0}, "needs evaluations before the end"),
        ({"early_stopping__metric": "min:"}, "a metric without a name"),
        ({"early_stopping__patience": 0}, "greater than or equal to 1"),
        ({"early_stopping__min_delta": -1}, "greater than or equal to 0"),
        ({"early_stopping__metric": ""}, "patience 2 has no effect without --early_stopping.metric"),
        ({"ema__warmup": 10}, "warmup 10 has no effect without --ema.decay"),
    ],
)
def test_what_can_never_end_a_run_is_refused(engine: Any, flags: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused, match=text):
        engine.run("never", **EARLY | flags)
    assert not Path(engine.station.runs / "never").exists()
