"""The rank is this process: `train run` alone, and rank 0 of a torchrun of somebody else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from train.record.outcome import Outcome
from train.runs.processes import Guard


class Here:
    """One attempt, which has ended when `start` returns.

    Args:
        train: trains the rank to its end, given the attempt.
        ranks: how many there are with those of other processes.
    """

    problem = ""
    repeats = False

    def __init__(self, train: Callable[[int], Outcome], ranks: int = 1) -> None:
        self.ranks, self._train = ranks, train
        self._told: dict[int, Outcome] = {}

    def start(self, attempt: int) -> Guard | None:
        self._told = {0: self._train(attempt)}
        return None

    def wait(self) -> bool:
        return True

    def pids(self) -> list[int]:
        return [os.getpid()]

    def living(self) -> list[int]:
        return self.pids()

    def signal(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def exits(self) -> Mapping[int, int]:
        return {}

    def kept(self) -> int:
        return 0

    def told(self) -> Mapping[int, Outcome]:
        return self._told
