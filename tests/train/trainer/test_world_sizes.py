"""The same run on any number of ranks and loader workers, up to the order of a sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.training import CLOSE, assert_same_training
from train.build.objects import plan_of
from train.config import from_toml
from train.data.plan import Sharing, micro_batches_of
from train.launcher.checks import prepare
from train.launcher.request import Request

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]


def test_each_epoch_sees_every_sample_once_with_the_short_batch_last(steady: Any) -> None:
    samples = steady.station.samples("one")
    assert [len(ids) for ids in samples.values()] == [16, 16, 16, 7, 16, 16, 16, 7, 16, 16]
    for first in (1, 5):
        epoch = [index for step in range(first, first + 4) for index in samples[step]]
        assert sorted(epoch) == list(range(55))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (3, 2)])
def test_ranks_and_workers_change_nothing_but_rounding(steady: Any, ranks: int, workers: int) -> None:
    name = f"ranks{ranks}-workers{workers}"
    steady.run(name, ranks, precision="fp64", data__workers=workers)
    assert_same_training(steady, name)
    if ranks > 1:  # they did share the work
        logs = [path.read_text() for path in (steady.station.runs / name).glob("samples.rank*.log")]
        assert len(logs) == ranks
        assert all(len(log.splitlines()[0].split()) > 1 for log in logs)


def test_the_short_batch_may_be_left_out_on_any_number_of_ranks(engine: Any) -> None:
    flags = {"precision": "fp64", "data__drop_last": "true"}
    engine.run("dropped1", 1, **flags)
    engine.run("dropped3", 3, ["5 0 SIGTERM"], data__workers=2, **flags)
    assert engine.resume("dropped3", 3)["state"] == "finished"
    samples = engine.station.samples("dropped3")
    # 2.5 epochs of three whole batches of 16 of 55 samples; the seven left out are others in the next epoch
    assert [len(ids) for ids in samples.values()] == [16] * 8
    missing = [set(range(55)) - {i for step in steps for i in samples[step]} for steps in ((1, 2, 3), (4, 5, 6))]
    assert [len(left) for left in missing] == [7, 7] and missing[0] != missing[1]
    assert all(line["samples"] == 23 for line in engine.station.metrics("dropped3") if "eval" in line)
    assert_same_training(engine, "dropped3", "dropped1")


def test_a_run_may_change_its_world_size_half_way_also_to_more_ranks_than_micro_batches(steady: Any) -> None:
    stopped = steady.run("changing", 3, ["3 1 SIGTERM"], precision="fp64")
    assert (stopped["state"], stopped["step"]) == ("stopped", 3)
    again = steady.resume("changing", 1, ["3 0 SIGTERM"])
    assert (again["state"], again["step"]) == ("stopped", 6)
    steady.resume("changing", 5)
    assert_same_training(steady, "changing")


COMMUNICATES = """

import torch.distributed as dist

_loss, _metrics = loss, metrics


def _gather():
    if dist.is_initialized():
        dist.all_gather([torch.zeros(4) for _ in range(dist.get_world_size())], torch.zeros(4))


def loss(model, batch):
    _gather()
    return _loss(model, batch)


def metrics(model, batch):
    _gather()
    return _metrics(model, batch)
"""


def test_losses_and_metrics_may_communicate_where_ranks_have_no_data_left(steady: Any, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(steady.task.read_text() + COMMUNICATES)
    # four micro batches a step, two in the short one, six in an evaluation
    assert steady.run("communicating", 4, task=task, precision="fp64")["state"] == "finished"
    assert_same_training(steady, "communicating")


def test_gradients_weigh_samples_not_micro_batches(engine: Any) -> None:
    # nothing random: a batch of 7 in one piece, or in pieces of 4 and 3 on two ranks, is one computation
    flags = {"precision": "fp64", "task__dropout": 0, "task__noise": 0}
    engine.run("in-one", 1, micro_batch_size=16, **flags)
    engine.run("in-pieces", 2, micro_batch_size=4, **flags)
    assert_same_training(engine, "in-pieces", "in-one")


def test_gradient_clipping_sees_the_gradient_of_the_whole_batch(steady: Any) -> None:
    for ranks in (1, 3):
        steady.run(f"clipped{ranks}", ranks, precision="fp64", clip_grad_norm=0.05)
    assert_same_training(steady, "clipped3", "clipped1")
    assert steady.losses("one")[-1] != pytest.approx(steady.losses("clipped1")[-1], rel=1e-6)


def test_batchnorm_trains_alike_on_any_number_of_ranks_but_for_its_running_statistics(engine: Any) -> None:
    for ranks in (1, 3):
        engine.run(f"norm{ranks}", ranks, precision="fp64", task__batchnorm="true")
    assert engine.losses("norm3") == pytest.approx(engine.losses("norm1"), **CLOSE)
    weights, expected = engine.weights("norm3"), engine.weights("norm1")
    for key, value in expected.items():
        if "running" not in key and "num_batches" not in key:
            torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-12)


def test_another_seed_is_another_run(steady: Any) -> None:
    steady.run("seed1", 1, precision="fp64", seed=1, steps=4)
    assert steady.station.samples("seed1")[1] != steady.station.samples("one")[1]
    assert steady.losses("seed1")[0] != pytest.approx(steady.losses("one")[0], rel=1e-3)


def test_a_batch_is_cut_evenly(tmp_path: Path) -> None:
    flags = {"batch_size": "7", "cpu_threads": "1", "device": "cpu", "data.drop_last": "true"}
    made = prepare(Request("digits", flags=flags), ranks=3)
    (tmp_path / "config.toml").write_text(str(made.files["config.toml"]))
    config = from_toml(tmp_path / "config.toml", made.task.Settings)
    micros = micro_batches_of(plan_of(config, 24), Sharing(), first=0, last=1)
    assert [len(micro.indices) for micro in micros] == [3, 2, 2]
