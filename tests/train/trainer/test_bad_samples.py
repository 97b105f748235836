"""Samples that cannot be read: named where they stop a run, left out alike on any number of ranks where they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.training import CLOSE, assert_same_training
from train.data.plan import Plan, Sharing, micro_batches_of

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

FLAGS = {"precision": "fp64", "data__on_error": "skip", "eval__every_epochs": 0}


def bad_ids() -> list[int]:
    """All of the second micro batch of step 2, and of the last, short one of step 4; one sample elsewhere."""
    micros = {
        (m.step, m.number): m.indices.tolist()
        for m in micro_batches_of(Plan(length=55, batch_size=16, micro_batch_size=4), Sharing(), first=0, last=4)
    }
    return sorted([*micros[1, 1], *micros[3, 1], micros[0, 2][1]])


def task(engine: Any, name: str, bad: list[int], raises: str = "ValueError(f'no {index}')") -> Path:
    """The test task, of whose training set these samples cannot be read, nor sample 3 of the evaluation set."""
    head = "    def __getitem__(self, index: int) -> dict[str, Any]:\n"
    more = f"        if index in ({bad} if len(self) == 55 else [3]):\n            raise {raises}\n"
    assert engine.task.read_text().count(head) == 1
    path = engine.station.folder / f"{name}.py"
    path.write_text(engine.task.read_text().replace(head, head + more))
    return path


@pytest.fixture(scope="module")
def torn(engine: Any) -> Path:
    path = task(engine, "torn", bad_ids())
    assert engine.run("torn1", 1, task=path, **FLAGS)["state"] == "finished", engine.said("torn1")
    return path


@pytest.mark.parametrize(("ranks", "workers"), [(3, 2), (5, 0)])
def test_the_same_ones_are_left_out_on_any_number_of_ranks(engine: Any, torn: Path, ranks: int, workers: int) -> None:
    name = f"torn{ranks}"
    if ranks == 5:  # more than there are micro batches: not at a launch
        engine.run(name, 2, ["2 0 SIGTERM"], task=torn, **FLAGS)
        engine.resume(name, ranks)
    else:
        engine.run(name, ranks, task=torn, data__workers=workers, **FLAGS)
    assert_same_training(engine, name, "torn1")
    samples = engine.station.samples("torn1")
    assert sorted(set(range(55)) - {index for step in range(1, 5) for index in samples[step]}) == bad_ids()
    for run in ("torn1", name):
        lines = [json.loads(line) for line in (engine.station.runs / run / "skipped.jsonl").open()]
        listed = sorted((line["set"], line["index"]) for line in lines)  # each once, though seen in three epochs
        assert listed == [("evaluation", 3), *(("training", index) for index in bad_ids())]
        assert all(line["reason"] == f"ValueError: no {line['index']}" for line in lines)
        assert engine.station.record(run)["skipped"] == {"training": len(bad_ids()), "evaluation": 1}
        assert engine.said(run).count(f"left out: sample {bad_ids()[0]} of the training set: ValueError") <= ranks
        assert [line["samples"] for line in engine.station.metrics(run) if "eval" in line] == [22]
    shown = engine.station.ok("show", name).stdout
    assert f"{len(bad_ids())} samples of the training set, 1 sample of the evaluation set" in shown


def test_ordered_sums_leave_out_the_same_ones(engine: Any, torn: Path) -> None:
    digests = {
        engine.run(f"torn-ordered{ranks}", ranks, task=torn, parallel__reduce="ordered", **FLAGS)["weights_sha256"]
        for ranks in (1, 3)
    }
    assert len(digests) == 1


def test_a_resume_is_equal_bit_for_bit(engine: Any, torn: Path) -> None:
    engine.run("torn-whole", 3, task=torn, **FLAGS)
    engine.run("torn-cut", 3, ["2 1 SIGTERM"], task=torn, **FLAGS)
    for _ in range(3):
        engine.resume("torn-cut", 3, ["2 0 SIGTERM"])
    assert engine.resume("torn-cut", 3)["state"] == "finished"
    assert engine.outcome("torn-cut") == engine.outcome("torn-whole")
    assert engine.station.record("torn-cut")["skipped"] == engine.station.record("torn-whole")["skipped"]


def test_what_is_left_weighs_by_its_true_count(engine: Any, torn: Path) -> None:
    # nothing random: a batch in one piece of 16, or in four of which one is empty, is one computation
    flags = FLAGS | {"task__dropout": 0, "task__noise": 0, "task__counted": "true"}
    engine.run("torn-in-one", 1, task=torn, micro_batch_size=16, **flags)
    engine.run("torn-in-pieces", 2, task=torn, micro_batch_size=4, **flags)
    assert_same_training(engine, "torn-in-pieces", "torn-in-one")


def test_skipping_changes_nothing_where_all_can_be_read(steady: Any) -> None:
    steady.run("careful", 1, precision="fp64", data__on_error="skip")
    assert steady.outcome("careful") == steady.outcome("one")
    assert not (steady.station.runs / "careful/skipped.jsonl").exists()


def test_a_step_without_any_sample_is_the_same_on_any_number_of_ranks(engine: Any) -> None:
    step = next(iter(engine_step(2)))
    path = task(engine, "hollow", step)
    for ranks in (1, 3):
        assert engine.run(f"hollow{ranks}", ranks, task=path, steps=4, optim__name="adamw", **FLAGS)["step"] == 4
        assert engine.losses(f"hollow{ranks}") == pytest.approx(engine.losses("hollow1"), **CLOSE)
    assert len(engine.station.samples("hollow1")[2]) == 0
    assert_same_training(engine, "hollow3", "hollow1")


def engine_step(step: int) -> Any:
    """The samples of a step, counted from 1."""
    micros = micro_batches_of(Plan(length=55, batch_size=16, micro_batch_size=16), Sharing(), first=step - 1, last=step)
    return (micro.indices.tolist() for micro in micros)


def test_a_run_of_which_nothing_can_be_read_fails(engine: Any) -> None:
    path = task(engine, "nothing", list(range(55)))
    record = engine.run("nothing", 2, task=path, steps=30, **FLAGS)
    assert (engine.code, record["state"]) == (3, "failed")
    assert "no sample could be read in 10 steps in a row" in record["reason"]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 1)])
def test_the_sample_and_the_line_are_named_where_it_stops_the_run(engine: Any, ranks: int, workers: int) -> None:
    raises = "OSError('image file is truncated')"  # as Pillow says it: not an error of the disk
    path = task(engine, "stops", bad_ids()[:1], raises)
    name = f"stops{ranks}{workers}"
    # without the first look, which reads this sample in the evaluation set
    record = engine.run(name, ranks, task=path, data__workers=workers, eval__first="false")
    assert (engine.code, record["state"]) == (3, "failed")
    assert f"sample {bad_ids()[0]} of the training set: OSError: image file is truncated" in record["reason"]
    line = path.read_text().splitlines().index(f"            raise {raises}") + 1
    assert f"task.py, line {line}:" in record["reason"]
    # and it goes on without the sample
    assert engine.resume(name, ranks, data__on_error="skip")["state"] == "finished"


def test_what_may_pass_is_not_left_out(engine: Any) -> None:
    path = task(engine, "disk", bad_ids()[:1], "OSError(5, 'Input/output error', '/data/7.png')")
    record = engine.run("disk", 1, task=path, **FLAGS)
    assert record["state"] != "finished" and not (engine.station.runs / "disk/skipped.jsonl").exists()
    assert "Input/output error" in json.dumps(record)
