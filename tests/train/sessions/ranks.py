"""Ranks for a session's state without the session: forked processes that meet by gloo, and a place with only a run."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.run.run_folder import Run
from train.sessions.state import Now, Position, State


@dataclasses.dataclass
class Where:
    """A place: what State needs to know of one."""

    run: Run
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    attempt: int = 1
    local_size: int = 1
    snapshot_memory: str = ""
    is_written: bool = True
    named: list[str] = dataclasses.field(default_factory=list)

    def beat(self, phase: int, step: int) -> None:
        """No agent watches."""

    def agree(self, key: str, make: Callable[[], str]) -> str:
        assert self.size == 1
        return make()

    def not_exact(self, reason: str) -> None:
        self.named.append(reason)


def where(folder: Path, rank: int = 0, size: int = 1) -> Where:
    folder.mkdir(exist_ok=True)
    return Where(Run(folder), rank, size, rank, local_size=size)


def save_now(state: State, position: Position, values: dict[str, Any], metrics_bytes: int = 0) -> bool:
    """Save, and wait until the checkpoint is on the disk."""
    return state.save(Now(position, values, metrics_bytes)) and state.wait()


def ranks(size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run body(rank, …) on connected ranks. Returns what each returns, or the name of the signal that ended it."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results: Any = fork.SimpleQueue()
        processes = [fork.Process(target=_rank, args=(r, size, folder, results, body, arguments)) for r in range(size)]
        for process in processes:
            process.start()
        found: list[Any] = [None] * size
        for process in processes:
            process.join(120)
            assert process.exitcode is not None, "a rank hangs"
        while not results.empty():
            rank, value = results.get()
            found[rank] = value
        for rank, process in enumerate(processes):
            if process.exitcode:
                found[rank] = found[rank] or f"exit {process.exitcode}"
        return found


def _rank(
    rank: int, size: int, folder: str, results: Any, body: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    code = 0
    try:
        dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=size)
        results.put((rank, body(rank, *arguments)))
    except BaseException:
        results.put((rank, traceback.format_exc()))
        code = 1
    os._exit(code)


def loop(state: State, step: Callable[[int], Any], steps: int, *, every: int, kill_at: int = 0) -> Iterator[Position]:
    """A loop of numbered steps, as a session would drive it. Yields the position after each."""
    saved = state.load()
    state.put_gradients()
    at = saved.position if saved else Position()
    for number in range(at.batch, steps):
        torch.manual_seed(number * 1000 + state._place.rank)
        step(number)
        state.border()
        if number + 1 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        at = Position(0, number + 1, state.updates)
        if state.is_clean and state.updates and state.updates % every == 0:
            assert save_now(state, at, {"rank": state._place.rank, "at": number})
        yield at
