"""Parameters that are not trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.tasks import TASKS
from tests.train.specs import with_spec
from train.build.freeze import freeze, set_training
from train.errors import Refused
from train.launcher import frozen_modes
from train.trainer.load import load_trained

pytestmark = pytest.mark.never_forgiven


def model() -> nn.Sequential:
    body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    return nn.Sequential(body, nn.BatchNorm1d(2), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("patterns", "trained", "in_eval"),
    [
        ("0", {"1.weight", "1.bias", "2.weight", "2.bias"}, {"0", "0.0", "0.1", "0.2"}),
        ("0.0.*, 2.bias", {"0.1.weight", "0.1.bias", "1.weight", "1.bias", "2.weight"}, {"0.0"}),
        ("*.weight", {"0.0.bias", "0.1.bias", "1.bias", "2.bias"}, set()),
        (
            "1.weight,1.bias,0.2",
            {"0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias", "2.weight", "2.bias"},
            {"1", "0.2"},
        ),
    ],
)
def test_patterns_name_parameters_or_modules_and_whole_modules_stay_in_eval_mode(
    patterns: str, trained: set[str], in_eval: set[str]
) -> None:
    made = model()
    freeze(made, patterns)
    set_training(made, patterns)
    assert {name for name, parameter in made.named_parameters() if parameter.requires_grad} == trained
    assert {name for name, part in made.named_modules() if not part.training} == in_eval


def test_a_pattern_for_nothing_or_for_all_is_refused() -> None:
    with pytest.raises(Refused, match=r"--freeze encoder: .* no parameter or module of that name; it has 0, 1, 2"):
        freeze(model(), "0,encoder")
    with pytest.raises(Refused, match=r"0\.1\.weihgt: .*did you mean .*0\.1\.weight"):
        freeze(model(), "0.1.weihgt")
    with pytest.raises(Refused, match="leaves no parameter to train"):
        freeze(model(), "*")


def weights_of(engine: Any, name: str, **flags: Any) -> list[dict[str, torch.Tensor]]:
    """Of a run of eight steps on two ranks: after step 2, and at the end."""
    record = engine.run(
        name, 2, checkpoint__every_steps=2, checkpoint__keep=9, checkpoint__asynchronous="false", **flags
    )
    assert record["state"] == "finished", engine.said(name)
    return [load_trained(*with_spec(engine.station.run(name)), step)[2].state_dict() for step in (2, 8)]


def test_a_frozen_part_keeps_its_weights_and_statistics_through_training_and_evaluations(engine: Any) -> None:
    flags = {"task__batchnorm": "true", "eval__every_epochs": 0.25, "steps": 8}
    first, last = weights_of(engine, "frozen", freeze="enter,norm", **flags)
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert same == {name for name in first if name.startswith(("enter", "norm"))} and len(same) == 7


def test_of_several_updates_none_thaws_what_is_frozen_and_each_has_something_to_train(engine: Any) -> None:
    flags = {"task": TASKS / "gan.py", "optim__lr": None, "optim__name": None}
    with pytest.raises(Refused, match="all parameters of g are frozen"):
        engine.run("never-frozen", freeze="g", **flags)
    first, last = weights_of(engine, "frozen-gan", freeze="g.0.bias", steps=8, **flags)
    assert torch.equal(first["g.0.bias"], last["g.0.bias"])
    assert not torch.equal(first["g.0.weight"], last["g.0.weight"])


ADAMW = {"optim__name": "adamw", "optim__lr": 0.01}


@pytest.mark.parametrize(
    ("ranks", "freezes", "flags"),
    [
        (1, "", {**ADAMW, "optim__layer_decay": 0.9}),  # the fork has a group of parameters more
        (2, "leave", {**ADAMW, "parallel__strategy": "fsdp"}),
        (2, "", {"optim__momentum": 0.5}),
    ],
    ids=["layers", "fsdp", "sgd"],
)
def test_a_fork_trains_what_it_frees_and_freezes_what_it_names_even_if_killed(
    engine: Any, ranks: int, freezes: str, flags: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    of = f"freeze-{request.node.callspec.id}"
    often = {"checkpoint__every_steps": 2, "checkpoint__asynchronous": "false"}
    engine.run(of, ranks, freeze="enter", checkpoint__every_steps=4, checkpoint__keep=9, **flags)
    assert engine.fork(of, f"{of}-free", 4, ranks, freeze=freezes)["state"] == "finished", engine.said(f"{of}-free")
    start = load_trained(*with_spec(engine.station.run(of)), 4)[2].state_dict()
    for name, frozen in ((of, {"enter"}), (f"{of}-free", {freezes} - {""})):
        end = engine.weights(name)
        assert {key.partition(".")[0] for key in start if torch.equal(start[key], end[key])} == frozen
    engine.fork(of, f"{of}-killed", 4, ranks, ["6 0 SIGKILL"], freeze=freezes, **often)
    engine.resume(f"{of}-killed", ranks)
    assert [attempt["from_step"] for attempt in engine.station.record(f"{of}-killed")["attempts"]] == [4, 8]
    assert engine.outcome(f"{of}-killed") == engine.outcome(f"{of}-free")


def test_a_launch_names_frozen_modules_in_training_mode() -> None:
    class Kept(nn.Sequential):
        def train(self, mode: bool = True) -> Any:
            return super().train(False)

    def block(kind: type[nn.Sequential] = nn.Sequential, extra: nn.Module | None = None) -> nn.Sequential:
        return kind(nn.Linear(4, 4), extra or nn.Dropout(0.5)).requires_grad_(False)

    parts = {
        "teacher": block(), "norm": block(extra=nn.BatchNorm1d(4)), "plain": block(extra=nn.Dropout(0.0)),
        "kept": block(Kept), "named": block(), "trained": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
    }  # fmt: skip
    model, task = nn.ModuleDict(parts), SimpleNamespace(file=Path("task.py"))
    model["teacher"].eval()  # training undoes it
    (line,) = frozen_modes.warnings(task, model, "named")  # type: ignore[arg-type]
    assert "in training mode: teacher (dropout), norm (BatchNorm); for eval mode: --freeze 'teacher,norm', or" in line
    assert not model["teacher"].training and model["named"].training
    assert frozen_modes.warnings(task, model, "named,teacher,norm") == []  # type: ignore[arg-type]
