"""What a user does to a run from outside: stop it, find those to resume. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

from train import screen, signals
from train.errors import EXIT_FAILED, EXIT_FINISHED, Refused
from train.launcher.script import AFTER_STOP
from train.run import heartbeat, run_folder, states
from train.run.record import Record
from train.run.run_folder import Run
from train.supervise import attempts, decide

_PATIENCE = 15.0
"""Seconds after which one who waits for a script to stop is told how to end it."""


def resumable(run: Run) -> bool | None:
    """Whether `train resume --all` and the keeper take this run: not those that a user stopped, or that failed.

    None: they would if this station had started it.
    """
    try:
        record = run.shown()
    except Refused:
        return False
    if is_kept_elsewhere(record):
        return False
    if record["state"] == states.COPY:
        return None
    return record["state"] == states.INTERRUPTED or rests_by_itself(record)


def is_kept_elsewhere(record: Record) -> bool:
    """Whether another one starts a run again: the engine that has it, or its user; or another machine that
    has this part of a run over several, and sees the same folder."""
    is_elsewhere = record.get("cluster") and record.get("host") != socket.gethostname()
    return bool(record.get("submitted") or record.get("submission") or is_elsewhere)


def nothing_left(run: Run, flags: dict[str, str], script: str | None) -> str:
    """What to say instead of resuming a run that has finished, unless these fields give it more to do; '' otherwise.

    Raises:
        Refused: it is running, or a finished script is to be replaced.
    """
    if run.state() == states.RUNNING:
        raise Refused(f"{run.name} is running; see: train show {run.name}")
    if run.state() != states.FINISHED or {"epochs", "steps"} & set(flags):
        return ""
    is_script = bool(run.read().get("script"))
    if script is not None and is_script:
        raise Refused(f"{run.name} has finished already; a new run: train launch --script {script}")
    more = "" if is_script else f"; for more: train resume {run.name} --epochs N"
    return f"{run.name} has finished already{more}"


def rests_by_itself(record: Record) -> bool:
    """Whether a run was stopped, and not by its user."""
    return bool(record["state"] == states.STOPPED and record["stopped_by"] not in (signals.USER, signals.CTRL_C))


def count_of(run: Run, record: Record) -> dict[str, int]:
    """The keeper's count for a run that it resumes now: deaths in a row without a new checkpoint. Stops are none, nor
    is an end while other machines were waited for, before any attempt began."""
    cluster = record.get("cluster")
    saved = int(record["step"]) if cluster and cluster["node"] else next(iter(run.steps_saved()), 0)  # node 0 saves
    counted = record.get("kept") or {"step": -1, "times": 0}
    before = counted["times"] if counted["step"] == saved and not _ran_well(run, record) else 0
    is_death = record["state"] != states.STOPPED and not _has_only_waited(record, counted.get("attempts", 0))
    return {"step": saved, "times": before + is_death, "attempts": len(record["attempts"])}


def _has_only_waited(record: Record, attempts: int) -> bool:
    """Whether a run over several machines gave up before an attempt began, since there were so many. One that was
    killed meanwhile has not written down its end."""
    return record.get("cluster") is not None and len(record["attempts"]) == attempts and bool(record.get("ended"))


def _ran_well(run: Run, record: Record) -> bool:
    """Whether the last attempt of a script ran so long that deaths before it do not count."""
    if not record.get("script") or not record["attempts"]:
        return False
    attempt = record["attempts"][-1]
    began = run_folder.seconds_of(attempt["started"])
    last = max(run_folder.seconds_of(attempt.get("ended")) or 0.0, heartbeat.last_sign(run.logs(attempt["number"])))
    return began is not None and last - began >= 60 * decide.healthy_minutes(record)


def stop(run: Run, now: bool) -> tuple[int, str]:
    """Stop a run and wait until it has. Returns an exit code and a line that says how it stands."""
    is_script = bool(run.read().get("script"))
    while True:
        if run.alive():
            with _Reminder(run, is_script and not now):
                try:
                    run.stop(states.NOW if now else states.POLITE)
                except OSError as error:
                    stop_by_signal(run, now, error)
        record = run.shown()
        state = record["state"]
        if not (state in (states.INTERRUPTED, states.COPY) or rests_by_itself(record)):
            break
        lock = run.acquire()
        if lock is None:  # somebody has just begun to resume it
            continue
        # by the user's wish it rests now: nothing brings it back by itself
        reason = "stopped (train stop)"
        if not is_script:
            reason += f"; the last checkpoint is of step {next(iter(run.steps_saved()), 0)}"
        try:
            attempts.rest(run, states.STOPPED, reason, signals.USER)
        except OSError as error:
            problem = f"{run.name} has ended, but its folder takes no record of it ({error.strerror}); when it does"
            raise Refused(f"{problem}: train stop {run.name}, or a keeper brings it back") from None
        finally:
            lock.release()
        record = run.shown()
        state = record["state"]
        break
    return how_it_stands(record)


def how_it_stands(record: Record) -> tuple[int, str]:
    """Of a run that was asked to stop: an exit code, and a line."""
    name = record["name"]
    if record["state"] == states.FAILED:
        return EXIT_FAILED, f"{name} failed: {record['reason']}"
    if record["state"] == states.FINISHED:
        return EXIT_FINISHED, f"{name} has finished"
    return EXIT_FINISHED, f"{name}: {record['reason'] or record['state']}; {how_to_go_on(record)}"


def stop_by_signal(run: Run, now: bool, error: OSError) -> None:
    """Stop a run whose folder takes no request, on a disk that is full for example, and wait until it has.

    By the ids that it has written down, of processes that hold its lock: of others, and beyond the wall of a container,
    ids mean nothing.

    Raises:
        OSError: `error`; none of its processes can be reached.
    """
    pids = run.read().get("pids") or {}
    asked = [pids["agent"]] if "agent" in pids else pids.get("ranks", [])
    reached = [pid for pid in asked if _holds(pid, run)]
    if not reached:
        raise error
    for pid in reached:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if now else signal.SIGTERM)
    while run.alive():
        time.sleep(0.05)


def _holds(pid: int, run: Run) -> bool:
    """Whether this process has the lock of the run open."""
    with contextlib.suppress(OSError):
        lock = (run.folder / "lock").stat()
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.path.samestat(file.stat(), lock):
                    return True
    return False


def how_to_go_on(record: Record) -> str:
    """What a user can do with a stopped run."""
    if record.get("script"):
        return f"train resume {record['name']} {AFTER_STOP}"
    return f"continue with: train resume {record['name']}"


class _Reminder:
    """Says once, while one waits for a script that was asked to stop, how to end it: it may never listen."""

    def __init__(self, run: Run, wanted: bool) -> None:
        self._timer = threading.Timer(_PATIENCE, self._say, args=(run.name,)) if wanted else None

    def _say(self, name: str) -> None:
        screen.say(f"train: {name} has not ended yet; at once: train stop {name} --now")

    def __enter__(self) -> None:
        if self._timer:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()
