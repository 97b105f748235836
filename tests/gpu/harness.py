"""What the parts of the proof share: rows of the table, sizes, and runs as `train run` makes them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.gpu import in_rank
from train import hash_seed
from train.checkpoint import snapshot
from train.checkpoint.buffers import ENVIRONMENT, SnapshotMemory
from train.config import strategies
from train.launcher import checks
from train.launcher.request import Request
from train.parallel.devices import prepare_nccl
from train.parallel.rank_env import RankEnv
from train.programs import TASK
from train.run import folders, states
from train.run.outcome import Outcome
from train.run.run_folder import Run
from train.run.spec import read_spec
from train.signals import StopRequest
from train.supervise.attempts import Supervisor, supervise_alone
from train.supervise.decide import LaunchMode
from train.supervise.ranks import TaskRanks
from train.supervise.worker import run_rank
from train.zygote.client import CHECKS, RANKS, Zygote, acquire

OK, FAILED, BELOW, FIGURE, UNCHECKED = "ok", "FAILED", "below goal", "figure", "not checked"
TASKS, ROOT = Path(__file__).with_name("tasks"), Path(__file__).parents[2]
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
    late: bool = False
    """Left out for lack of time."""
    at: float = 0.0
    """Seconds from the start of the proof until it was found."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to find out: a line of the table, or a few that are found together."""

    what: str
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
            "fake": {"batch_size": 64, "optim.name": "sgd", "optim.lr": 0.05},
            "resnet": {"batch_size": 256, "optim.name": "sgd", "optim.lr": 0.01},
            "gpt": {"batch_size": 16, "optim.name": "adamw", "optim.lr": 1e-4},
            "own": {"batch_size": 32},
            "hungry": {"batch_size": 8},
            "slow": {"batch_size": 2, "optim.lr": 0.01},
            "perceptron": {"batch_size": 128},
        }
        if self.is_gpu and torch.cuda.mem_get_info()[1] < _LARGE:
            sizes["resnet"]["batch_size"], sizes["gpt"]["batch_size"] = 64, 4
        if self.is_small:
            sizes["resnet"] |= {"batch_size": 8, "task.size": 32, "task.classes": 10, "task.count": 64,
                                "task.width": 8, "task.depth": 14}  # fmt: skip
            sizes["gpt"] |= {"batch_size": 4, "task.vocabulary": 256, "task.context": 32, "task.layers": 2,
                             "task.width": 64, "task.heads": 4, "task.count": 64}  # fmt: skip
        return common | sizes[task]

    def exact_flags(self, task: str) -> dict[str, Any]:
        """A task of the size at which its exactness is looked at: many steps in a few seconds, with dropout."""
        flags = self.flags(task) | {"log.every_steps": 1}
        if self.is_gpu and task == "resnet" and not self.is_small:
            # 1.3 MB of pictures: more than is copied among what is computed (train/data/to_device.py); a last batch of
            # less
            flags |= {"batch_size": 48, "task.count": 128, "task.size": 96}
        if task == "gpt":
            flags |= {"task.dropout": 0.1}
            if self.is_gpu and not self.is_small:
                # 16 x 256 tokens: up to 3072 an embedding's backward is another, small kernel, which no real batch
                # takes
                flags |= {"batch_size": 16, "task.layers": 2, "task.vocabulary": 16384, "task.context": 256,
                          "task.count": 96}  # fmt: skip
        return flags


@functools.cache
def zygote() -> Zygote:
    """What ranks in processes of their own are forked from; it has no GPU in use, whatever this process has."""
    return acquire(hash_seed.with_seed(os.environ), (*CHECKS, *RANKS))


@contextlib.contextmanager
def new_run(scale: Scale, task: str, flags: dict[str, Any], ranks: int = 1) -> Iterator[Run]:
    """A new run, checked as every run is. Its folder is removed afterwards: all of them would fill a disk.

    More ranks than there are GPUs share the first one.
    """
    texts = {name: str(value) for name, value in flags.items()}
    files = (TASKS / f"{task}.py", ROOT / "benchmarks" / f"{task}.py")
    source = next((str(file) for file in files if file.exists()), task)
    one_card = mock.patch.object(checks, "pick_device", in_rank.first_device)
    with one_card if _share_a_card(ranks) else contextlib.nullcontext():
        prepared = checks.prepare(Request(source, flags=texts), ranks=ranks)
    name = f"{task}-{os.getpid()}-{next(_numbers)}"  # of a process that was ended something may be left
    run = folders.create(scale.folder, name, files=prepared.files, record=prepared.record)
    try:
        yield run
    finally:
        shutil.rmtree(run.folder, ignore_errors=True)


def _share_a_card(ranks: int) -> bool:
    return ranks > max(torch.cuda.device_count(), 1)


