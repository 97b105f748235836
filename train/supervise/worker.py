"""The code of a rank, from connecting to the other ranks to its last line.

The zygote forks `task_rank`, with arguments from ranks.py. Under torchrun `train run` is a rank itself and calls
`run_rank`.
"""

from __future__ import annotations

import bdb
import contextlib
import faulthandler
import functools
import logging
import os
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from .. import breakpoints, caches, causes, faults, screen
from ..checkpoint.buffers import ENVIRONMENT
from ..errors import Refused, TrainingFailed, may_pass
from ..parallel.rank_env import RankEnv
from ..run import heartbeat, outcome
from ..run.heartbeat import Heart
from ..run.outcome import Kind, Outcome
from ..run.run_folder import Run
from ..run.spec import Spec
from ..signals import StopRequest, leave
from ..zygote.server import SIGNALS
from . import diagnose, memory

log = logging.getLogger("train")

_PATIENCE = 5.0
"""Seconds within which rank 0 reports a failure that all ranks have met."""
_MEETING = 300
"""Seconds the ranks of several machines get to connect. If one dies before, its node ends the others."""


def run_rank(run: Run, spec: Spec, *, rank_env: RankEnv, attempt: int, stop: StopRequest, bar: bool) -> Outcome:
    """Train one rank of a run until it ends. Returns its outcome, which is also written into the logs folder.

    Does not print an exception that ends the rank: the outcome contains it.
    """
    logs, file = run.logs(attempt), run.path / "task.py"
    caches.provide()
    try:
        end = _train(run, spec, rank_env, attempt, stop, bar)
    except BaseException as error:
        before = outcome.read(logs, rank_env.rank)
        if before is not None:  # the cleanup failed, which does not change how training has ended
            return before
        snapshot = logs / f"rank{rank_env.rank}.memory.pickle"
        why = diagnose.failure_of(error, file if (run.folder / "task.py").exists() else None, snapshot)
        end = Outcome(rank=rank_env.rank, kind=Kind.DIED, is_of_system=isinstance(error, OSError), **why)
    if outcome.read(logs, rank_env.rank) is None:
        with contextlib.suppress(OSError):
            outcome.write(logs, end)
    if end.kind in (Kind.FAILED, Kind.REFUSED) and (
        rank_env.rank == rank_env.lead or not _wait_for_lead(logs, rank_env)
    ):
        with contextlib.suppress(OSError):  # the terminal may be gone
            parts = filter(None, [end.reason, causes.hint(end.reason)])
            screen.remark("; ".join(parts))
    return end


def _train(run: Run, spec: Spec, rank_env: RankEnv, attempt: int, stop: StopRequest, bar: bool) -> Outcome:
    faults.arm(os.environ.get("TRAIN_FAULT"), rank_env.rank)
    heart = Heart(run.logs(attempt) / f"rank{rank_env.rank}.beat")
    with contextlib.ExitStack() as held:
        try:
            from ..trainer import setup
            from ..trainer.conclude import conclude
            from ..trainer.train import train

            address = os.environ.pop(ENVIRONMENT, None)  # for this run only, not for one that its task may start
            snapshot_memory = setup.Memory(address, memory.left) if address else None
            job = setup.set_up(
                run, spec, rank_env, attempt=attempt, stop=stop, bar=bar, heart=heart, held=held, memory=snapshot_memory
            )
            return conclude(job, train(job), attempt)
        except (Refused, TrainingFailed, RuntimeError, bdb.BdbQuit) as error:
            reason = _reason_of(error, run)
            if not reason:
                raise
            heart.beat(heartbeat.ENDING, heart.step)
            kind = Kind.REFUSED if isinstance(error, Refused) else Kind.FAILED
            passes = kind is Kind.REFUSED and may_pass(error)  # the disk of its data or its folder does not answer
            return Outcome(
                rank=rank_env.rank, kind=Kind.DIED if passes else kind, step=heart.step, reason=reason,
                recurs=not passes, is_of_system=passes, traceback=traceback.format_exc(),
            )  # fmt: skip


def _reason_of(error: BaseException, run: Run) -> str:
    """Return why a rank ends, in a line that says what to do; '' for an error without such a line.

    Raises:
        RuntimeError: the run's GPUs are gone. That is a death, not a failure of the run.
    """
    from ..build import determinism
    from ..parallel.devices import NoGPU

    if isinstance(error, NoGPU):
        raise RuntimeError(f"{causes.NO_GPU}: {run.name} computes on GPUs, but torch sees none here") from None
    if isinstance(error, bdb.BdbQuit):
        return breakpoints.ended()
    return str(error) if isinstance(error, (Refused, TrainingFailed)) else determinism.refusal(error)


