"""Times ways to do the same step, in turn block by block on the same ranks, so that a slow moment meets all of them."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from ..config import Config
from ..parallel.devices import pick_device, take_device
from ..parallel.rank_env import RankEnv, is_under_torchrun, read_rank_env
from ..parallel.world import World, join

Way = Callable[[World], Callable[[], None]]
"""Makes the step of a way on a rank."""
Blocks = dict[str, list[float]]
"""The seconds of each block, by way."""
_PRELOAD = ("torch", "train.parallel.preload")
"""Modules that a server has loaded when it forks ranks."""


def torchruns() -> RankEnv | None:
    """Return the rank env of this process under torchrun; None without torchrun."""
    return read_rank_env() if is_under_torchrun() else None


def measure(folder: Path, ranks: int, ways: Mapping[str, Way], steps: int, times: int) -> Blocks:
    """Time `times` blocks of `steps` steps of each way.

    Args:
        ranks: number of processes to start. Under torchrun its ranks measure; all of them call this once.
        ways: maps a name to the function that makes the step on a rank; a function of a module, because it is sent to
            other processes.
    """
    rank_env = torchruns()
    if rank_env is not None:
        return _timed(rank_env, ways, steps, times)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as name:
        method = "forkserver"
        if torch.cuda.device_count():  # which GPUs a process sees is its starter's to say
            method = "spawn"
        multiprocessing.set_forkserver_preload(list(_PRELOAD))
        given = (ranks, name, dict(ways), steps, times)
        torch.multiprocessing.start_processes(_rank, given, nprocs=ranks, start_method=method)
        return dict(json.loads((Path(name) / "blocks.json").read_text()))


def quartiles(seconds: list[float], plain: list[float]) -> list[float]:
    """Return the three quartiles of the ratios of blocks to those of the same turn."""
    ratios = [one / other for one, other in zip(seconds, plain, strict=True)]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios  # Python 3.11 wants two


def ratio(seconds: list[float], plain: list[float]) -> tuple[float, str]:
    """Return the median of the ratios of blocks to those of the same turn, and their quartiles as text."""
    low, middle, high = quartiles(seconds, plain)
    return middle, f"{low:.3f} to {high:.3f}"


def _rank(rank: int, size: int, folder: str, ways: dict[str, Any], steps: int, times: int) -> None:
    blocks = _timed(
        RankEnv(rank=rank, size=size, local_rank=rank, local_size=size, init=f"file://{folder}/store"),
        ways,
        steps,
        times,
    )
    if rank == 0:
        Path(folder, "blocks.json").write_text(json.dumps(blocks))


def _timed(rank_env: RankEnv, ways: Mapping[str, Way], steps: int, times: int) -> Blocks:
    """Return the seconds of each block of each way on this rank."""
    torch.set_num_threads(1)
    config = Config(device="auto" if torch.cuda.device_count() >= rank_env.local_size else "cpu")
    device = pick_device(config, rank_env.local_size, rank_env.local_rank)
    take_device(device)
    world = join(config, rank_env, device)
    made = {name: way(world) for name, way in ways.items()}
    blocks: Blocks = {name: [] for name in made}
    for count in range(times + 2):
        for name, step in made.items():
            world.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if count > 1:  # DDP lays out its buckets at first
                blocks[name].append(time.perf_counter() - began)
    if world.size > 1:
        world.barrier()
        dist.destroy_process_group()
    return blocks
