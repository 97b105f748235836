"""Checks, in the first steps of an attempt, that forwards neither change parameters nor add to the model's state.

Such changes would differ between ranks, and a resume would lose them. Also warns of a buffer in which each micro batch
leaves another value, because after a step it has the value of rank 0's last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.seeding import Seed
from ..errors import TrainingFailed
from ..parallel.strategy import local
from ..parallel.torch_private import Norm, buffers_of
from ..parallel.world import World

STEPS = 2
"""Number of steps of an attempt that are checked. One is too few: a teacher that starts equal to its student does not
change in the first step."""
_LATE = (
    "warning: the model or the loss has made a random generator in the first step, which nothing "
    "seeds, so a resume repeats its numbers; make it in model(), or at the top of the file"
)


_Buffer = tuple[nn.Module, str, torch.Size]
"""A buffer: its module, its full name and its shape."""


class ModelCheck:
    """Compares the model before and after the forwards of a step.

    Changes in the optimizer's step are allowed: all ranks make the same step, with the same hooks.
    """

    def __init__(
        self, model: nn.Module, known: Sequence[Seed], find: Callable[[], Sequence[Seed]], *, world: World | None = None
    ) -> None:
        """
        Args:
            known: the random generators in the model and the loss before the first step.
            find: finds the generators again.
            world: the ranks whose buffers are compared; None: no comparison, because their sums are ordered.
        """
        self._model, self._find, self._generators = model, find, len(known)
        self._world, self._written = world, ""
        self._buffers = _own_buffers(model) if world is not None else []
        self._values: list[list[tuple[int, ...]]] = []
        self._parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.numel()]
        self._names, self._numbers = set(model.state_dict(keep_vars=True)), _numbers(model)
        self._has_warned = False
        self.is_on = True
        """Whether the present step is checked. Otherwise the methods do nothing."""

    def begin(self) -> None:
        """Call before the forwards of a step."""
        if not self.is_on:
            return
        self._before = _fingerprints(self._parameters)
        self._values = [_values(self._buffers)] if self._buffers else []

    def after_micro_batch(self, is_last: bool) -> None:
        """Call after each micro batch of this rank. `is_last`: it is the last one of the step."""
        if self.is_on and not is_last and len(self._values) == 1:  # after the first one
            self._values.append(_values(self._buffers))

    def end(self) -> list[str]:
        """Check the model after the forwards and backwards of a step, before its update. Returns warnings.

        Raises:
            TrainingFailed: a forward has changed a parameter, or added something to the state.
        """
        if not self.is_on:
            return []
        changed = (_fingerprints(self._parameters) != self._before).any(1).tolist()
        if any(changed):
            raise TrainingFailed(
                f"the model changes its parameter {self._parameters[changed.index(True)][0]} in its forward, so "
                "every rank and micro batch changes it differently; make it a buffer, or change it in after_step"
            )
        new = sorted(self._model.state_dict(keep_vars=True).keys() - self._names)
        if new:
            raise TrainingFailed(
                f"the model added {new[0]} to its state in its first steps, so no checkpoint could be loaded; "
                "make it in model() with its final shape, or register it with persistent=False"
            )
        found = [] if self._has_warned else self._warnings()  # what after_step counts shows in the second step
        self._has_warned |= bool(found)
        return found

    def written_buffer(self) -> str:
        """Return why a buffer would differ on other numbers of ranks, once; '' if none would or it is reported already.

        After the forwards of a step. A collective, in a model with such buffers.
        """
        if not self.is_on or self._world is None or not self._buffers or self._written:
            return ""
        before, *after = [*self._values, _values(self._buffers)]
        # of each buffer what the first and the last micro batch left in it, where they changed it
        left = [{values[n] for values in after if values[n] not in (before[n], ())} for n in range(len(before))]
        for (_, full_name, _), *values in zip(self._buffers, *self._world.gather(left), strict=True):
            if len(set().union(*values)) > 1:
                self._written = (
                    f"each micro batch leaves another value in the buffer {full_name}, so other numbers of ranks give "
                    "other results; write it in after_step, or start a new run with --parallel.reduce ordered, which "
                    "takes the mean"
                )
                break
        return self._written

    def _warnings(self) -> list[str]:
        found = [_LATE] if len(self._find()) > self._generators else []
        counted = [name for name, value in _numbers(self._model).items() if self._numbers.get(name, value) != value]
        if counted:
            found.append(
                f"warning: the model counts in {counted[0]}, a plain attribute that no checkpoint holds, so it "
                "starts again after a resume or a death; make it a buffer (register_buffer)"
            )
        return found


def _numbers(model: nn.Module) -> dict[str, int | float]:
    """Return the numbers among the attributes of a model and its modules, except those saved as extra state."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, part in model.named_modules()
        if type(part).get_extra_state is nn.Module.get_extra_state
        for name, value in vars(part).items()
        if type(value) in (int, float)
    }


def _own_buffers(model: nn.Module) -> list[_Buffer]:
    """Return the buffers of a model, except BatchNorm's and counters, which are meant to be rank 0's."""
    return [
        (part, f"{prefix}.{name}" if prefix else name, buffer.shape)
        for prefix, part in model.named_modules()
        if not isinstance(part, Norm)
        for name, buffer in buffers_of(part).items()
        if buffer is not None and buffer.numel() > (not buffer.is_floating_point()) and buffer.layout == torch.strided
    ]


def _values(buffers: list[_Buffer]) -> list[tuple[int, ...]]:
    """Return two numbers per buffer that show whether it has changed; none for a cache that has grown."""
    values: list[tuple[int, ...]] = []
    for part, name, shape in buffers:
        now: Any = buffers_of(part).get(name.rpartition(".")[2])
        is_same = now is not None and now.shape == shape
        values.append(tuple(_fingerprint(local(now.detach())).view(torch.int64).tolist()) if is_same else ())
    return values


def _fingerprints(parameters: list[tuple[str, nn.Parameter]]) -> Tensor:
    """Return two numbers per parameter that show whether it has changed; as bits, because NaN does not equal itself."""
    return torch.stack([_fingerprint(local(parameter.detach())) for _, parameter in parameters]).view(torch.int64)


def _fingerprint(values: Tensor) -> Tensor:
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.itemsize == 1:  # floating point numbers of eight bits have no sums and norms: their bits do as well
        values = values.view(torch.uint8)
    if not values.is_floating_point():
        values = values.double()
    # summed in float64, not copied into it: a frozen model may fill the device
    return torch.stack([values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64)])
