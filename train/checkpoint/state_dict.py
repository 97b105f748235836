"""The state of model and optimizer under its names, and the digest of the weights."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from ..data.to_device import mapped
from ..parallel.precision import Precision
from ..parallel.torch_private import HOOKS
from .extra import AVERAGES, Extra

# torch warns about its own use of storages, and that one process alone is one process alone
warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a checkpoint holds, as it is on one rank."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    """For the loss scaling of fp16."""
    extra: Extra = dataclasses.field(default_factory=Extra)

    def tree(self) -> dict[str, Any]:
        """Return the state as a checkpoint holds it; `extra.packed` makes of it what DCP writes."""
        return state_of(self.module, self.optimizer) | self.extra.state()

    def take_apart(self, into: Any) -> dict[str, Any]:
        """Return the state with references instead of tensors, for snapshots.

        Args:
            into: a `serialize.Serialized`, which gets the tensors.
        """
        weights, extra = dict(self.module.state_dict(keep_vars=True)), self.extra.state()
        averages = {AVERAGES: extra.pop(AVERAGES)} if AVERAGES in extra else {}
        optimizer = self.optimizer.state_dict()
        # and not the groups: a rate may be a tensor, set before a forward
        moments = {"state": optimizer.pop("state", {})}
        found: dict[str, Any] = mapped({"model": weights, "scaler": self.precision.scaling()}, into.add)
        found["optimizer"] = mapped(moments, into.add_at_rest) | mapped(optimizer, into.add)
        found["extra"] = mapped(extra, into.add) | mapped(averages, into.add_at_rest)
        return found


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return model and optimizer state under names that do not depend on how the model is spread.

    An optimizer may have no state yet (fp16 may leave out the first steps), or never (SGD).
    """
    state: dict[str, Any] = {"model": get_model_state_dict(module)}
    if optimizer is not None:
        state["optim"] = _optimizer_state(module, optimizer)
    return state


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer; empty if it has none yet.

    For an optimizer without state, torch would make a step with gradients of 0. Traces of it would count in the first
    real step: weights in moments (by weight decay), counters, and a rate of 0 in ASGD and Rprop.
    """
    if optimizer.state:
        return get_optimizer_state_dict(module, optimizer)
    first = next(parameter for group in optimizer.param_groups for parameter in group["params"])
    optimizer.state[first] = {}  # enough for torch to take it for one that has a state
    try:
        with without_hooks(optimizer):
            return {**get_optimizer_state_dict(module, optimizer), "state": {}}
    finally:
        optimizer.state.clear()


def initialized_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of a fresh optimizer with all that its first step makes. The values are placeholders."""
    with without_hooks(optimizer):
        return get_optimizer_state_dict(module, optimizer)


@contextlib.contextmanager
def without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager for torch's step of an optimizer without state, with gradients and rates of 0. Switches its hooks
    off and restores parameters: the task's optimizer may add noise to them at any rate."""
    is_torchs = type(optimizer).__module__.startswith("torch.")
    parameters = (
        [] if optimizer.state or is_torchs else [p for group in optimizer.param_groups for p in group["params"]]
    )
    were = [parameter.detach().clone() for parameter in parameters]
    optimizers = [optimizer, *getattr(optimizer, "parts", ())]
    hooks = [vars(each)[name] for each in optimizers for name in HOOKS if vars(each).get(name)]
    before = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, was in zip(hooks, before, strict=True):
            each.update(was)
        with torch.no_grad():
            for parameter, value in zip(parameters, were, strict=True):
                parameter.copy_(value)


def size_of(state: Any) -> int:
    """Return the bytes of the tensors in a state."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(map(size_of, state.values()))
    return 0


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model's state under clean names, on their device, maybe spread over ranks."""
    return {name: t.detach() for name, t in get_model_state_dict(module).items() if isinstance(t, Tensor)}


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state of a whole model, on the CPU, contiguous, under clean names."""
    return {name: tensor.cpu().contiguous() for name, tensor in weights_of(module).items()}


def weights_sha256(state: dict[str, Tensor], is_wanted: bool = True) -> str:
    """Return the SHA-256 over the tensors in sorted order of names: UTF-8 `name\\ndtype\\nd0,d1\\n`, then the
    little-endian bytes.

    The dtype is written as `float32`, and nothing is written between tensors. A collective if tensors are spread over
    ranks: they are gathered one after the other, never the whole model.

    Args:
        is_wanted: whether this rank needs it; else '' is returned.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not is_wanted:
            if tensor.is_cuda:  # it is only queued: a rank that ended now would take its part from the others
                torch.cuda.current_stream(tensor.device).synchronize()
            continue
        tensor = tensor.cpu().contiguous()
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\n{str(tensor.dtype).removeprefix('torch.')}\n{shape}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest() if is_wanted else ""