@contextlib.contextmanager
def alone(scale: Scale, strategy: str) -> Iterator[None]:
    """Spread the model of a run of one rank: by itself such a run does not, and two ranks need two GPUs."""
    file = scale.folder.absolute() / f"{strategy}-alone"
    given: dict[str, Any] = {"device_id": scale.place} if scale.is_gpu else {}
    prepare_nccl(deterministic=True)
    backend = "cpu:gloo,cuda:nccl" if scale.is_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=0, world_size=1, **given)
    try:
        info = strategies.of(strategy)
        with mock.patch.object(strategies, "of", lambda *_: info):
            yield
    finally:
        dist.destroy_process_group()
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def snapshots(is_always: bool = True) -> Iterator[SnapshotMemory]:
    """Memory for snapshots of the runs in this process.

    Args:
        is_always: a snapshot is taken as soon as the one before is there.
    """
    memory = SnapshotMemory()
    share = mock.patch.object(snapshot, "SHARE", 1e9) if is_always else contextlib.nullcontext()
    try:
        with mock.patch.dict(os.environ, {ENVIRONMENT: memory.address}), share:
            yield memory
    finally:
        memory.close()


def train_here(run: Run, stop: StopRequest | None = None) -> None:
    """Train a run in this process, to its end, or to a stop that is asked for.

    Raises:
        torch.OutOfMemoryError: the device is full.
        RuntimeError: it did not come to its end.
    """

    ends: list[Outcome] = []
    asked, spec = stop or StopRequest(()), read_spec(run)

    def rank(attempt: int) -> Outcome:
        ends.append(run_rank(run, spec, rank_env=RankEnv(), attempt=attempt, stop=asked, bar=False))
        return ends[-1]

    lock = run.acquire()
    assert lock is not None
    try:
        supervise_alone(run, spec, program=TASK, ranks=1, train=rank, stop=StopRequest(()))
    finally:
        lock.release()
    record = run.read()
    if record["state"] != (states.STOPPED if asked.asked else states.FINISHED):
        trace = ends[-1].traceback if ends else ""
        print(trace, file=sys.stderr)
        kind = torch.OutOfMemoryError if "OutOfMemoryError" in trace else RuntimeError
        raise kind(f"{run.name} is {record['state']}: {reason(record)}")


def train_forked(
    run: Run, ranks: int = 1, fault: str = "", environment: Mapping[str, str] = MappingProxyType({}),
    mode: LaunchMode = LaunchMode.FOREGROUND, watch: Callable[[TaskRanks], Any] = lambda processes: None,
    changes: Sequence[str] = (),
) -> Mapping[str, Any]:  # fmt: skip
    """Train a run in processes of its own, with snapshots in memory; its record afterwards.

    Args:
        fault: where to kill it; see train/faults.py.
        environment: set in its processes.
        mode: FOREGROUND: a death ends it; LAUNCHED: it goes on by itself.
        watch: called on another thread meanwhile.
        changes: what is different in its processes; see in_rank.py.
    """
    lock = run.acquire(patience=30.0)
    assert lock is not None, f"{run.name} is alive"
    changes = [*changes, in_rank.ONE_CARD] if _share_a_card(ranks) else changes
    forking: Any = in_rank.Forking(zygote(), changes) if changes else zygote()
    processes = TaskRanks(
        run, read_spec(run), lock=lock, count=ranks, zygote=forking, environ={"TRAIN_FAULT": fault, **environment}
    )
    try:
        with ThreadPoolExecutor(1) as pool, contextlib.redirect_stderr(io.StringIO()):
            watching = pool.submit(watch, processes)
            watching.add_done_callback(lambda done: run.ask_stop(states.NOW) if done.exception() else None)
            Supervisor(
                run=run, spec=read_spec(run), program=TASK, ranks=processes, mode=mode, stop=StopRequest(())
            ).keep()
        watching.result()
    finally:
        lock.release()
    return run.read_effective()


def reason(record: Mapping[str, Any]) -> str:
    """Why a run ended, in a line."""
    return str(record.get("reason") or record["attempts"][-1].get("reason") or "")[:300]


class Stretch:
    """Times optimizer steps of this process, of any loop, from the end of the `first` to that of the `last`.

    It counts them by torch's own hook, so that our loop and a hand-written one are measured by the same means, and
    waits for the device at both ends and nowhere between. First it waits for a thread of ours that finds memory for
    checkpoints, which a run does once in its life.
    """

    def __init__(self, scale: Scale, first: int, last: int, then: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            then: called once it is over.
        """
        self.seconds = 0.0
        """Per step, once it is over."""
        self.memory = 0
        """Bytes of the device at most, meanwhile."""
        self._first, self._last, self._then, self._is_gpu = first, last, then, scale.is_gpu
        self._counted, self._began = 0, 0.0

    @property
    def is_over(self) -> bool:
        return self.seconds > 0

    def __enter__(self) -> Stretch:
        self._handle = register_optimizer_step_post_hook(lambda *_: self._step())
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _step(self) -> None:
        self._counted += 1
        if self._counted == self._first:
            for thread in threading.enumerate():
                if thread.name.startswith("reserve"):
                    thread.join()
            if self._is_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self._began = time.perf_counter()
        if self._counted == self._last:
            if self._is_gpu:
                torch.cuda.synchronize()
                self.memory = torch.cuda.max_memory_allocated()
            self.seconds = (time.perf_counter() - self._began) / (self._last - self._first)
            self._then()


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.0f} MiB"
