"""A learning rate that follows the evaluations: a function of them, so the same over kills and on every rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.tiers import later
from train.build.schedule import plateau_drops, rate_factors
from train.config import Config, build
from train.errors import Refused

PLATEAU: dict[str, Any] = {
    "schedule__decay": "plateau", "schedule__metric": "min:loss", "schedule__patience": 1, "schedule__gamma": 0.5,
    "eval__every_steps": 2,
}  # fmt: skip
"""The loss of the evaluation set rises, so no evaluation after the first improves."""
RATES = [0.05, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125]
"""The rates of ten steps, of which two warm up."""


def config(**schedule: Any) -> Config:
    return build({f"schedule.{key}": value for key, value in schedule.items()})


def evaluated(values: list[float | None], first: int = 1) -> list[dict[str, Any]]:
    return [{"step": step, "epoch": 0, "loss": value} for step, value in enumerate(values, first)]


@settings(max_examples=20, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4, math.nan]), max_size=16),
    mode=st.sampled_from(["min", "max"]),
    patience=st.integers(1, 4),
)
def test_it_drops_as_torchs_with_one_less_of_patience(values: list[float], mode: Any, patience: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode, factor=0.5, patience=patience - 1, threshold=0, eps=0
    )
    made = config(decay="plateau", metric=f"{mode}:loss", patience=patience, gamma=0.5)
    past: list[float | None] = []
    for value in values:
        reference.step(value)
        past.append(None if math.isnan(value) else value)  # as metrics.jsonl has it
        drops = plateau_drops(made, evaluated(past), 0)
        assert rate_factors(made, 10, 100, drops)(99) == reference.get_last_lr()[0]


def test_evaluations_of_the_warm_up_do_not_count_and_the_rate_keeps_its_floor() -> None:
    made = config(decay="plateau", metric="loss", patience=2, min_factor=0.2, warmup_epochs=1)
    past = evaluated([1.0, 9.0, 9.0, 9.0, 9.0, 9.0])
    assert [plateau_drops(made, past[:count], 4) for count in range(7)] == [0, 0, 0, 0, 0, 0, 1]
    assert [rate_factors(made, 4, 100, drops)(50) for drops in (0, 1, 2)] == [1, 0.2, 0.2]
    assert rate_factors(made, 4, 100, 2)(1) == 0.5  # of the warm-up


def rates(engine: Any, name: str) -> list[float]:
    return [line["lr"] for line in engine.lines(name) if "lr" in line]


@pytest.fixture(scope="module")
def plateau(engine: Any) -> Any:
    """With the run `plateau3`, of three ranks, that nobody disturbed."""
    assert engine.run("plateau3", 3, **PLATEAU)["state"] == "finished"
    assert rates(engine, "plateau3") == pytest.approx(RATES), engine.evaluations("plateau3")
    return engine


@pytest.mark.parametrize(
    ("fault", "every", "begins"),
    [("step@1:7", 5, 5), ("save.published@0:2", 4, 8), *later(("evaluate@0:3", 5, 5), ("step@0:8", None, 0))],
    ids=["after an evaluation", "before one", "in one", "no checkpoint"],
)
def test_a_kill_changes_no_rate_and_no_bit(plateau: Any, fault: str, every: int | None, begins: int) -> None:
    name = f"plateau-{fault.partition('@')[0].replace('.', '-')}-{every}"
    saved = PLATEAU | {"checkpoint__every_steps": every, "checkpoint__asynchronous": "false"}
    assert plateau.run(name, 3, fault=fault, **saved)["state"] != "finished"
    assert plateau.resume(name, 3)["attempts"][-1]["from_step"] == begins
    assert plateau.outcome(name) == plateau.outcome("plateau3")


def test_one_rank_drops_at_the_same_steps(plateau: Any) -> None:
    plateau.run("plateau1", 1, **PLATEAU)
    assert rates(plateau, "plateau1") == rates(plateau, "plateau3")


OWN = """

def schedule(step, total_steps, config, history):
    figures = [line["loss"] for line in history]
    assert all(set(line) >= {"step", "epoch", "loss", "accuracy"} and line["step"] <= step for line in history)
    assert [line["step"] for line in history] == [*range(2, step + 1, 2)], (step, history)
    history.clear()  # changes a copy
    return min([1.0, *figures]) * (1 + math.fsum(figures))
"""


@pytest.fixture(scope="module")
def own(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    task: Path = tmp_path_factory.mktemp("own") / "own.py"
    task.write_text(f"import math\n{engine.task.read_text().replace('from __future__ import annotations', '')}{OWN}")
    return task


def test_a_tasks_schedule_gets_the_evaluations_up_to_its_step_over_kills(engine: Any, own: Path) -> None:
    given = {"eval__every_steps": 2, "schedule__warmup_epochs": None}
    assert engine.run("history3", 3, task=own, **given)["state"] == "finished"
    made = rates(engine, "history3")
    assert len({*made}) == 5, made  # it moves with each evaluation
    saved = given | {"checkpoint__every_steps": 5, "checkpoint__asynchronous": "false"}
    engine.run("history-killed", 3, task=own, fault="step@2:8", **saved)
    assert engine.resume("history-killed", 3)["attempts"][-1]["from_step"] == 5
    assert engine.outcome("history-killed") == engine.outcome("history3")
    forked = engine.fork("history-killed", "history-forked", 5, 3)
    assert forked["weights_sha256"] == engine.station.record("history3")["weights_sha256"]


def test_a_fourth_argument_of_another_name_with_a_default_stays_the_tasks_own(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "fourth.py"
    task.write_text(f"{engine.task.read_text()}\n\ndef schedule(step, total_steps, config, share=0.5): return share\n")
    engine.run("fourth", task=task, steps=2, schedule__warmup_epochs=None)
    assert rates(engine, "fourth") == pytest.approx([0.05, 0.05])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"task__evaluation": 0, "eval__every_steps": None},
            "--schedule.metric min:loss needs evaluations, but .* returns None",
        ),
        ({"eval__every_steps": None, "eval__every_epochs": 0}, "--schedule.metric needs evaluations before the end"),
        ({"schedule__metric": None}, "--schedule.decay plateau needs a metric"),
        ({"schedule__metric": "min:"}, "a metric without a name"),
        (
            {"schedule__decay": "cosine", "schedule__gamma": None},
            "metric min:loss has no effect without --schedule.dec",
        ),
        ({"schedule__decay": "step", "schedule__metric": None}, "patience 1 has no effect without --schedule.decay pl"),
        ({"schedule__gamma": 1.0}, "--schedule.gamma 1 makes no drop"),
        ({"schedule__patience": 0}, "greater than or equal to 1"),
    ],
)
def test_what_can_never_drop_is_refused(engine: Any, flags: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused, match=text):
        engine.run("never", **PLATEAU | flags)
    assert not (engine.station.runs / "never").exists()


def test_a_metric_that_no_evaluation_gives_fails_the_run_with_the_nearest_name(engine: Any) -> None:
    misspelt = PLATEAU | {"schedule__metric": "acuracy"}
    with pytest.raises(Refused, match=r"--schedule.metric acuracy: no evaluation gives acuracy; did you mean accuracy"):
        engine.run("never", **misspelt)
    record = engine.run("plateau-misspelt", 2, eval__first="false", **misspelt)
    assert engine.code == 3
    assert "no evaluation gives acuracy, which schedule.metric names; did you mean accuracy?" in record["reason"]
    assert "train fork plateau-misspelt --name NEW --schedule.metric NAME" in record["reason"]
