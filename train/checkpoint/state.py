"""The state of model and optimizer: named, read back, hashed."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from train.errors import one_line
from train.parallel.torch_private import HOOKS

# torch warns about its own use of storages, and that one process alone is one process alone
warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Model and optimizer state under names that do not depend on how the model is spread.

    Of an optimizer that has none yet (fp16 may leave out the first steps, and SGD never has any) there is none.
    """
    state: dict[str, Any] = {"model": get_model_state_dict(module)}
    if optimizer is not None:
        state["optim"] = _as_it_is(module, optimizer)
    return state


def _as_it_is(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """torch would make a step of an optimizer without state, with gradients of 0. What that leaves behind counts in the
    first real one: weights in moments, by weight decay; counters; a rate of 0, in ASGD and Rprop."""
    if optimizer.state:
        return get_optimizer_state_dict(module, optimizer)
    first = next(parameter for group in optimizer.param_groups for parameter in group["params"])
    optimizer.state[first] = {}  # enough for torch to take it for one that has a state
    try:
        with _unwatched(optimizer):
            return {**get_optimizer_state_dict(module, optimizer), "state": {}}
    finally:
        optimizer.state.clear()


def _with_room(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a fresh optimizer with all that its first step makes: values to be read over, and to be kept by none
    of it."""
    with _unwatched(optimizer):
        return get_optimizer_state_dict(module, optimizer)


@contextlib.contextmanager
def _unwatched(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While torch makes a step of an optimizer without state, with gradients and rates of 0: no hook of its user sees
    it, and no parameter is changed. An optimizer of the user's own may add noise to them, whatever its rate is."""
    is_torchs = type(optimizer).__module__.startswith("torch.")
    parameters = (
        [] if optimizer.state or is_torchs else [p for group in optimizer.param_groups for p in group["params"]]
    )
    were = [parameter.detach().clone() for parameter in parameters]
    hooks = [vars(optimizer)[name] for name in HOOKS if vars(optimizer).get(name)]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, was in zip(hooks, kept, strict=True):
            each.update(was)
        with torch.no_grad():
            for parameter, value in zip(parameters, were, strict=True):
                parameter.copy_(value)


def size_of(state: Any) -> int:
    """Bytes of the tensors in a state."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(map(size_of, state.values()))
    return 0


def load(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, by_itself: bool = False
) -> None:
    """Read a verified checkpoint into a model and, if given, its fresh optimizer. A collective under several ranks.

    Args:
        by_itself: every rank reads all that it needs, without asking the others: their folders are others.

    Raises:
        ValueError: names or shapes of the model differ from those in the checkpoint.
        RuntimeError: another rank is gone, as torch says it.
    """
    for parameter in module.parameters():
        parameter.grad = None  # a gradient here would make torch skip the optimizer's state silently
    state = state_of(module, None)
    if optimizer is not None:
        state["optim"] = _with_room(module, optimizer)
    try:
        reader = dcp.FileSystemReader(folder)
        metadata = reader.read_metadata()
        written = list((metadata.planner_data or {}).items())
        unknown = {path[1] for _, path in written if path[0] == "model"} - state["model"].keys()
        if unknown:
            raise ValueError(f"{min(unknown)} is not in the model")
        unused = _take_unused(state["optim"], written) if optimizer is not None else []
        if optimizer is not None:
            _make_later(state["optim"]["state"], dict(module.named_parameters()), written, metadata)
        dcp.load(state, storage_reader=reader, no_dist=by_itself)
    except (dcp.api.CheckpointException, ValueError, KeyError) as error:  # DCP wraps all that the state is at fault for
        if isinstance(cause_of(error), OSError):  # of the disk, and may pass
            raise OSError(f"{folder.name} cannot be read: {reason_of(error)}") from error
        raise ValueError(f"the model does not fit the checkpoint {folder.name}: {reason_of(error)}") from error
    set_model_state_dict(module, state["model"])
    if optimizer is not None:
        if unused or state["optim"]["state"]:  # torch asks for all, where there are any
            for group in state["optim"]["param_groups"]:
                for name in group["params"]:  # in a group without momentum, say, there is none
                    state["optim"]["state"].setdefault(name, {})
        for group, own in zip(state["optim"]["param_groups"], optimizer.param_groups, strict=True):
            group.update({name: own[name] for name in _KERNELS if name in own})
        with _unwatched(optimizer):
            set_optimizer_state_dict(module, optimizer, state["optim"])
        for without in [parameter for parameter, values in optimizer.state.items() if not values]:
            del optimizer.state[without]


_KERNELS = ("fused", "foreach", "capturable", "differentiable")
"""Of an optimizer's groups, how a step is computed. It goes by device and strategy, which a resume may change: a fused
step knows no parameters that are spread (SGD's), and one that is not fused waits for the device."""
Written = list[tuple[str, Any]]
"""What a checkpoint holds: the key in its metadata, and the path in the state."""


def _take_unused(state: dict[str, Any], written: Written) -> list[str]:
    """Take from a fresh optimizer's state the parameters that had none when the checkpoint was written, for no step had
    used them yet. Returns their names."""
    used = {path[2] for _, path in written if path[:2] == ("optim", "state")}
    unused = [name for name in state["state"] if name not in used]
    for name in unused:
        del state["state"][name]
    return unused


def _make_later(
    state: dict[str, Any], parameters: dict[str, nn.Parameter], written: Written, metadata: Metadata
) -> None:
    """Make room in a fresh optimizer's state for what it makes in later steps only: DCP reads what is asked for."""
    for key, path in written:
        if path[:2] != ("optim", "state") or len(path) != 4 or path[3] in state.setdefault(path[2], {}):
            continue
        of, stored = parameters[path[2]], metadata.state_dict_metadata[key]
        if not isinstance(stored, TensorStorageMetadata):
            state[path[2]][path[3]] = None
        elif stored.size == of.shape:  # spread as the parameter is
            state[path[2]][path[3]] = torch.zeros_like(of, dtype=stored.properties.dtype, requires_grad=False)
        else:
            state[path[2]][path[3]] = torch.zeros(stored.size, dtype=stored.properties.dtype, device=of.device)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model's state under clean names, where and as they are: maybe spread over ranks."""
    return {name: t.detach() for name, t in get_model_state_dict(module).items() if isinstance(t, Tensor)}


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state of a model that is whole here, on the CPU, contiguous, under clean names."""
    return {name: tensor.cpu().contiguous() for name, tensor in weights_of(module).items()}


def weights_sha256(state: dict[str, Tensor], is_wanted: bool = True) -> str:
    """SHA-256 over the names in sorted order: UTF-8 `name\\ndtype\\nd0,d1\\n`, then the little-endian bytes.

    The dtype is written as `float32`; nothing stands between tensors. A collective where tensors are spread over ranks:
    one after the other is gathered, never all of the model.

    Args:
        is_wanted: by this rank; without, '' is returned.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not is_wanted:
            if tensor.is_cuda:  # it is only queued: who went on would end, and take its part from the others
                torch.cuda.current_stream(tensor.device).synchronize()
            continue
        tensor = tensor.cpu().contiguous()
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\n{str(tensor.dtype).removeprefix('torch.')}\n{shape}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest() if is_wanted else ""


def reason_of(error: BaseException) -> str:
    """The innermost cause of a failed save: DCP wraps an OSError in several layers of its own."""
    error = cause_of(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f": {error.filename}" if error.filename else "")
    return one_line(error)[:300]


def cause_of(error: BaseException) -> BaseException:
    """What is inside the layers of DCP."""
    if isinstance(error, dcp.api.CheckpointException):
        for inner in error.failures.values():
            return inner[0] if isinstance(inner, tuple) else inner
    return error
