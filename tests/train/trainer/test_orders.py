"""A task's own order of the samples: the same on any number of ranks and over kills, and checked before it is used."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from tests.train.training import BATCH, SAMPLES
from train.data import to_device
from train.data.loader import Loader
from train.data.plan import MicroBatch, Plan, Sharing, micro_batches_of
from train.errors import Refused
from train.launcher.checks import prepare
from train.launcher.fork import prepare_fork
from train.launcher.request import Request
from train.monitor.status import RunStatus
from train.parallel.world import World
from train.run.heartbeat import Heart
from train.trainer.orders import Orders
from train.views.listing import story

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

ORDER = """
import os
import torch

def order(epoch, config):
    with open(os.environ["CALLS"], "a") as calls:
        print(epoch, os.environ.get("RANK"), file=calls)
    return torch.randint(config.task.samples, (40,))
"""
WEIGHTS = "def weights(config): return [number % 3 for number in range(config.task.samples)]"
LENGTHS = "def lengths(config): return [7 * number % 31 for number in range(config.task.samples)]"
TASKS = {"order": ORDER, "weights": WEIGHTS, "lengths": LENGTHS}


class Ids(Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


def task(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(f"from tests.tasks.learner import *\n{text}\n")
    return path


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line `EPOCH RANK` for each call of `order`; the rank of a check is None."""
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


STATEFUL = """
_made = []
_loss = loss
def order(epoch, config): return torch.arange(config.task.samples).roll(len(_made))
def loss(model, batch):
    _made.append(1)
    return _loss(model, batch)
"""


def test_a_resume_with_another_order_of_its_epoch_is_called_not_exact(engine: Any, tmp_path: Path) -> None:
    saves = {"checkpoint__every_steps": 5, "checkpoint__asynchronous": "false"}
    killed = engine.run("stateful-order", 1, fault="step@0:6", task=task(tmp_path, STATEFUL), steps=9, **saves)
    assert killed["state"] == "interrupted"
    assert not engine.station.record("stateful-order")["not_exact"]
    engine.resume("stateful-order", 1)
    (reason,) = engine.station.record("stateful-order")["not_exact"]
    assert "order in " in reason and "gives another order for epoch 1 after an interruption than before" in reason
    assert f"warning: not exact: {reason}" in engine.said("stateful-order")


@pytest.mark.parametrize("name", TASKS)
def test_ranks_kills_and_workers_change_nothing(name: str, engine: Any, tmp_path: Path, calls: Path) -> None:
    flags = {"parallel__reduce": "ordered", "precision": "fp64", "task": task(tmp_path, TASKS[name]), "steps": 9}
    runs = [f"{name}{number}" for number in range(3)]
    engine.run(runs[0], 1, **flags)
    asked = [line.split() for line in calls.read_text().splitlines()] if name == "order" else []
    engine.run(runs[1], 3, data__workers=2, **flags)
    by_four = {"checkpoint__every_steps": 4, "checkpoint__asynchronous": "false"}
    assert engine.run(runs[2], 3, fault="step@1:6", data__workers=2, **by_four, **flags)["state"] == "interrupted"
    at_resume = calls.read_text().count("\n") if name == "order" else 0
    assert engine.resume(runs[2], 3)["state"] == "finished" and not engine.station.record(runs[2])["not_exact"]
    records = [engine.station.record(one) for one in runs]
    assert {one["state"] for one in records} == {"finished"}
    assert len({one["weights_sha256"] for one in records}) == 1
    assert {one["sampler"] for one in records} == {name}
    run = engine.station.run(runs[0])
    assert f"{name}() of the task, " in story(RunStatus(run, records[0]))
    assert engine.station.samples(runs[0]) == engine.station.samples(runs[1]) == engine.station.samples(runs[2])
    epoch = 40 if name == "order" else SAMPLES
    steps = engine.station.samples(runs[0])
    assert len({tuple(steps[step]) for step in steps}) == 9, "each epoch has an order of its own"
    seen = [*itertools.chain(*steps.values())][:epoch]
    assert {one["samples"] for one in records} == {epoch}
    if name == "lengths":
        assert sorted(seen) == list(range(SAMPLES))
    else:
        assert len(set(seen)) < epoch
    if name == "order":
        assert asked == [["0", "None"], ["0", "0"], ["1", "0"], ["2", "0"]]  # steps 1 to 3, 4 to 6, 7 to 9
        resumed = [line.split() for line in calls.read_text().splitlines()[at_resume:]]
        assert resumed == [["1", "0"], ["2", "0"]]  # from step 5 on: no check, no earlier epoch


