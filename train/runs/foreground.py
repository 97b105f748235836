"""`train run`: here and now. One process, or N that torch.multiprocessing starts, or one rank of a torchrun."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from train.engine.prepare import Request, prepare
from train.engine.stop import StopRequest, die_with_parent
from train.engine.worker import Seat, leave, leave_failure, log_to, run_rank, seat_of_environment
from train.errors import FAILED, FINISHED, REFUSED, STOPPED, Refused, one_line
from train.runs import store
from train.runs.store import Lock, Run

_CODES = {store.FINISHED: FINISHED, store.STOPPED: STOPPED}


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
    made = store.create(runs, name or store.fresh_name(runs, prepared.task.file.stem), prepared.files, prepared.record)
    lock = made.acquire()
    assert lock is not None  # a folder that has just been made
    stop = StopRequest((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2))
    attempt = made.begin_attempt(request.ranks, pids={"ranks": [os.getpid()]})
    _keep_log(made, attempt, 0)
    if spawn is not None:
        return _spawn(made, lock, spawn, attempt, stop)
    watch_stop_file(made, stop)
    try:
        code = run_rank(made, Seat(), attempt, stop, bar=sys.stderr.isatty())
    except Exception as error:
        traceback.print_exc()
        failure = leave_failure(made, Seat(), attempt, error)
        made.end_attempt(store.FAILED, failure["reason"], store.FAILED)
        print(f"train: {failure['reason']}", file=sys.stderr)
        return FAILED
    _end(made)
    return FAILED if code == REFUSED else code


def _end(made: Run) -> None:
    record = made.read()
    made.end_attempt(record["state"], record["reason"])


def _keep_log(made: Run, attempt: int, rank: int) -> None:
    handler = logging.FileHandler(made.logs(attempt) / f"rank{rank}.log")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("train").addHandler(handler)


def watch_stop_file(made: Run, stop: StopRequest) -> None:
    """Let `train stop` reach a run that has no agent."""
    made.clear_stop()

    def watch() -> None:
        while True:
            time.sleep(0.2)
            wanted = made.stop_asked()
            if wanted and not stop.asked:
                stop.asked, stop.reason = True, "train stop"
            if wanted == "now":
                made.end_attempt(store.STOPPED, "stopped at once (train stop --now)", store.STOPPED)
                os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="stop-watch").start()


def _spawn(made: Run, lock: Lock, ranks: int, attempt: int, stop: StopRequest) -> int:
    import multiprocessing

    import torch.multiprocessing as mp

    made.clear_stop()
    # a server that has imported torch once and forks the ranks; it has run nothing, so a fork of it is clean
    multiprocessing.set_forkserver_preload(["train.engine.worker", "train.engine.loop", "train.engine.prepare"])
    context = mp.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="train-spawn-") as meeting:
        processes = []
        for rank in range(ranks):
            seat = Seat(rank, ranks, rank, ranks, f"file://{meeting}/store")
            process = context.Process(target=_spawned, args=(str(made.folder), seat, attempt, _Held(lock.fd)))
            process.start()
            processes.append(process)
        made.update(durable=False, pids={"ranks": [process.pid for process in processes]})
        first: int | None = None
        forwarded = False
        while any(process.is_alive() for process in processes):
            time.sleep(0.05)
            wanted = made.stop_asked()
            if wanted and not stop.asked:
                stop.asked, stop.reason = True, "train stop"
            if stop.asked and not forwarded:
                forwarded = True
                for process in processes:
                    process.terminate()
            died = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if wanted == "now" or (died and first is None):
                first = died[0] if died else None
                time.sleep(0.2)  # let the others notice by themselves and say so in their logs
                for process in processes:
                    process.kill()
        if first is None:
            first = next((rank for rank, process in enumerate(processes) if process.exitcode != 0), None)
    made.clear_stop()
    record = made.read()
    if record["state"] != store.RUNNING:
        _end(made)
        return _CODES.get(record["state"], FAILED)
    if stop.asked and wanted == "now":
        made.end_attempt(store.STOPPED, "stopped at once (train stop --now)", store.STOPPED)
        return STOPPED
    code = processes[first].exitcode if first is not None else 0
    error = made.logs(attempt) / f"rank{first}.error.json"
    if error.exists():
        reason = json.loads(error.read_text())["reason"]
        made.end_attempt(store.FAILED, f"rank {first}: {reason}", store.FAILED)
    else:
        how = f"died of {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
        reason = f"rank {first} {how}; continue with: train resume {made.name}"
        made.end_attempt("died", reason)
        made.update(reason=reason)
    print(f"train: rank {first}: {reason}" if error.exists() else f"train: {reason}", file=sys.stderr)
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


def _spawned(folder: str, seat: Seat, attempt: int, held: _Held) -> None:
    # forked by the fork server, which lives exactly as long as the process that asked for us
    die_with_parent(os.getppid())
    stop = StopRequest()
    made = Run(Path(folder))
    if seat.rank:
        out = os.open(made.logs(attempt) / f"rank{seat.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        log_to(sys.stderr)
    else:
        log_to(sys.stderr)
        _keep_log(made, attempt, 0)
    code = 1
    try:
        run_rank(made, seat, attempt, stop, bar=seat.rank == 0 and sys.stderr.isatty())
        code = 0
    except BaseException as error:
        traceback.print_exc()
        leave_failure(made, seat, attempt, error)
    finally:
        leave(code)


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
    _keep_log(made, attempt, seat.rank)
    seat = Seat(seat.rank, seat.size, seat.local_rank, seat.local_size, dist.PrefixStore("train/group", board))
    code = 1
    try:
        run_rank(made, seat, attempt, stop, bar=seat.rank == 0 and sys.stderr.isatty())
        if lock is not None:
            _end(made)
        code = 0
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
        made = store.create(runs, name or store.fresh_name(runs, prepared.task.file.stem), prepared.files, record)
    lock = made.acquire(patience=30.0)  # the ranks of the attempt before may still be ending
    if lock is None:
        raise Refused(f"{made.name} is running already")
    return made, lock
