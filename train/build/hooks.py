"""What happens after each step beside the update: the task's state and its after_step(), and the average of the
weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..checkpoint.extra import Extra, check_equal
from ..checkpoint.state_dict import weights_of
from ..config import Config
from ..data.order import seed_of
from ..data.seeding import owned, seed_compute
from ..errors import TrainingFailed
from ..parallel.strategy import Strategy, local
from ..tasks import Task
from .objects import make_objects

_AVERAGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of buffers that can be averaged."""
_CHECKED = 2
"""Number of steps of an attempt after each of which the task's state is compared between ranks."""


class Average:
    """An exponential moving average of the weights: average = d average + (1 - d) weights, after each step.

    d is `ema.decay`; with `ema.warmup` W it is min(decay, (1 + step) / (W + step)), as TensorFlow's
    ExponentialMovingAverage does with W = 10. Buffers of finite numbers are averaged alike; others, and frozen
    parameters, are copied.
    """

    def __init__(self, module: nn.Module, config: Config) -> None:
        self._config = config.ema
        self._sharded: list[Any] = [part for part in module.modules() if hasattr(part, "reshard")]
        """With fsdp, the modules that gather parameters."""
        held = [one for one in module.state_dict(keep_vars=True).values() if isinstance(one, Tensor)]
        means = {id(now): now.detach().clone() for now in held}
        self.tensors = {name: means[id(now)] for name, now in zip(weights_of(module), held, strict=True)}
        """Maps a name of the model's state to its average. Tied names share a tensor; spread over ranks like the
        model."""
        pairs = {id(now): (local(means[id(now)]), now) for now in held}.values()
        # parameters and buffers, and not what they hold now: fsdp moves it in its first forward
        self._averaged = [(mean, now) for mean, now in pairs if _moves(now)]
        self._copied = [(mean, now) for mean, now in pairs if not _moves(now)]
        self._buffers = [mean for mean, now in pairs if not isinstance(now, nn.Parameter)]

    def update(self, step: int) -> None:
        """Add the weights after a step, counted from 1."""
        assert self._config.decay is not None
        decay, warmup = self._config.decay, self._config.warmup
        if warmup:
            decay = min(decay, (1 + step) / (warmup + step))
        means, weights = [mean for mean, _ in self._averaged], [local(now.detach()) for _, now in self._averaged]
        get_ema_multi_avg_fn(decay)(means, weights, step)
        for mean, now in self._copied:
            mean.copy_(local(now.detach()))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a saved average."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Context manager in which the model computes with the average. Changes of buffers inside are undone."""
        before = [mean.clone() for mean in self._buffers]
        self._swap()
        try:
            yield
        finally:
            self._swap()
            for mean, was in zip(self._buffers, before, strict=True):
                mean.copy_(was)

    def _swap(self) -> None:
        with torch.no_grad():
            for mean, now in (*self._averaged, *self._copied):
                own = local(now.detach())
                was = own.clone()
                own.copy_(mean)
                mean.copy_(was)
        for part in self._sharded:  # what it has gathered is of the other weights
            part.reshard()


def _moves(tensor: Tensor) -> bool:
    """Whether training changes the tensor by small steps. False for a frozen parameter and for a mask with
    infinities."""
    if isinstance(tensor, nn.Parameter):
        return tensor.requires_grad
    return tensor.dtype in _AVERAGED and bool(torch.isfinite(tensor).all())


class Hooks:
    """What happens after each step of the optimizer, on all ranks alike, and its state."""

    def __init__(self, task: Task, strategy: Strategy, config: Config) -> None:
        module, world = strategy.module, strategy.world
        self._task, self._strategy, self._module, self._config, self._world = task, strategy, module, config, world
        self.average = Average(module, config) if config.ema.decay is not None else None
        self._objects = make_objects(task, module, config=config, device=world.device)
        self.extra = Extra(self.average.tensors if self.average is not None else {}, self._objects)
        self.are_used = task.after_step is not None or self.average is not None or bool(self._objects)
        """Whether there is anything to do. Otherwise a step pays nothing for it."""
        holders = (module, task.after_step, *self._objects.values())
        self._generators = owned(*holders) if task.after_step is not None else []
        self._steps = 0

    def after_step(self, step: int) -> None:
        """Run what follows the update of a step, counted from 1.

        Raises:
            TrainingFailed: the task's own state differs between ranks, or after_step changes what is trained.
        """
        if self._task.after_step is not None:
            seed = seed_of(self._config.seed, step)
            seed_compute(seed, self._world.device, tag="after_step", own=self._generators)
            trained = [parameter.requires_grad for parameter in self._module.parameters()]
            with torch.no_grad():
                self._task.after_step(self._module, step, self._objects)
            if trained != [parameter.requires_grad for parameter in self._module.parameters()]:
                raise TrainingFailed(
                    f"after_step in {self._task.file} changes which parameters require gradients, but no checkpoint "
                    "holds that; use --freeze, or two runs, the second with --init"
                )
            self._strategy.buffers.restore()  # one that is reassigned (model.code = …)
        if self.average is not None:
            self.average.update(step)
        self._steps += 1
        if self._steps <= _CHECKED:
            self.check()

    def check(self) -> None:
        """Compare the task's state between ranks. A collective, if there is any state.

        Raises:
            TrainingFailed: it differs.
        """
        if self._objects:
            check_equal(self._world.gather(self.extra.digests()))
