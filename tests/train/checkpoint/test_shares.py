"""All ranks verify a checkpoint, and all agree on what one process finds."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from train.checkpoint import manifest as manifests
from train.checkpoint import shares
from train.checkpoint.shares import Shares, share_of
from train.parallel.world import World
from train.run.record import FORMAT
from train.run.run_folder import Run

pytestmark = pytest.mark.never_forgiven

RANKS, SECONDS = 3, 1.0
"""Seconds that a collective of these ranks may take."""
FILES = {"__0_0.distcp": 5000, "__1_0.distcp": 4000, "__2_0.distcp": 3000, "__3_0.distcp": 2000, ".metadata": 100}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with two checkpoints."""
    made = Run(tmp_path / "run")
    for step in (1, 2):
        folder = made.checkpoint(step)
        folder.mkdir(parents=True)
        for name, size in FILES.items():
            (folder / name).write_bytes(bytes([step]) * size)
        listed = {name: manifests.file_digest(folder / name) for name in FILES}
        text = manifests.manifest_text({"format": FORMAT, "step": step, "files": listed})
        (folder / manifests.MANIFEST).write_text(text)
    return made


def on_ranks(folder: Path, action: Callable[[World], object]) -> list[str]:
    """What the action returned on each rank; '' if it ended otherwise."""

    def one(rank: int) -> None:
        patience = datetime.timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", f"file://{folder}/meet", world_size=RANKS, rank=rank, timeout=patience)
        world = World(rank, size=RANKS, local_rank=rank, device=torch.device("cpu"))
        world.timeout = patience
        (folder / f"said{rank}").write_text(repr(action(world)))
        os._exit(0)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=one, args=(rank,)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode is not None
    said = [folder / f"said{rank}" for rank in range(RANKS)]
    return [path.read_text() if path.exists() else "" for path in said]


def newest(run: Run, world: World) -> object:
    made = Shares(run, world, lambda: None)
    return made.on_first(lambda: manifests.newest_valid(run, check=made.check))


@pytest.mark.parametrize("damaged", [[], [".metadata"], ["__0_0.distcp"], ["__3_0.distcp", "__1_0.distcp"], [*FILES]])
def test_all_ranks_find_what_one_process_finds_and_name_the_same_file(
    run: Run, tmp_path: Path, damaged: list[str]
) -> None:
    for number, name in enumerate(damaged):
        path = run.checkpoint(2) / name
        path.write_bytes(path.read_bytes()[:-1] + b"?" * (1 + number % 2))  # every second one is longer, too
    expected = manifests.newest_valid(run)
    assert expected[0] == (1 if damaged else 2)
    assert on_ranks(tmp_path, lambda world: newest(run, world)) == RANKS * [repr(expected)]


def test_each_file_is_one_ranks_and_no_rank_reads_more_than_it_must() -> None:
    files = {name: {"size": size} for name, size in FILES.items()}
    parts = [share_of(files, rank, RANKS) for rank in range(RANKS)]
    assert sorted(name for part in parts for name in part) == sorted(files)
    assert [sum(one["size"] for one in part.values()) for part in parts] == [5000, 4100, 5000]


def test_a_share_may_take_longer_than_a_collective(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(folder: Path, files: manifests.Files, beat: Callable[[], None]) -> dict[str, ValueError]:
        time.sleep(3 * SECONDS if "__1_0.distcp" in files else 0)
        return manifests.check_files(folder, files, beat)

    monkeypatch.setattr(shares, "check_files", slow)
    assert on_ranks(tmp_path, lambda world: newest(run, world)) == RANKS * [repr(manifests.newest_valid(run))]


def test_a_rank_that_dies_over_its_share_ends_the_wait_of_the_others(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(folder: Path, files: manifests.Files, beat: Callable[[], None]) -> dict[str, ValueError]:
        if "__1_0.distcp" in files:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    monkeypatch.setattr(shares, "check_files", dies)

    def action(world: World) -> str:
        with pytest.raises(RuntimeError):
            newest(run, world)
        return "ended"

    assert sorted(on_ranks(tmp_path, action)) == ["", "'ended'", "'ended'"]


def test_signs_of_life_come_at_full_minutes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ranks give them together, and a stop that waits less than that for one is not put off."""
    now, signs = [90.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    made = Shares(run, World(0, size=1, local_rank=0, device=torch.device("cpu")), lambda: signs.append(now[0]))
    monkeypatch.setattr(manifests, "_PIECE", 100)
    digest = manifests.file_digest

    def timed(path: Path, beat: Callable[[], None]) -> dict[str, object]:
        now[0] += 20
        return digest(path, beat)

    monkeypatch.setattr(manifests, "file_digest", timed)
    made.on_first(lambda: manifests.newest_valid(run, check=made.check))
    assert signs == [130.0, 190.0]
