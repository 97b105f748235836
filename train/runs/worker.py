"""What every rank executes, from meeting the others to the last line.

Run as a module it is one rank of a launched run: `python -m train.runs.worker RUN_FOLDER`, with the environment of
torchrun. `train run` calls `run_rank` in its own process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from train import faults
from train.errors import FAILED, REFUSED, Refused, TrainingFailed, one_line
from train.record import heartbeat, store
from train.record.heartbeat import Heart
from train.record.store import Run
from train.runs import cause, memory
from train.signals import StopRequest

if TYPE_CHECKING:
    pass
from train.parallel.seat import Seat, seat_of_environment

log = logging.getLogger("train")

_PATIENCE = 5.0
"""Seconds in which rank 0 will have recorded a failure that all ranks have met."""


def run_rank(run: Run, seat: Seat, attempt: int, stop: StopRequest, bar: bool) -> int:
    """Train one rank of a run to its end. Returns its exit code; rank 0 records the outcome in run.json.

    An exception that is not the run's own fault for certain is left to the caller: see `failure_of`.
    """
    faults.arm(os.environ.get("TRAIN_FAULT"), seat.rank)
    heart = Heart(run.logs(attempt) / f"rank{seat.rank}.beat")
    with contextlib.ExitStack() as held:
        try:
            from train.engine import finish, setup
            from train.engine.loop import train

            job, done = setup.set_up(run, seat, attempt, stop, bar, heart, held)
            return finish.conclude(job, train(job, done))
        except (Refused, TrainingFailed) as error:
            heart.beat(heartbeat.ENDING, heart.step)
            refused = isinstance(error, Refused)
            if seat.rank == 0:
                run.note(state=store.FAILED, reason=str(error), ended=store.now())
            else:
                leave_failure(run, seat, attempt, error)
            if seat.rank == 0 or not _is_recorded(run):
                with contextlib.suppress(OSError):  # the terminal may be gone
                    print(f"train: {error}", file=sys.stderr, flush=True)
            return REFUSED if refused else FAILED


def failure_of(error: BaseException, task_file: Path | None) -> dict[str, Any]:
    """What a rank leaves behind about the exception it dies of.

    `recurs` says whether it would fail again in the same way: randomness is a function here, so an exception of the
    task does, while one of the network, the machine or another rank's death may not.
    """
    import torch
    import torch.distributed as dist

    from train.tasks import where

    if isinstance(error, (Refused, TrainingFailed)):
        return {"time": time.time(), "reason": str(error)[:600], "recurs": True, "traceback": traceback.format_exc()}
    text = one_line(f"{type(error).__name__}: {error}")
    of_sample = getattr(error, "sample", "")
    passing = isinstance(error, (dist.DistError, OSError, EOFError))
    if of_sample:  # and of nothing that may pass: see data/fetch.py
        passing = False
        text = f"{of_sample}: {text}"
    elif isinstance(error, torch.OutOfMemoryError):
        passing = not memory.device_is_too_small(text)
    elif isinstance(error, RuntimeError) and "Original Traceback" not in text:  # that is a data set's own, in a worker
        passing |= cause.is_of_others(text)
    passing |= isinstance(error, RuntimeError) and not of_sample and cause.is_busy(text)
    line = where(error, task_file) if task_file is not None else text
    if isinstance(error, (MemoryError, OSError, RuntimeError)) and memory.is_refused(text):
        line, passing = f"out of memory ({line[:300]}): {memory.refused_at()}; {memory.ADVICE}", False
    return {"time": time.time(), "reason": line[:600], "recurs": not passing, "traceback": traceback.format_exc()}


def log_to(stream: Any) -> None:
    """Plain lines for people; warnings of libraries pass through."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def main() -> None:
    """One rank of a launched run. Exits 0 for every end that a restart would not change (see run.json for it)."""
    stop = StopRequest()
    run = Run(Path(sys.argv[1]))
    attempt = int(os.environ.get("TRAIN_ATTEMPT", "1"))
    log_to(sys.stderr)
    seat = seat_of_environment()
    # what the agent asks for when nothing moves; works also while this process waits inside a C function
    stacks = (run.logs(attempt) / f"rank{seat.rank}.stack.txt").open("a")
    faulthandler.register(signal.SIGQUIT, file=stacks, all_threads=True)
    code = 1
    try:
        code = exit_code(run, seat, run_rank(run, seat, attempt, stop, bar=False))
    except BaseException as error:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        leave_failure(run, seat, attempt, error)
    finally:
        leave(code)


def exit_code(run: Run, seat: Seat, end: int) -> int:
    """What a rank under an agent exits with: 0 for every end that is recorded and that a restart would not change.

    Not 0 either where the others do not notice the end: they have not met this rank yet, and wait for it.
    """
    if end not in (FAILED, REFUSED) or seat.size == 1:
        return 0
    import torch.distributed as dist

    return 1 if not dist.is_initialized() or (seat.rank and _is_running(run)) else 0


def _is_recorded(run: Run) -> bool:
    """Most failures meet all ranks at the same step, and rank 0 records them; of one rank's alone it knows nothing."""
    deadline = time.monotonic() + _PATIENCE
    while _is_running(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_running(run: Run) -> bool:
    try:
        return bool(run.read()["state"] == store.RUNNING)
    except Refused:  # its folder is gone: rank 0 has met that too
        return False


def leave_failure(run: Run, seat: Seat, attempt: int, error: BaseException) -> dict[str, Any]:
    """Write down, beside the log of this rank, what it dies of, where the disk takes it."""
    file = run.folder / "task.py"
    failure = failure_of(error, file if file.exists() else None) | {"rank": seat.rank}
    path = run.logs(attempt) / f"rank{seat.rank}.error.json"
    with contextlib.suppress(OSError):
        store.write_atomically(path, json.dumps(failure) + "\n", durable=False)
    return failure


def leave(code: int) -> NoReturn:
    """End this process at once.

    Not sys.exit: a process group whose peers are gone can hang in its destructor, and loader workers ignore the
    SIGTERM of Python's own clean-up. They die with us.
    """
    with contextlib.suppress(OSError, ValueError):  # a log on a disk that fails
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
