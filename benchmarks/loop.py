"""`python -m benchmarks.loop`: what a step costs beyond the model's arithmetic.

The same model, loss, data, batch size and optimizer are used in hand-written loops (one indexes tensors, one uses a
DataLoader), in the engine with a run folder and every default feature on, and in the trainers that are installed (the
extra `libraries`, as after `make setup`). Each run is one process with one rank and one thread. The figure is CPU time
of all threads over stretches of some thousand steps, the least of all stretches of all runs: other work on the machine
takes caches and clock, so it can only add time.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks import command, small
from train import hash_seed
from train.errors import EXIT_FINISHED
from train.launcher import checks
from train.launcher.request import Request
from train.programs import TASK
from train.run import folders
from train.run.spec import read_spec
from train.signals import StopRequest
from train.supervise.attempts import Supervisor
from train.supervise.decide import LaunchMode
from train.supervise.ranks import TaskRanks
from train.zygote.client import CHECKS, RANKS, acquire

TENSORS, LOADER, TRAIN = "a loop that indexes tensors", "a loop on DataLoader", "train"


@dataclass(frozen=True)
class Subject:
    """What is trained: its name in small.py, the samples of a batch, and the steps at which marks are set."""

    what: small.What
    batch: int
    first: int
    stride: int
    marks: int

    @property
    def steps(self) -> int:
        return self.first + (self.marks - 1) * self.stride + 1


SUBJECTS = {
    "mlp": Subject("mlp", 64, 1000, 2000, 5),
    "resnet18": Subject("resnet18", 16, 4, 5, 5),
}


@dataclass(frozen=True)
class Cost:
    """Cost of one run: CPU seconds per step in each stretch, and bytes of memory added between the first and the
    last."""

    seconds: list[float]
    memory: int


def bench(folder: Path, model: str, times: int) -> str:
    """Measure each way this many times, in turn. Returns a table in Markdown, and what is missing."""
    if model not in SUBJECTS:
        raise SystemExit(f"--model {model}: choose one of {', '.join(SUBJECTS)}")
    subject = SUBJECTS[model]
    _silently(forkserver.ensure_running)  # its lines are no figures
    there = {way: make for way, (package, make) in _TRAINERS.items() if importlib.util.find_spec(package)}
    found: dict[str, list[Cost]] = {way: [] for way in (TENSORS, LOADER, TRAIN, *there)}
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as place:
        for turn in range(times):
            for way, costs in found.items():
                costs.append(_cost(Path(place), subject, way, turn))
    least = {way: min(min(cost.seconds) for cost in costs) for way, costs in found.items()}
    lines = [
        f"| {model} | CPU, us a step | / indexes tensors | / DataLoader "
        f"| memory from step {subject.first} to {subject.steps - 1} |",
        "|---|---|---|---|---|",
    ]
    for way, seconds in least.items():
        memory = statistics.median(cost.memory for cost in found[way])
        lines.append(
            f"| {way} | {1e6 * seconds:.1f} | {seconds / least[TENSORS]:.3f} | {seconds / least[LOADER]:.3f} "
            f"| {memory / 1e6:+.1f} MB |"
        )
    missing = [way for way in _TRAINERS if way not in there]
    if missing:
        lines.append(f"\nnot installed here: {', '.join(missing)}")
    return "\n".join(lines)


def _silently(start: Callable[[], None]) -> None:
    """Start a server of processes without output; its processes have none either."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        start()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _cost(folder: Path, subject: Subject, way: str, turn: int) -> Cost:
    """Return the cost of one run of a way."""
    marks = folder / "marks.json"
    settings = small.Settings(subject.what, subject.first, subject.stride, subject.marks, str(marks))
    if way == TRAIN:
        _train(folder, f"turn-{turn}", subject, settings)
    else:
        process = multiprocessing.get_context("forkserver").Process(target=_loop, args=(way, subject, settings, folder))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{way}: {(folder / 'log').read_text().strip()}")
    found = json.loads(marks.read_text())
    marks.unlink()
    seconds = [(after - before) / subject.stride for (before, _), (after, _) in itertools.pairwise(found)]
    return Cost(seconds, found[-1][1] - found[0][1])


