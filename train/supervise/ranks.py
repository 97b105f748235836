"""The processes of a run's ranks on this machine: starts them, and knows which still run and their exit codes.

The zygote forks all of them. Why a rank ended, and what follows, is decided elsewhere (decide.py).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from .. import hash_seed
from ..checkpoint.buffers import ENVIRONMENT, SnapshotMemory
from ..errors import Refused, one_line
from ..parallel.rank_env import RankEnv
from ..run import wandb_run
from ..run.run_folder import Lock, Run
from ..run.spec import Spec
from ..zygote.client import RANKS, Zygote

_WAIT = 0.2
"""Seconds `wait` takes if no rank ends."""
_MOMENT = 0.25
"""Seconds within which ranks end that end for the same reason."""


class Peers(Protocol):
    """What the ranks of this machine need to know of the other machines of their run."""

    @property
    def meeting(self) -> dict[str, Any]:
        """The address at which the ranks connect: `host` and `port`."""

    def rank_envs(self) -> list[RankEnv]:
        """Return the ranks of this machine in the current attempt."""

    def take_store(self) -> socket.socket | None:
        """On node 0: return the listening socket for rank 0, once."""

    def environment(self) -> dict[str, str]:
        """Return more environment variables for the ranks of this machine."""


class Ranks(abc.ABC):
    """The ranks of this machine, one attempt after the other. A subclass starts those of its program.

    Args:
        count: Number of ranks.
        nodes: The other machines, if the run has several.
        environ: Variables that override the environment of the ranks.
        is_foreground: Whether rank 0 has this process's terminal.
    """

    _after = ""
    """The import of the zygote for which a rank waits; '': none."""

    def __init__(
        self,
        run: Run,
        lock: Lock,
        count: int,
        zygote: Zygote,
        nodes: Peers | None = None,
        environ: Mapping[str, str] | None = None,
        is_foreground: bool = False,
    ) -> None:
        self.run, self.count, self.environ = run.held(), count, dict(environ or {})
        self.problem = ""
        """Why the ranks could not be started, in one line."""
        self.left_behind: list[int] = []
        """Processes that the ranks have started and not ended; they were ended."""
        self.rank_envs: list[RankEnv] = []
        self._lock, self._zygote, self._nodes = lock, zygote, nodes
        self._is_foreground = is_foreground
        self.memory: SnapshotMemory | None = None
        """The memory for snapshots of the state, from which a restart continues; None: not used."""
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._wandb: dict[str, Any] = {"run_id": "", "has_feed": False}
        self._first_until = math.inf
        self._signalled: set[int] = set()

    def start(self, spec: Spec, attempt: int) -> None:
        """Start all ranks. If that fails, `problem` says why."""
        self.problem, self._pids, self._codes, self._first = "", {}, {}, {}
        self._wandb = {"run_id": spec.wandb_id, "has_feed": bool(spec.config.get("log.wandb"))}
        self._first_until, self._signalled = math.inf, set()
        self.rank_envs = [
            RankEnv(rank=rank, size=self.count, local_rank=rank, local_size=self.count) for rank in range(self.count)
        ]
        if self._nodes is not None:
            self.rank_envs = self._nodes.rank_envs()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            if self._zygote.is_lost:
                self._zygote = self._zygote.again()
            self._zygote.adopt_orphans()
            self._start(spec, attempt)
        except (OSError, Refused) as error:  # the machine has no resources for a process
            self.problem = one_line(error if isinstance(error, Refused) else f"{type(error).__name__}: {error}")
            self._first = {self.rank_envs[0].rank: 1}
            for pid in self.living:
                self.end_peer(pid, signal.SIGKILL)

    @abc.abstractmethod
    def _start(self, spec: Spec, attempt: int) -> None:
        """Start all ranks. Raises OSError or Refused if that fails."""

    def _fork(
        self,
        function: str,
        arguments: list[Any],
        attempt: int,
        rank_env: RankEnv,
        environ: Mapping[str, str],
        more: list[int],
    ) -> None:
        logs = self.run.logs(attempt)
        environ = {
            **hash_seed.with_seed(os.environ), **wandb_run.variables(os.environ, rank=rank_env.rank, **self._wandb),
            **flight_recorder(logs.resolve()), **environ, **self.environ,
            "TRAIN_ATTEMPT": str(attempt), "TRAIN_AGENT_PID": str(os.getpid()),
            "TRAIN_RUN_DIR": str(self.run.path), "TRAIN_NAME": self.run.name,
        }  # fmt: skip
        with contextlib.ExitStack() as held:
            log = os.open(logs / f"rank{rank_env.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            held.callback(os.close, log)
            files = [0, 1, 2]
            if not self._has_terminal(rank_env):
                files = [os.open(os.devnull, os.O_RDONLY), log, log]
                held.callback(os.close, files[0])
            leases = self._lock.leases[rank_env.local_rank :: self.count]  # each rank those of its own GPUs
            self._pids[rank_env.rank] = self._zygote.fork(
                function, arguments, files=[*files, self._lock.fd, self.run.fd, *more, *leases],
                environ=environ, after=self._after,
            )  # fmt: skip

    def _has_terminal(self, rank_env: RankEnv) -> bool:
        return self._is_foreground and rank_env.rank == 0

    def wait(self) -> bool:
        """Wait a moment. Returns whether all ranks have ended, with all that they have started."""
        if len(self._codes) < len(self._pids):
            ended = self._zygote.ended(_WAIT)
            codes = {rank: ended[pid] for rank, pid in self._pids.items() if pid in ended}
            self._codes |= codes
            self._note_first({rank: code for rank, code in codes.items() if code and rank not in self._signalled})
        has_ended = len(self._codes) == len(self._pids)
        if has_ended:
            self._end_rest()
        return has_ended

    def _end_rest(self) -> None:
        """End what the ranks have left behind: it would keep ports, GPU memory and the lock of the run."""
        self.left_behind = self._zygote.end_orphans()

    def _note_first(self, failed: dict[int, int]) -> None:
        """Note the exit codes of ranks that failed by themselves.

        The other ranks lose their connections to a killed rank and may be seen to end before it. So all ranks that end
        in the same moment count as first.
        """
        if failed and time.monotonic() < self._first_until:
            self._first_until = min(self._first_until, time.monotonic() + _MOMENT)
            self._first |= failed

    @property
    def numbers(self) -> list[int]:
        """The ranks of this machine in the current attempt."""
        return [rank_env.rank for rank_env in self.rank_envs]

    @property
    def pids(self) -> list[int]:
        """Process ids of all started ranks, by rank."""
        return list(self._pids.values())

    @property
    def living(self) -> list[int]:
        """Process ids of the ranks that still run."""
        return [pid for rank, pid in self._pids.items() if rank not in self._codes]

    @property
    def exits(self) -> Mapping[int, int]:
        """Maps the ranks that failed first to their exit codes; negative: killed by that signal."""
        return self._first

    def signal(self, number: int) -> None:
        """Send a signal to all running ranks."""
        for pid in self.living:
            self._zygote.signal(pid, number)

    def end_peer(self, pid: int, number: int) -> None:
        """End a rank by this signal because of another rank. Its exit code is then ignored."""
        self._signalled |= {rank for rank, other in self._pids.items() if other == pid}
        self._zygote.signal(pid, number)

    @property
    def copied(self) -> int:
        """The newest step of which all ranks have a snapshot in memory; 0: none."""
        return self.memory.step if self.memory is not None else 0

    @property
    def _memory_address(self) -> str:
        return self.memory.address if self.memory is not None else ""  # '' hides the variable of an enclosing run


class TaskRanks(Ranks):
    """Ranks of a task: forks of the zygote, which has imported all that they need."""

    _after = RANKS[-1]

    def __init__(self, run: Run, spec: Spec, *, lock: Lock, count: int, zygote: Zygote, **more: Any) -> None:
        super().__init__(run, lock, count, zygote, **more)
        self.memory = None if self._is_foreground else snapshot_memory(spec, count)

    def _start(self, spec: Spec, attempt: int) -> None:
        common = {"OMP_NUM_THREADS": str(spec.config.get("cpu_threads", 1)), ENVIRONMENT: self._memory_address}
        meeting: dict[str, Any] = {}
        with contextlib.ExitStack() as held:
            place = []
            if self._nodes is not None:
                meeting, common = self._nodes.meeting, common | self._nodes.environment()
                listening = self._nodes.take_store()
                place = [held.enter_context(listening).fileno()] if listening is not None else []
            else:  # in memory: other processes cannot open it, and it vanishes with these processes
                place = [os.memfd_create("train-store")]
                held.callback(os.close, place[0])
            for rank_env in self.rank_envs:
                known = {key: value for key, value in dataclasses.asdict(rank_env).items() if key != "init"}
                has_terminal = self._has_terminal(rank_env)
                arguments = [str(self.run.path), spec.to_json(), attempt, known, meeting, has_terminal]
                at = place if not meeting or rank_env.rank == 0 else []
                environ = common | of_rank(rank_env)
                self._fork("train.supervise.worker:task_rank", arguments, attempt, rank_env, environ, at)


def of_rank(rank_env: RankEnv) -> dict[str, str]:
    """Return torchrun's variables that say which rank a process is."""
    return {
        "RANK": str(rank_env.rank), "LOCAL_RANK": str(rank_env.local_rank),
        "WORLD_SIZE": str(rank_env.size), "LOCAL_WORLD_SIZE": str(rank_env.local_size),
    }  # fmt: skip


def snapshot_memory(spec: Spec, ranks: int) -> SnapshotMemory | None:
    """Return the memory for snapshots of a task's state, from which a restart continues; None: not used."""
    if spec.max_restarts == 0 or not spec.config.get("checkpoint.snapshots", True):
        return None
    return SnapshotMemory(ranks)


_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables of the flight recorder: the name in newer releases of torch, and the older name."""


def flight_recorder(logs: Path) -> dict[str, str]:
    """Return the environment variables for NCCL's flight recorder; health.py triggers its trace.

    Uses the names that this torch knows, because newer releases warn about old names on each rank. A size that the user
    has set, under either name, stays.
    """
    which = 0 if _knows_new_names() else 1
    values = {} if any(name in os.environ for name in _SIZES) else {_SIZES[which]: "2000"}
    values |= {_FILES[which]: str(logs / "nccl-trace-rank"), "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(logs / "nccl-rank")}
    return {"TORCH_NCCL_DUMP_ON_TIMEOUT": os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"), **values}


@functools.cache
def _knows_new_names() -> bool:
    """Whether this torch warns about the older names: from 2.9 on (pytorch/pytorch#152563)."""
    return tuple(map(int, version("torch").split(".")[:2])) >= (2, 9)
