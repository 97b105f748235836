"""Counts the updates of a loop that is not ours, and knows which gradients are pending.

An update is what changes registered weights. Torch calls a hook after each step of any optimizer, so the steps inside
SAM or Lookahead count, and those of an optimizer that was made after `session.register`. If no optimizer of torch steps
at all, the versions of the parameters tell whether a body has changed them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..parallel.strategy import local
from ..parallel.torch_private import versions_of

LONG = 50
"""Batches without an update after which a line asks for the optimizer, and stops are agreed without updates."""


class Updates:
    """Follows the optimizers of this process.

    Several optimizers in one body make as many updates as the one of them that steps most often: a GAN whose two
    optimizers step for each batch makes one update per batch. Without any optimizer, a batch counts as an update.

    Args:
        not_exact: names an optimizer whose state no checkpoint holds.
        warn: prints a line that asks for an optimizer.
    """

    def __init__(
        self, *, not_exact: Callable[[str], None] = lambda _: None, warn: Callable[[str], None] = lambda _: None
    ) -> None:
        self._not_exact, self._warn = not_exact, warn
        self._total = self._batches = 0
        """Updates up to the last border, and all batches."""
        self._in_body: dict[str, int] = {}
        """Maps optimizers to their steps since the last border."""
        self._names: dict[int, str] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Maps each optimizer that is not registered to the batch of its first step; -1: it changes no registered
        parameter, or was named."""
        self._ids: set[int] = set()
        """Registered parameters."""
        self._used: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """Maps parameters to the gradient that the last step has used, and the number of writes to it."""
        self._last: list[Tensor] = []
        """The parameters of the optimizer that stepped last in this attempt."""
        self._stepped_before = self._has_ever_stepped = False
        self._versions = 0
        """Number of writes to the registered optimizers' parameters."""
        self.without = 0
        """Batches since the last update."""
        _hook_all(self)

    @property
    def total(self) -> int:
        return self._total + self._steps

    @property
    def _steps(self) -> int:
        """Updates since the last border. Optimizers that are not registered count if no registered one has stepped."""
        registered = [count for name, count in self._in_body.items() if name]
        return max(registered, default=self._in_body.get("", 0))

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Let every optimizer count that changes these."""
        self._ids.update(map(id, parameters))

    def follow(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of a registered optimizer."""
        self._names[id(optimizer)] = name
        self._optimizers.append(optimizer)
        self.watch(_parameters(optimizer))
        self._versions = self._count_writes()

    def follow_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Count steps that a scaler leaves out because gradients are infinite.

        Such a step is a step of the loop: its gradients are used up. If it did not count, a run whose scaler skips
        for long could neither save nor stop.
        """
        step = scaler.step

        @functools.wraps(step)
        def stepped(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(optimizer), "")
            before = self._in_body.get(name)
            result = step(optimizer, *args, **kwargs)
            if name and self._in_body.get(name) == before:
                self._stepped(optimizer)
            return result

        scaler.step = stepped  # type: ignore[method-assign] # of this object: torch has no hook for a skipped step

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        name = self._names.get(id(optimizer), "")
        if not name and not self._counts(optimizer):
            return
        self._in_body[name] = self._in_body.get(name, 0) + 1
        self._has_ever_stepped, self._last = True, _parameters(optimizer)
        pairs = [(id(parameter), gradient) for parameter in self._last if (gradient := parameter.grad) is not None]
        versions = versions_of([_local(gradient) for _, gradient in pairs])
        self._used.update(
            (key, (weakref.ref(gradient), version)) for (key, gradient), version in zip(pairs, versions, strict=True)
        )

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer that is not registered changes registered parameters. Names it where it lives longer
        than a body: then it has a state that no checkpoint holds."""
        if not self._ids:  # nothing is registered yet
            return False
        first = self._others.get(optimizer)
        if first is None:
            changes = any(id(parameter) in self._ids for parameter in _parameters(optimizer))
            first = self._others[optimizer] = self._batches if changes else -1
            return changes
        if 0 <= first < self._batches:
            kind = type(optimizer).__name__
            self._not_exact(f"{kind}: an optimizer that is not registered; a resume starts it from zero; register it")
            self._others[optimizer] = self._batches + (1 << 62)
        return first >= 0

    def end_body(self) -> None:
        """The body of a batch is over. Called before `total` and `is_clean` are read."""
        steps = self._steps
        if not steps and not self._has_ever_stepped:
            steps = int(self._have_changed()) if self._optimizers else 1
        self._total, self._stepped_before = self._total + steps, bool(steps)
        self._in_body.clear()
        self._batches += 1
        self.without = 0 if steps else self.without + 1
        if self.without == LONG:
            self._ask()

    def end_work(self) -> None:
        """The work at the end of an epoch is over."""
        self._stepped_before |= bool(self._steps)
        self._total += self._steps
        self._in_body.clear()

    def _have_changed(self) -> bool:
        """Whether the registered optimizers' parameters were written to since the last call."""
        before, self._versions = self._versions, self._count_writes()
        return self._versions != before

    def _count_writes(self) -> int:
        return sum(versions_of([_local(one) for each in self._optimizers for one in _parameters(each)]))

    def _ask(self) -> None:
        """Say which optimizer to register, if gradients are computed and nothing is updated."""
        kinds = sorted({type(one).__name__ for one in self._others})
        if kinds or any(parameter.grad is not None for each in self._optimizers for parameter in _parameters(each)):
            which = f"register the {' and the '.join(kinds)}" if kinds else "register the optimizer that steps"
            self._warn(f"no update in {LONG} batches: {which}, unless your loop accumulates for so long")

    @property
    def made_update(self) -> bool:
        """Whether there was an update in the last body or after it.

        An earlier one is not enough: FSDP2 keeps gradients that it has not summed yet out of sight.
        """
        return self._stepped_before or bool(self._in_body) or not (self._optimizers or self._has_ever_stepped)

    @property
    def looks_clean(self) -> bool:
        """Whether no gradient seems to be pending, judged by two parameters: enough for what is shown."""
        return self.made_update and are_zero(self._changed(self._last[:1] + self._last[-1:]))

    @property
    def is_clean(self) -> bool:
        """Whether there was an update, and no gradient that its optimizer could use came after it."""
        return self.made_update and are_zero(self._changed(self._last))

    def _changed(self, parameters: list[Tensor]) -> list[Tensor]:
        """Return gradients that were made or written to since a step has used them."""
        return [one.grad for one in parameters if one.grad is not None and not self.is_used(one)]

    def is_used(self, parameter: Tensor) -> bool:
        """Whether a step has used this parameter's gradient, and nothing was written to it since."""
        used, gradient = self._used.get(id(parameter)), parameter.grad
        return used is not None and used[0]() is gradient and [used[1]] == versions_of([_local(gradient)])

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"total": self.total, "batches": self._batches, "has_stepped": self._has_ever_stepped}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._total, self._batches, self._has_ever_stepped = state["total"], state["batches"], state["has_stepped"]
        self._in_body.clear()
        self._versions = self._count_writes()
        self._stepped_before = True  # gradients that were pending are in the checkpoint

    def count_end(self) -> None:
        """Count what a loop has done without any update as one, at its end: there is no checkpoint of step 0."""
        if not self.total and self._batches:
            self._total = 1


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _local(tensor: Any) -> Tensor:
    return local(tensor.detach()) if isinstance(tensor, DTensor) else tensor


def are_zero(gradients: list[Tensor]) -> bool:
    """Whether gradients hold nothing but zeros: then they were zeroed in place. Waits for the device at most once for
    each device and type."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        one = local(gradient.detach())
        one = one.coalesce().values() if one.is_sparse else one
        by_kind.setdefault((one.device, one.dtype), []).append(one.any())
    return not any(bool(torch.stack(found).any()) for found in by_kind.values())


def _hook_all(updates: Updates) -> None:
    """Call `updates` after each step of any optimizer, as long as it lives."""
    weak = weakref.ref(updates)

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (one := weak()) is not None:
            one._stepped(optimizer)

    weakref.finalize(updates, register_optimizer_step_post_hook(stepped).remove)
