"""Parameters that a forward changes, as buffers are: a teacher's, averages of the student's, weights kept to a norm."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Named = list[tuple[str, nn.Parameter]]


class Marks:
    """What parameters were at some moment, and whether they are others now."""

    def __init__(self, parameters: Named) -> None:
        self.parameters = parameters
        self._values = _fingerprints(parameters)
        self._places = [_place(parameter) for _, parameter in parameters]

    def changed(self) -> Tensor:
        """Which of the parameters have been changed since, (n,) of bool.

        By their values, and by torch's count of changes in place: a teacher that is a copy of its student yet is what
        it was after it has followed. That count says nothing where the parameter lies elsewhere now: cuDNN's recurrent
        layers move their weights.
        """
        counted = [
            then is not None and now is not None and then[0] != now[0] and then[1] == now[1]
            for then, now in zip(self._places, (_place(parameter) for _, parameter in self.parameters), strict=True)
        ]
        values = _fingerprints(self.parameters)
        return (values != self._values).any(1) | torch.tensor(counted, dtype=torch.bool).to(values.device)

    def without(self, names: set[str]) -> Marks:
        """The marks of those alone that no optimizer updates, and have none of these names."""
        rest = copy.copy(self)
        chosen = [
            place for place, (name, parameter) in enumerate(self.parameters)
            if name not in names and not parameter.requires_grad
        ]  # fmt: skip
        rest.parameters = [self.parameters[place] for place in chosen]
        rest._places = [self._places[place] for place in chosen]
        rest._values = self._values[chosen]
        return rest


def _place(parameter: nn.Parameter) -> tuple[int, int] | None:
    """How often a parameter was changed in place, and where it lies; None where torch tells of no part of it."""
    return None if isinstance(parameter, DTensor) else (parameter._version, parameter.data_ptr())


def _fingerprints(parameters: Named) -> Tensor:
    """Numbers that tell whether a parameter has been changed: (n, 2), as bits, for a not-a-number equals nothing."""
    rows = [_fingerprint(local(parameter.detach())) for _, parameter in parameters]
    return torch.stack(rows).view(torch.int64) if rows else torch.zeros((0, 2), dtype=torch.int64)


def _fingerprint(values: Tensor) -> Tensor:
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.is_floating_point():
        values = values.double()
    # summed in float64, not copied into it: a frozen model may fill the device
    return torch.stack([values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64)])


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor that may be spread over ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
