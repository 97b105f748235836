"""Parameters that a forward changes, as buffers are: a teacher's, averages of the student's, weights kept to a norm."""

from __future__ import annotations

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


class Moved:
    """The parameters of a model that its forward changes, as far as they have been found.

    What is changed in an optimizer's step is something else: averages that a hook of it makes (EMA) are the same on
    all ranks that make the same step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.found: list[nn.Parameter] = []
        self._marks = Marks([])
        self._by_step: set[str] = set()
        """Names of those that an optimizer's step changes, which are not given to it."""
        self.is_watching = False

    def watch(self) -> None:
        """Before the forwards of a step."""
        self._marks, self.is_watching = Marks(self._named(frozen_only=False)), True

    def flags(self) -> Tensor:
        """Which of the parameters that are looked at have been changed by a forward on this rank: (n,) of bool."""
        others = [name not in self._by_step for name, _ in self._marks.parameters]
        changed = self._marks.changed()
        return changed & torch.tensor(others, dtype=torch.bool).to(changed.device)

    def take(self, flags: list[float]) -> dict[str, nn.Parameter]:
        """Add those that any rank has flagged to the found ones. Returns them by name."""
        new = {name: p for (name, p), is_flagged in zip(self._marks.parameters, flags, strict=True) if is_flagged}
        self.found += new.values()
        # from here on those alone that no optimizer updates, and as they are now
        self._marks = Marks(self._named(frozen_only=True))
        return new

    def end_step(self) -> None:
        """After the optimizer's step: what it has changed beside what it was given, no forward did."""
        if self.is_watching:
            changed = self._marks.changed().tolist()
            self._by_step |= {
                name for (name, _), is_changed in zip(self._marks.parameters, changed, strict=True) if is_changed
            }
            self._marks, self.is_watching = Marks(self._marks.parameters), False

    def _named(self, frozen_only: bool) -> Named:
        known = {id(parameter) for parameter in self.found}
        return [
            (name, p) for name, p in self._model.named_parameters()
            if p.numel() and id(p) not in known and not (frozen_only and p.requires_grad)
        ]  # fmt: skip


def _place(parameter: nn.Parameter) -> tuple[int, int] | None:
    """How often a parameter was changed in place, and where it lies; None where torch tells of no part of it."""
    return None if isinstance(parameter, DTensor) else (parameter._version, parameter.data_ptr())


def _fingerprints(parameters: Named) -> Tensor:
    """Numbers that tell whether a parameter has been changed: (n, 2), as bits, for a not-a-number equals nothing."""
    rows = [_fingerprint(local(parameter.detach())) for _, parameter in parameters]
    return torch.stack(rows).view(torch.int64) if rows else torch.zeros((0, 2), dtype=torch.int64)


def _fingerprint(values: Tensor) -> Tensor:
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.itemsize == 1:  # floating point numbers of eight bits have no sums and norms: their bits tell as much
        values = values.view(torch.uint8)
    if not values.is_floating_point():
        values = values.double()
    # summed in float64, not copied into it: a frozen model may fill the device
    return torch.stack([values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64)])


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor that may be spread over ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
