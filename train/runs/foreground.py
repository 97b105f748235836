"""`train run`: here and now. One process, or N that torch.multiprocessing starts, or one rank of a torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from train.errors import FAILED, REFUSED, Refused, one_line
from train.parallel.seat import Seat, seat_of_environment
from train.record import environment, store
from train.record.store import Lock, Run
from train.runs import interrupt
from train.runs.admit import Prepared, Request, prepare
from train.runs.spawn import keep_log
from train.runs.spawn import spawn as spawn_ranks
from train.runs.worker import exit_code, leave, leave_failure, log_to, run_rank
from train.signals import StopRequest

_GRACE = 5.0
"""Seconds in which the process that started ranks will have ended them."""


def run(runs: Path, name: str | None, request: Request, spawn: int | None) -> int:
    """Train in the foreground. Returns the exit code.

    Raises:
        Refused: the request is wrong; nothing has been created.
    """
    log_to(sys.stderr)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if spawn is not None:
            raise Refused("--spawn starts ranks of its own, and torchrun has started this one; leave out --spawn")
        return _under_torchrun(runs, name, request)
    request.ranks = spawn or 1
    prepared = prepare(request)
    made = store.create(
        runs, name or store.fresh_name(runs, prepared.task.file.stem), _files(prepared), prepared.record
    )
    lock = made.acquire()
    assert lock is not None  # a folder that has just been made
    stop = StopRequest((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2))
    attempt = made.begin_attempt(request.ranks, pids={"ranks": [os.getpid()]})
    keep_log(made, attempt, 0)
    interrupt.listen(made, stop, lambda: interrupt.end_at_once(made), grace=0.0 if spawn is None else _GRACE)
    if spawn is not None:
        return spawn_ranks(made, lock, spawn, attempt, stop)
    watch_stop_file(made, stop)
    try:
        code = run_rank(made, Seat(), attempt, stop, bar=sys.stderr.isatty())
    except Exception as error:
        interrupt.hold(stop)
        with contextlib.suppress(OSError):  # the terminal may be gone
            if not isinstance(error, OSError):  # a disk that fails is told in a line
                traceback.print_exc()
        failure = leave_failure(made, Seat(), attempt, error)
        with contextlib.suppress(OSError, Refused):
            made.end_attempt(store.FAILED, failure["reason"], store.FAILED)
        with contextlib.suppress(OSError):
            print(f"train: {failure['reason']}", file=sys.stderr)
        return FAILED
    _end(made)
    return FAILED if code == REFUSED else code


def _files(prepared: Prepared) -> dict[str, str | bytes]:
    return prepared.files | {environment.FILE: environment.to_json(environment.keep(os.environ))}


def _end(made: Run) -> None:
    with contextlib.suppress(OSError, Refused):  # the rank has said how it ended
        record = made.read()
        made.end_attempt(record["state"], record["reason"])


def watch_stop_file(made: Run, stop: StopRequest) -> None:
    """Let `train stop` reach a run that has no agent."""
    made.clear_stop()

    def watch() -> None:
        while True:
            time.sleep(0.2)
            wanted = made.stop_asked()
            if wanted and not stop.asked:
                stop.asked, stop.reason = True, store.WHO.get(wanted, wanted)
            if wanted == store.NOW:
                made.end_attempt(store.STOPPED, "stopped at once (train stop --now)", store.STOPPED)
                os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="stop-watch").start()


def _under_torchrun(runs: Path, name: str | None, request: Request) -> int:
    """One rank of a torchrun that somebody else started.

    Ends that a restart would not change exit with 0, for torchrun restarts whatever exits otherwise; run.json and the
    last line say how it really ended.
    """
    import torch.distributed as dist

    seat = seat_of_environment()
    meeting, _, _ = next(dist.rendezvous("env://", seat.rank, seat.size))
    board = dist.PrefixStore(f"train/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", meeting)
    lock: Lock | None = None
    if seat.rank == 0:
        request.ranks = seat.size
        try:
            made, lock = _open_under_torchrun(runs, name, request)
            attempt = made.begin_attempt(seat.size, pids={"ranks": [os.getpid()]})
            board.set("run", json.dumps({"folder": str(made.folder), "attempt": attempt}))
        except BaseException as error:
            board.set("run", json.dumps({"refused": one_line(error)}))
            if not isinstance(error, Refused):
                raise
            print(f"train: {error}", file=sys.stderr, flush=True)
            leave(0)
    told = json.loads(board.get("run"))
    if "refused" in told:
        leave(0)
    made, attempt = Run(Path(told["folder"])), told["attempt"]
    stop = StopRequest()
    if seat.rank == 0:
        watch_stop_file(made, stop)
    keep_log(made, attempt, seat.rank)
    seat = Seat(seat.rank, seat.size, seat.local_rank, seat.local_size, dist.PrefixStore("train/group", board))
    code = 1
    try:
        end = run_rank(made, seat, attempt, stop, bar=seat.rank == 0 and sys.stderr.isatty())
        if lock is not None:
            _end(made)
        code = exit_code(made, seat, end)
    except BaseException as error:
        traceback.print_exc()
        leave_failure(made, seat, attempt, error)
    finally:
        leave(code)


def _open_under_torchrun(runs: Path, name: str | None, request: Request) -> tuple[Run, Lock]:
    """Create the run, or find it again when torchrun has restarted us."""
    job = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}/{os.getppid()}"
    made: Run | None = None
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        candidates = [Run(runs / name)] if name and (runs / name / "run.json").exists() else list(store.every(runs))
        made = next((old for old in candidates if old.read().get("torchelastic") == job), None)
    if made is None:
        prepared = prepare(request)
        record = prepared.record | {"torchelastic": job}
        made = store.create(runs, name or store.fresh_name(runs, prepared.task.file.stem), _files(prepared), record)
    lock = made.acquire(patience=30.0)  # the ranks of the attempt before may still be ending
    if lock is None:
        raise Refused(f"{made.name} is running already")
    return made, lock
