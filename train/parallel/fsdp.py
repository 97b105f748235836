"""FSDP2 (`fully_shard`): parameters, gradients and the optimizer's state are spread over the ranks.

Zhao et al., "PyTorch FSDP", 2023. With `hsdp` over groups of `parallel.shard_size` ranks, each of which holds the whole
model among its members; between the groups gradients are all-reduced, as with ddp.

A forward is a collective here (parameters are gathered for it), so a rank without data of its own computes on data of
another rank, with weight 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from train.errors import Refused
from train.parallel.strategy import Spread

_UNITS = 32
"""A module of its own share of the parameters is gathered and freed by itself: with `wrap auto` at least one part in so
many of the whole, so that messages are neither many and small nor one that holds the whole model."""
_LEAST = 100_000
"""Parameters that a unit has at least with `wrap auto`."""
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers: their forward is never called, and a unit's parameters are gathered by its forward."""


class Sharded(Spread):
    """fsdp and hsdp."""

    lends_data = True

    def place(self, model: nn.Module) -> nn.Module:
        model.to(self.world.device)
        size, is_hybrid = self.world.size, self.config.parallel.strategy == "hsdp"
        self._share = self.config.parallel.shard_size or size if is_hybrid else size
        # two dimensions: groups that hold the same part, and groups that hold one copy of the model among them
        shape = (size // self._share, self._share)
        mesh = init_device_mesh(self.world.device.type, shape, mesh_dim_names=("replicate", "shard"))
        for unit in [*units(model, self.config.parallel.wrap), model]:
            # the root too: an evaluation would leave its parameters gathered, and the next step would use old ones
            fully_shard(unit, mesh=mesh["shard"], reshard_after_forward=True)
            if self._share < size:
                self._add_over(unit, mesh["replicate"].get_group())
        self._take(model)
        return model

    def _add_over(self, unit: nn.Module, group: dist.ProcessGroup) -> None:
        """After a unit's gradients are summed inside a copy, sum them over the copies.

        With the two-dimensional mesh given to it, fully_shard would do the same by itself, but not on a CPU.
        """
        assert isinstance(unit, FSDPModule)
        unit.set_all_reduce_hook(lambda gradients: dist.all_reduce(gradients, group=group))

    @property
    def _root_unit(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    @contextlib.contextmanager
    def micro_batch(self, number: int, is_last: bool) -> Iterator[None]:
        self._root_unit.set_requires_gradient_sync(is_last)
        self._root_unit.set_is_last_backward(is_last)
        yield

    def backward(self, value: Tensor, weight: float, votes: Tensor | None) -> None:
        # it takes the mean over the ranks of a copy; weights are made for a sum
        torch.autograd.backward(*self._root(value, weight * self._share))

    def idle(self, votes: Tensor) -> None:
        raise AssertionError("a rank without data is lent some")


def units(model: nn.Module, wrap: str) -> list[nn.Module]:
    """The modules inside `model` that are gathered and freed by themselves, inner ones before outer ones.

    Args:
        wrap: class names with commas, or `auto`: modules of at least 1/32 of all parameters (and 100,000) that are not
            inside smaller units yet.

    Raises:
        Refused: the model has no module of such a class.
    """
    owners = _owners(model)
    if wrap != "auto":
        names = [name.strip() for name in wrap.split(",") if name.strip()]
        known = sorted({type(module).__name__ for module in model.modules() if module is not model})
        for name in names:
            if name not in known:
                raise Refused(
                    f"--parallel.wrap {name}: the model has no module of that class; it has {', '.join(known)}"
                )
        chosen = [module for module in model.modules() if module is not model and type(module).__name__ in names]
        for module in chosen:
            if isinstance(module, _NEVER_CALLED):
                raise Refused(
                    f"--parallel.wrap {type(module).__name__}: a container is never called; name what is in it"
                )
        return [module for module in reversed(chosen) if _is_closed(module, owners)]
    total = sum(parameter.numel() for parameter in model.parameters())
    least = max(_LEAST, total // _UNITS)
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Units inside this module, and how many parameters of it are in none."""
        left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if not isinstance(module, nn.MultiheadAttention):  # it reads its parts' weights without calling them
            left += sum(visit(child) for child in module.children())
        else:
            left = sum(parameter.numel() for parameter in module.parameters())
        if module is model or left < least or isinstance(module, _NEVER_CALLED) or not _is_closed(module, owners):
            return left
        found.append(module)
        return 0

    visit(model)
    return found


def _owners(model: nn.Module) -> dict[int, set[int]]:
    """By the identity of a parameter, those of the modules that hold it directly: tied weights have several."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    return owners


def _is_closed(module: nn.Module, owners: dict[int, set[int]]) -> bool:
    """Whether no parameter of this module is tied to one outside: such parameters belong to a common unit."""
    inside = {id(part) for part in module.modules()}
    return all(owners[id(parameter)] <= inside for parameter in module.parameters())
