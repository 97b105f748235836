"""N ranks on this machine, forked by torch.multiprocessing's server: `train run --spawn N`, benches, tests."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

from train.parallel.seat import Seat
from train.record import outcome
from train.record.outcome import Kind, Outcome
from train.record.store import Lock, Run
from train.runs.processes import Guard
from train.runs.worker import exit_code, leave, log_to, run_rank, show
from train.signals import POLITE, StopRequest, end_with_parent

_GRACE = 0.2
"""Seconds that ranks have to notice by themselves that one of them is dead, and to say so in their logs."""
_NOBODY_KNOWS = 255
"""What multiprocessing says of a process whose fork server is gone. Its death is theirs: `end_with_parent`."""


class Forked:
    """Ranks that are children of this process's fork server.

    Args:
        environment: set in each of them.
    """

    problem = ""
    repeats = True

    def __init__(self, run: Run, lock: Lock, ranks: int, environment: dict[str, str] | None = None) -> None:
        self.run, self.lock, self.ranks = run, lock, ranks
        self.processes: list[Any] = []
        self._environment = environment or {}
        self._meeting = ""
        self._first: dict[int, int] = {}

    def start(self, attempt: int) -> Guard | None:
        import torch.multiprocessing as mp

        context = mp.get_context("forkserver")
        self._first, self.processes = {}, []
        self._meeting = tempfile.mkdtemp(prefix="train-spawn-")  # fresh for every attempt
        for rank in range(self.ranks):
            seat = Seat(rank, self.ranks, rank, self.ranks, f"file://{self._meeting}/store")
            arguments = (str(self.run.folder), seat, attempt, Passed(self.lock.fd), self._environment)
            process = context.Process(target=_rank, args=arguments)
            process.start()
            self.processes.append(process)
        return _Peers(self)

    def wait(self) -> bool:
        connection.wait([process.sentinel for process in self.processes if process.is_alive()], timeout=0.05)
        is_over = not any(process.is_alive() for process in self.processes)
        # what fell first: its peers meet their ends because of it, or by our hand
        self._first = self._first or {
            rank: -signal.SIGKILL if process.exitcode == _NOBODY_KNOWS else process.exitcode
            for rank, process in enumerate(self.processes)
            if process.exitcode
        }
        return is_over

    def close(self) -> None:
        """Remove where the ranks have met."""
        shutil.rmtree(self._meeting, ignore_errors=True)

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def living(self) -> list[int]:
        return [process.pid for process in self.processes if process.is_alive()]

    def signal(self, number: int) -> None:
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def exits(self) -> Mapping[int, int]:
        return self._first

    def kept(self) -> int:
        return 0

    def told(self) -> Mapping[int, Outcome]:
        return {}


class _Peers:
    """Ends the peers of a rank that has failed."""

    hang = ""
    is_ending = False

    def __init__(self, forked: Forked) -> None:
        self._forked = forked

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        if self._forked.exits():
            time.sleep(_GRACE)
            self._forked.signal(signal.SIGKILL)

    def end(self) -> None:
        self._forked.signal(signal.SIGKILL)

    def close(self) -> None:
        self._forked.close()


class Passed:
    """An open file, such as a run's lock, on its way to a process that multiprocessing starts: the same one there."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        from multiprocessing.reduction import DupFd

        return DupFd(self.fd)

    def __setstate__(self, passed: Any) -> None:
        self.fd = passed.detach()


def _die_with_its_asker() -> None:
    """End this process when the one that asked the fork server for it dies: nobody would take its run up again.

    The server does not do it: it lives on for as long as a process that it forked does.
    """
    end_with_parent(os.getppid())
    asker = multiprocessing.parent_process()
    assert asker is not None

    def watch(sentinel: int) -> None:
        connection.wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, args=(asker.sentinel,), daemon=True, name="asker-watch").start()


def _rank(folder: str, seat: Seat, attempt: int, held: Passed, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    _die_with_its_asker()
    stop = StopRequest((*POLITE, signal.SIGHUP))
    run = Run(Path(folder))
    logs = run.logs(attempt)
    log_to(sys.stderr)
    if seat.rank:
        out = os.open(logs / f"rank{seat.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
    else:
        keep_log(logs, 0)
    end = run_rank(run, seat, attempt, stop, bar=seat.rank == 0 and sys.stderr.isatty())
    if end.kind is Kind.DIED:
        first = outcome.first_fault(outcome.read_all(logs))
        # rank 0 writes to the terminal, where a lost connection would hide why it was lost
        if seat.rank or end.recurs or first is None or first.rank == seat.rank:
            show(end)
    leave(exit_code(logs, seat, end))


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A disk that fails: the line stands on the terminal, and a page of traceback for each would hide it."""


def keep_log(logs: Path, rank: int) -> None:
    """Write this process's lines into the log of its rank too."""
    handler = _LogFile(logs / f"rank{rank}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("train").addHandler(handler)
