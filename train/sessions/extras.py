"""What a module holds beside its state dict: flags, plain attributes, dtypes, and buffers that are not persistent.

A resume restores what training has changed. If the script has made something otherwise than at the run's first start,
an argument has changed it. That stays as the script made it, and is named.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel.torch_private import buffers_of, is_persistent, version_of

TRAINING, GRADIENT, PARAMETER, BUFFER, TENSOR, PLAIN = "training", "requires_grad", "parameter", "buffer", "tensor", ""
"""Kinds of what a module holds. A tensor is a plain attribute."""
Modules = Mapping[str, nn.Module]
"""Maps clean paths to modules."""
Look = dict[tuple[str, str], Any]
"""Maps a kind and a name to a plain value: of a tensor its dtype, shape, and whether the state dict has it."""
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module."""
_TYPES = (int, float, bool, str, type(None))
_LONGEST = 1000
"""Maximum length of a list or dict that is looked at."""
_SHOWN = 3
"""Maximum number of lines that name differences of one module."""


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def look(modules: Modules) -> Look:
    """Return what modules hold beside the values of their tensors."""
    found: Look = {}
    for path, module in modules.items():
        found[TRAINING, path] = module.training
        start = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            found[GRADIENT, start + name] = parameter.requires_grad
            found[PARAMETER, start + name] = parameter.dtype
        for name, buffer in buffers_of(module).items():
            found[BUFFER, start + name] = None if buffer is None else (*_kind(buffer), is_persistent(module, name))
        for name, value in vars(module).items():
            if name not in _OF_TORCH and _is_plain(value):
                found[PLAIN, start + name] = copy.copy(value)
            elif _is_plain_tensor(value):
                found[TENSOR, start + name] = *_kind(value), False
    return found


def _is_plain(value: Any) -> bool:
    """Whether a value is plain: a number, a text, None, or a short list, tuple or dict of them."""
    if type(value) in _TYPES:
        return True
    if type(value) not in (list, tuple, dict) or len(value) > _LONGEST:
        return False
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return all(type(one) in _TYPES for one in inner)


def _kind(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _is_plain_tensor(value: Any) -> bool:
    return type(value) is Tensor and not value.requires_grad and value.layout == torch.strided


def _tensors(modules: Modules) -> dict[str, Tensor]:
    """Return tensors that the state dict lacks, by name."""
    found: dict[str, Tensor] = {}
    for path, module in modules.items():
        start = f"{path}." if path else ""
        buffers = {name: one for name, one in buffers_of(module).items() if not is_persistent(module, name)}
        tensors = {name: one for name, one in vars(module).items() if _is_plain_tensor(one)}
        found |= {start + name: one for name, one in (buffers | tensors).items() if isinstance(one, Tensor)}
    return found


class Extras:
    """Follows what a module holds beside its state dict.

    Args:
        modules: as they are at `register`, before a checkpoint is loaded.
    """

    def __init__(self, modules: Modules) -> None:
        self.first = look(modules)
        """As it was at `register` of the run's first start."""
        self._made = {name: (weakref.ref(one), version_of(one)) for name, one in _tensors(modules).items()}

    def state(self, modules: Modules) -> dict[str, Any]:
        """Return plain values for a checkpoint: the differences from `first`."""
        now, first = look(modules), self.first
        changed = {key: value for key, value in now.items() if key not in first or not _same(value, first[key])}
        return {"changed": changed, "gone": [key for key in first if key not in now]}

    def tensors(self, modules: Modules) -> dict[str, Tensor]:
        """Return those tensors that the state dict lacks and that were written to since `register`: a mask or a table
        that never changes needs no place."""
        found = {}
        for name, tensor in _tensors(modules).items():
            made, first = self._made.get(name), self.first.get((BUFFER, name)) or self.first.get((TENSOR, name))
            is_as_made = made is not None and made[0]() is tensor and made[1] == version_of(tensor)
            if not is_as_made or first is None or first[:2] != _kind(tensor):
                found[name] = tensor.detach()
        return found

    def restore(self, modules: Modules, first: Look, state: Mapping[str, Any]) -> list[str]:
        """Restore all but the values of tensors, before they are loaded. Returns lines `NAME: was A, is B` for what an
        argument of the script has changed.

        Args:
            first: that of the checkpoint.

        Raises:
            ValueError: a module is missing.
        """
        self.first = first
        saved = first | state["changed"]
        for key in state["gone"]:
            del saved[key]
        fresh, left = look(modules), []
        keys = dict.fromkeys([*saved, *fresh])
        for key in sorted(keys, key=lambda key: key in saved):  # what is gone gives way to what has its name
            was, made, now = (one.get(key, _MISSING) for one in (saved, first, fresh))
            if _same(was, now) or was is made is _MISSING:  # the latter: the script is newer
                continue
            if _same(made, now):
                _put(modules, key, was)
            else:
                kind, name = key
                full = ".".join(part for part in (name, kind if kind in (TRAINING, GRADIENT) else "") if part)
                left.append(f"{full}: was {_text(was)}, is {_text(now)}")
        more = [f"{len(left) - _SHOWN} more attributes differ"] if len(left) > _SHOWN else []
        return left[:_SHOWN] + more

    def fill(self, modules: Modules, values: Mapping[str, Tensor]) -> None:
        """Load the values of tensors that the state dict lacks."""
        own = _tensors(modules)
        with torch.no_grad():
            for name, value in values.items():
                if name in own and _kind(own[name]) == _kind(value):  # else it was named
                    own[name].copy_(value)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or repr(one) == repr(other))  # nan is not equal to itself


