"""Reading a state: into an optimizer that has not made a step yet, and beside a rank that dies."""

from __future__ import annotations

import copy
import datetime
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.waiting import eventually
from train.checkpoint.load import load
from train.checkpoint.save import Saver
from train.checkpoint.state_dict import TrainState, size_of, state_of
from train.config import Config
from train.parallel.precision import Precision
from train.parallel.world import World
from train.run.folders import create

pytestmark = pytest.mark.never_forgiven

WAYS: dict[str, Any] = {
    "plain": ("SGD", {}),
    "adam": ("Adam", {}),
    "Adam, fused": ("Adam", {"fused": True, "weight_decay": 0.1}),
    "Adam, the largest": ("Adam", {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    **{f"{kind} with decay": (kind, {"weight_decay": 0.1}) for kind in (
        "Adadelta", "Adafactor", "Adagrad", "AdamW", "Adamax", "NAdam", "RAdam",
    )},
    "RMSprop, centred": ("RMSprop", {"weight_decay": 0.1, "momentum": 0.9, "centered": True}),
    "momentum, damped": ("SGD", {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "averages": ("ASGD", {"t0": 1.0}),
    "signs": ("Rprop", {}),
}  # fmt: skip
"""Of torch's optimizers, each with what may make its first step another than the later ones."""
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: functools.partial(getattr(torch.optim, of), lr=0.1, **options) for name, (of, options) in WAYS.items()
}


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, KINDS[kind](model.parameters())


def after(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and all that the optimizer keeps, after so many steps more."""
    for _ in range(steps):
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def equal(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_at_the_state_before_the_first_step_changes_no_step(kind: str) -> None:
    """As after a step that fp16 left out."""
    looked_at, plain = made(kind), made(kind)
    before = copy.deepcopy(plain[1].state_dict())
    state_of(*looked_at)
    assert equal(looked_at[1].state_dict()["state"], before["state"])
    assert looked_at[1].state_dict()["param_groups"] == before["param_groups"]
    assert equal(after(1, *looked_at), after(1, *plain))
    assert equal(after(2, *looked_at), after(2, *plain))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_from_before_the_first_step_continues_as_nothing_had_been(kind: str, tmp_path: Path) -> None:
    dcp.save(state_of(*made(kind)), checkpoint_id=tmp_path / "step", no_dist=True)
    model, optimizer = made(kind)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    load(tmp_path / "step", model, optimizer=optimizer)
    assert equal(after(3, model, optimizer), after(3, *made(kind)))


def test_room_is_made_once_there_is_a_state(tmp_path: Path) -> None:
    saver = Saver(
        create(tmp_path, "adam", files={}, record={}),
        World(0, size=1, local_rank=0, device=torch.device("cpu")),
        config=Config(),
        attempt=1,
        saved=print,
    )
    model, optimizer = made("adam")
    state = TrainState(module=model, optimizer=optimizer, precision=Precision("fp32", torch.device("cpu")))
    staging = saver._staging
    assert staging is not None
    saver.prepare(state)  # as after a step that fp16 left out
    assert not optimizer.state
    after(1, model, optimizer)
    saver.prepare(state)
    size = size_of(state_of(model, optimizer))
    eventually("memory for a copy", lambda: staging.bytes >= size)
    saver.close()  # its thread would count as one of a task that another test checks


def _read_beside_one_that_dies(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)  # a fork has none of the threads of OpenMP, and would wait for them
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/meet", limit, world_size=2, rank=rank)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        load(folder / "step", nn.Linear(4, 2))
    except BaseException as error:
        (folder / "said").write_text(type(error).__name__)
    os._exit(0)


def test_a_rank_that_dies_meanwhile_is_not_taken_for_a_model_that_does_not_fit(tmp_path: Path) -> None:
    dcp.save(state_of(nn.Linear(4, 2), None), checkpoint_id=tmp_path / "step", no_dist=True)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_read_beside_one_that_dies, args=(rank, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, -signal.SIGKILL]
    assert (tmp_path / "said").read_text() in ("RuntimeError", "DistBackendError")


def test_a_model_that_does_not_fit_is_told_so(tmp_path: Path) -> None:
    dcp.save(state_of(nn.Linear(4, 2), None), checkpoint_id=tmp_path / "step", no_dist=True)
    with pytest.raises(ValueError, match="does not fit the checkpoint step"):
        load(tmp_path / "step", nn.Linear(5, 2))
    with pytest.raises(ValueError, match="does not fit the checkpoint step"):
        load(tmp_path / "step", nn.Sequential(nn.Linear(4, 2)))


class _Late(torch.optim.SGD):
    """SGD that keeps an average of what it made, from its second step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            values = self.state[parameter]
            if "count" in values:
                values.setdefault("slow", torch.zeros_like(parameter)).add_(parameter.detach())
                values.setdefault("row", torch.ones(3))
            values["count"] = torch.ones(())


class _Later(torch.optim.SGD):
    """SGD without a state before its third step."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.calls += 1
        for parameter in self.param_groups[0]["params"] if self.calls > 2 else ():
            self.state[parameter]["slow"] = parameter.detach().clone()


@pytest.mark.parametrize(("kind", "momentum"), [(_Late, 0.9), (_Later, 0.0)])
def test_what_an_optimizer_makes_in_later_steps_is_read_back(kind: Any, momentum: float, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = kind(model.parameters(), lr=0.1, momentum=momentum)
    for _ in range(3):
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / "step", no_dist=True)
    again = nn.Linear(4, 2)
    fresh = kind(again.parameters(), lr=0.1, momentum=momentum)
    load(tmp_path / "step", again, optimizer=fresh)
    for parameter, same in zip(model.parameters(), again.parameters(), strict=True):
        assert fresh.state[same].keys() == optimizer.state[parameter].keys() >= {"slow"}
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(fresh.state[same][key], value), key


def test_a_group_of_parameters_without_a_state_beside_one_with_is_read_back(tmp_path: Path) -> None:
    def two_groups() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "momentum": 0.9}]
        return model, torch.optim.SGD(groups, lr=0.1)

    model, optimizer = two_groups()
    after(2, model, optimizer)
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / "step", no_dist=True)
    again, fresh = two_groups()
    load(tmp_path / "step", again, optimizer=fresh)
    assert equal(after(2, again, fresh), after(2, model, optimizer))


def test_a_buffer_that_a_model_lacks_is_not_left_out_in_silence(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(2)
    dcp.save(state_of(model, None), checkpoint_id=tmp_path / "step", no_dist=True)
    model.register_buffer("running_mean", None)
    with pytest.raises(ValueError, match="running_mean is not in the model"):
        load(tmp_path / "step", model)


def test_looking_at_a_state_calls_no_hook_of_a_step() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # which never has a state
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    state_of(model, optimizer)
    assert called == []
    optimizer.step()
    assert called == ["pre", "post"]


def test_how_an_optimizer_makes_its_step_is_not_read_from_a_checkpoint(tmp_path: Path) -> None:
    """It follows from the device and the strategy, which a resume may change."""
    model = nn.Linear(4, 2)
    fused = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    model(torch.ones(3, 4)).square().sum().backward()
    fused.step()
    fused.zero_grad()
    dcp.save(state_of(model, fused), checkpoint_id=tmp_path / "step", no_dist=True)
    for own in ({"fused": False}, {"foreach": True, "maximize": True}, {"fused": True}):
        again = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.1, **own)
        before = dict(optimizer.param_groups[0])
        load(tmp_path / "step", again, optimizer=optimizer)
        after = optimizer.param_groups[0]
        for name in ("fused", "foreach", "differentiable"):
            assert after[name] == before[name], name
        assert (after["lr"], after["momentum"], after["maximize"]) == (0.1, 0.9, False)
        assert torch.equal(
            optimizer.state[again.weight]["momentum_buffer"], fused.state[model.weight]["momentum_buffer"]
        )
