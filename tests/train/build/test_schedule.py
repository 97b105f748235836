"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.tiers import later
from tests.train.training import OWN_OPTIMIZER, TASK
from train.build.schedule import Planned, factors, rate_factors, rate_scale
from train.config import Config, build
from train.errors import Refused
from train.launcher.resume import prepare_resume


def config(**schedule: Any) -> Config:
    batch = schedule.pop("batch_size", 64)
    return build({"batch_size": batch} | {f"schedule.{key}": value for key, value in schedule.items()})


def rates(made: Config, steps_per_epoch: int, total: int) -> list[float]:
    return [*map(rate_factors(made, steps_per_epoch, total), range(total))]


@pytest.mark.parametrize(
    ("rule", "batch", "base", "expected"),
    [("none", 1024, 256, 1), ("linear", 1024, 256, 4), ("linear", 64, 256, 0.25)],
)
def test_the_peak_follows_the_scaling_rule(rule: str, batch: int, base: int, expected: float) -> None:
    assert rate_scale(config(scaling=rule, batch_size=batch, base_batch_size=base)) == expected


@pytest.mark.parametrize("decay", ["cosine", "own", "step", *later("linear", "wsd", "onecycle", "constant")])
def test_a_change_of_length_that_moves_the_rate_is_said_with_both_rates(
    engine: Any, tmp_path: Path, decay: str
) -> None:
    """And what it offers holds the end of the old curve, or begins a new one."""
    task, own = tmp_path / "task.py", "def schedule(step, total_steps, config): return 1 - step / total_steps"
    task.write_text(f"{TASK.read_text()}\n{own if decay == 'own' else ''}\n")
    name = f"moved-{decay}"
    chosen: dict[str, Any] = {} if decay == "own" else {"schedule__decay": decay}
    flags: dict[str, Any] = {"task": task, "epochs": 2, "schedule__warmup_epochs": None, "schedule__step_epochs": None}
    if decay == "wsd":
        chosen["schedule__decay_share"] = 0.5
    engine.run(name, **flags, **chosen)
    warnings = prepare_resume(engine.station.run(name), {"epochs": "4"}, 1)[1]
    if decay in ("step", "constant"):
        assert warnings == []
        return
    (said,) = warnings
    engine.resume(name, epochs=4)
    before, after = _rates(engine, name)[7:9]
    assert f"was {before:.3g} in step 8 and is {after:.3g} in step 9" in said and "over 16 steps now" in said
    kept, cycle = (way.partition(f": train fork {name} --name NEW --checkpoint 8 ") for way in said.split("; ")[1:])
    assert (kept[0], kept[2]) == ("to keep the old curve and hold its end", "--epochs 4 --schedule.total_epochs 2")
    assert (cycle[0], cycle[2]) == ("for a new cycle", "--epochs 4 --schedule.start_epoch 2")
    forked = engine.fork(name, f"{name}-kept", 8, epochs=4, schedule__total_epochs=2)
    rates = _rates(engine, f"{name}-kept")
    assert rates[8:] == [before] * 8 and forked["warnings"] == []
    engine.run(f"{name}-again", **flags, **chosen)  # a resume that asks for it at once
    assert prepare_resume(engine.station.run(f"{name}-again"), HELD, 1)[1] == []
    engine.resume(f"{name}-again", **{flag.replace(".", "__"): text for flag, text in HELD.items()})
    assert _rates(engine, f"{name}-again") == rates
    jumps = engine.fork(name, f"{name}-cycle", 8, epochs=4, schedule__start_epoch=2)["warnings"]
    assert _rates(engine, f"{name}-cycle") == rates[:8] * 2 and not any("; " in line for line in jumps)
    if decay == "cosine":
        (again,) = engine.fork(name, f"{name}-jump", 8, epochs=6)["warnings"]
        assert again.startswith(said.partition(" and is ")[0]) and f"warning: {again}" in engine.said(f"{name}-jump")


HELD = {"epochs": "4", "schedule.total_epochs": "2"}


def test_a_run_in_steps_is_offered_the_epochs_that_are_its_steps(engine: Any) -> None:
    engine.run("moved-steps", steps=3, schedule__warmup_epochs=None)
    (said,) = prepare_resume(engine.station.run("moved-steps"), {"steps": "7"}, 1)[1]
    assert "--checkpoint 3 --steps 7 --schedule.total_epochs 0.8;" in said  # 0.8 of 4 steps
    (other,) = prepare_resume(engine.station.run("moved-steps"), {"steps": "7", "schedule.total_epochs": "1"}, 1)[1]
    assert "over 4 steps now, cosine over 3 steps before" in other and "; " not in other