def _text(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], torch.dtype):
        return f"{_text(value[0])} of shape {list(value[1])}"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)[:80]


def _put(modules: Modules, key: tuple[str, str], value: Any) -> None:
    """Set what a module holds; _MISSING: remove it."""
    kind, name = key
    path, _, own = name.rpartition(".")
    if (module := modules.get(name if kind == TRAINING else path)) is None:
        raise ValueError(f"{name} is not in the model; make it before session.register on a resume")
    if kind == TRAINING:
        module.training = module.training if value is _MISSING else value
    elif kind in (GRADIENT, PARAMETER):
        parameter = dict(module.named_parameters(recurse=False)).get(own)
        if parameter is None or value is _MISSING:  # the state dict tells
            return
        if kind == GRADIENT:
            parameter.requires_grad_(value)
        else:
            parameter.data = parameter.data.to(value)
    elif kind == BUFFER:
        _put_buffer(module, own, value, _device(modules, module))
    elif value is _MISSING:
        vars(module).pop(own, None)
    elif kind == TENSOR:
        vars(module)[own] = torch.zeros(value[1], dtype=value[0], device=_device(modules, module))
    elif isinstance(value, list) and isinstance(before := vars(module).get(own), list):
        before[:] = value  # the script may hold it too
    elif isinstance(value, dict) and isinstance(before := vars(module).get(own), dict):
        before.clear()
        before.update(value)
    else:
        vars(module)[own] = value


def _put_buffer(module: nn.Module, name: str, value: Any, device: torch.device) -> None:
    buffers = buffers_of(module)
    if value is _MISSING:
        delattr(module, name)
        return
    made = None if value is None else torch.zeros(value[1], dtype=value[0], device=device)
    if name in buffers and (value is None or is_persistent(module, name) == value[2]):
        buffers[name] = made  # keeps its place
        return
    if name in buffers:
        delattr(module, name)
    vars(module).pop(name, None)  # a plain attribute until then
    module.register_buffer(name, made, persistent=value is None or value[2])


def _device(modules: Modules, module: nn.Module) -> torch.device:
    """Return the device of a module, or else of the first one that has a tensor."""
    for one in (module, *modules.values()):
        for tensor in (*one.parameters(), *one.buffers()):
            return tensor.device
    return torch.device("cpu")
