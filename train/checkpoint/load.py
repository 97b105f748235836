"""Reads a verified checkpoint into a model and its optimizer."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

from ..errors import one_line
from ..run import owner
from .extra import AVERAGES, LOSSES, OBJECTS, ORDERS, Extra
from .frozen import FROZEN_KEYS, fill, held_by
from .state_dict import initialized_state, state_of, without_hooks

_KERNELS = ("fused", "foreach", "capturable", "differentiable")
"""Keys of an optimizer's groups that say how a step is computed. They depend on device and strategy, which a resume may
change: a fused step takes no spread parameters (SGD's), and a step that is not fused waits for the device."""
_PLAIN = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"),
}  # fmt: skip
"""Classes in the metadata of a checkpoint, by module and name (torch 2.7 to 2.13)."""
Written = list[tuple[str, Any]]
"""What a checkpoint holds: the key in its metadata, and the path in the state."""


def load(
    folder: Path, module: nn.Module, *, optimizer: torch.optim.Optimizer | None = None, by_itself: bool = False,
    extra: Extra = Extra(), group: Any = None,  # noqa: B008 - of nothing
) -> None:  # fmt: skip
    """Read a verified checkpoint into a model and, if given, its fresh optimizer. A collective under several ranks.

    Args:
        extra: further state to read.
        by_itself: this rank reads all that it needs without the other ranks, which do not see the folder.
        group: in which ranks wait for each other's reading; None: the default one.

    Raises:
        ValueError: names or shapes of the model differ from those in the checkpoint.
        RuntimeError: another rank is gone.
    """
    for parameter in module.parameters():
        parameter.grad = None  # a gradient here would make torch skip the optimizer's state silently
    state = state_of(module, None)
    own: list[dict[str, Any]] = []
    if optimizer is not None:
        state["optim"] = initialized_state(module, optimizer)
        own = state["optim"]["param_groups"]
    try:
        owner.check_checkpoint(folder)
        reader = dcp.FileSystemReader(folder)
        metadata = reader.read_metadata()
        written = list((metadata.planner_data or {}).items())
        unknown = {path[1] for _, path in written if path[0] == "model"} - state["model"].keys()
        if unknown:
            raise ValueError(f"{min(unknown)} is not in the model")
        if optimizer is not None:
            _make_places(state["optim"], dict(module.named_parameters()), written, metadata)
        known = {path[:2] for _, path in written}
        places = extra.state() | ({OBJECTS: b""} if extra.objects else {})
        for key in (LOSSES, ORDERS):  # edited code of a fork may have other ones
            kept = {name: value for name, value in places.pop(key, {}).items() if (key, name) in known}
            state |= {key: kept} if kept else {}
        state |= places
        held, stored = held_by(folder), {path[:2] for _, path in written}
        beside = {
            key: {name: one for name, one in state[key].items() if name in held and (key, name) not in stored}
            for key in FROZEN_KEYS & state.keys()
        }
        for key, tensors in beside.items():
            state[key] = {name: one for name, one in state[key].items() if name not in tensors}
        dcp.load(state, storage_reader=reader, no_dist=by_itself, process_group=group)
        for key, tensors in beside.items():
            fill(tensors, held)
            state[key] |= tensors
    except (dcp.api.CheckpointException, ValueError, KeyError) as error:  # DCP wraps all that the state is at fault for
        if isinstance(cause_of(error), OSError):  # of the disk, and may pass
            raise OSError(f"{folder.name} cannot be read: {reason_of(error)}") from error
        raise ValueError(f"the model does not fit the checkpoint {folder.name}: {reason_of(error)}") from error
    set_model_state_dict(module, state["model"])
    extra.load(state, next(module.parameters()).device)
    if optimizer is not None:
        _set_optimizer(module, optimizer, state["optim"], own)


def _set_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], own: list[dict[str, Any]]
) -> None:
    """Load the state that was read into a fresh optimizer.

    Args:
        own: its groups. Each takes the values of the saved group that held its first trained parameter.
    """
    saved = {name: group for group in state["param_groups"] for name in group["params"]}
    for group in own:
        values: dict[str, Any] = next((saved[name] for name in group["params"] if name in saved), {})
        group.update({name: value for name, value in values.items() if name not in ("params", *_KERNELS)})
        for name in group["params"]:  # torch asks for all; in a group without momentum, say, there is none
            state["state"].setdefault(name, {})
    with without_hooks(optimizer):
        set_optimizer_state_dict(module, optimizer, state | {"param_groups": own})
    for without in [parameter for parameter, values in optimizer.state.items() if not values]:
        del optimizer.state[without]


