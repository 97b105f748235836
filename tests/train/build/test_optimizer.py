"""The optimizer that [optim] describes, its groups, and optimizers that evaluate other weights than they train."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.specs import with_spec
from tests.train.training import OWN_OPTIMIZER, assert_same_training
from train.build.optimizer import make_optimizer
from train.checkpoint.state_dict import weights, weights_sha256
from train.config import Config, build, resolve
from train.errors import Refused
from train.trainer.evaluate import evaluate_run
from train.trainer.load import load_trained

pytestmark = pytest.mark.never_forgiven

RATES = {"optim__name": "nadam", "optim__args__momentum_decay": 0.01, "optim__no_decay": "true",
         "optim__layer_decay": 0.5, "freeze": "enter,no*", "task__batchnorm": "true"}  # fmt: skip


def made(model: nn.Module, own: Any = None, **optim: Any) -> torch.optim.Optimizer:
    """An optimizer for a model; `own`: the task's param_groups."""
    task: Any = SimpleNamespace(optimizer=None, param_groups=own, schedule=None, file=Path("task.py"))
    return make_optimizer(task, model, build({f"optim.{key}": value for key, value in optim.items()}))


def groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, tuple[float, float]]:
    """Rate and weight decay of each parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(p)]: (round(group["lr"], 12), group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1, 2))
        self.embed = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm([2, 2]), nn.Linear(2, 2)) for _ in range(3)])
        self.head = nn.Linear(2, 2, bias=False)


def test_arguments_reach_torchs_optimizer_and_a_wrong_one_is_refused_with_the_nearest() -> None:
    adam = made(nn.Linear(2, 2), name="AdamW", args={"betas": [0.8, 0.95], "amsgrad": True, "eps": None})
    group = adam.param_groups[0]
    assert type(adam) is torch.optim.AdamW
    assert (group["betas"], group["amsgrad"], group["eps"]) == ((0.8, 0.95), True, 1e-8)
    assert made(nn.Linear(2, 2), name="rmsprop").param_groups[0]["momentum"] == 0  # torch's own


@pytest.mark.parametrize(
    ("optim", "words"),
    [
        ({"args": {"beta": [0.9, 0.9]}}, "adamw takes no such argument; did you mean betas"),
        ({"args": {"betas": [0.9]}}, "must be a list of 2 numbers"),
        ({"args": {"betas": [2, 0.9]}}, "Invalid beta parameter"),
        ({"args": {"eps": True}}, "must be a number"),
        ({"args": {"lr": 0.1}}, "its own field; use --optim.lr"),
        ({"momentum": 0.5}, r"or use --optim.args.betas '\[0.5, 0.999\]'"),
        ({"name": "rmsprop", "momentum": 0.5}, "or use --optim.args"),
        ({"name": "rprop", "weight_decay": 0.5}, "has no weight decay; give --optim.weight_decay 0"),
        ({"layer_decay": 0.5}, "one layer only"),
    ],
)
def test_what_the_optimizer_cannot_do_is_refused(optim: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        made(nn.Linear(2, 2), **optim)


def test_arguments_are_flags_that_are_laid_over_a_tasks_and_protected_on_a_resume(tmp_path: Path) -> None:
    from train import config

    flags = {"optim.args.betas": "[0.9, 0.95]", "optim.args.eps": "none"}
    made = resolve(
        flags,
        config_file=None,
        settings=None,
        defaults={"optim.args": {"eps": 0.1, "amsgrad": True}},
        task_file=tmp_path,
    )
    assert made.optim.args == {"eps": None, "amsgrad": True, "betas": [0.9, 0.95]}
    (tmp_path / "config.toml").write_text(config.to_toml(made))
    again = config.from_toml(tmp_path / "config.toml", None)
    assert again.optim.args == {"amsgrad": True, "betas": [0.9, 0.95]}
    changed = config.with_flags(
        {"optim.args.betas": "[0.9, 0.9]"}, settings=None, task_file=tmp_path, flat=config.to_flat(again)
    )
    assert config.forbidden_changes(config.to_flat(again), config.to_flat(changed)) == ["optim.args.betas"]
    with pytest.raises(Refused, match=r"optim\.args\.eps nan: must be a finite number"):
        resolve({"optim.args.eps": "nan"}, config_file=None, settings=None, defaults={}, task_file=tmp_path)


def test_layers_have_falling_rates_and_norms_and_biases_no_decay() -> None:
    model = Deep()
    rates = groups(made(model, lr=1.0, weight_decay=0.1, layer_decay=0.5, no_decay=True), model)
    assert rates["place"] == rates["embed.weight"] == (0.5**4, 0.1)
    assert rates["blocks.0.1.weight"] == (0.5**3, 0.1)
    assert rates["blocks.2.1.weight"] == (0.5, 0.1) and rates["blocks.2.1.bias"] == (0.5, 0)
    assert rates["blocks.2.0.weight"] == (0.5, 0)
    assert rates["head.weight"] == (1, 0.1)


def test_groups_of_the_tasks_own_have_rates_by_lr_scale() -> None:
    model = Deep()
    model.embed.requires_grad_(False)

    def own(model: Any, config: Config) -> list[dict[str, Any]]:
        blocks = model.blocks.named_parameters()
        return [{"params": blocks, "lr_scale": 0.1, "betas": (0.5, 0.5)}, {"params": model.embed.parameters()},
                {"params": model.place, "lr": 0.3}, {"params": [model.head.weight], "weight_decay": 0}]  # fmt: skip

    optimizer = made(model, own, lr=1.0)
    rates = groups(optimizer, model)
    assert rates["blocks.0.1.weight"] == (0.1, 0.01) and rates["place"] == (0.3, 0.01)
    assert rates["head.weight"] == (1, 0) and "embed.weight" not in rates
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.5)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (lambda m: [{"params": [m.weight, m.weight]}], "names weight twice"),
        (lambda m: [{"params": m.weight}], "leaves out bias; .* --freeze bias"),
        (lambda m: [{"params": [torch.ones(2)]}], "no parameter of the model"),
        (lambda m: [{"params": m.parameters(), "lr_scal": 1}], "unknown key 'lr_scal'; did you mean lr_scale"),
        (lambda m: [{"params": m.parameters(), "lr_scale": "0.1"}], "lr_scale is '0.1'"),
        (lambda m: m.parameters(), "must return a list of dicts"),
    ],
)
def test_wrong_groups_are_refused_by_name(own: Any, words: str) -> None:
    with pytest.raises(Refused, match=words):
        made(nn.Linear(2, 2), lambda model, config: own(model))


def test_functions_and_fields_that_take_each_others_place_are_refused(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "both.py"
    groups = "\n\ndef param_groups(model, config):\n    return [{'params': model.parameters()}]\n"
    own = "\n\ndef optimizer(model, config):\n    return torch.optim.SGD(model.parameters())\n"
    for text, flags, words in (
        (groups, {"optim__layer_decay": 0.5}, r"param_groups\(\) in .* replaces --optim.layer_decay"),
        (own, {"optim__args__eps": 0.5} | OWN_OPTIMIZER, r"optimizer\(\) in .* replaces --optim.args"),
        (own + groups, {}, "has optimizer and param_groups, but optimizer replaces"),
    ):
        task.write_text(engine.task.read_text() + text)
        with pytest.raises(Refused, match=words):
            engine.run("never-grouped", task=task, **flags)


def test_groups_and_frozen_parts_are_the_same_on_any_ranks_and_over_a_kill(engine: Any) -> None:
    engine.run("grouped", 1, precision="fp64", **RATES)
    engine.run("grouped3", 3, precision="fp64", **RATES)
    assert_same_training(engine, "grouped3", "grouped")
    assert engine.run("grouped2", 2, parallel__strategy="fsdp", **RATES)["state"] == "finished"
    by_four = {"checkpoint__every_steps": 4, "checkpoint__asynchronous": "false", "parallel__strategy": "fsdp"}
    engine.run("grouped2-killed", 2, ["6 0 SIGKILL"], **by_four, **RATES)
    engine.resume("grouped2-killed", 2)
    assert engine.outcome("grouped2-killed") == engine.outcome("grouped2")


FREE = '''

class ScheduleFree(torch.optim.Optimizer):
    """SGD by Defazio et al., "The Road Less Scheduled", 2024: trains y, evaluates the mean x, keeps z."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.5, "steps": 0, "trains": False})

    def _move(self, group, weight):
        for p in group["params"]:
            if "z" in self.state[p]:
                p.lerp_(self.state[p]["z"], weight)

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["trains"]:
                self._move(group, 0.1)
            group["trains"] = True

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["trains"]:
                self._move(group, 1 - 1 / 0.9)
            group["trains"] = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["trains"]
            group["steps"] += 1
            share = 1 / group["steps"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).add_(p.grad, alpha=group["lr"] * (0.9 * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def optimizer(model, config):
    return ScheduleFree(model.parameters())
'''


def test_an_optimizer_with_modes_evaluates_its_means_and_resumes_with_the_same_bits(
    engine: Any, tmp_path: Path
) -> None:
    task = tmp_path / "averaged.py"
    task.write_text(engine.task.read_text() + FREE)
    flags = OWN_OPTIMIZER | {
        "task": task,
        "eval__every_epochs": 0.25,
        "checkpoint__every_steps": 2,
        "checkpoint__asynchronous": "false",
    }
    assert engine.run("averaged", 2, **flags)["state"] == "finished", engine.said("averaged")
    engine.run("averaged-killed", 2, ["6 0 SIGKILL"], **flags)
    engine.resume("averaged-killed", 2)
    assert engine.outcome("averaged-killed") == engine.outcome("averaged")
    # what is evaluated alone, and exported, is what the run has evaluated at its end
    run = engine.station.run("averaged")
    assert evaluate_run(*with_spec(run), None)[2] == pytest.approx(engine.evaluations("averaged")[-1], rel=1e-12)
    assert weights_sha256(weights(load_trained(*with_spec(run))[2])) == run.read()["weights_sha256"]
