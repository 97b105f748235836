"""What the parts of the proof share: sizes, rows of the table, and runs as `train run` makes them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from train import hashing
from train.launcher import checks
from train.launcher.request import Request
from train.parallel.rank_env import RankEnv
from train.run import folders, states
from train.run.outcome import Outcome
from train.run.run_folder import Run
from train.signals import StopRequest
from train.supervise.attempts import Supervisor, alone
from train.supervise.decide import LaunchMode
from train.supervise.forks import CHECKS, RANKS, Zygote, acquire
from train.supervise.ranks import Ranks
from train.supervise.worker import run_rank

OK, FAILED, BELOW, FIGURE, UNCHECKED = "ok", "FAILED", "below goal", "figure", "not checked"
TASKS = Path(__file__).with_name("tasks")
_LARGE = 40 * 2**30
"""Bytes of a card on which the usual batches fit, in fp32 too."""
_numbers = itertools.count(1)


@dataclasses.dataclass
class Row:
    """A line of the table."""

    what: str
    found: str
    verdict: str = FIGURE
    goal: str = ""
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What JSON keeps besides."""
    part: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to find out: a line of the table, or a few that are found together."""

    what: str
    seconds: float
    """About how many it takes on one H100, by estimate."""
    find: Callable[..., Row | Iterable[Row]]
    given: tuple[Any, ...] = ()
    """What it is called with."""

    def rows(self) -> Iterator[Row]:
        found = self.find(*self.given)
        yield from [found] if isinstance(found, Row) else found


@dataclasses.dataclass(frozen=True)
class Scale:
    """Where the proof is run, and how large."""

    device: str
    """cuda or cpu"""
    is_small: bool
    """So small that a CPU makes it in a minute: proves that the code runs, and no more."""
    gpus: int
    folder: Path
    """For run folders; on a disk of the kind that runs are kept on."""

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    def precisions(self, task: str) -> tuple[str, ...]:
        """Those to prove a task in: all that this device has; small, all of them for one task."""
        if self.is_small and task != "digits":
            return ("bf16",)
        return ("fp32", "bf16", "fp16") if self.is_gpu else ("fp32", "bf16")

    @property
    def place(self) -> torch.device:
        """The device of a single rank."""
        return torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")

    def flags(self, task: str) -> dict[str, Any]:
        """A task of the size that its speed is measured at."""
        common = {
            "device": self.device, "log.tensorboard": "false", "data.workers": 0, "checkpoint.every_minutes": 0,
            "checkpoint.keep": 1, "schedule.decay": "constant", "eval.every_epochs": 0,
        }  # fmt: skip
        if not self.is_gpu:
            common["cpu_threads"] = 1
        sizes: dict[str, dict[str, Any]] = {
            "digits": {"batch_size": 64, "optim.name": "sgd", "optim.lr": 0.05},
            "resnet": {"batch_size": 256, "optim.name": "sgd", "optim.lr": 0.01},
            "gpt": {"batch_size": 16, "optim.name": "adamw", "optim.lr": 1e-4},
        }
        if self.is_gpu and torch.cuda.mem_get_info()[1] < _LARGE:
            sizes["resnet"]["batch_size"], sizes["gpt"]["batch_size"] = 64, 4
        if self.is_small:
            sizes["resnet"] |= {"batch_size": 8, "task.size": 32, "task.classes": 10, "task.count": 64,
                                "task.width": 8, "task.depth": 14}  # fmt: skip
            sizes["gpt"] |= {"batch_size": 4, "task.vocabulary": 256, "task.context": 32, "task.layers": 2,
                             "task.width": 64, "task.heads": 4, "task.count": 64}  # fmt: skip
        return common | sizes[task]


def exact_flags(scale: Scale, task: str) -> dict[str, Any]:
    """A task of the size at which its exactness is looked at: many steps in a few seconds, with dropout."""
    flags = scale.flags(task) | {"checkpoint.every_steps": 4, "log.every_steps": 1}
    if scale.is_gpu and task == "resnet":
        # 1.3 MB of pictures: more than is copied among what is computed (train/data/to_device.py); a last batch of less
        flags |= {"batch_size": 48, "task.count": 128, "task.size": 96}
    if task == "gpt":
        flags |= {"task.dropout": 0.1}
        if scale.is_gpu:
            # 16 x 256 tokens: up to 3072 an embedding's backward is another, small kernel, which no real batch takes
            flags |= {
                "task.layers": 2,
                "task.vocabulary": 16384,
                "task.context": 256,
                "batch_size": 16,
                "task.count": 96,
            }
    return flags


@functools.cache
def _zygote() -> Zygote:
    """What ranks in processes of their own are forked from; it has no GPU in use, whatever this process has."""
    return acquire(hashing.fixed(os.environ), (*CHECKS, *RANKS, "tests.gpu.models"))


def warm_up() -> None:
    """Let it import meanwhile."""
    _zygote()


def made(scale: Scale, task: str, flags: dict[str, Any], ranks: int = 1) -> Run:
    """A new run of one of the tasks here, checked as every run is."""
    texts = {name: str(value) for name, value in flags.items()}
    prepared = checks.prepare(Request(str(TASKS / f"{task}.py"), texts, ranks=ranks))
    name = f"{task}-{os.getpid()}-{next(_numbers)}"  # of a process that was ended something may be left
    return folders.create(scale.folder, name, prepared.files, prepared.record)


@contextlib.contextmanager
def passing(scale: Scale, task: str, flags: dict[str, Any], ranks: int = 1) -> Iterator[Run]:
    """A new run whose folder is removed afterwards: all of them together would fill a disk."""
    run = made(scale, task, flags, ranks)
    try:
        yield run
    finally:
        shutil.rmtree(run.folder, ignore_errors=True)


def train_here(run: Run, stop: StopRequest | None = None) -> None:
    """Train a run in this process, to its end, or to a stop that is asked for.

    Raises:
        torch.OutOfMemoryError: the device is full.
        RuntimeError: it did not come to its end.
    """

    ends: list[Outcome] = []
    asked = stop or StopRequest(())

    def rank(attempt: int) -> Outcome:
        ends.append(run_rank(run, RankEnv(), attempt, asked, bar=False))
        return ends[-1]

    lock = run.acquire()
    assert lock is not None
    try:
        alone(run, LaunchMode.TORCHRUN, 1, rank, StopRequest(()))
    finally:
        lock.release()
    record = run.read()
    if record["state"] != (states.STOPPED if asked.asked else states.FINISHED):
        trace = ends[-1].traceback if ends else ""
        print(trace, file=sys.stderr)
        kind = torch.OutOfMemoryError if "OutOfMemoryError" in trace else RuntimeError
        raise kind(f"{run.name} is {record['state']}: {record['reason'] or record['attempts'][-1]}")


def train_forked(
    run: Run, ranks: int = 1, fault: str = "", environment: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Train a run in processes of its own, as `train run --spawn` does; its record afterwards.

    Args:
        fault: where to kill it; see train/faults.py.
        environment: set in its processes.
    """
    lock = run.acquire(patience=30.0)
    assert lock is not None, f"{run.name} is alive"
    try:
        with _quiet():
            environ = {"TRAIN_FAULT": fault, **environment}
            processes = Ranks(run, lock, ranks, _zygote(), environ=environ, is_foreground=True)
            Supervisor(run, processes, LaunchMode.FOREGROUND, StopRequest(())).keep()
    finally:
        lock.release()
    return run.shown()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What ranks say goes to their logs, not here."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def hush() -> None:
    """No lines of runs in this process on the terminal."""
    logger = logging.getLogger("train")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    logger.setLevel(logging.WARNING)