class _Unpickler(pickle.Unpickler):
    """Reads DCP's metadata without executing code from it."""

    def find_class(self, module: str, name: str) -> Any:
        is_kind = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_kind or (module, name) in _PLAIN:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise ValueError(f"its metadata names {module}.{name}, which is code")


def _member(of: Any, name: Any) -> Any:
    """Replaces getattr in metadata, and returns only members of DCP's enum.

    Python 3.11.0 to 3.11.3 pickles a member by its name, as `getattr(enum, name)`. Others pickle its value.
    """
    if of is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise ValueError("its metadata names builtins.getattr, which is code")
    return _MEM_FORMAT_ENCODING[name]


class SafeReader(dcp.FileSystemReader):
    """Reads the metadata once. DCP asks for them again, and another user could swap the file in between."""

    _known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._known is not None:
            return self._known
        with (Path(self.path) / ".metadata").open("rb") as file:
            try:
                found: Metadata = _Unpickler(file).load()
            except (pickle.UnpicklingError, AttributeError, EOFError, TypeError) as error:
                raise ValueError(f"its metadata is damaged: {one_line(error)[:200]}") from None
        if not isinstance(found, Metadata):
            raise ValueError("its metadata is none of torch's")
        self._known = found
        return found


def weights_in(folder: Path, is_averaged: bool = False) -> dict[str, Tensor]:
    """Read the weights in a verified checkpoint, whatever their model and writer, on the CPU.

    Args:
        is_averaged: Whether to read the average of the weights, where the checkpoint has one.

    Raises:
        ValueError: the checkpoint cannot be read.
    """
    try:
        reader = SafeReader(folder)
        metadata = reader.read_metadata()
        written = {path: metadata.state_dict_metadata[key] for key, path in (metadata.planner_data or {}).items()}
        tensors = {
            key: {
                path[1]: torch.empty(one.size, dtype=one.properties.dtype)
                for path, one in written.items()
                if path[0] == key and isinstance(one, TensorStorageMetadata)
            }
            for key in ("model", *([AVERAGES] if is_averaged else []))
        }
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        found = tensors["model"] | tensors.get(AVERAGES, {})
        found |= {name: tensor for name, tensor in held_by(folder).items() if name not in found}
    except (dcp.api.CheckpointException, ValueError, KeyError) as error:
        raise ValueError(f"{folder.name} cannot be read: {reason_of(error)}") from error
    return found


def _make_places(
    optim: dict[str, Any], parameters: dict[str, nn.Parameter], written: Written, metadata: Metadata
) -> None:
    """Make places in a fresh optimizer's state for all that the checkpoint holds, because DCP reads only what has a
    place.

    With other frozen parameters there were other groups. A parameter that no step had used has no state, and there may
    be state that the optimizer makes only in later steps.
    """
    own, state = optim["param_groups"][0], optim["state"]
    groups: dict[int, dict[str, Any]] = {}
    used = set()
    for key, path in written:
        if path[:2] == ("optim", "param_groups"):
            value = own.get(path[3])
            groups.setdefault(path[2], {})[path[3]] = value.clone() if isinstance(value, Tensor) else value
        if path[:2] != ("optim", "state"):
            continue
        used.add(path[2])
        if len(path) != 4 or path[3] in state.setdefault(path[2], {}):
            continue
        of, stored = parameters[path[2]], metadata.state_dict_metadata[key]
        if not isinstance(stored, TensorStorageMetadata):
            state[path[2]][path[3]] = None
        elif stored.size == of.shape:  # spread as the parameter is
            state[path[2]][path[3]] = torch.zeros_like(of, dtype=stored.properties.dtype, requires_grad=False)
        else:
            state[path[2]][path[3]] = torch.zeros(stored.size, dtype=stored.properties.dtype, device=of.device)
    optim["param_groups"] = [groups[number] for number in sorted(groups)]
    for name in state.keys() - used:
        del state[name]


def reason_of(error: BaseException) -> str:
    """Return the innermost cause of a failed save: DCP wraps an OSError in several layers."""
    error = cause_of(error)
    if isinstance(error, OSError) and error.strerror:
        return one_line(f"{error.strerror}" + (f": {error.filename}" if error.filename else ""))
    return one_line(error)[:300]


def cause_of(error: BaseException) -> BaseException:
    """Return the error inside DCP's layers."""
    if isinstance(error, dcp.api.CheckpointException):
        for inner in error.failures.values():
            return inner[0] if isinstance(inner, tuple) else inner
    return error
