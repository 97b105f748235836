"""`train bench collective`: how fast ranks add up a tensor, by its size, beside the speed of their link.

The rate is the bus bandwidth of NVIDIA's nccl-tests (doc/PERFORMANCE.md there): for a tensor of S bytes, every link
carries 2 (n - 1) / n S, so the rate of n ranks can be compared with that of one link. The speed of the link is that of
a plain copy of as many bytes on every rank at the same time: on GPUs to the next GPU, on a CPU within its memory.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ..parallel.world import World
from .compare import measure, torchruns

KILOBYTES = (64, 1024, 16384, 65536)
STEPS = 5
"""Number of reductions per block."""


def bench(folder: Path, times: int, ranks: int | None = None) -> str:
    """Measure with this many blocks of each size. Returns a table in Markdown, with what this machine cannot show.

    Args:
        ranks: default: those of torchrun; without torchrun the number of GPUs, or 2 processes on the CPU if there is at
            most one GPU.
    """
    gpus, rank_env = torch.cuda.device_count(), torchruns()
    ranks = ranks or (rank_env.size if rank_env else max(gpus, 2))
    on_gpus = gpus >= (rank_env.local_size if rank_env else ranks)
    ways = {f"{kind} {size}": functools.partial(way, size) for size in KILOBYTES for kind, way in _KINDS.items()}
    blocks = measure(folder, ranks, ways, STEPS, times)
    where = "GPUs over NCCL" if on_gpus else "one CPU over gloo"
    lines = [
        f"{ranks} ranks on {where}, medians of {times} blocks of {STEPS}:",
        "",
        "| size kB | all-reduce ms | bus GB/s | copy GB/s | bus / copy |",
        "|---|---|---|---|---|",
    ]
    for size in KILOBYTES:
        reduced, copied = (statistics.median(blocks[f"{kind} {size}"]) / STEPS for kind in _KINDS)
        bus, link = bus_rate(1024 * size, ranks, reduced), 1024 * size / copied
        lines.append(f"| {size} | {1000 * reduced:.3f} | {bus / 1e9:.2f} | {link / 1e9:.2f} | {bus / link:.2f} |")
    if not on_gpus:
        here = {0: "no GPU is here", 1: "one GPU is here"}.get(gpus, f"{gpus} GPUs are here")
        lines += ["", f"Not shown: {ranks} ranks over NCCL, for {here}."]
    return "\n".join(lines)


def bus_rate(size: int, ranks: int, seconds: float) -> float:
    """Return the bytes per second over each link for an all-reduce of `size` bytes that took this long."""
    return 2 * (ranks - 1) / ranks * size / seconds


def _all_reduce(kilobytes: int, world: World) -> Callable[[], None]:
    values = torch.zeros(256 * kilobytes, device=world.device)
    return lambda: (dist.all_reduce(values), None)[1]


def _copy(kilobytes: int, world: World) -> Callable[[], None]:
    values = torch.zeros(256 * kilobytes, device=world.device)
    if world.device.type == "cuda":
        target = torch.empty_like(values, device=f"cuda:{(world.local_rank + 1) % torch.cuda.device_count()}")
    else:
        target = torch.empty_like(values)
    return lambda: (target.copy_(values), None)[1]


_KINDS = {"all-reduce": _all_reduce, "copy": _copy}
