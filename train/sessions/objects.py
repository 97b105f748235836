"""What a session may register, and its state in two parts: tensors, and plain values with a mark for each tensor."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..data.to_device import mapped
from ..errors import Refused, one_line
from ..parallel.torch_private import copy_metadata
from .extras import Extras

MODEL, OBJECTS = "model", "objects"
"""Sections of a checkpoint: the tensors of modules, and those of all other objects."""
Key = tuple[str, str]
"""A section and a name in it."""
_MARK, _FUNCTION = "\0tensor ", "\0function "
_WRAPPERS = (DistributedDataParallel, nn.DataParallel)
_SAVES_ITSELF = {
    "FullyShardedDataParallel": "FSDP1 saves by itself; shard the model with fully_shard (FSDP2), or save it yourself",
    "DeepSpeedEngine": "DeepSpeed saves by itself: call its save_checkpoint and load_checkpoint",
    "DeepSpeedZeroOptimizer": "DeepSpeed saves by itself: call its save_checkpoint and load_checkpoint",
    "DeepSpeedZeroOptimizer_Stage3": "DeepSpeed saves by itself: call its save_checkpoint and load_checkpoint",
    "ZeroRedundancyOptimizer": "each rank has a part of its state; use a plain optimizer, or fully_shard (FSDP2)",
}
"""Maps classes that a session cannot save to what to do."""
_SCALAR: Any = np.float64().__reduce__()[0]
_ARRAY: Any = np.zeros(1).__reduce__()[0]
_PLAIN: list[Any] = [
    (_SCALAR, "numpy.core.multiarray.scalar"), (_SCALAR, "numpy._core.multiarray.scalar"),
    (_ARRAY, "numpy.core.multiarray._reconstruct"), (_ARRAY, "numpy._core.multiarray._reconstruct"),
    np.ndarray, np.dtype, *(type(np.dtype(code)) for code in "?bhilqBHILQefd"),
]  # fmt: skip
"""Classes of NumPy that execute nothing. torch allows none of them by itself."""


@dataclasses.dataclass(frozen=True)
class Ref:
    """A tensor of a state: where it lies in the checkpoint, and what it looks like."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    of: str | int | None
    """The tensor of the object that this one is spread over ranks like: a name of the module's state, or a number of an
    optimizer's parameter."""
    is_on_gpu: bool
    is_parameter: bool
    requires_grad: bool

    def plain(self) -> list[Any]:
        """Return it as plain values."""
        return [*dataclasses.astuple(self)]

    @classmethod
    def of_plain(cls, values: list[Any]) -> Ref:
        return cls(*values)

    def empty(self, like: Any) -> Tensor:
        """Return a tensor to read into, spread over ranks if `like` is."""
        if isinstance(like, DTensor) and tuple(like.shape) == self.shape:
            return torch.empty_like(like, dtype=self.dtype, requires_grad=False)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@dataclasses.dataclass
