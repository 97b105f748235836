"""Files go from each machine to the others in pieces; what is in the way of one is told to all, and nobody waits."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from train.checkpoint.exchange import exchange
from train.parallel.world import World
from train.record.manifest import file_digest

LARGE = 192 << 20
"""Bytes of a file, many times what a rank may need for it."""


def _folder(base: Path, rank: int) -> Path:
    """Ranks 0 and 1 are a machine, rank 2 is another."""
    return base / ("one" if rank < 2 else "two")


def _rank(rank: int, base: Path, listed: list[dict[str, Any]]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{base}/store", rank=rank, world_size=3)
    world = World(rank, 3, rank, torch.device("cpu"), leads=(0, 2)).with_own_group()
    world.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = ""
    try:
        exchange(world, _folder(base, rank), listed)
    except OSError as error:
        said = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    (base / f"said{rank}").write_text(f"{grown}\n{said}")
    world.barrier()  # nobody is left behind


def _exchanged(base: Path, listed: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Growth of memory in kB, and what was said, by rank."""
    torch.multiprocessing.start_processes(_rank, (base, listed), nprocs=3, start_method="spawn")
    told = [(base / f"said{rank}").read_text().split("\n", 1) for rank in range(3)]
    return [(int(grown), said) for grown, said in told]


@pytest.fixture
def written(tmp_path: Path) -> list[dict[str, Any]]:
    """What each rank has written into the folder of its machine."""
    names = (("__0_0.distcp", ".metadata"), ("__1_0.distcp",), ("__2_0.distcp", "empty"))
    sizes = {"__2_0.distcp": LARGE, "empty": 0}
    for rank, own in enumerate(names):
        _folder(tmp_path, rank).mkdir(exist_ok=True)
        for name in own:
            (_folder(tmp_path, rank) / name).write_bytes(os.urandom(sizes.get(name, 12_345 + rank)))
    return [{name: file_digest(_folder(tmp_path, rank) / name) for name in own} for rank, own in enumerate(names)]


@pytest.mark.minutes
def test_each_machine_has_all_and_no_rank_holds_a_file(tmp_path: Path, written: list[dict[str, Any]]) -> None:
    told = _exchanged(tmp_path, written)
    assert [said for _, said in told] == ["", "", ""]
    everything = {name: entry for part in written for name, entry in part.items()}
    for rank in (0, 2):
        folder = _folder(tmp_path, rank)
        assert {path.name: file_digest(path) for path in folder.iterdir()} == everything
    assert max(grown for grown, _ in told) * 1024 < LARGE / 2, told


@pytest.mark.minutes
def test_what_cannot_be_read_or_written_is_told_to_all(tmp_path: Path, written: list[dict[str, Any]]) -> None:
    (tmp_path / "two" / "__2_0.distcp").write_bytes(b"short")
    assert [("shorter" in said and "__2_0" in said) for _, said in _exchanged(tmp_path, written)] == [True] * 3
    taken = tmp_path / "one" / "__2_0.distcp"
    taken.unlink()
    taken.mkdir()  # a folder where the file is to be
    (tmp_path / "two" / "__2_0.distcp").write_bytes(b"short again")
    written[2]["__2_0.distcp"] = file_digest(tmp_path / "two" / "__2_0.distcp")
    assert ["directory" in said for _, said in _exchanged(tmp_path, written)] == [True] * 3
    taken.rmdir()
    (tmp_path / "two" / "__2_0.distcp").write_bytes(b"other bytes")  # as many
    assert ["other bytes" in said for _, said in _exchanged(tmp_path, written)] == [True] * 3
