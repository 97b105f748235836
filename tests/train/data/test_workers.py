"""Data sets that keep a file open give the right bytes to any number of loader processes."""

from __future__ import annotations

import _thread
import contextlib
import functools
import multiprocessing
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from train.data.loader import Loader
from train.data.plan import Plan, Sharing, micro_batches_of
from train.data.shards import shards
from train.errors import Refused

pytestmark = pytest.mark.never_forgiven

COUNT, SIZE = 512, 3000
ROWS = np.random.default_rng(0).integers(0, 256, (COUNT, SIZE), dtype=np.uint8)


class Rows(Dataset[Any]):
    """Row `index`, read through a handle that was opened before there were workers."""

    def __init__(self, kind: str, folder: Path) -> None:
        path = folder / f"rows.{kind}"
        content = {f"{index}": row.tobytes() for index, row in enumerate(ROWS)}
        if kind == "plain":
            path.write_bytes(ROWS.tobytes())
            self.handle: Any = path.open("rb")
            path.unlink()  # it can be read all the same
        elif kind == "sqlite":
            self.handle = sqlite3.connect(path)
            self.handle.execute("create table rows (number integer primary key, content blob)")
            self.handle.executemany("insert into rows values (?, ?)", enumerate(content.values()))
            self.handle.commit()
        elif kind == "h5py":
            import h5py

            with h5py.File(path, "w") as file:
                file.create_dataset("rows", data=ROWS, chunks=(1, SIZE), compression="gzip")
            self.handle = h5py.File(path, "r")
        elif kind == "lmdb":
            import lmdb

            with lmdb.open(str(path), map_size=1 << 24) as made, made.begin(write=True) as writing:
                for key, row in content.items():
                    writing.put(key.encode(), row)
            self.handle = lmdb.open(str(path), readonly=True, lock=False)
        elif kind == "arrow":
            datasets = pytest.importorskip("datasets", reason="the station's image has no room for it")
            datasets.Dataset.from_dict({"row": [*content.values()]}).save_to_disk(path)
            self.handle = datasets.load_from_disk(path)
        elif kind == "parquet":
            pyarrow = pytest.importorskip("pyarrow", reason="the station's image has no room for it")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.table({"row": [*content.values()]}), path, row_group_size=20)
            self.handle = shards(path)
            _ = self.handle[0]  # opened here, too

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.handle, sqlite3.Connection):
            (content,) = self.handle.execute("select content from rows where number = ?", (index,)).fetchone()
        elif hasattr(self.handle, "seek"):
            self.handle.seek(index * SIZE)
            content = b""
            while len(content) < SIZE:  # in pieces, as libraries do: between two of them another process may seek
                content += self.handle.read(min(100, SIZE - len(content)))
        elif hasattr(self.handle, "begin"):
            with self.handle.begin() as reading:
                content = reading.get(str(index).encode())
        elif hasattr(self.handle, "keys"):
            content = self.handle["rows"][index].tobytes()
        else:
            content = self.handle[index]["row"]
        return index, torch.frombuffer(bytearray(content), dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["plain", "sqlite", "h5py", "lmdb", "arrow", "parquet"])
def test_workers_do_not_move_each_others_place_in_an_open_file(kind: str, tmp_path: Path) -> None:
    dataset = Rows(kind, tmp_path)
    plan = Plan(length=COUNT, batch_size=16, micro_batch_size=16)
    with Loader(dataset, {}, collate=None, workers=3, device=torch.device("cpu"), dtype=None) as loader:
        seen = 0
        for _, (indices, rows) in loader.batches(
            micro_batches_of(plan, Sharing(), first=0, last=2 * plan.steps_per_epoch)
        ):
            for index, row in zip(indices.tolist(), rows, strict=True):
                assert np.array_equal(row.numpy(), ROWS[index])
                seen += 1
        assert seen == 2 * COUNT


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_a_file_that_workers_may_not_open_is_refused_with_the_way_out(tmp_path: Path) -> None:
    dataset = Rows("sqlite", tmp_path)
    (tmp_path / "rows.sqlite").chmod(0)
    with contextlib.closing(dataset.handle), pytest.raises(Refused, match=r"rows\.sqlite .* open it in __getitem__"):
        Loader(dataset, {}, collate=None, workers=2, device=torch.device("cpu"), dtype=None)


def waits(ends: threading.Event, begun: threading.Event | None = None) -> None:
    if begun is not None:
        begun.set()
    ends.wait()


class Refreshing(threading.Thread):
    """A thread whose work is a method of its own."""

    def __init__(self, ends: threading.Event) -> None:
        super().__init__(daemon=True, name="own class")
        self.ends = ends

    def run(self) -> None:
        self.ends.wait()


@contextlib.contextmanager
def running(kind: str) -> Iterator[None]:
    """A thread of this kind, until the end."""
    ends = threading.Event()
    with contextlib.ExitStack() as held:
        held.callback(ends.set)
        if kind == "refresh":
            threading.Thread(target=functools.partial(waits, ends), name="refresh", daemon=True).start()
        elif kind == "own class":
            Refreshing(ends).start()
        elif kind == "pool":
            pool = held.enter_context(ThreadPoolExecutor(1, "pool"))
            pool.submit(int).result()  # idle now: in a worker nobody would take what it is given
        elif kind == "timer":
            timer = threading.Timer(600, print)
            timer.name = "timer"
            timer.start()
            held.callback(timer.cancel)
        elif kind == "without a name":
            begun = threading.Event()
            _thread.start_new_thread(waits, (ends, begun))
            begun.wait()
        elif kind == "of tqdm":
            from tqdm import tqdm

            bar = held.enter_context(tqdm(range(3)))  # starts the thread that watches all bars
            assert bar.monitor is not None and bar.monitor.is_alive()
        elif kind == "ending":
            threading.Thread(target=time.sleep, args=(0.3,)).start()
        yield


@pytest.mark.parametrize("kind", ["refresh", "own class", "pool", "timer", "without a name"])
def test_workers_are_not_forked_beside_a_thread_of_the_task(kind: str) -> None:
    with running(kind), pytest.raises(Refused, match=rf"1 thread .*\({kind}.*\).*__getitem__.*--data\.workers 0"):
        Loader(range(8), {}, collate=None, workers=1, device=torch.device("cpu"), dtype=None)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kind", ["of tqdm", "ending"])
def test_threads_of_libraries_and_those_that_end_are_in_nobodys_way(kind: str) -> None:
    with running(kind), Loader(range(8), {}, collate=None, workers=1, device=torch.device("cpu"), dtype=None) as loader:
        assert (
            len(
                list(
                    loader.batches(
                        micro_batches_of(Plan(length=8, batch_size=4, micro_batch_size=4), Sharing(), first=0, last=2)
                    )
                )
            )
            == 2
        )


def test_the_lock_of_a_run_stays_held_by_its_workers(tmp_path: Path) -> None:
    from train.run.run_folder import Run

    run = Run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "lock").touch()
    lock = run.acquire()
    assert lock is not None
    with Loader(Rows("plain", tmp_path), {}, collate=None, workers=2, device=torch.device("cpu"), dtype=None) as loader:
        next(
            loader.batches(
                micro_batches_of(Plan(length=COUNT, batch_size=16, micro_batch_size=16), Sharing(), first=0, last=8)
            )
        )
        lock.release()
        assert run.alive()
    assert not run.alive()