def log_to(stream: Any) -> None:
    """Log plain lines to a stream; warnings of libraries are unchanged."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(screen.PlainLines())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def task_rank(
    folder: str,
    spec: dict[str, Any],
    attempt: int,
    rank_env: dict[str, Any],
    meeting: dict[str, Any],
    has_terminal: bool,
    files: list[int],
) -> NoReturn:
    """Run one rank of a task, in a fork of the zygote, until it ends.

    Args:
        spec: What the agent has read, as JSON.
        rank_env: The fields of RankEnv except `init`.
        has_terminal: Whether its output goes to the terminal of `train run` and not to its log.
        meeting: How the ranks connect: {}: by an open file; else by `host` and `port`, at which rank 0 listens.
        files: Standard files, the run's lock, its folder, the open file or listening socket for connecting, and
            leases.
    """
    stop = StopRequest()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    run, rank = Run(Path(folder), files.pop(4)), rank_env["rank"]
    logs = run.logs(attempt)
    memory.lower_than_agent()
    for fd in (files[3], *files[5:]):  # a process that the task starts keeps the run alive, and its GPU, too
        os.set_inheritable(fd, True)
    with contextlib.suppress(ImportError):  # in a checkout that was not installed: tests/gpu/README.md
        from setproctitle import setproctitle

        setproctitle(f"train-rank {rank} {run.name}")
    limit_threads(int(os.environ["OMP_NUM_THREADS"]))
    init: Any = (
        f"file:///proc/self/fd/{files[4]}" if not meeting else functools.partial(_meet, **meeting, files=files[4:])
    )
    # for the agent's request in a hang; also works while this process waits inside a C function
    stacks = (logs / f"rank{rank}.stack.txt").open("a")
    faulthandler.register(signal.SIGQUIT, file=stacks, all_threads=True)
    log_to(sys.stderr)
    if has_terminal:
        keep_log(logs, rank)
    else:
        refuse_breakpoints(Spec.from_json(spec), rank)
    place = RankEnv(**rank_env, init=init)
    has_bar = has_terminal and sys.stderr.isatty()
    end = run_rank(run, Spec.from_json(spec), rank_env=place, attempt=attempt, stop=stop, bar=has_bar)
    # on a terminal a lost connection would hide the reason for the loss; the supervisor reports disk errors
    if end.kind is Kind.DIED and not (has_terminal and (_is_of_other(logs, end) or end.is_of_system)):
        show(end)
    leave(exit_code(logs, place, end))


def refuse_breakpoints(spec: Spec, rank: int) -> None:
    """Make breakpoint() fail in a rank without a terminal, with a line that names the way."""
    which = f"rank {rank}" if rank else "a launched run"
    way = f"train run {shlex.quote(spec.task_source or spec.task)} --watch.hang_minutes 0"
    breakpoints.refuse(f"{which} has no terminal; to debug with one rank: {way}")


def _is_of_other(logs: Path, end: Outcome) -> bool:
    """Whether a rank died because another rank did."""
    first = outcome.first_fault(outcome.read_all(logs))
    return not end.recurs and first is not None and first.rank != end.rank


def limit_threads(threads: int) -> None:
    """Limit the threads of libraries that read OMP_NUM_THREADS only when loaded, as NumPy's did before the fork."""
    with contextlib.suppress(ImportError):
        from threadpoolctl import threadpool_limits

        threadpool_limits(threads)


def _meet(host: str, port: int, files: list[int]) -> Any:
    """Return the store at which the ranks of several machines connect.

    Args:
        files: On rank 0, its listening socket.
    """
    import datetime

    import torch.distributed as dist

    limit = datetime.timedelta(seconds=_MEETING)
    own: dict[str, Any] = {"is_master": True, "master_listen_fd": files[0]} if files else {"is_master": False}
    return dist.TCPStore(host, port, timeout=limit, wait_for_workers=False, use_libuv=False, **own)


def keep_log(logs: Path, rank: int) -> None:
    """Also write this process's log lines into the log of its rank."""
    logging.raiseExceptions = False  # if the disk fails, print the lines without a traceback for each
    handler = logging.FileHandler(logs / f"rank{rank}.log", encoding="utf-8")
    handler.setFormatter(screen.PlainLines())
    log.addHandler(handler)


def show(end: Outcome) -> None:
    """Print the exception that ended a rank, if the terminal still exists."""
    with contextlib.suppress(OSError):
        print(end.traceback, end="", file=sys.stderr, flush=True)


def exit_code(logs: Path, rank_env: RankEnv, end: Outcome) -> int:
    """Return a rank's exit code: 0 for every recorded end that a restart would not change.

    It is also 1 if the other ranks cannot notice the end, because they have not connected and wait for this rank.
    """
    if end.kind is Kind.DIED:
        return 1
    if not end.is_fault or rank_env.size == 1:
        return 0
    import torch.distributed as dist

    if not dist.is_initialized():
        return 1
    return 0 if rank_env.rank == rank_env.lead or _lead_has_reported(logs, rank_env) else 1


def _wait_for_lead(logs: Path, rank_env: RankEnv) -> bool:
    """Wait for the machine's first rank to report a failure. Returns whether it did.

    It reports a failure that all ranks meet at the same step, but knows nothing of a failure of one other rank.
    """
    deadline = time.monotonic() + _PATIENCE
    while not _lead_has_reported(logs, rank_env):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _lead_has_reported(logs: Path, rank_env: RankEnv) -> bool:
    """Whether the machine's first rank has ended by itself, other than by an exception."""
    first = outcome.read(logs, rank_env.lead)
    return not logs.exists() or (
        first is not None and first.kind is not Kind.DIED
    )  # rank 0 notices a removed folder too
