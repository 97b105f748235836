"""Host memory for copies of a state: exactly as much as a rank's part takes, each tensor on one rank."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from train.checkpoint.staging import Staging, own_part
from train.checkpoint.state_dict import size_of

pytestmark = pytest.mark.never_forgiven


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(300, 7), (64,), (), (5, 4, 3, 2), (1000,), (999,), (0, 3)]
    model: dict[str, Any] = {f"layer.{n}": torch.randn(size, generator=generator) for n, size in enumerate(sizes)}
    model["half"] = torch.randn(33, generator=generator).bfloat16()
    model["flags"] = torch.tensor([True, False, True])
    model["layer.3"] = model["layer.3"].to(memory_format=torch.channels_last)
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "params": ["layer.0"], "decay": [torch.ones(2)]}]
    return {"model": model, "optim": {"state": {"layer.0": {"step": torch.tensor(3.0)}}, "param_groups": groups}}


def tensors(tree: Any, path: str = "") -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {name: t for key, inner in items for name, t in tensors(inner, f"{path}/{key}").items()}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_each_tensor_is_one_rank_s_and_the_loads_are_alike(size: int) -> None:
    whole = tensors(state()["model"])
    parts = [tensors(own_part(state(), rank, size)["model"]) for rank in range(size)]
    assert sorted(itertools.chain(*parts)) == sorted(whole)
    largest = max(t.numel() * t.element_size() for t in whole.values())
    loads = [size_of(part) for part in parts]
    assert max(loads) <= max(largest, sum(loads) / size + largest)
    if size == 2:
        assert max(loads) - min(loads) <= 256


def test_what_is_no_tensor_stays_on_every_rank() -> None:
    for rank in range(3):
        group = own_part(state(), rank, 3)["optim"]["param_groups"][0]
        assert group["lr"] == 0.1 and group["params"] == ["layer.0"] and len(group["decay"]) == 1


def test_a_copy_is_equal_and_is_not_changed_with_what_it_was_made_of() -> None:
    staging, original = Staging(), state()
    copied = staging.copy(original)
    for tensor in tensors(original).values():
        tensor.zero_()
    for name, tensor in tensors(state()).items():
        found = tensors(copied)[name]
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype, name
    assert copied["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)


def test_the_memory_is_of_exact_size_and_used_again() -> None:
    staging = Staging(rank=1, size=2)
    staging.reserve(state())
    part = tensors(own_part(state(), 1, 2))
    exact = sum(-(-t.numel() * t.element_size() // 64) * 64 for t in part.values())
    assert staging.bytes == exact < size_of(state())
    where = {name: t.data_ptr() for name, t in tensors(staging.copy(state())).items() if t.numel()}
    again = {name: t.data_ptr() for name, t in tensors(staging.copy(state())).items() if t.numel()}
    assert where == again and len(set(where.values())) == len(where)


def test_each_tensor_has_a_storage_of_its_own_size() -> None:
    """torch.distributed.checkpoint copies a tensor once more whose storage holds more than it."""
    for name, tensor in tensors(Staging().copy(state())).items():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name


def test_a_state_of_other_shapes_gets_other_room() -> None:
    staging = Staging()
    staging.copy(state())
    other = {"model": {"weight": torch.arange(5)}}
    assert torch.equal(staging.copy(other)["model"]["weight"], torch.arange(5)) and staging.bytes == 64


class _Runtime:
    """What torch has of CUDA's, which pins nothing and remembers what it was given."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.resident = 0
        """Bytes of the process's memory that were there when they were to be pinned."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.resident = _resident(address)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def _resident(address: int) -> int:
    """Bytes that are in memory of the mapping at an address (proc(5), smaps)."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            is_there = int(found[1], 16) <= address < int(found[2], 16)
        elif is_there and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    return 0


def _pinned(monkeypatch: pytest.MonkeyPatch, code: int) -> tuple[Staging, _Runtime]:
    """Room for 8 MiB, pinned as if they were copied from a GPU."""
    runtime = _Runtime(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    staging = Staging()
    staging._device = torch.device("cpu")
    staging.reserve({"weight": torch.ones(2 << 20)})
    return staging, runtime


def test_memory_is_touched_before_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would find its pages itself, gigabytes of them, and let no other thread start a kernel meanwhile."""
    staging, runtime = _pinned(monkeypatch, 0)
    assert runtime.resident >= staging.bytes == 8 << 20


def test_an_error_of_pinning_is_left_to_no_kernel_of_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps the last error of a thread until somebody asks, and torch asks after each kernel."""
    kept = ["CUDA error: out of memory"]

    def launch(tensor: Tensor, value: int) -> Tensor:
        if kept:
            raise RuntimeError(kept.pop())
        return tensor

    monkeypatch.setattr(torch.Tensor, "fill_", launch)
    staging, _ = _pinned(monkeypatch, 2)
    assert not kept and staging.bytes == 8 << 20
