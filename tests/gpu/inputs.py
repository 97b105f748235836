"""From samples on the host to batches on the device: our loader beside torch's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.gpu.harness import Row, Scale
from train.data.loader import Loader
from train.data.plan import MicroBatch


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


def part(scale: Scale) -> Iterator[Row]:
    """Batches a second with as many loader processes as there are cores for."""
    size, batch, count = (32, 16, 64) if scale.is_small else (224, 256, 1024)
    dataset, batches = Pictures(count, size), 6 if scale.is_small else 40
    workers = min(2 if scale.is_small else 8, len(os.sched_getaffinity(0)))
    theirs = _rate(scale, lambda: _torchs(scale, dataset, batch, batches, workers))
    ours = _rate(scale, lambda: _ours(scale, dataset, batch, batches, workers))
    figures = {"ours": ours * batch, "torch": theirs * batch, "workers": workers}
    found = f"{ours * batch:.0f} samples/s, {ours / theirs:.2f} times torch's DataLoader; {workers} processes"
    yield Row("loader to device", found, goal="1.0 of torch's", figures=figures)
    if scale.is_gpu:
        yield _copies(scale)


def _rate(scale: Scale, batches: Callable[[], Iterator[Any]]) -> float:
    """Batches a second, after the first two: processes are started by then."""
    began, count = 0.0, 0
    for number, _ in enumerate(batches()):
        if number == 1:
            began = time.perf_counter()
        count = number
    if scale.is_gpu:
        torch.cuda.synchronize()
    return (count - 1) / (time.perf_counter() - began)


def _ours(scale: Scale, dataset: Any, batch: int, batches: int, workers: int) -> Iterator[Any]:
    def plan() -> Iterator[MicroBatch]:
        order = np.random.default_rng(0)
        for number in range(batches):
            yield MicroBatch(number, 0, order.integers(len(dataset), size=batch), number)

    with Loader(dataset, None, None, workers, scale.place, None) as loader:
        yield from loader.batches(plan())


def _torchs(scale: Scale, dataset: Any, batch: int, batches: int, workers: int) -> Iterator[Any]:
    order = np.random.default_rng(0)
    sampler = [order.integers(len(dataset), size=batch).tolist() for _ in range(batches)]
    loader = DataLoader(
        dataset, batch_sampler=sampler, num_workers=workers, pin_memory=scale.is_gpu, prefetch_factor=4,
        multiprocessing_context="fork",
    )  # fmt: skip
    for each in loader:
        yield [tensor.to(scale.device, non_blocking=True) for tensor in each]


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
