"""One process: on one device, or with nn.DataParallel on all GPUs that it sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from train.data.order import seed_of
from train.parallel.strategy import Spread


class Single(Spread):
    """One rank. Nothing is communicated."""


class DataParallel(Spread):
    """nn.DataParallel: one process cuts each micro batch into a part for every GPU. For comparison and teaching.

    Slower than ddp: threads of one interpreter, and the model is copied to the other GPUs in every forward.
    """

    tells_exposed = False

    def _take(self, model: nn.Module) -> None:
        super()._take(model)
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
