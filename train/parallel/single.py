"""One process: on one device, or with nn.DataParallel on all GPUs that it sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from train.data.order import seed_of
from train.parallel.strategy import BaseStrategy


class Single(BaseStrategy):
    """One rank. Nothing is communicated."""


class DataParallel(BaseStrategy):
    """nn.DataParallel: one process cuts each micro batch into a part for every GPU. For comparison and teaching.

    Slower than ddp: threads of one interpreter, and the model is copied to the other GPUs in every forward.
    """

    measures_communication = False

    def take(self, model: nn.Module) -> None:
        super().take(model)
        self._replicas = _Replicas(model)

    def compute(self, loss: Callable[[nn.Module], Tensor]) -> Tensor:
        return loss(self._replicas)


class _Replicas(nn.DataParallel):
    """Each GPU draws from a generator of its own, seeded by the first one's seed whenever that has a new one."""

    _seed: int | None = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        first = torch.cuda.default_generators[self.device_ids[0]].initial_seed() if self.device_ids else None
        if first is not None and first != self._seed:
            self._seed = first
            for index in self.device_ids[1:]:
                torch.cuda.default_generators[index].manual_seed(seed_of(first, f"gpu {index}") & (2**63 - 1))
        return super().forward(*inputs, **kwargs)

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        return super().parallel_apply(as_here(replicas, self.src_device_obj.type), inputs, kwargs)


def as_here(replicas: Sequence[Callable[..., Any]], device_type: str) -> list[Callable[..., Any]]:
    """The same functions, to be called in other threads with the autocast of this one.

    nn.DataParallel passes on whether autocast is on, but not its type, which each thread has for itself: fp16 in a new
    one on a GPU, in which a bf16 run's unscaled gradients would become 0.
    """
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def alike(replica: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any, **kwargs: Any) -> Any:
            with torch.autocast(device_type, dtype=dtype, enabled=enabled):
                return replica(*inputs, **kwargs)

        return call

    return [alike(replica) for replica in replicas]