class Parts:
    """A state in two parts."""

    tensors: dict[Key, Tensor] = dataclasses.field(default_factory=dict)
    refs: list[Any] = dataclasses.field(default_factory=list)
    """The tensors by their marks: plain values of a Ref."""

    def take_out(self, key: Callable[[int], Key], of: str | int | None = None) -> Callable[[Any], Any]:
        """Return a function that returns a mark for a tensor, and other values as they are.

        Args:
            key: returns the key of the tensor with this number.
        """

        def mark(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
                return value
            number = len(self.refs)
            tensor = value.detach().resolve_conj().resolve_neg()
            stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
            kind = isinstance(value, nn.Parameter)
            ref = Ref(key(number), tensor.dtype, tuple(tensor.shape), tuple(stride), of, tensor.device.type != "cpu",
                      kind, value.requires_grad)  # fmt: skip
            self.refs.append(ref.plain())
            self.tensors[ref.key] = tensor
            return f"{_MARK}{number}"

        return mark


class Whole(Parts):
    """Parts of a state whose tensors stay in their places."""

    def take_out(self, key: Callable[[int], Key], of: str | int | None = None) -> Callable[[Any], Any]:
        return lambda value: value


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie in memory without gaps, each once."""
    end = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count != 1 and stride != end:
            return False
        end *= count
    return True


def put_in(state: Any, tensor: Callable[[int], Tensor]) -> Any:
    """Return a state with tensors instead of marks.

    Args:
        tensor: returns the tensor with this number.
    """

    def replaced(value: Any) -> Any:
        is_mark = isinstance(value, str) and value.startswith(_MARK)
        return tensor(int(value.removeprefix(_MARK))) if is_mark else value

    return mapped(state, replaced)


def _named(value: Any) -> Any:
    """Return a mark with the name of a function, and other values as they are. A function is code of the script."""
    is_function = isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
    return f"{_FUNCTION}{value.__module__}.{value.__qualname__}" if is_function else value


def _with_functions(saved: Any, own: Any, path: str, left: list[str]) -> Any:
    """Return a state with the functions of the present object instead of names.

    Args:
        left: gets a line for each function that has another name now.
    """
    if isinstance(saved, str) and saved.startswith(_FUNCTION):
        if _named(own) != saved:
            now = _named(own) if callable(own) else repr(own)
            left.append(f"{path}: was {saved.removeprefix(_FUNCTION)}, is {str(now).removeprefix(_FUNCTION)[:80]}")
        return own
    if isinstance(saved, Mapping):
        inner = own if isinstance(own, Mapping) else {}
        made: Any = {key: _with_functions(one, inner.get(key), f"{path}.{key}", left) for key, one in saved.items()}
        changed = {key: one for key, one in made.items() if one is not saved[key]}
        if changed:
            saved = copy.copy(saved)
            for key, one in changed.items():
                saved[key] = one
        return saved
    if type(saved) in (list, tuple):
        others = own if isinstance(own, (list, tuple)) else ()
        return type(saved)(
            _with_functions(one, others[number] if number < len(others) else None, f"{path}.{number}", left)
            for number, one in enumerate(saved)
        )
    return saved


def numbers_in(state: Any) -> list[int]:
    """Return the numbers of the tensors that have marks in a state, each once, in their order."""
    found: dict[int, Tensor] = {}
    put_in(state, lambda number: found.setdefault(number, torch.empty(0)))
    return list(found)


class Registered:
    """A scheduler, a scaler, or any object with state_dict and load_state_dict."""

    order = 3
    """Objects are loaded by this number: an optimizer's moments take the dtypes of parameters."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def key(self, number: int) -> Key:
        """Return the key of a tensor of its state."""
        return OBJECTS, f"{self.name}.{number}"

    def take_apart(self, parts: Parts) -> Any:
        """Return the state with marks, after its tensors were put into `parts`."""
        mark = parts.take_out(self.key)
        return mapped(self.value.state_dict(), lambda value: mark(_named(value)))

    def prepare(self, state: Any) -> None:
        """Make places for a saved state, whose tensors may not be read yet. A second call does nothing.

        Raises:
            ValueError: that is impossible.
        """

    def like(self, ref: Ref, number: int) -> Any:
        """Return the tensor of the present object that this one of the saved state is spread over ranks like.

        Args:
            number: the place among the tensors of the object's state.
        """
        parts = Parts()
        self.take_apart(parts)
        present = list(parts.tensors.values())
        return present[number] if number < len(present) else None

    def settings(self) -> dict[str, str]:
        """Return how a fresh scheduler or scaler of torch was made, as texts. A checkpoint's values will replace it."""
        is_torchs = isinstance(self.value, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler))
        return _texts(self.value.state_dict()) if is_torchs else {}

    def load(self, state: Any) -> list[str]:
        """Load a whole state. Returns lines `NAME: was A, is B` for what it could not restore."""
        left: list[str] = []
        self.value.load_state_dict(_with_functions(state, self.value.state_dict(), self.name, left))
        return left

    def parameters_by_key(self) -> Iterable[tuple[Any, Tensor, Any]]:
        """Yield key, parameter, and what a Ref says of it."""
        return ()