class Stretch:
    """Times so many optimizer steps of this process, whatever loop makes them.

    It counts optimizer steps by torch's own hook, so that our loop and a hand-written one are measured by the same
    means, and waits for the device at both ends and nowhere between. It begins when things are ready: after a few steps
    and seconds, and not while a thread of ours finds memory for checkpoints, which a run does once in its life.
    """

    def __init__(self, scale: Scale, steps: int = 0, last: int = 0, least: int = 8, settle: float = 2.0) -> None:
        """
        Args:
            steps: how many to time; or
            last: the step, counted from 1, to time up to.
            least: steps before it begins.
            settle: seconds from the first step until it begins, on a GPU.
        """
        self.seconds = 0.0
        """Per step, once it is over."""
        self.steps = steps
        """That were timed."""
        self.memory = 0
        """Bytes of the device at most, meanwhile."""
        self.then: Callable[[], None] = lambda: None
        """Called once it is over."""
        self.counted = 0
        self.begun = 0
        """After which step it began."""
        self._last, self._least, self._settle, self._is_gpu = last, least, settle, scale.is_gpu
        self._first_at = self._began = 0.0

    @property
    def is_over(self) -> bool:
        return self.seconds > 0

    def __enter__(self) -> Stretch:
        self._handle = register_optimizer_step_post_hook(lambda *_: self._step())
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _step(self) -> None:
        self.counted += 1
        if self.is_over:
            return
        if self.begun:
            if self.counted == (self._last or self.begun + self.steps):
                self._end()
            return
        self._first_at = self._first_at or time.perf_counter()
        if self._is_ready():
            if self._is_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self.begun, self._began = self.counted, time.perf_counter()

    def _is_ready(self) -> bool:
        if self.counted < self._least or any(thread.name.startswith("reserve") for thread in threading.enumerate()):
            return False
        return not self._is_gpu or time.perf_counter() - self._first_at >= self._settle

    def _end(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()
            self.memory = torch.cuda.max_memory_allocated()
        self.steps = self.counted - self.begun
        self.seconds = (time.perf_counter() - self._began) / self.steps
        self.then()


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.0f} MiB"
