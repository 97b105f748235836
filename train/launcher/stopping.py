"""How a run is stopped from outside, and what is said of how it stands then. Imports no torch."""

from __future__ import annotations

import time

from train import screen, signals
from train.errors import EXIT_FAILED, EXIT_FINISHED, Refused
from train.launcher.script import AFTER_STOP
from train.run import states
from train.run.record import Record
from train.run.run_folder import Run
from train.supervise import attempts


def stop(run: Run, now: bool) -> tuple[int, str]:
    """Stop a run and wait until it has. Returns an exit code and a line that says how it stands.

    Raises:
        Refused: its folder takes no request, or no record.
    """
    run = run.held()  # it may be renamed meanwhile
    is_script = bool(run.read().get("script"))
    while True:
        if run.alive():
            if is_script and not now:  # it may never listen
                screen.remark(f"waiting for {run.name} to end; at once: train stop {run.name} --now")
            ask_to_stop(run, states.NOW if now else states.POLITE)
        record = run.read_effective()
        if not (record["state"] in (states.INTERRUPTED, states.COPY) or states.rests_by_itself(record)):
            return how_it_stands(record)
        lock = run.acquire()
        if lock is not None:  # else a resume has just begun
            break
    # by the user's wish it rests now: nothing brings it back by itself
    reason = "stopped (train stop)"
    if not is_script:
        reason += f"; the last checkpoint is of step {run.newest_checkpoint}"
    try:
        attempts.record_end(run, states.STOPPED, reason, signals.USER)
    except OSError as error:
        problem = f"{run.name} has ended, but its folder takes no record of it ({error.strerror}); when it does"
        raise Refused(f"{problem}: train stop {run.name}, or a keeper brings it back") from None
    finally:
        lock.release()
    return how_it_stands(run.read_effective())


def stop_and_wait(run: Run, wanted: str) -> None:
    """Ask until a run is not alive any more: one that is just starting may overlook the first request.

    Raises:
        OSError: its folder takes no request.
    """
    while run.alive():
        if run.stop_asked() not in (wanted, states.NOW):
            run.ask_stop(wanted)
        time.sleep(0.05)
    run.clear_stop()


def ask_to_stop(run: Run, wanted: str) -> None:
    """Ask a live run to stop and wait until it has.

    Raises:
        Refused: its folder takes no request, on a full disk for example.
    """
    try:
        stop_and_wait(run, wanted)
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
