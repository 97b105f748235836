"""The ranks of a script on this machine: forks of the zygote that execute its file with torchrun's variables."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import uuid
from collections.abc import Callable
from pathlib import Path

from .. import module_runner
from ..checkpoint.buffers import ENVIRONMENT, SnapshotMemory
from ..parallel.rank_env import STORE
from ..run.run_folder import Lock, Run
from ..run.spec import Spec
from ..supervise.ranks import Ranks, of_rank
from ..zygote.client import SCRIPT, Zygote
from . import command
from .meeting import Meeting, asks_rank

_ANSWER = 2.0
"""Seconds the store of the ranks has to answer."""


class ScriptRanks(Ranks):
    """The ranks of a script, one attempt after the other.

    Args:
        say: Prints a line on the terminal.
    """

    def __init__(
        self, run: Run, spec: Spec, *, lock: Lock, count: int, zygote: Zygote, say: Callable[[str], None]
    ) -> None:
        super().__init__(run, lock, count, zygote)
        self.memory = SnapshotMemory(count)  # used if it opens a session
        self._starts, self._say = command.Starts(spec), say
        self._store: int | None = None
        self._line: socket.socket | None = None
        self._meeting: Meeting | None = None

    def _start(self, spec: Spec, attempt: int) -> None:
        has_failed = command.has_failed(self.run.attempts()[:-1], 60 * command.healthy_minutes(spec))
        arguments, line = self._starts.arguments(self.run.path, attempt, has_failed)
        for text in (*command.edited(spec, self.run.name), *filter(None, [line])):
            self._say(text)
        log = self.run.logs(attempt) / "rank0.log"
        if line:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        sources = [Path(name) for name in (spec.script, *spec.script_files) if name.endswith(".py")]
        has_own_port = bool(command.ports_set(sources))
        self._meeting = None
        store, run_id = self._host_store(), uuid.uuid4().hex
        if self.count > 1 and not (has_own_port or asks_rank(sources)):
            self._meeting = Meeting(self.run, log, self.count, self._have_met)
        # a script with a port of its own starts a store there, as under `python`, and must not look for ours
        port = _free_port() if has_own_port else store
        is_ours = {} if has_own_port else {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        common = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default", "ROLE_WORLD_SIZE": str(self.count),
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": run_id, ENVIRONMENT: self._memory_address, STORE: f"{run_id} {store}", **is_ours,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }  # fmt: skip
        program = ["-m", spec.script_module] if spec.script_module else [spec.script]
        if self.count > 1:  # as torchrun does
            common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        for rank_env in self.rank_envs:
            environ = {**common, "ROLE_RANK": str(rank_env.rank), **of_rank(rank_env)}
            self._fork("train.scripts.worker:script_rank", [[*program, *arguments]], attempt, rank_env, environ, [])

    def _host_store(self) -> int:
        """Start the store at which the ranks of a script connect. Returns its port.

        Raises:
            OSError: the store did not start.
        """
        self._end_store()
        self._line, other = socket.socketpair()
        with other:
            self._store = self._zygote.fork(
                "train.scripts.worker:host_store", [], files=[0, 1, 2, other.fileno()], after=SCRIPT[-1]
            )
        port = self._line.recv(16)
        if not port:
            raise OSError("the store for the rendezvous of the ranks did not start")
        self._line.settimeout(_ANSWER)
        return int(port)

    def _have_met(self) -> bool:
        """Whether a rank has written into the store; also if the store does not answer."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.sendall(b"?")
                return self._line.recv(1) != b"0"
        return True

    def wait(self) -> bool:
        if self._meeting is not None:
            self._meeting.look()
        return super().wait()

    def _end_store(self) -> None:
        if self._store is not None:
            self._zygote.signal(self._store, signal.SIGKILL)
        if self._line is not None:
            self._line.close()
        self._store = self._line = None

    def _end_rest(self) -> None:
        if self._meeting is not None and [*self._codes.values()] == [0] * self.count:
            self._meeting.look(is_last=True)
        self._end_store()
        super()._end_rest()


class LoopRanks(Ranks):
    """The one rank of a sweep: our loop (launcher/sweep_loop.py) as a separate process, without torch."""

    def __init__(self, run: Run, *, lock: Lock, count: int, zygote: Zygote) -> None:
        super().__init__(run, lock, count, zygote)

    def _start(self, spec: Spec, attempt: int) -> None:
        command = module_runner.command("train.launcher.sweep_loop", str(self.run.path))[1:]
        for rank_env in self.rank_envs:
            self._fork("train.scripts.worker:script_rank", [command], attempt, rank_env, {}, [])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
