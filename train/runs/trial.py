"""Tries steps with micro batches of several sizes, for `micro_batch_size auto`. A process of its own:

    python -P …/train/own.py train.runs.trial < ORDER

The order and the answer are JSON (see runs/fit.py). For each size the ranks of the run are forked: they meet, spread
the model as the run will, and make two steps, the second of which has the optimizer's state beside the gradients. A
rank to which memory is refused, or which the kernel takes, says that the size does not fit. On a GPU a try may take
all that is free but a twentieth. On a CPU it is measured (peaks of /proc/self/status) and compared with the limits of
process, control group and machine; nothing is tried of which smaller sizes say that it is too much.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from train import config as configuration
from train.config import Config
from train.errors import Refused, one_line
from train.runs import fit, memory
from train.runs.request import task_of
from train.signals import die_with_parent
from train.tasks import Task, where

_LIMIT = 900.0
"""Seconds that the two steps of one size may take."""
_SPARE = 0.05
"""Of a GPU's free memory, the share that a try leaves."""
_SLOTS = 2
"""Micro batches a rank and step: the second adds to gradients that are there."""


@dataclasses.dataclass
class _Order:
    """What is to be tried. Held by the process that forks ranks, so that each begins with it."""

    task: Task
    config: Config
    ranks: int
    data: Any
    """The training set."""
    model: Any


@dataclasses.dataclass(frozen=True)
class _Tried:
    """How a rank has fared with one size."""

    full: str = ""
    """Why it does not fit."""
    failed: str = ""
    """What went wrong otherwise."""
    use: memory.Use | None = None
    """What it took, on a CPU."""


def main() -> None:
    """Read the order, write the answer."""
    asked = json.load(sys.stdin)
    answer = os.dup(1)
    os.dup2(2, 1)  # what a task prints is no answer
    die_with_parent(asked["parent"])
    os.setsid()
    memory.lower_than_agent()
    try:
        try:
            size, reason = _search(asked)
            said: dict[str, Any] = {"size": size, "reason": reason}
        except Refused as error:
            said = {"refused": str(error)}
        os.write(answer, json.dumps(said).encode())
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)  # with all that the task has started here


def _search(asked: dict[str, Any]) -> tuple[int, str]:
    import torch

    # what ranks import, once for all tries; and a rank has no more of it than a try had
    import train.engine.setup
    import train.parallel.ddp
    import train.parallel.fsdp
    import train.parallel.ordered
    import train.parallel.single  # noqa: F401
    from train.engine import build

    torch.set_num_threads(1)  # a fork takes no threads along
    task = task_of(asked["task"], asked["copy"])
    config = configuration.build(asked["config"], task.Settings)
    ranks, sizes = asked["ranks"], asked["sizes"]
    # the launch has settled where it computes. To ask here how many GPUs there are may open the driver (on a MIG slice,
    # or without NVML), and CUDA could be used in no fork of this process
    room = memory.room(ranks) if config.device == "cpu" else memory.Room()
    train_set, _ = build.make_datasets(task, config)
    model = build.make_model(task, config, torch.float64 if config.precision == "fp64" else torch.float32)
    order = _Order(task, config, ranks, train_set, model)
    known: dict[int, memory.Use] = {}
    full: dict[int, str] = {}

    def fits(size: int) -> bool:
        guess = fit.expected(size, known)
        if guess is not None and not room.holds(guess, 0.0):
            full[size] = _too_much(guess, room)
            return False
        tried = _try(order, size)
        if tried.use is not None:
            known[size] = tried.use
            tried = tried if room.holds(tried.use) else _Tried(full=_too_much(tried.use, room))
        if tried.failed and not full:
            raise Refused(
                f"--micro_batch_size auto: a step with {size} samples at a time failed: {tried.failed[:400]}; "
                "if that is no fault of the task, give a number"
            )
        if tried.full or tried.failed:
            full[size] = tried.full or tried.failed
        return size not in full

    found = fit.largest(sizes, fits)
    if found is None:
        raise Refused(
            f"--micro_batch_size auto: not even {sizes[0]} sample{'s' if sizes[0] > 1 else ''} at a time fit: "
            f"{full[sizes[0]]}; try --parallel.recompute auto, a smaller model, or (on several ranks) "
            "--parallel.strategy fsdp"
        )
    if found == sizes[-1]:
        return found, "the batch over the ranks: it fits"
    above = min(full)
    return found, f"the largest that fits; with {above}: {full[above]}"


def _too_much(use: memory.Use, room: memory.Room) -> str:
    """Which limit is too low for so much."""
    if room.resident is not None and use.resident > room.resident * (1 - memory.MARGIN):
        return (
            f"{memory.size(use.resident)} a rank, and there are {memory.size(room.resident)}, a tenth to be left free"
        )
    limit = f"{memory.size(room.address_space or 0)} a process (ulimit -v)"
    return f"{memory.size(use.address_space)} of address space, of {limit}, a tenth to be left free"


def _try(order: _Order, size: int) -> _Tried:
    """Make two steps on all ranks. What they had is given back by their end."""
    with tempfile.TemporaryDirectory(prefix="train-trial-") as folder:
        children: dict[int, int] = {}
        for rank in range(order.ranks):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reader)
                _be_rank(order, size, rank, Path(folder), writer)
            os.close(writer)
            children[reader] = child
        return _gather(children)


