"""The arithmetic of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from train.config import Config
from train.errors import Refused
from train.launcher.checks import prepare
from train.launcher.request import Request
from train.parallel.precision import Precision
from train.parallel.strategy import Strategy
from train.parallel.world import World


@pytest.mark.minutes
def test_bf16_trains_on_a_cpu_with_weights_in_float32(engine: Any) -> None:
    flags = {"epochs": 20, "task__samples": 256, "task__dropout": 0, "optim__lr": 0.3}
    engine.run("bf16", 2, precision="bf16", **flags)
    engine.run("fp32", 2, **flags)
    losses, expected = engine.losses("bf16"), engine.losses("fp32")
    assert sum(losses[-16:]) < 0.8 * sum(losses[:16])
    assert losses[0] != expected[0]  # it did compute in bfloat16
    assert losses[0] == pytest.approx(expected[0], rel=0.02)
    assert {value.dtype for value in engine.weights("bf16").values()} == {torch.float32}


def test_a_bf16_run_resumes_bit_for_bit(engine: Any) -> None:
    engine.run("bf16-whole", 3, precision="bf16", steps=6)
    engine.run("bf16-parts", 3, ["3 0 SIGTERM"], precision="bf16", steps=6)
    engine.resume("bf16-parts", 3)
    assert engine.outcome("bf16-parts") == engine.outcome("bf16-whole")


def test_fp64_keeps_weights_and_inputs_in_float64(steady: Any) -> None:
    assert {value.dtype for value in steady.weights("one").values()} == {torch.float64}
    assert Precision("fp64", torch.device("cpu")).inputs == torch.float64


def test_fp16_on_a_cpu_is_refused_with_the_remedy(engine: Any) -> None:
    with pytest.raises(Refused, match="fp16 needs a GPU; on a CPU use --precision bf16"):
        prepare(Request(str(engine.task), {"precision": "fp16", "device": "cpu"}))


def test_tf32_on_a_cpu_is_refused_with_the_remedy(engine: Any) -> None:
    with pytest.raises(Refused, match="tf32 needs a GPU; on a CPU use --precision fp32"):
        prepare(Request(str(engine.task), {"precision": "tf32", "device": "cpu"}))


def test_a_rank_that_has_scaled_no_loss_yet_takes_part_in_a_step_that_scales() -> None:
    """Of fp16: a rank of whose first micro batch not a sample could be read."""
    made = Precision("fp32", torch.device("cpu"))
    made.scaler = torch.amp.GradScaler("cpu")
    strategy, model = Strategy(World(0, 1, 0, torch.device("cpu")), Config(), made), torch.nn.Linear(2, 2)
    strategy.place(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.start()
    strategy.backward(None, 0.0, torch.zeros(5))
    strategy.scale_and_clip_gradients(optimizer, None)
    strategy.update(optimizer)
    assert made.scaler.get_scale() == 65536


@pytest.mark.parametrize("before", ["nothing", "by the older way", "by the newer way", "for everything"])
def test_fp32_on_a_gpu_has_whole_products_and_tf32_short_ones_whatever_a_task_has_set(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all that torch itself reads says the same: it raises an error where its older and newer settings differ."""
    backends: Any = torch.backends
    places = [backends.cuda.matmul]
    if hasattr(backends, "fp32_precision"):
        places += [backends.cudnn.conv, backends.cudnn.rnn, backends.cudnn]
    elif before in ("by the newer way", "for everything"):
        pytest.skip("this torch has one way to say it")
    for name, is_short in (("tf32", True), ("fp32", False), ("tf32", True), ("bf16", False)):
        if before == "by the older way":
            backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = not is_short
        elif before == "by the newer way":
            for place in places:
                place.fp32_precision = "ieee" if is_short else "tf32"
        elif before == "for everything":
            monkeypatch.setattr(backends, "fp32_precision", "tf32")
        Precision(name, torch.device("cuda"))
        assert backends.cuda.matmul.allow_tf32 is backends.cudnn.allow_tf32 is is_short
        if len(places) > 1:
            assert {place.fp32_precision for place in places} == {"tf32" if is_short else "ieee"}
        if before != "for everything":  # which the CPU's products follow too
            assert torch.get_float32_matmul_precision() == ("high" if is_short else "highest")


@pytest.mark.parametrize(("name", "inside"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_holds_inside_a_forward_pass_and_ends_with_it(name: str, inside: torch.dtype) -> None:
    made, layer = Precision(name, torch.device("cpu")), torch.nn.Linear(2, 2)
    with made.autocast():
        assert layer(torch.ones(1, 2)).dtype == inside
    assert layer(torch.ones(1, 2)).dtype == torch.float32


def test_the_loss_of_a_model_that_is_float64_by_itself_is_not_rounded_to_float32(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    changed = """

_plain, _loss = model, loss


def model(config):
    return _plain(config).double()


def loss(model, batch):
    return _loss(model, batch | {"point": batch["point"].double()})


def metrics(model, batch):
    return {}
"""
    task.write_text(engine.task.read_text() + changed)
    for name, ranks in (("double-1", 1), ("double-3", 3)):
        assert engine.run(name, ranks, task=task)["state"] == "finished", engine.said(name)
        losses = engine.losses(name)
        assert any(loss != float(torch.tensor(loss, dtype=torch.float32)) for loss in losses)
    assert engine.losses("double-3") == pytest.approx(engine.losses("double-1"), rel=1e-12)
