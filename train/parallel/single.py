"""One process: on one device, or with nn.DataParallel on all GPUs that it sees."""

from __future__ import annotations

from torch import nn

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
        self.call = nn.DataParallel(model)
