"""`python -m benchmarks.writing`: what it brings that checkpoints are written past the page cache (O_DIRECT).

Ours is the file of checkpoint/writer.py. Beside it stand ordinary writes of the same bytes, hashed by another thread
and ended by fsync, as they are and with their pages dropped from the cache on the way (posix_fadvise).
"""

from __future__ import annotations

import functools
import hashlib
import os
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import command
from train.checkpoint.writer import DurableFile

_PIECE, _DROP = 4 << 20, 32 << 20
"""Bytes of one write, and of those after which pages are dropped."""


def bench(folder: Path, times: int, megabytes: int) -> str:
    """Write this much with each way in turn. Returns a table in Markdown."""
    piece, count = os.urandom(_PIECE), (megabytes << 20) // _PIECE
    ways: dict[str, Callable[[Path, bytes, int], None]] = {
        "past the page cache": _direct,
        "ordinary writes, pages dropped": functools.partial(_ordinary, drops=True),
        "ordinary writes": functools.partial(_ordinary, drops=False),
    }
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    for _ in range(times):
        for way, write in ways.items():
            os.sync()
            cached, used, begun = _cached(), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            write(folder / "file", piece, count)
            took, now = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
            cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
            found[way].append((took, cpu, _cached() - cached))
            (folder / "file").unlink()
    lines = ["| way | s | CPU s | MB left in the page cache |", "|---|---|---|---|"]
    for way, rows in found.items():
        took, cpu, left = map(statistics.median, zip(*rows, strict=True))
        lines.append(f"| {way} | {took:.2f} | {cpu:.2f} | {max(left, 0):.0f} |")
    return "\n".join(lines)


def _direct(path: Path, piece: bytes, count: int) -> None:
    with DurableFile(path) as file:
        for _ in range(count):
            file.write(piece)


def _ordinary(path: Path, piece: bytes, count: int, *, drops: bool) -> None:
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as hasher, path.open("wb", buffering=0) as file:
        for number in range(count):
            hashed = hasher.submit(digest.update, piece)
            file.write(piece)
            if drops and number * _PIECE % _DROP == 0:
                os.posix_fadvise(file.fileno(), 0, number * _PIECE, os.POSIX_FADV_DONTNEED)
            hashed.result()
        os.fsync(file.fileno())
        if drops:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cached() -> float:
    """Return the megabytes of files that the page cache of this machine holds."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["Cached"].split()[0]) / 1024


if __name__ == "__main__":
    command.run(bench, times=3, megabytes=2048)