def test_a_cycle_that_starts_late_warms_up_and_decays_from_there() -> None:
    made = config(decay="linear", warmup_epochs=1, start_epoch=2, total_epochs=4)
    task: Any = SimpleNamespace(schedule=None)
    factor = factors(task, Planned(made, steps_per_epoch=2, total_steps=12))
    assert [factor(step) for step in range(12)] == pytest.approx([0.5] * 5 + [1, 1, 0.5] + [0.5] * 4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"decay": "constant", "total_epochs": 2}, "total_epochs 2 has no effect without --schedule.decay linear or"),
        ({"decay": "constant", "start_epoch": 1, "warmup_epochs": None}, "no effect on a constant learning rate"),
        ({"start_epoch": 9}, "--schedule.start_epoch 9: give less than the end, epoch 2.5"),
        ({"start_epoch": 1.5, "total_epochs": 1}, "--schedule.start_epoch 1.5: give less than the end, epoch 1"),
        ({"total_epochs": 0}, "greater than 0"),
    ],
)
def test_a_curve_without_use_is_refused(engine: Any, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        engine.run("never-curved", **{f"schedule__{name}": value for name, value in flags.items()})


def _rates(engine: Any, name: str) -> list[float]:
    return [line["lr"] for line in engine.lines(name) if "lr" in line]


def test_the_warm_up_rises_in_equal_steps_and_ends_at_the_peak() -> None:
    assert rates(config(warmup_epochs=2, decay="constant"), 5, 20) == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0] + [1.0] * 10
    )


def test_cosine_falls_from_the_peak_through_half_to_almost_nothing() -> None:
    made = rates(config(decay="cosine"), 10, 100)
    assert made[0] == 1
    assert made[50] == pytest.approx(0.5)
    assert made[25] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert 0 < made[99] < 0.001
    assert made == sorted(made, reverse=True)


def test_cosine_begins_where_the_warm_up_ends() -> None:
    made = rates(config(decay="cosine", warmup_epochs=1), 10, 30)
    assert made[9] == made[10] == 1
    assert made[20] == pytest.approx(0.5)


def test_step_decay_drops_by_gamma_each_so_many_epochs() -> None:
    made = rates(config(decay="step", step_epochs=2.0, gamma=0.1), 3, 15)
    assert made == pytest.approx([1.0] * 6 + [0.1] * 6 + [0.01] * 3)


def test_step_decay_takes_fractions_of_epochs_without_rounding_errors() -> None:
    made = rates(config(decay="step", step_epochs=0.1, gamma=0.5), 10, 10)
    assert made == pytest.approx([0.5**step for step in range(10)])


def test_a_warm_up_longer_than_the_run_still_rises_to_the_peak() -> None:
    assert rates(config(warmup_epochs=100), 10, 4) == [0.25, 0.5, 0.75, 1.0]


@settings(max_examples=150, deadline=None)
@given(
    decay=st.sampled_from(["constant", "linear", "cosine", "step", "wsd", "onecycle"]),
    warmup=st.floats(0, 5),
    floor=st.sampled_from([0.0, 0.25]),
    per_epoch=st.integers(1, 50),
    total=st.integers(1, 200),
)
def test_every_step_has_a_positive_rate_up_to_the_peak(
    decay: str, warmup: float, floor: float, per_epoch: int, total: int
) -> None:
    made = rates(config(decay=decay, warmup_epochs=warmup, min_factor=floor), per_epoch, total)
    assert all(0 < rate <= 1 for rate in made)
    assert all(rate >= floor for rate in made[math.ceil(warmup * per_epoch) :])


def test_linear_falls_in_equal_steps_to_its_floor() -> None:
    made = rates(config(decay="linear", min_factor=0.5, warmup_epochs=1), 2, 7)
    assert made == pytest.approx([0.5, 1, 1, 0.9, 0.8, 0.7, 0.6])


def test_wsd_falls_in_the_last_share_of_the_steps() -> None:
    made = rates(config(decay="wsd", decay_share=0.25, warmup_epochs=1), 2, 16)
    assert made == pytest.approx([0.5, 1] + [1] * 11 + [0.75, 0.5, 0.25])


def test_onecycle_is_torchs() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=40)
    expected = []
    for _ in range(40):
        expected += scheduler.get_last_lr()
        optimizer.step()
        if len(expected) < 40:
            scheduler.step()
    assert rates(config(decay="onecycle"), 5, 40) == pytest.approx(expected, rel=1e-9)


OWN = """

def schedule(step, total_steps, config):
    return {body}
"""


@pytest.fixture
def own(engine: Any, tmp_path: Path) -> Any:
    """Makes the test task with a schedule() of this body."""

    def make(body: str) -> Path:
        task = tmp_path / "own.py"
        task.write_text(engine.task.read_text() + OWN.format(body=body))
        return task

    return make


PLAIN = {"schedule__warmup_epochs": None, "steps": 6}


