"""What training changes beside the state dicts comes back, or is named where an argument of the script changed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR

from tests.train.sessions.ranks import Where, loop, ranks, save_now, where
from train.checkpoint.load import weights_in
from train.checkpoint.state_dict import weights_sha256
from train.errors import Refused
from train.sessions.state import Position, State

pytestmark = pytest.mark.never_forgiven


class Net(nn.Module):
    """Training changes all that it has: counters, flags, dtypes, shapes, and buffers that it makes late."""

    def __init__(self, rate: float = 0.5, size: int = 4) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 1), nn.Dropout(rate)
        self.steps, self.kind, self.best = 0, "warm", None
        self.hidden = torch.zeros(2)
        self.register_buffer("mean", torch.zeros(size), persistent=False)
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))
        self.register_buffer("late", None)

    def changed(self) -> Net:
        self.layer.requires_grad_(False)
        self.layer.double()
        self.drop.p, self.drop.training = 0.25, False
        self.steps, self.kind, self.best, self.more = 12, "cold", 0.1, True
        self.hidden = self.hidden + 3
        self.mean += 2
        self.count = self.count + 13.5
        self.late = torch.ones(5)
        self.register_buffer("later", torch.full((2,), 7.0))
        return self

    def all(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if type(value) in (int, float, str, bool)}
        tensors: dict[str, Any] = dict(self.named_parameters()) | dict(self.named_buffers()) | {"hidden": self.hidden}
        flags = [(one.requires_grad, one.dtype, one.tolist()) for one in tensors.values()]
        return plain | {"p": (self.drop.p, self.drop.training), "flags": flags, "names": [*tensors]}


def opened(place: Where, **objects: Any) -> State:
    state = State(place)
    state.register(**objects)
    return state


def save(state: State, step: int = 1) -> None:
    assert save_now(state, Position(0, step, step), {}, 0)


@pytest.mark.parametrize("attempts", [1, 2])
def test_what_training_changed_in_a_module_comes_back(tmp_path: Path, attempts: int) -> None:
    net = Net()
    state = opened(where(tmp_path), net=net)
    made = state.digest()
    net.changed()
    save(state)
    assert weights_sha256(weights_in(tmp_path / "checkpoints/step-00000001")) == state.digest() != made
    for number in range(attempts):  # what a resume has restored belongs into its own checkpoint too
        again, place = Net(), where(tmp_path)
        state = opened(place, net=again)
        assert state.load() is not None and not place.named
        assert again.all() == net.all() and "mean" not in again.state_dict()
        save(state, number + 2)


def test_what_an_argument_changed_stays_and_is_named(tmp_path: Path) -> None:
    net = Net(rate=0.5)
    state = opened(where(tmp_path), net=net)
    net.steps = 12
    save(state)
    again, place = Net(rate=0.1, size=6), where(tmp_path)
    again.steps = 3
    assert opened(place, net=again).load() is not None
    assert again.drop.p == 0.1 and again.steps == 3 and again.mean.shape == (6,)
    assert sorted(place.named) == [
        "net.drop.p: was 0.5, is 0.1",
        "net.mean: was float32 of shape [4], is float32 of shape [6]",
        "net.steps: was 12, is 3",
    ]


def thawed(add: bool) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    return model, torch.optim.SGD((model[1] if add else model).parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("add", [True, False])
def test_a_part_that_is_thawed_in_training_stays_so(tmp_path: Path, add: bool) -> None:
    """A resume repeats the head of its epoch, so the script may add the same group again."""

    def run(folder: Path, steps: int, every: int, heads: list[int]) -> str:
        model, optimizer = thawed(add)
        state = opened(where(folder), model=model, optimizer=optimizer)

        def step(number: int) -> None:
            if number in heads:
                model[0].requires_grad_(True)
                if add:
                    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()

        for _ in loop(state, step, steps, every=every):
            pass
        return state.digest()

    whole = run(tmp_path / "whole", 9, 9, [3])
    run(tmp_path / "parts", 6, 2, [3])
    assert run(tmp_path / "parts", 9, 3, [6]) == whole


def test_a_group_whose_parameters_no_module_has_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model, optimizer = thawed(True)
    state = opened(where(tmp_path), model=model, optimizer=optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    save(state)
    model, optimizer = thawed(True)
    with pytest.raises(Refused, match=r"added a group of parameters; add it before session\.register on a resume"):
        opened(where(tmp_path), model=model, optimizer=optimizer).load()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert opened(where(tmp_path), model=model, optimizer=optimizer).load() is not None


def test_swalr_is_taken_and_its_function_is_the_scripts(tmp_path: Path) -> None:
    def made(strategy: Any) -> tuple[Where, State, SWALR]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        swalr, place = SWALR(optimizer, 0.01, anneal_epochs=4, anneal_strategy=strategy), where(tmp_path)
        return place, opened(place, model=model, optimizer=optimizer, swalr=swalr), swalr

    _, state, swalr = made("cos")
    swalr.optimizer.step()
    swalr.step()
    save(state)
    place, state, again = made("cos")
    assert state.load() is not None and not place.named
    assert again.state_dict() == swalr.state_dict() and again.anneal_func is swalr.anneal_func
    place, state, again = made("linear")
    assert state.load() is not None and callable(again.anneal_func)
    (line,) = place.named
    assert line.startswith("swalr.anneal_func: was torch.optim.swa_utils.SWALR._cosine_anneal, is torch.optim.")


def test_an_optimizer_whose_parameters_nobody_saves_is_named(tmp_path: Path) -> None:
    place, model, extra = where(tmp_path), nn.Linear(2, 2), torch.ones(3, requires_grad=True)
    opened(place, model=model, optimizer=torch.optim.SGD([*model.parameters(), extra], lr=0.1))
    (line,) = place.named
    assert line.startswith("optimizer: 1 of its parameters are in no registered module")


def _register(rank: int, folder: Path, what: str) -> str:
    model: Any = nn.Linear(2, 2)
    given: dict[str, Any] = {"model": model}
    if what == "name" and rank == 0:
        given["ema"] = nn.Linear(2, 2)
    if what == "kind" and rank == 1:
        given["model"] = nn.Conv2d(1, 1, 1)
    if what == "value" and rank == 1:
        given["model"] = 3
    try:
        opened(where(folder, rank, 2), **given)
    except Refused as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("name", "register: rank 0 registers ema, rank 1 does not; make it on all ranks"),
        ("kind", "register: model is a Linear on rank 0 and a Conv2d on rank 1; register the same on all ranks"),
        ("value", "a int has no state_dict"),
        ("", ""),
    ],
)
def test_what_ranks_register_differently_is_refused_on_all(tmp_path: Path, what: str, line: str) -> None:
    found = ranks(2, _register, tmp_path, what)
    assert found[0] == found[1] and line in found[0] and bool(line) == bool(found[0]), found


class Cell(nn.Module):
    """Carries a state from batch to batch in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(2, 2), None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(2) if self.hidden is None else self.hidden
        out = torch.tanh(self.layer(x) + hidden)
        self.hidden = out.detach()  # type: ignore[assignment]
        return out


def test_a_tensor_carried_between_batches_comes_back(tmp_path: Path) -> None:
    cell = Cell()
    state = opened(where(tmp_path), cell=cell)
    cell(torch.ones(2))
    save(state)
    again = Cell()
    assert opened(where(tmp_path), cell=again).load() is not None
    assert torch.equal(again(torch.ones(2)), cell(torch.ones(2)))


def test_another_class_of_optimizers_is_refused_if_it_cannot_step_with_the_saved_groups(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(opened(where(tmp_path), model=model, optimizer=torch.optim.Adam(model.parameters())))
    place = where(tmp_path)
    assert opened(place, model=model, optimizer=torch.optim.AdamW(model.parameters())).load() is not None
    assert place.named == ["optimizer: was Adam, is AdamW"]
    with pytest.raises(Refused, match="the saved groups have no momentum, so they are of another class"):
        opened(where(tmp_path), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).load()