def _train(folder: Path, name: str, subject: Subject, settings: small.Settings) -> None:
    """Do what every run does: check, record, train by a rank, keep snapshots, save at the end."""
    flags = {f"task.{key}": str(value) for key, value in vars(settings).items()}
    flags |= {"steps": str(subject.steps), "batch_size": str(subject.batch), "cpu_threads": "1"}
    prepared = checks.prepare(Request(task=small.__file__, flags=flags))
    run = folders.create(folder, name, files=prepared.files, record=prepared.record)
    lock = run.acquire()
    assert lock is not None  # nobody else knows of it
    zygote = acquire(hash_seed.with_seed(os.environ), (*CHECKS, *RANKS))
    try:
        # as in a launched run, with memory for snapshots
        code = Supervisor(
            run=run,
            spec=read_spec(run),
            program=TASK,
            ranks=TaskRanks(run, read_spec(run), lock=lock, count=1, zygote=zygote),
            mode=LaunchMode.LAUNCHED,
            stop=StopRequest(()),
        ).keep()
    finally:
        zygote.close()
        lock.release()
    if code != EXIT_FINISHED:
        raise RuntimeError((run.logs(1) / "rank0.log").read_text())


@dataclass(frozen=True)
class _Parts:
    """The objects that every loop gets."""

    model: torch.nn.Module
    data: Any
    optimizer: torch.optim.Optimizer
    batch: int
    steps: int
    folder: Path

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.data, self.batch, shuffle=True)


def _loop(way: str, subject: Subject, settings: small.Settings, folder: Path) -> None:
    """Run a loop that is not the engine's, in its own process."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = argparse.Namespace(task=settings)
    data, model = small.datasets(config)[0], small.model(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(str(small.DEFAULTS["optim.lr"])))
    ways: dict[str, Callable[[_Parts], None]] = {TENSORS: _indexing, LOADER: _loading}
    ways |= {name: make for name, (_, make) in _TRAINERS.items()}
    ways[way](_Parts(model, data, optimizer, subject.batch, subject.steps, folder))


def _indexing(parts: _Parts) -> None:
    """The tightest loop written by hand: the data are in memory, and a batch is an index."""
    inputs, classes = parts.data.tensors
    model, optimizer, done = parts.model, parts.optimizer, 0
    while True:
        order = torch.randperm(len(inputs))
        for chosen in order.split(parts.batch):
            if done == parts.steps:
                return
            small.loss(model, (inputs[chosen], classes[chosen])).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1


def _loading(parts: _Parts) -> None:
    """The loop of most tutorials."""
    _steps(parts, parts.model, parts.optimizer, parts.loader(), torch.Tensor.backward)


def _fabric(parts: _Parts) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(parts.model, parts.optimizer)
    _steps(parts, model, optimizer, fabric.setup_dataloaders(parts.loader()), fabric.backward)


def _accelerate(parts: _Parts) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(parts.model, parts.optimizer, parts.loader())
    _steps(parts, model, optimizer, loader, accelerator.backward)


def _steps(parts: _Parts, model: Any, optimizer: Any, loader: Any, backward: Callable[[Any], None]) -> None:
    done = 0
    while True:
        for batch in loader:
            if done == parts.steps:
                return
            backward(small.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            done += 1


def _lightning(parts: _Parts) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts.model

        def training_step(self, batch: Any, number: int) -> Any:
            return small.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return parts.optimizer

    lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=parts.steps, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=parts.folder,
    ).fit(Module(), parts.loader())  # fmt: skip


_TRAINERS: dict[str, tuple[str, Callable[[_Parts], None]]] = {
    "Fabric": ("lightning", _fabric),
    "Accelerate": ("accelerate", _accelerate),
    "Lightning": ("lightning", _lightning),
}
"""Maps a name to the package and to the loop as in its documentation, without logs, checkpoints and bar."""


if __name__ == "__main__":
    command.run(bench, model="mlp", times=5)
