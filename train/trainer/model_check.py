"""Checks, in the first steps of an attempt, that forwards neither change parameters nor add to the model's state.

Such changes would differ between ranks, and a resume would lose them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from train.data.seeding import Seed
from train.errors import TrainingFailed
from train.parallel.strategy import local

STEPS = 2
"""Steps of an attempt that are checked; one is too few: a teacher that begins as its student does not move in it."""
_LATE = (
    "warning: the first step has made a random generator that the model or the loss keeps: nothing seeds it, and a "
    "resume draws from its beginning; make it in model(), or at the top of the file"
)


class ModelCheck:
    """Compares the model before and after the forwards of a step.

    Changes in the optimizer's step are allowed: all ranks make the same step, with the same hooks.
    """

    def __init__(self, model: nn.Module, known: Sequence[Seed], find: Callable[[], Sequence[Seed]]) -> None:
        """
        Args:
            known: the random generators in the model and the loss before the first step.
            find: finds them again.
        """
        self._model, self._find, self._generators = model, find, len(known)
        self._parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.numel()]
        self._names, self._numbers = set(model.state_dict(keep_vars=True)), _numbers(model)
        self._has_warned = False

    def begin(self) -> None:
        """Before the forwards of a step."""
        self._before = _fingerprints(self._parameters)

    def end(self) -> list[str]:
        """After the forwards and backwards of a step, before its update. Returns warnings.

        Raises:
            TrainingFailed: a forward has changed a parameter, or added something to the state.
        """
        changed = (_fingerprints(self._parameters) != self._before).any(1).tolist()
        if any(changed):
            raise TrainingFailed(
                f"the model updates its parameter {self._parameters[changed.index(True)][0]} in its forward, which "
                "every rank and micro batch does anew; make it a buffer, or update it in after_step"
            )
        new = sorted(self._model.state_dict(keep_vars=True).keys() - self._names)
        if new:
            raise TrainingFailed(
                f"the model has got {new[0]} in its first steps, and a checkpoint could not be read back into a model "
                "without it; make it in model(), of its final shape, or register it with persistent=False"
            )
        found = [] if self._has_warned else self._warnings()  # what after_step counts shows in the second step
        self._has_warned |= bool(found)
        return found

    def _warnings(self) -> list[str]:
        found = [_LATE] if len(self._find()) > self._generators else []
        counted = [name for name, value in _numbers(self._model).items() if self._numbers.get(name, value) != value]
        if counted:
            found.append(
                f"warning: the model counts in {counted[0]}, a plain attribute, which no checkpoint holds: after a "
                "resume or a death it begins anew; make it a buffer (register_buffer)"
            )
        return found


def _numbers(model: nn.Module) -> dict[str, int | float]:
    """The numbers among the attributes of a model and its parts, where these do not save them as extra state."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, part in model.named_modules()
        if type(part).get_extra_state is nn.Module.get_extra_state
        for name, value in vars(part).items()
        if type(value) in (int, float)
    }


def _fingerprints(parameters: list[tuple[str, nn.Parameter]]) -> Tensor:
    """Two numbers a parameter that show whether it has changed; as bits, for NaN does not equal itself."""
    return torch.stack([_fingerprint(local(parameter.detach())) for _, parameter in parameters]).view(torch.int64)


def _fingerprint(values: Tensor) -> Tensor:
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.itemsize == 1:  # floating point numbers of eight bits have no sums and norms: their bits do as well
        values = values.view(torch.uint8)
    if not values.is_floating_point():
        values = values.double()
    # summed in float64, not copied into it: a frozen model may fill the device
    return torch.stack([values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64)])
