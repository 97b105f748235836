"""What a user does to a run from outside: stop it, find those to resume. Imports no torch."""

from __future__ import annotations

import socket

from train import screen, signals
from train.errors import EXIT_FAILED, EXIT_FINISHED, Refused
from train.launcher.script import AFTER_STOP
from train.run import heartbeat, run_folder, states
from train.run.record import Record
from train.run.run_folder import Run
from train.supervise import attempts, decide

KEEPER_TRIES = 3
"""Resumes by the keeper in a row, without a new checkpoint, after which a run is failed."""


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
    return record["state"] == states.INTERRUPTED or states.rests_by_itself(record)


def is_kept_elsewhere(record: Record) -> bool:
    """Whether another one starts a run again: the engine that has it, or its user; or another machine that
    has this part of a run over several, and sees the same folder."""
    is_elsewhere = record.get("cluster") and record.get("host") != socket.gethostname()
    return bool(record.get("submitted") or record.get("submission") or is_elsewhere)


def nothing_left(run: Run, flags: dict[str, str]) -> str:
    """What to say instead of resuming a run that has finished, unless these fields give it more to do; '' otherwise.

    Raises:
        Refused: it is running.
    """
    if run.state() == states.RUNNING:
        raise Refused(f"{run.name} is running; see: train show {run.name}")
    if run.state() != states.FINISHED or {"epochs", "steps"} & set(flags):
        return ""
    more = "" if run.read().get("script") else f"; for more: train resume {run.name} --epochs N"
    return f"{run.name} has finished already{more}"


def count_of(run: Run, record: Record) -> dict[str, int]:
    """The keeper's count for a run that it resumes now: deaths in a row without a new checkpoint. Stops are none, nor
    is an end while other machines were waited for, before any attempt began."""
    cluster = record.get("cluster")
    saved = int(record["step"]) if cluster and cluster["node"] else next(iter(run.steps_saved()), 0)  # node 0 saves
    counted = record.get("kept") or {"step": -1, "times": 0}
    before = counted["times"] if counted["step"] == saved and not _ran_well(run, record) else 0
    is_death = record["state"] != states.STOPPED and not _has_only_waited(record, counted.get("attempts", 0))
    return {"step": saved, "times": before + is_death, "attempts": len(record["attempts"])}


def why_given_up(record: Record, count: dict[str, int]) -> str:
    """Why the keeper resumes a run no more, by its count for it; '' where it does."""
    if count["times"] <= KEEPER_TRIES:
        return ""
    if record.get("script"):
        return f"interrupted {KEEPER_TRIES} times in a row before it had run {decide.healthy_minutes(record):g} minutes"
    return f"interrupted {KEEPER_TRIES} times in a row without a new checkpoint after step {count['step']}"


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
    """Stop a run and wait until it has. Returns an exit code and a line that says how it stands.

    Raises:
        Refused: its folder takes no request, or no record.
    """
    is_script = bool(run.read().get("script"))
    while True:
        if run.alive():
            if is_script and not now:  # it may never listen
                screen.say(f"train: waiting for {run.name} to end; at once: train stop {run.name} --now")
            ask_to_stop(run, states.NOW if now else states.POLITE)
        record = run.shown()
        if not (record["state"] in (states.INTERRUPTED, states.COPY) or states.rests_by_itself(record)):
            return how_it_stands(record)
        lock = run.acquire()
        if lock is not None:  # else a resume has just begun
            break
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
    return how_it_stands(run.shown())


def ask_to_stop(run: Run, wanted: str) -> None:
    """Ask a live run to stop and wait until it has.

    Raises:
        Refused: its folder takes no request, on a full disk for example.
    """
    try:
        run.stop(wanted)
    except OSError as error:
        pid = (run.read().get("pids") or {}).get("agent")
        by_signal = f", or on {run.read().get('host')}: kill {pid}" if pid else ""
        problem = f"{run.folder} takes no request to stop ({error.strerror})"
        raise Refused(f"{problem}; free space there, then: train stop {run.name}{by_signal}") from None


def how_it_stands(record: Record) -> tuple[int, str]:
    """Of a run that was asked to stop: an exit code, and a line."""
    name = record["name"]
    if record["state"] == states.FAILED:
        return EXIT_FAILED, f"{name} failed: {record['reason']}"
    if record["state"] == states.FINISHED:
        return EXIT_FINISHED, f"{name} has finished"
    return EXIT_FINISHED, f"{name}: {record['reason'] or record['state']}; {how_to_go_on(record)}"


def how_to_go_on(record: Record) -> str:
    """What a user can do with a stopped run."""
    if record.get("script"):
        return f"train resume {record['name']} {AFTER_STOP}"
    return f"continue with: train resume {record['name']}"