class Module(Registered):
    """A module, under names that do not depend on DDP and torch.compile around it or parts of it.

    Its state has two parts: what its state dict has, and what it lacks.
    """

    order = 0
    prefix = ""
    """Precedes names in the checkpoint, if several modules are registered."""

    def __init__(self, name: str, value: nn.Module) -> None:
        super().__init__(name, value)
        self._extras = Extras(self._modules())
        self._first = _bytes_of(packed(self._extras.first))
        """That of the extras. Packed once: it may be long, and never changes."""

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile wraps the module or a part of it."""
        return any("_orig_mod" in dict(one.named_children()) for one in self.value.modules())

    def _drops(self) -> set[str]:
        """Return the paths of modules inside wrappers."""
        drops = set()
        for path, module in self.value.named_modules():
            inner = "module" if isinstance(module, _WRAPPERS) else "_orig_mod"
            if isinstance(module, _WRAPPERS) or inner in dict(module.named_children()):
                drops.add(f"{path}.{inner}" if path else inner)
        return drops

    def _modules(self) -> dict[str, nn.Module]:
        """Return modules by clean paths, without wrappers."""
        drops = self._drops()
        return {_clean(path, drops): one for path, one in self.value.named_modules()}  # the inner one comes later

    def names(self) -> dict[str, str]:
        """Map the names in a checkpoint to those of the module's own state."""
        drops = self._drops()
        return {_clean(name, drops): name for name in self.value.state_dict()}

    def parameters_by_key(self) -> Iterable[tuple[Any, Tensor, Any]]:
        drops = self._drops()
        for name, parameter in self.value.named_parameters():
            yield _clean(name, drops), parameter, name

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state under clean names."""
        state = self.value.state_dict()
        found = {clean: state[name] for clean, name in self.names().items()}
        return {self.prefix + name: one.detach() for name, one in found.items() if isinstance(one, Tensor)}

    def take_apart(self, parts: Parts) -> Any:
        state, found = self.value.state_dict(), {}
        for clean, name in self.names().items():
            key = MODEL, self.prefix + clean
            found[clean] = mapped(state[name], parts.take_out(lambda _, key=key: key, of=name))  # type: ignore[misc]
        modules = self._modules()
        beside = {
            name: parts.take_out(lambda _, key=(OBJECTS, f"{self.name}.beside.{name}"): key)(tensor)  # type: ignore[misc]
            for name, tensor in self._extras.tensors(modules).items()
        }
        first = parts.take_out(lambda _: (OBJECTS, f"{self.name}.first"))(self._first)
        return {"state": found, "extras": self._extras.state(modules), "first": first, "beside": beside}

    def like(self, ref: Ref, number: int) -> Any:
        return self.value.state_dict().get(ref.of)

    def load(self, state: Any) -> list[str]:
        modules = self._modules()
        self._first = state["first"].cpu().clone()
        left = self._extras.restore(modules, unpacked(self._first.numpy().tobytes()), state["extras"])
        saved, own = state["state"], self.names()
        for these, those, what in ((saved, own, "not in the model"), (own, saved, "not in the checkpoint")):
            if missing := [name for name in these if name not in those]:
                raise ValueError(f"{missing[0]} is {what}")
        found = OrderedDict((own[name], value) for name, value in saved.items())
        copy_metadata(found, self.value)
        self.value.load_state_dict(found)
        self._extras.fill(modules, state["beside"])
        return [f"{self.name}.{line}" for line in left]


def _clean(name: str, drops: set[str]) -> str:
    """Return a name without the parts that wrappers add."""
    kept, path = [], ""
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        if path not in drops:
            kept.append(part)
    return ".".join(kept)


class Optimizer(Registered):
    """An optimizer. What it holds of a parameter is spread over ranks as the parameter is."""

    value: torch.optim.Optimizer
    order = 1
    outer: Optimizer | None = None
    """The optimizer that holds this one and shares its groups, as SAM does. It is loaded before."""

    def __init__(self, name: str, value: torch.optim.Optimizer) -> None:
        super().__init__(name, value)
        self.modules: list[Module] = []
        """The registered modules, by whose names parameters are found."""
        self._made = len(value.param_groups)
        """Groups at `register`. Training may add others."""

    def share_groups(self, outer: Optimizer) -> None:
        """Share groups after loading, if both share them now."""
        if self.value.param_groups is outer.value.param_groups:
            self.outer, self.order = outer, 2

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.value.param_groups for parameter in group["params"]]

    def parameters_by_key(self) -> Iterable[tuple[Any, Tensor, Any]]:
        return ((number, parameter, number) for number, parameter in enumerate(self.parameters))

    def take_apart(self, parts: Parts) -> Any:
        state, mark = dict(self.value.state_dict()), parts.take_out(self.key)
        held = state.pop("state", {})
        made = mapped(state, lambda value: mark(_named(value)))
        made["state"] = {number: mapped(one, parts.take_out(self.key, of=number)) for number, one in held.items()}
        added = self.value.param_groups[self._made :]
        return {"state": made, "added": self._names_of(added) if added else []}

    def _names_of(self, groups: list[dict[str, Any]]) -> list[list[Any]]:
        """Return for each group the modules and names of its parameters; None: in no registered module."""
        names = {id(one): [each.name, key] for each in self.modules for key, one, _ in each.parameters_by_key()}
        return [[names.get(id(parameter)) for parameter in group["params"]] for group in groups]

    def prepare(self, state: Any) -> None:
        """Add the groups that training has added."""
        added, groups = state["added"], state["state"].get("param_groups", [])
        if len(groups) == len(self.value.param_groups) or not added or self.outer is not None:
            return
        found = {each.name: {key: one for key, one, _ in each.parameters_by_key()} for each in self.modules}
        again: list[set[int]] = []
        for names in added:
            parameters = [found.get(name[0], {}).get(name[1]) if name else None for name in names]
            if len(groups) != self._made + len(added) or any(one is None for one in parameters):
                raise ValueError("training has added a group of parameters; add it before session.register on a resume")
            self.value.add_param_group({"params": parameters})
            again.append(set(map(id, parameters)))
        self._let_add_again(again)

    def _let_add_again(self, added: list[set[int]]) -> None:
        """Let the script add these groups once more: a resume repeats the head of an epoch."""
        add = self.value.add_param_group

        @functools.wraps(add)
        def add_param_group(group: dict[str, Any]) -> None:
            given = group["params"]
            group = {**group, "params": [given] if isinstance(given, Tensor) else list(given)}
            ids = {id(one[1] if isinstance(one, tuple) else one) for one in group["params"]}
            if ids in added:
                added.remove(ids)
            else:
                add(group)

        vars(self.value)["add_param_group"] = add_param_group

    def like(self, ref: Ref, number: int) -> Any:
        own = self.parameters
        return own[ref.of] if isinstance(ref.of, int) and ref.of < len(own) else None

    def settings(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for number, group in enumerate(self.value.param_groups):
            found |= _texts(group, f" of group {number}" if number else "")
        return found

    def load(self, state: Any) -> list[str]:
        self.prepare(state)
        left = super().load(state := state["state"])
        if self.outer is not None:
            self.value.param_groups = self.outer.value.param_groups
        needed = getattr(self.value, "defaults", {})  # some wrappers leave out Optimizer.__init__
        missing = [name for group in self.value.param_groups for name in needed if name not in group]
        if missing:
            raise ValueError(f"the saved groups have no {missing[0]}, so they are of another class of optimizers")
        # torch casts moments to the type of their parameter, but some optimizers keep them in fp32 for bf16 weights
        for number, parameter in enumerate(self.parameters):
            for name, saved in state["state"].get(number, {}).items():
                own = self.value.state.get(parameter, {}).get(name)
                if isinstance(own, Tensor) and isinstance(saved, Tensor) and own.dtype != saved.dtype:
                    self.value.state[parameter][name] = saved.to(own.device)
        return left


def _texts(values: Mapping[str, Any], end: str = "") -> dict[str, str]:
    """Return settings as texts by name. Names that begin with _ or initial_ follow from others."""
    plain = (bool, int, float, str, list, tuple, Mapping)
    return {
        f"{name}{end}": repr(value)
        for name, value in values.items()
        if isinstance(value, plain) and not name.startswith(("_", "initial_", "params"))
    }


def registered(name: str, value: Any) -> Registered:
    """Return what stands for an object that a user registers.

    Raises:
        Refused: a checkpoint cannot hold it.
    """
    what = f"register({name}=…)"
    parts = [value, *(value.modules() if isinstance(value, nn.Module) else ())]
    classes = {base.__name__ for one in parts for base in type(one).__mro__}
    for known, way in _SAVES_ITSELF.items():
        if known in classes:
            raise Refused(f"{what}: {way}; leave it out of register")
    if isinstance(value, torch.Generator):
        raise Refused(f"{what}: a session seeds generators itself; leave it out")
    missing = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(value, method, None))]
    if missing or isinstance(value, type):
        of = f"a {type(value).__name__} has no {' and no '.join(missing)}" if missing else "it is a class"
        raise Refused(f"{what}: {of}; register objects with both methods, and put plain values into session.values")
    if isinstance(value, nn.Module):
        return Module(name, value)
    inner = unwrapped(value)
    return Optimizer(name, inner) if isinstance(inner, torch.optim.Optimizer) else Registered(name, value)


def is_of_user(one: Registered) -> bool:
    """Whether it is an object of a class that torch does not have, which may save anything."""
    is_torchs = isinstance(one.value, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler))
    return not isinstance(one, (Module, Optimizer)) and not is_torchs


def held_optimizers(one: Registered) -> dict[str, torch.optim.Optimizer]:
    """Return optimizers that are attributes of an object: SAM and Lookahead save nothing of the one that they hold."""
    held = getattr(one.value, "__dict__", {})
    return {f"{one.name}.{name}": value for name, value in held.items() if isinstance(value, torch.optim.Optimizer)}


def unwrapped(value: Any) -> Any:
    """Return the optimizer inside the wrappers of Accelerate and Fabric, whose own hooks nothing calls."""
    while isinstance(inner := getattr(value, "optimizer", None), torch.optim.Optimizer) and _is_wrapper(value):
        value = inner
    return value


def _is_wrapper(value: Any) -> bool:
    return type(value).__module__.split(".")[0] in ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


def packed(values: Any) -> bytes:
    """Return plain values as bytes.

    Raises:
        ValueError: they could not be read back; the message names the class.
    """
    buffer = io.BytesIO()
    try:
        torch.save(values, buffer)
    except Exception as error:  # pickle raises anything
        raise ValueError(one_line(error)[:200]) from None
    data = buffer.getvalue()
    unpacked(data)
    return data


def _bytes_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpacked(data: bytes) -> Any:
    """Read plain values without executing anything.

    Raises:
        ValueError: they hold something else.
    """
    try:
        with torch.serialization.safe_globals(_PLAIN):
            return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        text = str(error)
        found = text.partition("GLOBAL ")[2].split()
        raise ValueError(f"it holds {found[0]}, which is no plain value" if found else one_line(text)[:200]) from None
