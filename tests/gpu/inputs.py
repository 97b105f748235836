"""From samples on the host to batches on the device: our loader beside torch's, and what is said of waiting."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.gpu import overlap, waits
from tests.gpu.harness import UNCHECKED, Case, Row, Scale, mebibytes
from train.data.loader import Loader
from train.data.plan import MicroBatch

_WHAT = "loader to device"
_AHEAD = 4
"""Batches that each loader process makes before they are asked for; our loader's number."""
_SHARED = "/dev/shm"
"""Where batches lie on their way from a loader process."""


class Pictures(Dataset[tuple[Tensor, int]]):
    """uint8 pictures that cost some work each, as cropping and flipping do."""

    def __init__(self, count: int, size: int) -> None:
        self.pictures = torch.randint(256, (count, 3, size + 32, size + 32), dtype=torch.uint8)
        self.size = size

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        y, x, flip = torch.randint(32, (3,)).tolist()
        part = self.pictures[index, :, y : y + self.size, x : x + self.size]
        return (part.flip(2) if flip & 1 else part).contiguous(), index


@dataclasses.dataclass(frozen=True)
class _Measure:
    """What both loaders are to do."""

    scale: Scale
    dataset: Pictures
    batch: int
    workers: int

    def rate(self, batches: Callable[[_Measure], Iterator[Any]], seconds: float) -> float:
        """Samples a second, once what the workers fetch ahead of the first batch is used up."""
        made, ahead, began, count = batches(self), self.workers * _AHEAD + 2, 0.0, 0
        with contextlib.closing(made):  # type: ignore[type-var]
            for count, _ in enumerate(made, 1):
                if count == ahead:
                    self._wait()
                    began = time.perf_counter()
                if began and time.perf_counter() - began >= seconds and count > ahead + 1:
                    break
            self._wait()
            return (count - ahead) * self.batch / (time.perf_counter() - began)

    def _wait(self) -> None:
        if self.scale.is_gpu:
            torch.cuda.synchronize()


def part(scale: Scale) -> Iterator[Case]:
    """Batches on their way, and what is said of waiting for them."""
    yield Case(_WHAT, 9, _beside, (scale,))
    if scale.is_gpu:
        yield Case("pinned memory to the device", 1, _copies, (scale,))
    yield from overlap.cases(scale)
    yield from waits.cases(scale)


def _beside(scale: Scale) -> Row:
    """Samples a second with as many loader processes as there are cores for."""
    size, batch, count = (32, 16, 64) if scale.is_small else (224, 256, 1024)
    workers = min(2 if scale.is_small else 8, len(os.sched_getaffinity(0)))
    needed, free = (workers * _AHEAD + 4) * batch * 3 * size**2, shutil.disk_usage(_SHARED).free
    if needed > free:
        found = f"{workers} loader processes need {mebibytes(needed)} of {_SHARED}, where {mebibytes(free)} are free"
        return Row(_WHAT, found, UNCHECKED)
    return _compared(_Measure(scale, Pictures(count, size), batch, workers), 0.3 if scale.is_small else 1.2)


def _compared(measure: _Measure, seconds: float) -> Row:
    """Each once before: who goes first opens the device and finds the pinned memory that both use."""
    torch.zeros(1, device=measure.scale.device)
    for loader in (_torchs, _ours):
        measure.rate(loader, 0.0)
    pairs = [(measure.rate(_ours, seconds), measure.rate(_torchs, seconds)) for _ in range(3)]
    ours, theirs = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    figures = {"ours": ours, "torch": theirs, "ratio": ratio, "workers": measure.workers}
    found = f"{ours:.0f} samples/s, {ratio:.2f} times torch's DataLoader; {measure.workers} processes"
    return Row(_WHAT, found, goal="1.0 of torch's", figures=figures)


def _ours(measure: _Measure) -> Iterator[Any]:
    def plan() -> Iterator[MicroBatch]:
        for number, indices in enumerate(_indices(measure)):
            yield MicroBatch(number, 0, indices, number)

    with Loader(measure.dataset, None, None, measure.workers, measure.scale.place, None) as loader:
        yield from loader.batches(plan())


def _torchs(measure: _Measure) -> Iterator[Any]:
    is_gpu = measure.scale.is_gpu
    loader = DataLoader(
        measure.dataset, batch_sampler=_Lists(measure), num_workers=measure.workers, pin_memory=is_gpu,
        prefetch_factor=_AHEAD, multiprocessing_context="fork",
    )  # fmt: skip
    for each in loader:
        yield [tensor.to(measure.scale.device, non_blocking=True) for tensor in each]


class _Lists:
    """A batch sampler without end."""

    def __init__(self, measure: _Measure) -> None:
        self._measure = measure

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in _indices(self._measure))


def _indices(measure: _Measure) -> Iterator[Any]:
    order = np.random.default_rng(0)
    while True:
        yield order.integers(len(measure.dataset), size=measure.batch)


def _copies(scale: Scale) -> Row:
    """How fast pinned memory reaches the device."""
    here = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=scale.device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(8):
        there.copy_(here, non_blocking=True)
    torch.cuda.synchronize()
    rate = 8 * here.numel() / (time.perf_counter() - began)
    return Row("pinned memory to the device", f"{rate / 1e9:.1f} GB/s", figures={"bytes_per_s": rate})
