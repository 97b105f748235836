"""What a session registers comes back as it was, on each rank, or is refused in a line."""

from __future__ import annotations

import collections
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.train.sessions.ranks import loop, ranks, save_now, where
from train.checkpoint.load import weights_in
from train.checkpoint.manifest import verify
from train.checkpoint.state_dict import weights, weights_sha256
from train.errors import Refused, TrainingFailed
from train.run.run_folder import Run
from train.sessions.state import Now, Position, State
from train.trainer.export import export_registered

pytestmark = pytest.mark.never_forgiven


def opened(folder: Path, **objects: Any) -> State:
    state = State(where(folder))
    state.register(**objects)
    return state


def trained(optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()


class Meter:
    """An object of a user's own, with a tensor in a Counter's neighbour."""

    def __init__(self) -> None:
        self.seen, self.kept = collections.Counter[str](), torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "kept": [self.kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, (self.kept,) = state["seen"], state["kept"]


def objects() -> dict[str, Any]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "milestones": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
        "cycle": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50),
        "scaler": torch.amp.GradScaler("cpu"),
        "ema": torch.optim.swa_utils.AveragedModel(model),
        "meter": Meter(),
    }


def plain(value: Any) -> Any:
    """A state as values that compare: tensors by type, shape and bytes."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return type(value).__name__, {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def test_all_that_is_registered_comes_back_bit_by_bit(tmp_path: Path) -> None:
    made = objects()
    state = opened(tmp_path, **made)
    trained(made["optimizer"], 3)
    made["milestones"].step()
    made["meter"].seen["cat"] += 7
    made["meter"].kept += 0.1
    made["ema"].update_parameters(made["model"])
    values = {"best": 0.1 + 0.2, "of": {3: (1, np.float32(0.1))}, "list": [np.arange(3)], "nan": float("inf")}
    state.border()
    assert save_now(state, Position(1, 4, state.updates), values, 99)
    again = objects()
    other = opened(tmp_path, **again)
    saved = other.load()
    assert saved is not None and saved.position == Position(1, 4, 3) and saved.metrics_bytes == 99
    assert repr(saved.values) == repr(values)
    for name, one in made.items():
        assert plain(again[name].state_dict()) == plain(one.state_dict()), name
    moment = again["optimizer"].state[again["model"][0].weight]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last)
    assert other.updates == 3 and other.digest() == state.digest()
    both = {f"{name}.{key}": one for name in ("model", "ema") for key, one in weights(made[name]).items()}
    assert weights_sha256(weights_in(tmp_path / "checkpoints/step-00000003")) == weights_sha256(both) == state.digest()


def test_one_module_keeps_its_names_without_what_wraps_it(tmp_path: Path, caplog: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[1] = torch.compile(model[1], backend="eager")  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = opened(tmp_path, net=torch.compile(model, backend="eager"), optimizer=optimizer)
    assert "net is compiled: a resume is exact if shapes" in caplog.text
    trained(optimizer)
    assert save_now(state, Position(0, 1, 1), {}, 0)
    found = weights_in(tmp_path / "checkpoints/step-00000001")
    assert sorted(found) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    bare = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    other = opened(tmp_path, net=bare, optimizer=torch.optim.SGD(bare.parameters(), lr=0.1))
    assert other.load() is not None and other.digest() == state.digest() == weights_sha256(found)


class _Code:
    """A state that could execute something when it is read."""

    def state_dict(self) -> dict[str, Any]:
        return {"when": Path("x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class DeepSpeedEngine(nn.Module):
    """Stands for DeepSpeed's by its name, which is what is looked at."""


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"x": 3}, "a int has no state_dict and no load_state_dict"),
        ({"x": [nn.Linear(1, 1)]}, "a list has no state_dict"),
        ({"x": nn.Linear}, "it is a class"),
        ({"x": torch.Generator()}, "seeds generators itself"),
        ({"x": DeepSpeedEngine()}, "DeepSpeed saves by itself"),
        ({"x": nn.Sequential(DeepSpeedEngine())}, "DeepSpeed saves by itself"),
        ({"x": _Code()}, r"register\(x=…\): its state cannot be saved: it holds pathlib.PosixPath"),
        ({}, "nothing to register"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused(tmp_path: Path, given: dict[str, Any], line: str) -> None:
    with pytest.raises(Refused, match=line) as refused:
        opened(tmp_path, **given)
    assert "\n" not in str(refused.value)


def test_a_second_registration_is_refused(tmp_path: Path) -> None:
    state = opened(tmp_path, model=nn.Linear(1, 1))
    with pytest.raises(Refused, match="called twice"):
        state.register(other=nn.Linear(1, 1))


def test_names_and_shapes_must_be_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = opened(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert save_now(state, Position(0, 1, 1), {}, 0)
    with pytest.raises(Refused, match=r"holds optimizer, which session\.register does not name"):
        opened(tmp_path, model=model).load()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(Refused, match="does not hold ema; leave it out"):
        opened(tmp_path, model=model, optimizer=optimizer, ema=model).load()
    for other, line in ((nn.Linear(3, 2), "shape"), (nn.Linear(2, 2, bias=False), "bias is not in the model")):
        with pytest.raises(Refused, match=f"model does not fit the checkpoint step-00000001.*{line}") as refused:
            opened(tmp_path, model=other, optimizer=optimizer).load()
        assert "\n" not in str(refused.value)
    with pytest.raises(Refused, match="optimizer does not fit"):
        opened(tmp_path, model=model, optimizer=torch.optim.SGD([*model.parameters(), torch.ones(1)], lr=1)).load()


def test_a_setting_that_the_checkpoint_replaces_is_named(tmp_path: Path, caplog: Any) -> None:
    def made(rate: float, steps: int) -> tuple[State, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return opened(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler), optimizer

    assert save_now(made(0.1, 30)[0], Position(0, 1, 1), {}, 0)
    assert made(0.1, 30)[0].load() is not None
    assert not [record for record in caplog.records if record.name == "train"]
    state, optimizer = made(0.2, 60)
    assert state.load() is not None and optimizer.param_groups[0]["lr"] == 0.1
    said = caplog.text
    assert "optimizer was made with lr 0.2, but the checkpoint goes on with 0.1" in said
    assert "scheduler was made with T_max 60, but the checkpoint goes on with 30" in said


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_loaded(tmp_path: Path, caplog: Any) -> None:
    model = nn.Linear(2, 2)
    state = opened(tmp_path, model=model)
    for step in (1, 2, 3, 4):
        assert save_now(state, Position(0, step, step), {"at": step}, 0)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [f"step-0000000{n}" for n in (2, 3, 4)]
    shard = next((tmp_path / "checkpoints/step-00000004").glob("__0*"))
    shard.write_bytes(shard.read_bytes()[:-3])
    saved = opened(tmp_path, model=nn.Linear(2, 2)).load()
    assert saved is not None and saved.values == {"at": 3} and shard.name in caplog.text


def test_a_value_that_could_not_be_read_back_ends_the_run_at_its_save(tmp_path: Path) -> None:
    state = opened(tmp_path, model=nn.Linear(2, 2))
    with pytest.raises(TrainingFailed, match=r"session.values\['when'\] cannot be saved: it holds pathlib.PosixPath"):
        save_now(state, Position(0, 1, 1), {"best": 1.0, "when": Path("x")}, 0)
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_what_a_library_writes_is_committed_with_the_position(tmp_path: Path) -> None:
    state = State(where(tmp_path))

    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "sub/weights.bin").write_bytes(b"weights")

    assert state.save(Now(Position(2, 5, 7), {}, 3), write=write)
    folder = tmp_path / "checkpoints/step-00000007"
    assert "library/sub/weights.bin" in verify(folder)["files"]
    saved = State(where(tmp_path)).load()
    assert saved is not None and saved.library == folder / "library" and saved.position == Position(2, 5, 7)
    (folder / "library/sub/more").write_bytes(b"")
    with pytest.raises(ValueError, match="library/sub/more does not belong to it"):
        verify(folder)


def test_a_registered_module_is_exported_without_its_script(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model = nn.Linear(2, 2)
    assert save_now(opened(folder, model=model, ema=nn.Linear(3, 1)), Position(0, 4, 4), {}, 0)
    for name, shape in (("", (2, 2)), ("model", (2, 2)), ("ema", (1, 3))):
        assert export_registered(Run(folder), tmp_path / "one.pt", step=None, name=name) == 4
        assert torch.load(tmp_path / "one.pt")["weight"].shape == shape
    export_registered(Run(folder), tmp_path / "one.safetensors", step=4, name="model")
    assert weights_sha256(load_file(tmp_path / "one.safetensors")) == weights_sha256(weights(model))
    for name, file, line in (
        ("gan", "x.pt", "has registered no module gan; choose one: model, ema"),
        ("", "x.onnx", "runs a script, whose model is not known here"),
    ):
        with pytest.raises(Refused, match=line):
            export_registered(Run(folder), tmp_path / file, step=None, name=name)


class Net(nn.Module):
    """Several buckets (2 MB of gradients; the first one takes 1 MB), dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(64, 500), nn.BatchNorm1d(500), nn.ReLU(), nn.Dropout(0.1), nn.Linear(500, 500), nn.ReLU(),
            nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 10),
        )  # fmt: skip

    def forward(self, points: Tensor) -> Tensor:
        return self.layers(points)


def _train(rank: int, folder: Path, size: int, kill_at: int, strategy: str) -> Any:
    model: nn.Module
    if strategy == "fsdp":
        model = net = Net()
        for module in (*(one for one in net.layers if isinstance(one, nn.Linear)), net):
            fully_shard(module, mesh=init_device_mesh("cpu", (size,)))
    else:
        net = Net()
        model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = State(where(folder, rank, size))
    state.register(model=model, optimizer=optimizer)

    def step(_: int) -> None:
        loss = nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.randint(10, (16,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in loop(state, step, 9, every=3, kill_at=kill_at if rank == size - 1 else 0):
        pass
    assert set(net.state_dict()) == set(Net().state_dict())
    norm = net.layers[1]
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_var is not None
    return state.digest(), norm.running_var.tolist()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_rank_changes_neither_weights_nor_statistics_of_any_rank(tmp_path: Path, strategy: str) -> None:
    """With ddp on three ranks only if buckets are laid out before the first step; and statistics are saved by rank."""
    whole = ranks(3, _train, tmp_path / "whole", 3, 0, strategy)
    assert len(whole[0][0]) == 64, whole
    assert ranks(3, _train, tmp_path / "killed", 3, 5, strategy)[-1] == "exit -9"
    assert ranks(3, _train, tmp_path / "killed", 3, 0, strategy) == whole


def test_other_ranks_take_what_is_rank_0s(tmp_path: Path, caplog: Any) -> None:
    ranks(2, _train, tmp_path / "run", 2, 0, "ddp")
    caplog.set_level(logging.WARNING)
    model = Net()
    saved = opened(tmp_path / "run", model=model, optimizer=torch.optim.AdamW(model.parameters())).load()
    assert saved is not None and saved.values["rank"] == 0
    assert "is of 2 ranks, and this run has 1" in caplog.text and "rank 0's now" in caplog.text
