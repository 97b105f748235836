"""`train run --spawn N`: N ranks on this machine, started by torch.multiprocessing."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from train.errors import FAILED, FINISHED, INTERRUPTED, STOPPED, Refused, one_line
from train.parallel.seat import Seat
from train.record import store
from train.record.store import Lock, Run
from train.runs import interrupt, memory
from train.runs.worker import exit_code, leave, leave_failure, log_to, run_rank
from train.signals import POLITE, StopRequest, die_with_parent

CODES = {store.FINISHED: FINISHED, store.STOPPED: STOPPED}


def warm_up() -> None:
    """Start the server that forks ranks, while this process still checks the request.

    It imports torch once for all ranks and computes nothing, so a fork of it is clean.
    """
    from multiprocessing import forkserver, set_forkserver_preload

    set_forkserver_preload(["train.runs.unmoved", "train.runs.worker", "train.engine.loop", "train.runs.admit"])
    forkserver.ensure_running()


def start_ranks(
    made: Run, lock: Lock, ranks: int, attempt: int, meeting: str, environment: dict[str, str] | None = None
) -> list[Any]:
    """Start the ranks of an attempt; they meet in the folder `meeting`, fresh for every attempt."""
    import torch.multiprocessing as mp

    context = mp.get_context("forkserver")
    processes = []
    for rank in range(ranks):
        seat = Seat(rank, ranks, rank, ranks, f"file://{meeting}/store")
        arguments = (str(made.folder), seat, attempt, _Held(lock.fd), environment or {})
        process = context.Process(target=_spawned, args=arguments)
        process.start()
        processes.append(process)
    return processes


def spawn(made: Run, lock: Lock, ranks: int, attempt: int, stop: StopRequest) -> int:
    """Train with so many ranks and wait for their end. Returns the exit code."""
    made.clear_stop()
    kills = memory.Kills()
    with tempfile.TemporaryDirectory(prefix="train-spawn-") as meeting:
        processes = start_ranks(made, lock, ranks, attempt, meeting)
        made.note(pids={"ranks": [process.pid for process in processes]})
        first: int | None = None
        forwarded = 0.0
        while any(process.is_alive() for process in processes):
            time.sleep(0.05)
            wanted = made.stop_asked()
            if wanted and not stop.asked:
                stop.asked, stop.reason = True, store.WHO.get(wanted, wanted)
            if stop.asked and time.monotonic() > forwarded + 1:  # again: a rank that is starting does not listen yet
                forwarded = time.monotonic()
                for process in processes:
                    process.terminate()
            died = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
            if stop.at_once or wanted == store.NOW or (died and first is None):
                first = min(died, key=died.__getitem__, default=None)  # killed ones, then those who met their end
                if stop.at_once:  # whatever they wait for
                    interrupt.end_processes()
                    break
                time.sleep(0.2)  # let the others notice by themselves and say so in their logs
                for process in processes:
                    process.kill()
        if first is None:
            first = next((rank for rank, process in enumerate(processes) if process.exitcode != 0), None)
    made.clear_stop()
    code = processes[first].exitcode if first is not None else 0
    try:
        if stop.at_once and made.read()["state"] == store.RUNNING:
            interrupt.record(made)
            return INTERRUPTED
        return _record_end(made, attempt, stop, first, code, kills.limit())
    except (OSError, Refused) as error:
        if first is not None:  # otherwise rank 0 has said on the terminal how it ended
            print(f"train: how {made.name} ended cannot be recorded: {one_line(error)}", file=sys.stderr)
        return FAILED


def _record_end(
    made: Run, attempt: int, stop: StopRequest, first: int | None, code: int, out_of_memory: str | None
) -> int:
    """Write down how an attempt ended, of which rank `first` died first, if any did. Returns the exit code.

    Args:
        out_of_memory: the limit at which the kernel has killed for lack of memory meanwhile.
    """
    record = made.read()
    if record["state"] != store.RUNNING:
        made.end_attempt(record["state"], record["reason"])
        return CODES.get(record["state"], FAILED)
    error = made.first_failure(attempt) if first is not None else None
    if error is not None and code < 0 and not error["recurs"]:  # its peers have lost a rank that was killed
        error = None
    how = f"died of {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
    if stop.asked and error is None:  # at once, or before the ranks could listen, or while they saved
        newest = next(iter(made.steps_saved()), 0)
        reason = f"stopped ({stop.reason})"
        if first is not None and stop.reason != store.WHO[store.NOW]:
            reason += f", and rank {first} {how}"
        made.end_attempt(
            store.STOPPED, reason + (f"; the last checkpoint is of step {newest}" if newest else ""), store.STOPPED
        )
        return STOPPED
    if out_of_memory and code == -signal.SIGKILL:
        reason = f"out of memory: rank {first} was killed at {out_of_memory}; {memory.ADVICE}"
        made.end_attempt(store.FAILED, reason, store.FAILED)
    elif error is not None:
        reason = f"rank {error['rank']}: {error['reason']}"
        made.end_attempt(store.FAILED, reason, store.FAILED)
    else:
        reason = f"rank {first} {how}; continue with: train resume {made.name}"
        made.end_attempt("died", reason)
        made.update(reason=reason)
    print(f"train: {reason}", file=sys.stderr)
    return FAILED


class _Held:
    """The run's lock on its way to a process that multiprocessing starts: the same open file, held there too."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        from multiprocessing.reduction import DupFd

        return DupFd(self.fd)

    def __setstate__(self, passed: Any) -> None:
        self.fd = passed.detach()


def _spawned(folder: str, seat: Seat, attempt: int, held: _Held, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    # forked by the fork server, which lives exactly as long as the process that asked for us
    die_with_parent(os.getppid())
    stop = StopRequest((*POLITE, signal.SIGHUP))
    made = Run(Path(folder))
    if seat.rank:
        out = os.open(made.logs(attempt) / f"rank{seat.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        log_to(sys.stderr)
    else:
        log_to(sys.stderr)
        keep_log(made, attempt, 0)
    code = 1
    try:
        end = run_rank(made, seat, attempt, stop, bar=seat.rank == 0 and sys.stderr.isatty())
        code = exit_code(made, seat, end)
    except BaseException as error:
        own = leave_failure(made, seat, attempt, error)
        first = made.first_failure(attempt)
        # rank 0 writes to the terminal, where a lost connection would hide why it was lost
        if seat.rank or own["recurs"] or first is None or first["rank"] == seat.rank:
            traceback.print_exc()
    finally:
        leave(code)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A disk that fails: the line stands on the terminal, and a page of traceback for each would hide it."""


def keep_log(made: Run, attempt: int, rank: int) -> None:
    """Write this process's lines into the log of its rank too."""
    handler = _LogFile(made.logs(attempt) / f"rank{rank}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("train").addHandler(handler)