def test_a_tasks_own_schedule_gives_the_factor_of_each_step_after_a_resume_too(engine: Any, own: Any) -> None:
    task = own("(step + 1) / total_steps")
    engine.run("own-schedule", 1, ["4 0 SIGTERM"], task=task, **PLAIN)
    engine.resume("own-schedule", 1)
    lines = [line["lr"] for line in engine.station.metrics("own-schedule") if "lr" in line]
    assert lines == pytest.approx([0.1 * step / 6 for step in range(1, 7)])


def test_a_resume_says_what_a_schedule_that_knows_no_other_length_does_to_new_steps(engine: Any, own: Any) -> None:
    engine.run("own-end", 1, ["4 0 SIGTERM"], task=own("max(0, 1 - step / 6)"), **PLAIN)
    run, text = engine.station.run("own-end"), "schedule() over 9 steps now, schedule() over 6 steps before"
    (said,) = prepare_resume(run, {"steps": "9"}, 1)[1]  # in the middle nothing moves yet
    assert f"({text}); it is 0 in steps 7 to 9, which train nothing; to keep the old curve and hold its end: " in said
    engine.resume("own-end", 1)
    (said,) = prepare_resume(run, {"steps": "9"}, 1)[1]
    assert f"was 0.0167 in step 6 and is 0 in step 7 ({text}); it is 0 in steps 7 to 9" in said
    assert prepare_resume(run, {"steps": "9", "schedule.total_epochs": "1.5"}, 1)[1] == []


@pytest.mark.parametrize(
    ("body", "flags", "words"),
    [
        ("math.nan", {}, "returns nan for step 0"),
        ("None", {}, "returns None for step 0"),
        ("1 / step", {}, "line .*: ZeroDivisionError"),
        ("1", {"schedule__decay": "linear"}, "replaces --schedule.decay linear"),
        ("1", {"schedule__decay": "cosine"}, "replaces --schedule.decay cosine"),
    ],
)
def test_a_schedule_that_fails_at_once_is_refused(engine: Any, own: Any, body: str, flags: Any, words: str) -> None:
    with pytest.raises(Refused, match=words):
        engine.run("never-scheduled", task=own(body), **PLAIN | flags)


def test_a_schedule_that_gives_no_number_later_fails_the_run_with_the_step(engine: Any, own: Any) -> None:
    engine.run("bad-schedule", 2, task=own("1 if step < 3 else -1"), **PLAIN)
    assert (
        engine.code == 3 and "returns -1 for step 3, counted from 0" in engine.station.record("bad-schedule")["reason"]
    )


def test_onecycle_with_a_warm_up_of_ours_is_refused(engine: Any) -> None:
    with pytest.raises(Refused, match="rises by itself"):
        engine.run("never-scheduled", schedule__decay="onecycle")


FOREIGN = """

def optimizer(model, config):
    made = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
    made.register_step_post_hook(lambda *_: scheduler.step())
    return made
"""


def test_a_scheduler_of_the_tasks_own_is_refused_in_its_second_step_with_the_way(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "foreign.py"
    task.write_text(engine.task.read_text() + FOREIGN)
    record = engine.run("foreign", 2, task=task, **PLAIN, **OWN_OPTIMIZER)
    assert engine.code == 3 and record["step"] == 1
    assert "is 0.05 after step 1, because a scheduler or hook of the task has changed it" in record["reason"]
    assert "schedule(step, total_steps, config)" in record["reason"]


def test_a_run_trains_with_these_rates(steady: Any) -> None:
    lines = [line for line in steady.station.metrics("one") if "lr" in line]
    made = config(warmup_epochs=0.5)
    assert [line["lr"] for line in lines] == pytest.approx(
        [0.1 * one for one in map(rate_factors(made, 4, 10), range(10))]
    )


RATED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Rate(torch.Tensor):
    asked = 0

    def __float__(self):
        Rate.asked += 1
        if Rate.asked > 3:
            raise AssertionError("the host asked for a rate again and again, and on a GPU waited for it")
        return super().__float__()

def datasets(config):
    return TensorDataset(torch.randn(32, 4)), None

def model(config):
    return nn.Linear(4, 4)

def optimizer(model, config):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25).as_subclass(Rate), foreach=False)

def loss(model, batch):
    return model(batch[0]).square().mean()
"""


def test_a_rate_that_is_a_tensor_is_read_once(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "rated.py"
    task.write_text(RATED)
    steady = {"schedule__warmup_epochs": 0, "schedule__decay": "constant"} | OWN_OPTIMIZER
    record = engine.run("rated", task=task, steps=8, epochs=None, **steady)
    assert record["state"] == "finished", engine.said("rated")
    assert [line["lr"] for line in engine.station.metrics("rated")] == [0.25] * 8
