"""Counts the updates of a loop that is not ours, and knows where no gradient is pending."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..parallel.strategy import local
from ..parallel.torch_private import version_of


class Updates:
    """Follows optimizers by torch's hooks after a step.

    With several optimizers the one that has stepped most often counts: a GAN whose two optimizers step for each batch
    makes one update per batch. Without any, a batch counts as an update.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        """Maps the name of an optimizer to the number of its steps."""
        self._names: dict[int, str] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._batches = 0
        self._smallest: dict[str, Tensor] = {}
        self._has_stepped = self._stepped_before = False
        self._last = ""
        """The optimizer that stepped last."""
        self._seen: tuple[Tensor | None, int] = None, 0
        """The gradient of its smallest parameter after the step, and the number of writes to the gradient."""

    @property
    def total(self) -> int:
        return max(self._counts.values(), default=self._batches)

    def follow(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of an optimizer."""
        self._names[id(optimizer)], self._optimizers[name] = name, optimizer
        self._counts.setdefault(name, 0)  # a library makes its optimizers after a checkpoint was read
        optimizer.register_step_post_hook(lambda *_: self._stepped(name))

    def follow_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Count steps that a scaler leaves out because gradients are infinite.

        Such a step is a step of the loop: its gradients are used up. If it did not count, a run whose scaler skips
        for long could neither save nor stop.
        """
        step = scaler.step

        @functools.wraps(step)
        def stepped(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(optimizer), "")
            before = self._counts.get(name)
            result = step(optimizer, *args, **kwargs)
            if before is not None and self._counts[name] == before:
                self._stepped(name)
            return result

        scaler.step = stepped  # type: ignore[method-assign] # of this object: torch has no hook for a skipped step

    def _stepped(self, name: str) -> None:
        self._counts[name] += 1
        self._has_stepped, self._last, self._seen = True, name, self._look(name)

    def _look(self, name: str) -> tuple[Tensor | None, int]:
        if name not in self._smallest:
            with_gradient = [
                parameter for group in self._optimizers[name].param_groups for parameter in group["params"]
                if parameter.grad is not None
            ]  # fmt: skip
            if not with_gradient:
                return None, 0
            self._smallest[name] = min(with_gradient, key=Tensor.numel)
        gradient = self._smallest[name].grad
        return gradient, 0 if gradient is None else version_of(local(gradient.detach()))

    def end_body(self) -> None:
        """The body of a batch is over. Called before `total` and `is_clean` are read."""
        self._stepped_before, self._has_stepped = self._has_stepped, False
        self._batches += 1

    @property
    def is_clean(self) -> bool:
        """Whether no gradient is pending: an optimizer stepped in the last body or after it, and no backward followed.

        A step in an earlier body is not enough: FSDP2 keeps gradients that it has not summed yet out of sight.
        """
        if not self._counts:
            return True
        if not (self._has_stepped or self._stepped_before):
            return False
        if not self._last:  # of the checkpoint that was loaded
            return True
        gradient, version = self._look(self._last)
        if gradient is None or (gradient is self._seen[0] and version == self._seen[1]):
            return True
        return not local(gradient).any()  # zeroed in place; else a backward came after the step

    def left_over(self) -> list[str]:
        """Return the optimizers whose gradients may still be used, where one of several stepped last.

        Those of a GAN's discriminator hold what the generator's backward left; others may accumulate for longer.
        """
        return [name for name in self._counts if name != self._last]

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"counts": dict(self._counts), "batches": self._batches}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._counts.update(state["counts"])
        self._batches = state["batches"]
        self._stepped_before = True  # a checkpoint is taken only where no gradient is pending
