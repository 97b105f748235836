"""What a checkpoint holds besides model and optimizer: averaged weights, and the task's objects."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from train.data.to_device import mapped
from train.errors import Refused, TrainingFailed, one_line

AVERAGES, OBJECTS, LOSSES = "ema", "stateful", "losses"
"""Their names in a checkpoint."""


@dataclasses.dataclass(frozen=True)
class Extra:
    """State beside model and optimizer; most runs have none."""

    averages: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Maps a name of the model's state to its average, spread over ranks like the model."""
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Maps a name from the task's stateful() to an object with state_dict() and load_state_dict()."""
    losses: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Maps the name of an update that leaves out steps to the stats (STEP_STATS) of the last step that made it."""

    def state(self) -> dict[str, Any]:
        """Return what is saved: tensors, and all objects as one value; {} if there is nothing."""
        found: dict[str, Any] = {}
        if self.averages:
            found[AVERAGES] = self.averages
        if self.objects:
            buffer = io.BytesIO()
            torch.save({name: one.state_dict() for name, one in self.objects.items()}, buffer)
            found[OBJECTS] = buffer.getvalue()
        if self.losses:
            found[LOSSES] = self.losses
        return found

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Load what `state` returned in another process.

        Args:
            device: receives tensors that were on a GPU.
        """
        for key, own in ((AVERAGES, self.averages), (LOSSES, self.losses)):
            for name, value in state.get(key, {}).items():
                if value is not own[name]:
                    own[name].copy_(value)
        if self.objects:

            def place(storage: Any, saved_on: str) -> Any:
                return storage if saved_on == "cpu" else storage.to(device=device)

            held = torch.load(io.BytesIO(state[OBJECTS]), weights_only=True, map_location=place)
            for name, one in self.objects.items():
                one.load_state_dict(held[name])

    @contextlib.contextmanager
    def unchanged(self, device: torch.device) -> Iterator[None]:
        """Context manager that undoes changes of the objects on exit."""
        alone = Extra(objects=self.objects)
        held = alone.state()
        try:
            yield
        finally:
            alone.load(held, device)

    def check(self, file: object, device: torch.device) -> None:
        """Check that the objects can be saved and restored.

        Raises:
            Refused: one of them cannot be.
        """
        for name, one in self.objects.items():
            alone = Extra(objects={name: one})
            try:
                alone.load(alone.state(), device)
            except Exception as error:
                raise Refused(
                    f"stateful in {file}: {name} cannot be saved and restored: {one_line(error)[:200]}; state_dict() "
                    "must hold only tensors, numbers, strings, lists and dicts, and load_state_dict() take it"
                ) from error

    def digests(self) -> dict[str, str]:
        """Return a digest of each object's state, which must be the same on all ranks."""
        texts = {name: repr(mapped(one.state_dict(), _comparable)) for name, one in self.objects.items()}
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


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
