"""Ranks under torchrun's elastic agent, which runs in a thread of this process: launched scripts.

And tasks where this process cannot be forked as it is (see runs/agent.py); theirs import everything themselves.

In a thread, so that signals are ours: torchrun alone would give ranks 30 seconds to save and report a stop as a
failure. Each attempt has a rendezvous of its own and no restarts inside, so that no attempt reads another's keys, and
restarts are counted in runs/supervise.py, against progress.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
import tomllib
import traceback
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

from train import own
from train.errors import one_line
from train.record.outcome import Outcome
from train.record.store import Lock, Run
from train.runs import guard, scripts
from train.runs.processes import Guard, flight_recorder
from train.runs.processes.kept import lend, memory_of

if TYPE_CHECKING:
    import psutil
    from torch.distributed.elastic.multiprocessing import ProcessFailure


def failed(failures: Mapping[int, ProcessFailure]) -> dict[int, int]:
    """The exit codes of the ranks that failed by themselves.

    Newer releases of torch (2.11 is one) list, behind those that torchrun found to have failed, the ones that it ended
    for it: by SIGTERM, or by SIGKILL who was still there half a minute later. What those died of is no cause.

    Args:
        failures: of torchrun, by rank, in its order.
    """
    first = next(iter(failures.values()))

    def is_ended(failure: ProcessFailure) -> bool:
        late = failure.timestamp > first.timestamp + 1  # full seconds; those found together have the same, or the next
        return failure.exitcode == -signal.SIGTERM or (late and failure.exitcode == -signal.SIGKILL)

    return {rank: each.exitcode for rank, each in failures.items() if each is first or not is_ended(each)}


class Elastic:
    """Ranks of a task or of a script, each started through runs/rank.py."""

    repeats = False  # a script may take a second SIGTERM for another request

    def __init__(self, run: Run, lock: Lock, ranks: int) -> None:
        self.run, self.ranks = run, ranks
        self.is_script = bool(run.read().get("script"))
        self.problem = ""
        self._exits: dict[int, int] = {}
        self._thread = threading.Thread()
        self._found: list[psutil.Process] = []
        self._memory = memory_of(run, ranks)
        os.dup2(lock.fd, 0)  # how ranks inherit the lock: see runs/rank.py

    def start(self, attempt: int) -> Guard | None:
        self.problem, self._exits, self._found = "", {}, []
        looked_after = guard.of(self.run, attempt, range(self.ranks))
        self._thread = threading.Thread(target=self._host, args=(attempt,), name="torchrun")
        try:
            self._thread.start()
        except RuntimeError as error:  # no room for a thread: the machine is busy
            self._thread = threading.Thread()
            self._fail(error)
        return looked_after

    def _host(self, attempt: int) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            self._launch(attempt)
        except ChildFailedError as error:
            self._exits = failed(error.failures)
        except BaseException as error:
            self._fail(error)
            with contextlib.suppress(OSError):
                traceback.print_exc()

    def _fail(self, error: BaseException) -> None:
        self.problem, self._exits = one_line(error), {0: 1}

    def wait(self) -> bool:
        if self._thread.is_alive():
            self._thread.join(0.2)
        return not self._thread.is_alive()

    def pids(self) -> list[int]:
        import psutil

        if len(self._found) < self.ranks:  # an attempt starts its ranks once; looking costs a walk through /proc
            try:
                children = psutil.Process().children()
                found = [child for child in children if self.is_script or "train.runs.rank" in child.cmdline()]
                self._found = sorted(found, key=lambda process: process.pid)
            except psutil.Error:
                self._found = []
        return [process.pid for process in self._found]

    def living(self) -> list[int]:
        self.pids()
        return [process.pid for process in self._found if process.is_running()]  # by its start, too: not another's

    def signal(self, number: int) -> None:
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def exits(self) -> Mapping[int, int]:
        return self._exits

    def told(self) -> Mapping[int, Outcome]:
        return {}

    def kept(self) -> int:
        return self._memory.step if self._memory is not None else 0

    def _launch(self, attempt: int) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        # it misses signal handlers in a thread, for fear of orphans; both are our business (see runs/rank.py)
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
        self._prepare_environment(attempt)
        rest = ["--", *scripts.command(self.run, self.run.read())] if self.is_script else []
        program, *arguments = own.command("train.runs.rank", str(self.run.folder), str(attempt), *rest)
        # torchrun never takes its folder away; what a kill leaves of this one goes with the run
        logs = self.run.logs(attempt).absolute()
        with tempfile.TemporaryDirectory(prefix=".torchrun-", dir=logs, ignore_cleanup_errors=True) as desk:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=self.ranks,
                logs_specs=DefaultLogsSpecs(log_dir=desk),  # without it, it makes one among temporary files, too
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                monitor_interval=0.1,
                local_addr="127.0.0.1",
            )
            elastic_launch(config, program)(*arguments)

    def _prepare_environment(self, attempt: int) -> None:
        """What the ranks inherit from this process."""
        if not self.is_script:
            content = tomllib.loads((self.run.folder / "config.toml").read_text(encoding="utf-8"))
            os.environ["OMP_NUM_THREADS"] = str(content.get("cpu_threads", 1))
        elif self.ranks > 1:  # as torchrun does
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["TRAIN_AGENT_PID"] = str(os.getpid())
        os.environ.update(flight_recorder(self.run.logs(attempt)))
        lend(self._memory)
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
