"""A task's own state, its change after each step, and the average of the weights: on any ranks, through any kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks import TASKS
from tests.train.specs import with_spec
from tests.train.training import assert_same_training
from train.checkpoint.extra import Extra
from train.trainer.evaluate import evaluate_run
from train.trainer.export import export
from train.trainer.load import load_trained

pytestmark = pytest.mark.never_forgiven

FLAGS: dict[str, Any] = {
    "task": TASKS / "moving.py", "ema__decay": 0.9, "task__batchnorm": "true", "checkpoint__every_steps": 4,
    "checkpoint__asynchronous": "false", "task__sees": "true",
}  # fmt: skip


def extra_of(engine: Any, name: str, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The average of a run's weights, as it is exported."""
    from safetensors.torch import load_file

    export(*with_spec(engine.station.run(name)), tmp_path / f"{name}.safetensors", which="ema")
    return load_file(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize("flags", [{}, {"parallel__strategy": "fsdp", "task__batchnorm": "false"}], ids=["ddp", "fsdp"])
def test_killed_and_resumed_it_ends_bit_for_bit_as_undisturbed(
    engine: Any, flags: dict[str, Any], tmp_path: Path
) -> None:
    strategy = flags.get("parallel__strategy", "ddp")
    whole, killed = f"moving-{strategy}", f"moving-{strategy}-killed"
    assert engine.run(whole, 3, **FLAGS | flags)["state"] == "finished", engine.said(whole)
    assert engine.run(killed, 3, ["6 1 SIGKILL"], **FLAGS | flags)["state"] == "interrupted", engine.said(killed)
    engine.resume(killed, 3)
    assert engine.outcome(killed) == engine.outcome(whole)
    average, again = extra_of(engine, whole, tmp_path), extra_of(engine, killed, tmp_path)
    assert average.keys() == again.keys() == engine.weights(whole).keys()
    assert all(torch.equal(again[name], value) for name, value in average.items())
    differing = [name for name, value in engine.weights(whole).items() if not torch.equal(average[name], value)]
    assert "student.enter.weight" in differing
    assert average["mask"].tolist() == [-torch.inf, 0.0]  # and nothing else has become infinite
    assert all(torch.isfinite(value).all() for name, value in average.items() if name != "mask")


def test_it_is_the_same_on_one_and_three_ranks(engine: Any) -> None:
    flags = FLAGS | {"precision": "fp64", "task__batchnorm": "false", "task__dropout": 0.0, "task__sees": "false"}
    engine.run("one-moving", 1, **flags)
    engine.run("three-moving", 3, **flags)
    assert_same_training(engine, "three-moving", "one-moving")


def test_in_order_it_ends_with_the_same_bits_on_any_number_of_ranks(engine: Any) -> None:
    flags = FLAGS | {"parallel__reduce": "ordered", "freeze": "teacher"}
    records = [engine.run(f"ordered-moving-{ranks}", ranks, **flags) for ranks in (1, 3)]
    assert len({record["weights_sha256"] for record in records}) == 1


def test_what_after_step_freezes_is_refused(engine: Any, tmp_path: Path, capfd: Any) -> None:
    task = tmp_path / "late.py"
    late = "def after_step(model, step, stateful):\n    model.leave.requires_grad_(step < 3)\n"
    task.write_text(f"{engine.task.read_text()}\n\n{late}")
    engine.run("late-freeze", 1, task=task)
    assert engine.code == 3 and "changes which parameters require gradients" in capfd.readouterr().err


def test_state_that_differs_between_ranks_is_refused(engine: Any, capfd: Any) -> None:
    engine.run("by-rank", 2, **FLAGS, task__by_rank="true")
    assert engine.code == 3
    assert "the state of history (stateful) differs between ranks" in capfd.readouterr().err


def test_the_average_is_what_its_formula_says(engine: Any, tmp_path: Path) -> None:
    engine.run("average", 1, steps=5, ema__decay=0.8, ema__warmup=3, checkpoint__every_steps=1, checkpoint__keep=9)
    saved = [load_trained(*with_spec(engine.station.run("average")), step) for step in range(1, 6)]
    weights = [model.state_dict() for _, _, model, _, _ in saved]
    from train.build.objects import make_model

    expected = make_model(saved[0][0], saved[0][1]).state_dict()
    for step, now in enumerate(weights, 1):
        decay = min(0.8, (1 + step) / (3 + step))
        expected = {key: decay * value + (1 - decay) * now[key] for key, value in expected.items()}
    found = extra_of(engine, "average", tmp_path)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)


def test_the_average_is_evaluated_beside_the_weights(engine: Any, tmp_path: Path) -> None:
    name = "evaluated-average"
    flags = {"ema__decay": 0.8, "checkpoint__best": "min:ema.loss", "eval__every_epochs": 0, "precision": "fp64"}
    engine.run(name, 2, parallel__strategy="fsdp", **flags)
    (figures,) = engine.evaluations(name)
    run = engine.station.run(name)
    assert run.read()["best"]["metric"] == "ema.loss"
    task, config, model, _, _ = load_trained(*with_spec(run))
    whole = torch.utils.data.default_collate([*task.datasets(config)[1]])
    for prefix, weights in (("", model.state_dict()), ("ema.", extra_of(engine, name, tmp_path))):
        model.load_state_dict(weights)
        loss = task.loss(model.double().eval(), whole | {"point": whole["point"].double()}).item()
        assert figures[f"{prefix}loss"] == pytest.approx(loss, rel=1e-6)
    assert figures["loss"] != figures["ema.loss"]
    assert evaluate_run(*with_spec(run), None)[2] == pytest.approx(figures, rel=1e-9)


class _Stuck:
    """Its state holds what no checkpoint may."""

    def state_dict(self) -> dict[str, Any]:
        return {"where": Path("x")}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_state_that_cannot_be_restored_is_refused() -> None:
    from train.errors import Refused

    with pytest.raises(Refused, match=r"stateful in task.py: odd cannot be saved and restored"):
        Extra(objects={"odd": _Stuck()}).check("task.py", torch.device("cpu"))
