"""Ranks that this process forks itself: `train launch` and `train resume` of a task.

All that a rank imports has been imported here, once, and nothing here has computed, started threads (but one, of
several machines, which stands still meanwhile: Nodes.still), or touched a GPU: a fork of it is a rank that begins at
once, and a restart after a death pays no import either. What a process inherits by being forked is undone or set in
`_become_rank`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Mapping
from typing import NoReturn

from train.checkpoint.buffers import SnapshotMemory
from train.errors import one_line
from train.parallel.seat import Seat
from train.record.outcome import Outcome
from train.record.store import Lock, Run
from train.runs import guard, memory, title
from train.runs.nodes import Nodes
from train.runs.processes import Guard, flight_recorder
from train.runs.processes.kept import lend, memory_of
from train.signals import POLITE, StopRequest, die_with_parent

_LOOK_EVERY = 0.02
"""Seconds between two looks for a dead child while waiting."""
_WAIT = 0.2
"""Seconds that `wait` takes where none ends."""


class Children:
    """Ranks of a task, each a child of this process."""

    repeats = False  # a rank listens from its first moment on

    def __init__(self, run: Run, lock: Lock, ranks: int, nodes: Nodes | None = None) -> None:
        self.run, self.lock, self.ranks, self._nodes = run, lock, ranks, nodes
        self._seats: list[Seat] = []
        self.problem = ""
        self._pids: list[int] = []
        self._codes: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._memory = memory_of(run, ranks)

    def start(self, attempt: int) -> Guard | None:
        self.problem, self._pids, self._codes, self._first = "", [], {}, {}
        config = tomllib.loads((self.run.folder / "config.toml").read_text(encoding="utf-8"))
        threads = int(config.get("cpu_threads", 1))
        lend(self._memory)
        sys.stdout.flush()
        sys.stderr.flush()
        # where they meet, in memory: nobody else can open it, and nothing of it is left when these processes are gone
        meeting = os.memfd_create("train-store")
        self._seats = [
            Seat(rank, self.ranks, rank, self.ranks, f"file:///proc/self/fd/{meeting}") for rank in range(self.ranks)
        ]
        if self._nodes is not None:
            self._seats = self._nodes.seats()
        looked_after = guard.of(self.run, attempt, [seat.rank for seat in self._seats])
        # no signal is lost between the fork and the first line of the child
        kept = signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
        try:
            with self._nodes.still() if self._nodes is not None else contextlib.nullcontext():
                for seat in self._seats:
                    parent, pid = os.getpid(), os.fork()
                    if pid == 0:
                        _be(self.run, self.lock, seat, attempt, threads, parent, self._memory, self._nodes)
                    self._pids.append(pid)
        except OSError as error:  # no room for a process: the machine is busy
            self._fail(error)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, kept)
            os.close(meeting)
            if self._nodes is not None:
                self._nodes.started()
        return looked_after

    def _fail(self, error: OSError) -> None:
        self.problem, self._first = one_line(f"{type(error).__name__}: {error}"), {self._seats[0].rank: 1}
        self.signal(signal.SIGKILL)

    def wait(self) -> bool:
        deadline = time.monotonic() + _WAIT
        while not self._reap() and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
        return len(self._codes) == len(self._pids)

    def _reap(self) -> bool:
        """Take in who has ended. Whether any has."""
        ended = False
        for rank, pid in self._by_rank():
            if rank not in self._codes and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                with contextlib.suppress(OSError):  # what its task leaves behind would hold the run's lock
                    os.killpg(pid, signal.SIGKILL)
                self._codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                ended = True
        # what fell first: its peers meet their ends because of it, or by our hand
        self._first = self._first or {rank: code for rank, code in sorted(self._codes.items()) if code}
        return ended or len(self._codes) == len(self._pids)

    def _by_rank(self) -> list[tuple[int, int]]:
        return [(seat.rank, pid) for seat, pid in zip(self._seats, self._pids, strict=False)]  # some may not be there

    def pids(self) -> list[int]:
        return list(self._pids)

    def living(self) -> list[int]:
        return [pid for rank, pid in self._by_rank() if rank not in self._codes]  # not reaped: the id is still its own

    def signal(self, number: int) -> None:
        for pid in self.living():
            os.kill(pid, number)

    def exits(self) -> Mapping[int, int]:
        return self._first

    def told(self) -> Mapping[int, Outcome]:
        return {}

    def kept(self) -> int:
        return self._memory.step if self._memory is not None else 0


def _be(
    run: Run, lock: Lock, seat: Seat, attempt: int, threads: int, parent: int, kept: SnapshotMemory | None,
    nodes: Nodes | None,
) -> NoReturn:  # fmt: skip
    """Be a rank, in a process that has just been forked, until it ends."""
    try:
        from train.runs import worker

        stop = StopRequest()  # in place of the agent's handlers, before a signal can arrive
        signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE)
        _become_rank(run, lock, seat, attempt, threads, parent)
        if kept is not None:
            kept.close()  # ours to open, as everybody else's: not the agent's own
        if nodes is not None:
            os.environ.update(nodes.environment())
            nodes.forget()
        worker.work(run, seat, attempt, stop)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(1)  # never back into the agent's own code


def _become_rank(run: Run, lock: Lock, seat: Seat, attempt: int, threads: int, parent: int) -> None:
    memory.lower_than_agent()
    die_with_parent(parent)
    with contextlib.suppress(OSError):
        os.setsid()  # what is typed in the run's terminal is the agent's business
    title.show(sys.executable, "-m", "train.runs.rank", str(run.folder), str(attempt), f"rank {seat.rank}")
    os.set_inheritable(lock.fd, True)  # a task that starts processes of its own stays alive as a whole
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    log = run.logs(attempt) / f"rank{seat.rank}.log"
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    for fd in (nothing, out):
        os.close(fd)
    os.environ.update(flight_recorder(run.logs(attempt)))
    os.environ.update(
        {
            "TRAIN_ATTEMPT": str(attempt), "TRAIN_AGENT_PID": str(parent), "OMP_NUM_THREADS": str(threads),
            "RANK": str(seat.rank), "LOCAL_RANK": str(seat.local_rank),
            "WORLD_SIZE": str(seat.size), "LOCAL_WORLD_SIZE": str(seat.local_size),
        }
    )  # fmt: skip
    _limit_threads(threads)


def _limit_threads(threads: int) -> None:
    """What OMP_NUM_THREADS does to libraries that read it when they are loaded, as NumPy's did before the fork."""
    with contextlib.suppress(ImportError):  # in a checkout that was not installed: docs/gpu.md
        from threadpoolctl import threadpool_limits

        threadpool_limits(threads)
