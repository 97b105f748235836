"""`python -m benchmarks.session`: what a session costs a loop on DataLoader.

One process trains the same perceptron (64-256-10 on scans of digits, batches of 64 that are read item by item) in three
ways, in turns of some hundred steps: a bare loop on DataLoader, the same loop in a session, and in a session that calls
log() at each step. Once without data workers and once with two. The figure is CPU time of the process that trains; the
ratio is that of two blocks of the same turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from benchmarks import command
from train.bench.compare import ratio
from train.run import folders

BARE, SESSION, LOGGING = "a loop on DataLoader", "in a session", "in a session, log() at each step"
BATCH, BATCHES = 64, 1000
"""Samples of a batch, and batches of an epoch."""


class Scans(Dataset[Any]):
    """Scans of digits, item by item."""

    def __init__(self) -> None:
        from train.tasks import digits

        scans, _ = digits.datasets(argparse.Namespace(task=digits.Settings(shift=0)))
        self._images, self._digits = scans.images.flatten(1), scans.digits

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        index %= len(self._images)
        return self._images[index], self._digits[index]


def bench(folder: Path, steps: int, times: int) -> str:
    """Measure with this many turns of this many steps each. Returns a table in Markdown."""
    lines = ["| way | data workers | CPU, us a step | / DataLoader | quartiles |", "|---|---|---|---|---|"]
    for workers in (0, 2):
        run = folders.create(folder, f"workers{workers}", files={}, record={"script": __file__})
        number, file = run.begin_attempt(1, None), folder / "seconds.json"
        where = {"TRAIN_RUN_DIR": str(run.path), "TRAIN_ATTEMPT": str(number)}
        pid = os.fork()
        if not pid:
            _turns(where, workers, steps, times, file)
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise SystemExit(f"the loop has ended with code {code}")
        blocks: dict[str, list[float]] = json.loads(file.read_text())
        for way, seconds in blocks.items():
            middle, quartiles = ratio(seconds, blocks[BARE])
            microseconds = 1e6 * statistics.median(seconds) / steps
            lines.append(f"| {way} | {workers} | {microseconds:.1f} | {middle:.3f} | {quartiles} |")
    return "\n".join(lines)


def _turns(where: dict[str, str], workers: int, steps: int, times: int, file: Path) -> None:
    """Let the ways take turns, in a process of its own: it opens a session."""
    from train.sessions.session import session

    os.environ |= where
    torch.set_num_threads(1)
    opened = session(seed=0)
    data, logs = Scans(), {"each": False}
    loops = {BARE: _bare(data, workers), SESSION: _in_session(opened, data, workers, logs)}
    blocks: dict[str, list[float]] = {way: [] for way in (BARE, SESSION, LOGGING)}
    for turn in range(-1, times):  # the first one warms up
        for way, seconds in blocks.items():
            logs["each"] = way == LOGGING
            loop, before = loops.get(way, loops[SESSION]), time.process_time()
            for _ in itertools.islice(loop, steps):
                pass
            if turn >= 0:
                seconds.append(time.process_time() - before)
    file.write_text(json.dumps(blocks))
    os._exit(0)


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def _bare(data: Any, workers: int) -> Iterator[None]:
    model, optimizer = _model()
    loader = DataLoader(data, BATCH, shuffle=True, drop_last=True, num_workers=workers)
    while True:
        for inputs, classes in loader:
            loss = cross_entropy(model(inputs), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def _in_session(opened: Any, data: Any, workers: int, logs: dict[str, bool]) -> Iterator[None]:
    model, optimizer = _model()
    loader = opened.loader(data, BATCH, num_workers=workers)
    opened.register(model=model, optimizer=optimizer)
    for _ in opened.epochs():
        for inputs, classes in loader:
            loss = cross_entropy(model(inputs), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if logs["each"]:
                opened.log(loss=loss, lr=0.05)
            yield


if __name__ == "__main__":
    command.run(bench, steps=200, times=60)