@pytest.mark.parametrize(("ahead", "length"), [(0, 40), (7, 40), (11, 16), (11, 5), (35, 100)])
def test_an_order_is_there_before_a_sample_of_its_epoch_is_fetched(ahead: int, length: int, tmp_path: Path) -> None:
    plan, total = Plan(length=length, batch_size=BATCH, micro_batch_size=4, seed=1), 30
    for first in (0, 4, 29):
        asked: list[int] = []
        orders = Orders(
            lambda epoch, asked=asked: asked.append(epoch) or np.arange(length) + epoch,  # type: ignore[misc,func-returns-value]
            name="", plan=plan, world=World(0, size=1, local_rank=0, device=torch.device("cpu")),
            heart=Heart(tmp_path / "beat"), ahead=ahead, total_steps=total,
        )  # fmt: skip
        ordered = Plan(length=length, batch_size=BATCH, micro_batch_size=4, seed=1, order=orders.of)
        micros = micro_batches_of(ordered, Sharing(), first=first, last=total)
        waiting: list[Any] = []
        for step in range(first, total):
            orders.ready(step)
            for number in range(plan.micro_batches(step)):
                waiting += itertools.islice(micros, 1 + ahead - len(waiting))
                micro = waiting.pop(0)
                assert (micro.step, micro.number, micro.epoch) == (step, number, plan.epoch(step))
                assert (
                    micro.indices[0] - micro.epoch
                    == step % plan.steps_per_epoch * BATCH + plan.span(number, plan.samples(step))[0]
                )
        assert asked == [*range(plan.epoch(first), plan.epoch(total - 1) + 1)]
        assert len(orders._known) <= 2 + ahead // plan.steps_per_epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_takes_no_more_of_a_plan_than_it_says(workers: int) -> None:
    plan, here = Plan(length=64, batch_size=1, micro_batch_size=1), torch.device("cpu")
    taken = 0

    def counted() -> Iterator[MicroBatch]:
        nonlocal taken
        for micro in micro_batches_of(plan, Sharing(), first=0, last=64):
            taken += 1
            yield micro

    with Loader(Ids(), {}, collate=None, workers=workers, device=here, dtype=None) as loader:
        batches = (
            to_device.ahead(loader._fetched(counted()), lambda item: item) if workers else loader.batches(counted())
        )
        most = 0
        for number, _ in enumerate(batches, 1):
            time.sleep(0.01)  # for the thread, which pins on a GPU
            most = max(most, taken - number)
        assert most == loader.ahead


WRONG = {
    "def order(epoch, config): return [1, 2]": "LongTensor of one dimension .* got a list of 2",
    "def order(epoch, config): return torch.rand(5)": r"got a tensor of shape \(5,\) of torch.float32",
    "def order(epoch, config): return torch.zeros(5, 2).long()": r"got a tensor of shape \(5, 2\)",
    "def order(epoch, config): return torch.zeros(0).long()": "no index for epoch 0",
    "def order(epoch, config): return torch.tensor([0, -1])": "index -1 for epoch 0, .* from 0 to 54",
    "def order(epoch, config): return torch.tensor([0, 55])": "index 55 for epoch 0, .* 55 samples",
    "def order(epoch, config): raise ValueError('no\\nway')": r"order\(\) failed: .*ValueError: no way",
    "def order(epoch): return torch.arange(5)": r"does not take \(epoch, config\)",
    "def weights(config): return [1.0] * 3": "one number for each of the 55 samples .* got 3; .* call it _weights",
    "def weights(config): return None": "got NoneType",
    "def weights(config): return [0.0] * 55": "add up to 0.0",
    "def weights(config): return [1e308] * 55": "add up to inf",
    "def weights(config): return [1.0] * 54 + [-1.0]": "-1.0 for sample 54, which is negative",
    "def weights(config): return [1.0] * 54 + [float('nan')]": "nan for sample 54, which is not finite",
    "def lengths(config): return [[1, 2]] * 55": "got 55x2",
    "def lengths(config): return [-1] * 55": "negative",
    "def weights(config): return [1] * 55\ndef lengths(config): return [1] * 55": "both order the samples",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_order_is_refused_before_anything_is_created(text: str, tmp_path: Path) -> None:
    path = task(tmp_path, text)
    with pytest.raises(Refused, match=WRONG[text]) as refused:
        prepare(Request(str(path), flags={}))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "later", "said"),
    [
        ("longer", "torch.arange(40 + epoch)", "returns 41 indices for epoch 1, but 40 when the run was launched"),
        ("typed", "torch.arange(40.0) if epoch else torch.arange(40)", "of torch.float32"),
        ("raising", "torch.arange(40 // (1 - epoch))", "order() failed"),
    ],
)
def test_a_wrong_order_of_a_later_epoch_ends_the_run_on_all_ranks(
    name: str, later: str, said: str, engine: Any, tmp_path: Path
) -> None:
    path = task(tmp_path, f"def order(epoch, config): return {later}")
    record = engine.run(name, 2, task=path)
    assert (engine.code, record["state"], len(record["attempts"])) == (3, "failed", 1)
    assert said in record["reason"] and "Traceback" not in engine.said(name)


def test_lengths_of_a_fork_with_other_fields_are_counted_anew(engine: Any, tmp_path: Path) -> None:
    text = "def order(epoch, config): return torch.arange(config.task.samples - config.task.width)"
    engine.run("folded", task=task(tmp_path, text), steps=1, task__width=24)
    record = engine.fork("folded", "refolded", 1, seed=1, steps=4)
    assert (record["state"], record["samples"], record["sampler"]) == ("finished", 31, "order")


def test_overfit_chooses_the_samples_itself_and_says_so(engine: Any, tmp_path: Path) -> None:
    path = task(tmp_path, "def order(epoch, config): raise AssertionError('called')")
    record = engine.run("overfit", task=path, overfit=8, steps=6)
    assert (record["state"], record["samples"], record["sampler"]) == ("finished", 8, "")
    assert any("--overfit 8 chooses the samples, so order() in" in warning for warning in record["warnings"])
    assert len({index for step in engine.station.samples("overfit").values() for index in step}) == 8


def test_a_fork_of_edited_code_that_overfits_does_not_ask_for_an_order(engine: Any, tmp_path: Path) -> None:
    begun = engine.run("begun", task=task(tmp_path, WEIGHTS), steps=6, fault="step@0:2")
    assert begun["sampler"] == "weights" and not engine.station.run("begun").steps_saved()
    edited = task(tmp_path, "def order(epoch, config): raise AssertionError('called')")
    made = prepare_fork(engine.station.run("begun"), 0, {"overfit": "8"}, 1, str(edited))
    assert (made.record["samples"], made.record["sampler"]) == (8, "")
    assert any("--overfit 8 chooses the samples" in warning for warning in made.warnings)