def _gather(children: dict[int, int]) -> _Tried:
    """The answers of all ranks, or the first that is no success; none is alive afterwards.

    Args:
        children: the process of each rank, by the pipe that it answers through.
    """
    said = dict.fromkeys(children, b"")
    answers: list[_Tried] = []
    deadline = time.monotonic() + _LIMIT
    try:
        while len(answers) < len(children):
            ready, _, _ = select.select(list(said), [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return _Tried(failed=f"it took more than {_LIMIT / 60:.0f} minutes")
            for reader in ready:
                part = os.read(reader, 65536)
                said[reader] += part
                if part:
                    continue
                tried = _read(said.pop(reader), children[reader])
                if tried.full or tried.failed:  # the others may wait for it for ever
                    return tried
                answers.append(tried)
    finally:
        for reader, child in children.items():
            os.close(reader)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    uses = [tried.use for tried in answers if tried.use is not None]
    if not uses:
        return _Tried()
    return _Tried(use=memory.Use(max(use.resident for use in uses), max(use.address_space for use in uses)))


def _read(text: bytes, child: int) -> _Tried:
    """What a rank has answered. One that could not was taken for its memory, as far as anybody can tell."""
    if text:
        found = json.loads(text)
        return _Tried(**found | {"use": memory.Use(**found["use"]) if found["use"] else None})
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return _Tried(full=f"a rank died of {signal.Signals(-code).name}; memory ends at {memory.refused_at()}")
    return _Tried(failed=f"a rank exited with code {code}")


def _be_rank(order: _Order, size: int, rank: int, folder: Path, writer: int) -> None:
    """The whole life of a forked rank."""
    code = 1
    try:
        parent = os.getppid()
        die_with_parent(parent)
        tried = _tried(order, size, rank, folder)
        os.write(writer, json.dumps(dataclasses.asdict(tried)).encode())
        code = 0
    finally:
        os._exit(code)


def _tried(order: _Order, size: int, rank: int, folder: Path) -> _Tried:
    import torch

    from train.parallel.world import pick_device, take_device

    try:
        device = pick_device(order.config, order.ranks, rank)
        take_device(device)
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            torch.cuda.set_per_process_memory_fraction((1 - _SPARE) * free / total, device)
        _steps(order, size, rank, device, f"file://{folder}/store")
    except Exception as error:
        text = one_line(f"{type(error).__name__}: {error}")
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or memory.is_refused(text) or _is_full(text):
            limit = "" if device.type == "cuda" else f" ({memory.refused_at()})"
            return _Tried(full=text[:300] + limit)
        return _Tried(failed=where(error, order.task.file))
    return _Tried(use=None if device.type == "cuda" else memory.peaks())


def _is_full(text: str) -> bool:
    """Whether a library says in words of its own that a GPU is full: NCCL, cuBLAS, Triton; and torch of cuDNN, whose
    engines it tries one after the other, and passes over those whose workspace it does not get (Conv_v8.cpp)."""
    return any(words in text for words in ("out of memory", "ALLOC_FAILED", "unable to find an engine"))


def _steps(order: _Order, size: int, rank: int, device: Any, init: str) -> None:
    """Two steps as the run will make them, on the first samples."""
    import torch

    from train.data import handles
    from train.data.nested import mapped
    from train.engine import arithmetic, build, setup
    from train.engine.loss import training_loss
    from train.parallel import choose
    from train.parallel.precision import Precision
    from train.parallel.seat import Seat
    from train.parallel.strategy import VOTES
    from train.parallel.world import join

    handles.open_own()
    task, config, ranks = order.task, order.config, order.ranks
    config.micro_batch_size, config.cpu_threads = size, config.cpu_threads or 1
    arithmetic.fix(config)
    precision = Precision(config.precision, device)
    batch = build.first_samples(task, config, precision, order.data)
    world = join(config, Seat(rank, ranks, rank, ranks, init), device)
    strategy = choose.make(world, config, precision)
    model = strategy.place(setup.arrange(order.model, config, ranks))
    optimizer = build.make_optimizer(task, model, config)
    model.train()
    strategy.start()
    slots = min(_SLOTS, math.ceil(math.ceil(config.batch_size / size) / ranks))
    kept: list[Any] = []
    if device.type == "cuda":  # a run copies its next batch meanwhile: data/copies.py
        kept.append(mapped(batch, lambda one: one.clone() if isinstance(one, torch.Tensor) else one))
    for _ in range(2):
        votes = torch.zeros(len(VOTES), dtype=strategy.votes_type, device=device)
        strategy.begin(slots * ranks)
        for slot in range(slots):
            is_last = slot == slots - 1
            with strategy.micro_batch(rank * slots + slot, is_last):
                with precision.autocast():
                    loss = training_loss(task, strategy.compute, batch, size)
                strategy.backward(loss.value, 1.0, votes if is_last else None)
        strategy.reduce(votes)
        strategy.settle(optimizer, config.clip_grad_norm)
        strategy.update(optimizer)
        if device.type == "cpu" and not kept:  # a checkpoint is written from a copy
            kept = _copies(model, optimizer)


def _copies(model: Any, optimizer: Any) -> list[Any]:
    """What a checkpoint takes beside the state: the tensors of model and optimizer, once more."""
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves([model.state_dict(), optimizer.state_dict()["state"]])
    return [leaf.detach().clone() for leaf in leaves if hasattr(leaf, "detach")]


if __name__ == "__main__":
    main()
