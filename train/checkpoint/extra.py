"""What a checkpoint holds besides model and optimizer: averaged weights, and the task's objects.

The state of the objects is taken apart: its tensors are copied like the model's, so that nothing waits for a GPU, and
the rest is pickled. A checkpoint on the disk holds both as one value, as torch.save writes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..data.to_device import mapped
from ..errors import Refused, TrainingFailed, one_line

AVERAGES, OBJECTS, LOSSES, ORDERS = "ema", "stateful", "losses", "orders"
"""Their names in a checkpoint."""


@dataclasses.dataclass(frozen=True)
class Extra:
    """State beside model and optimizer; most runs have none."""

    averages: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Maps a name of the model's state to its average, spread over ranks like the model."""
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Maps a name from the task's stateful() to an object with state_dict() and load_state_dict()."""
    losses: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Maps the name of an update that leaves out steps to the stats (STEP_STATS) of the last step that made it, and
    `parts_kept` of it to the parts of that loss."""

    orders: dict[str, Tensor] = dataclasses.field(default_factory=dict, kw_only=True)
    """`digests`: of the orders of epochs that the task's own function gave; see trainer/orders.py."""

    def state(self) -> dict[str, Any]:
        """Return what is copied and saved: tensors, and the objects' states, taken apart; {} if there is nothing."""
        found: dict[str, Any] = {}
        if self.averages:
            found[AVERAGES] = self.averages
        if self.objects:
            found[OBJECTS] = _apart({name: stateful.state_dict() for name, stateful in self.objects.items()})
        if self.losses:
            found[LOSSES] = self.losses
        if self.orders:
            found[ORDERS] = self.orders
        return found

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Load what `state` or `packed` returned in another process.

        Args:
            device: receives tensors that were on a GPU.
        """
        for key, own in ((AVERAGES, self.averages), (LOSSES, self.losses), (ORDERS, self.orders)):
            for name, value in state.get(key, {}).items():
                if value is not own[name]:
                    own[name].copy_(value)
        if self.objects:
            held = state[OBJECTS]
            states = _unpacked(held, device) if isinstance(held, bytes) else _together(held[0], held[1], device)
            if missing := self.objects.keys() - states.keys():
                raise ValueError(f"it has no state of {min(missing)}, which stateful() returns")
            for name, stateful in self.objects.items():
                stateful.load_state_dict(states[name])

    @contextlib.contextmanager
    def unchanged(self, device: torch.device) -> Iterator[None]:
        """Context manager that undoes changes of the objects on exit. Does not wait for the device."""
        alone = Extra(objects=self.objects)
        held = alone.state()
        for tensors, _ in held.values():
            tensors[:] = [tensor.clone() for tensor in tensors]
        try:
            yield
        finally:
            alone.load(held, device)

    def check(self, file: object, device: torch.device) -> None:
        """Check that the objects can be saved and restored.

        Raises:
            Refused: one of them cannot be.
        """
        for name, stateful in self.objects.items():
            alone = Extra(objects={name: stateful})
            try:
                alone.load(packed(alone.state()), device)
            except Exception as error:
                raise Refused(
                    f"stateful in {file}: {name} cannot be saved and restored: {one_line(error)[:200]}; state_dict() "
                    "must hold only tensors, numbers, strings, lists and dicts, and load_state_dict() take it"
                ) from error

    def digests(self) -> dict[str, str]:
        """Return a digest of each object's state, which must be the same on all ranks."""
        texts = {name: repr(mapped(stateful.state_dict(), _comparable)) for name, stateful in self.objects.items()}
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands for a tensor in the pickled part of a state."""

    number: int
    is_on_gpu: bool
    requires_grad: bool
    is_parameter: bool


def _apart(state: Any) -> list[Any]:
    """Take a state apart: return a list of its tensors, and the rest, pickled. Tensors of unusual layouts stay in the
    rest."""
    tensors: list[Tensor] = []
    places: dict[int, _Place] = {}

    def take_out(value: Any) -> Any:
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return value
        if id(value) not in places:
            kind = (value.is_cuda, value.requires_grad, isinstance(value, nn.Parameter))
            places[id(value)] = _Place(len(tensors), *kind)
            tensors.append(value.detach().resolve_conj().resolve_neg())
        return places[id(value)]

    rest = mapped(state, take_out)
    return [tensors, pickle.dumps(rest)]


def _together(tensors: list[Tensor], rest: bytes, device: torch.device | None) -> Any:
    """Put a state together again.

    Args:
        device: receives tensors that were on a GPU; None: all stay where they are.
    """
    made: dict[int, Tensor] = {}

    def tensor(value: Any) -> Any:
        if not isinstance(value, _Place):
            return value
        if value.number not in made:
            one = tensors[value.number]
            one = one.to(device) if value.is_on_gpu and device is not None else one
            is_trained = value.requires_grad
            made[value.number] = nn.Parameter(one, is_trained) if value.is_parameter else one.requires_grad_(is_trained)
        return made[value.number]

    return mapped(pickle.loads(rest), tensor)


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as it is written to the disk: the objects' states as one value, with all tensors on the host."""
    if OBJECTS not in state:
        return state
    tensors, rest = state[OBJECTS]
    on_gpu = set[int]()

    def note(value: Any) -> Any:
        if isinstance(value, _Place) and value.is_on_gpu:
            on_gpu.add(value.number)
        return value

    mapped(pickle.loads(rest), note)
    whole = _together([tensor.cpu() for tensor in tensors], rest, None)
    buffer = io.BytesIO()
    torch.save((whole, sorted(on_gpu)) if on_gpu else whole, buffer)
    return state | {OBJECTS: buffer.getvalue()}


def _unpacked(value: bytes, device: torch.device) -> Any:
    """Return the objects' states from a checkpoint, with tensors on the device where they were."""
    held = torch.load(io.BytesIO(value), weights_only=True)
    if not isinstance(held, tuple):
        return held
    state, on_gpu = held
    tensors, rest = _apart(state)

    def put(value: Any) -> Any:
        is_place = isinstance(value, _Place)
        return dataclasses.replace(value, is_on_gpu=value.number in on_gpu) if is_place else value

    return _together(tensors, pickle.dumps(mapped(pickle.loads(rest), put)), device)


def check_equal(digests: list[dict[str, str]]) -> None:
    """Check that all ranks have the same objects.

    Raises:
        TrainingFailed: they differ, and a resume would continue with those of one rank.
    """
    for name in digests[0]:
        if len({one[name] for one in digests}) > 1:
            raise TrainingFailed(
                f"the state of {name} (stateful) differs between ranks: change it in after_step, which is the "
                "same on all ranks, and not by what one rank sees of a batch"
            )


def _comparable(value: Any) -> Any:
    """Return a text that is the same for equal values, which may be pickled into different bytes."""
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        content = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        return whole.dtype, tuple(whole.shape), hashlib.sha256(content).hexdigest()
    return sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
