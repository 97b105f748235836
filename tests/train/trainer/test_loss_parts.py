"""The parts of a loss are logged as the loss is: weighted by true counts, on any number of ranks, over kills."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.tasks import TASKS
from tests.train.tiers import later
from tests.train.training import CLOSE, TASK, assert_same_training, sample_of
from train.build.loss import checked_loss
from train.data.plan import Plan, Sharing, micro_batches_of
from train.errors import TrainingFailed

pytestmark = pytest.mark.turns

PARTS: dict[str, Any] = {"precision": "fp64", "task__parts": "all", "schedule__decay": "constant"}
GAN: dict[str, Any] = {
    "task": TASKS / "gan.py", "optim__lr": None, "optim__name": None, "schedule__decay": "constant",
    "schedule__warmup_epochs": 0, "task__parts": "true",
}  # fmt: skip


def parts_of(engine: Any, name: str) -> list[dict[str, float]]:
    """The loss and its parts in each training line; the line of the last evaluation has its own."""
    lines = [line for line in engine.lines(name) if "loss" in line]
    return [{key: value for key, value in line.items() if key.startswith("loss")} for line in lines]


@pytest.fixture(scope="module")
def alone(engine: Any) -> list[dict[str, float]]:
    """Of one rank: computed by hand from the samples of each step, as far as their ids show."""
    assert engine.run("parts-1", **PARTS)["state"] == "finished", engine.said("parts-1")
    lines = parts_of(engine, "parts-1")
    for line, ids in zip(lines, engine.station.samples("parts-1").values(), strict=True):
        assert [*line] == ["loss", "loss.ce", "loss.id", "loss.zeros"]
        assert line["loss.ce"] == pytest.approx(line["loss"], rel=1e-12)
        assert line["loss.id"] == pytest.approx(sum(ids) / len(ids), rel=1e-12)
    return lines


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        (3, {}),
        (3, {"parallel__reduce": "ordered"}),
        *later((3, {"parallel__find_unused_parameters": "true"}), (3, {"parallel__strategy": "fsdp"})),
    ],
)
def test_they_are_the_same_on_three_ranks(
    engine: Any, alone: list[dict[str, float]], ranks: int, way: dict[str, Any]
) -> None:
    name = f"parts-{ranks}-{'-'.join(way.values())}"
    assert engine.run(name, ranks, **PARTS, **way)["state"] == "finished", engine.said(name)
    assert parts_of(engine, name) == [pytest.approx(line, **CLOSE) for line in alone]
    for found, expected in zip(engine.evaluations(name), engine.evaluations("parts-1"), strict=True):
        assert found == pytest.approx(expected, **CLOSE)
        assert [*found][:4] == ["loss", "loss.ce", "loss.id", "loss.zeros"]
        assert found["loss.ce"] == pytest.approx(found["loss"], rel=1e-12)


def test_parts_of_a_total_are_divided_by_its_count(engine: Any) -> None:
    for ranks in (1, 3):
        engine.run(f"totals-{ranks}", ranks, **PARTS, task__counted="true")
    lines = parts_of(engine, "totals-3")
    assert lines == [pytest.approx(line, **CLOSE) for line in parts_of(engine, "totals-1")]
    figures = [*lines, *engine.evaluations("totals-3")]
    assert all(line["loss.three"] == pytest.approx(3 * line["loss"], rel=1e-12) for line in figures)


@pytest.mark.never_forgiven
def test_each_update_has_its_own_and_keeps_the_last_ones_over_kills(engine: Any) -> None:
    """Line 6 has the loss and the parts of step 4, which only the state of step 5 knows after the kill."""
    flags = GAN | {"task__every": 4, "log__every_steps": 3, "checkpoint__every_steps": 5, "precision": "fp64"}
    flags |= {"checkpoint__asynchronous": "false"}  # the kill finds the checkpoint of step 5
    engine.run("gan-parts-1", 1, **flags)
    engine.run("gan-parts-3", 3, **flags)
    assert engine.run("gan-parts-killed", 3, ["6 0 SIGKILL"], **flags)["step"] < 6
    assert engine.station.run("gan-parts-killed").steps_saved() == [5]
    engine.resume("gan-parts-killed", 3)
    assert engine.outcome("gan-parts-killed") == engine.outcome("gan-parts-3")
    assert_same_training(engine, "gan-parts-3", "gan-parts-1")
    lines = parts_of(engine, "gan-parts-3")
    assert lines == [pytest.approx(line, **CLOSE) for line in parts_of(engine, "gan-parts-1")]
    assert lines[2]["loss.g"] == lines[3]["loss.g"] != lines[1]["loss.g"] and len(lines) == 4
    assert all(line["loss"] == line["loss.d"] + line.get("loss.g", 0) for line in lines)
    assert [*lines[0]] == ["loss", "loss.d", "loss.d.real", "loss.d.fake"]
    for line in lines[1:]:
        assert [*line] == ["loss", "loss.d", "loss.g", "loss.d.real", "loss.d.fake", "loss.g.half"]
        assert line["loss.d"] == pytest.approx(line["loss.d.real"] + line["loss.d.fake"], rel=1e-12)
        assert line["loss.g.half"] == pytest.approx(line["loss.g"] / 2, rel=1e-12)


def test_a_step_left_out_does_not_enter_what_later_lines_repeat(engine: Any) -> None:
    """A part that is not finite leaves out nothing by itself, and is null in the line."""
    flags = PARTS | {"on_nan": "skip", "task__poison": sample_of(3), "checkpoint__every_steps": 4}
    record = engine.run("parts-nan", 3, **flags)
    assert record["state"] == "finished" and record["nan_steps"] > 0, engine.said("parts-nan")
    third = parts_of(engine, "parts-nan")[2]
    assert third["loss"] is None and third["loss.ce"] is None and third["loss.id"] > 0


@pytest.mark.parametrize("way", [{}, *later({"parallel__reduce": "ordered"})])
def test_a_rank_without_data_in_the_first_step_knows_the_names(engine: Any, way: dict[str, Any]) -> None:
    """Of the first step only the third micro batch can be read; of four ranks one has it, two ranks have none."""
    first = [
        index
        for micro in micro_batches_of(Plan(length=55, batch_size=16, micro_batch_size=4), Sharing(), first=0, last=1)
        for index in micro.indices.tolist()
        if micro.number != 2
    ]
    path = engine.station.folder / "late.py"
    head = "    def __getitem__(self, index: int) -> dict[str, Any]:\n"
    path.write_text(
        TASK.read_text().replace(head, f"{head}        {{}}[None] if index in {first} and len(self) == 55 else 0\n")
    )
    flags = PARTS | way | {"task": path, "data__on_error": "skip", "steps": 4}
    for ranks in (1, 3, 4):
        name = f"late-{ranks}{len(way)}"
        assert engine.run(name, ranks, **flags)["state"] == "finished", engine.said(name)
        assert parts_of(engine, name) == [
            pytest.approx(line, **CLOSE) for line in parts_of(engine, f"late-1{len(way)}")
        ]
    assert all(len(line) == 4 for line in parts_of(engine, f"late-4{len(way)}"))


def test_other_names_end_the_run_also_where_a_resume_gives_them_first(engine: Any) -> None:
    late = engine.station.runs / "other-parts" / "late"
    flags = PARTS | {"task__parts": "late", "checkpoint__every_steps": 2}
    said = "returned the parts ce, id, zeros, late, but ce, id, zeros before; return the same parts for every batch"
    record = engine.run("other-parts", 2, [f"4 0 sh touch {late}"], **flags)
    assert record["state"] == "failed" and said in record["reason"]
    record = engine.resume("other-parts", 2)
    assert record["state"] == "failed" and said in record["reason"], "the first attempt fixes them"
    assert len(parts_of(engine, "other-parts")) == 2
    late.unlink()
    assert engine.resume("other-parts", 2)["state"] == "finished", engine.said("other-parts")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ((1.0, {"ce": 1}), "must return a scalar tensor"),
        ((torch.ones(()), {"a.b": 1}), "names a part 'a.b'; use letters, digits, _ and -"),
        (
            (torch.ones(()), {"ce": torch.ones(2)}),
            "returns for its part ce a tensor of shape (2,); give",
        ),
        ((torch.ones(()), {"ce": None}), "returns for its part ce NoneType"),
        ((torch.ones(()), {f"p{n}": 1 for n in range(33)}), "returns 33 parts; at most 32 are logged"),
    ],
)
def test_a_part_of_another_kind_is_named(value: Any, why: str) -> None:
    with pytest.raises(TrainingFailed, match=re.escape(why)):
        checked_loss(value, 4, "loss in task.py")


def test_parts_need_no_graph_and_may_be_numbers() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    made = checked_loss(((loss, 3), {"a": loss, "b": 7, "c": (loss, loss), "d": np.float32(1.5)}), 4, "loss")
    assert made.value.requires_grad and made.count == 3
    assert not any(part.value.requires_grad for part in made.parts.values())
    assert {name: (part.total(torch.float64).item(), float(part.counted())) for name, part in made.parts.items()} == {
        "a": (2.0, 3.0), "b": (7.0, 3.0), "c": (2.0, 2.0), "d": (1.5, 3.0),
    }  # fmt: skip
    mean = checked_loss((loss, {"a": 7}), 4, "loss")
    assert (mean.parts["a"].total(torch.float64).item(), mean.parts["a"].counted()) == (28.0, 4)


def test_a_checkpoint_may_be_the_best_by_a_part(engine: Any) -> None:
    flags = PARTS | {"checkpoint__best": "loss.zeros", "checkpoint__keep": 1}
    assert engine.run("best-part", 1, **flags)["best"]["metric"] == "loss.zeros"
    scores = [(line["eval"]["loss.zeros"], line["step"]) for line in engine.lines("best-part") if "eval" in line]
    assert engine.station.record("best-part")["best"]["step"] == min(scores)[1]
