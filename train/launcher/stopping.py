"""Stops a run from outside, and reports its state afterwards. Imports no torch."""

from __future__ import annotations

import time

from .. import programs, screen, signals
from ..errors import EXIT_FAILED, EXIT_FINISHED, Refused
from ..run import states
from ..run.record import Record
from ..run.run_folder import Run
from ..run.spec import spec_of
from ..supervise import attempts
from ..sweeps.kept import rests_for_sweep


def stop(run: Run, program: programs.Program, *, now: bool) -> tuple[int, str]:
    """Stop a run of this program and wait until it has stopped. Returns an exit code and a line about its state.

    Raises:
        Refused: the request or the record cannot be written into its folder.
    """
    run = run.held()  # the run may be renamed meanwhile
    while True:
        if run.alive():
            if program.stop_remark and not now:
                screen.remark(program.stop_remark.format(name=run.name))
            ask_to_stop(run, states.NOW if now else states.POLITE)
        record = run.read_effective()
        is_resumed = record["state"] in (states.INTERRUPTED, states.COPY) or states.rests_by_itself(record)
        if not (is_resumed or rests_for_sweep(run, record)):
            return how_it_stands(record)
        lock = run.acquire()
        if lock is not None:  # else a resume has just begun
            break
    # the user wants the run to stay stopped: nothing resumes it automatically
    reason = "stopped (train stop)"
    if program.reports_steps(record["attempts"]):
        reason += f"; the last checkpoint is of step {run.newest_checkpoint}"
    try:
        attempts.record_end(run, states.STOPPED, reason=reason, by=signals.USER)
    except OSError as error:
        problem = f"{run.name} has ended, but that cannot be written into its folder ({error.strerror})"
        raise Refused(f"{problem}; fix that, then: train stop {run.name} (or a keeper resumes it)") from None
    finally:
        lock.release()
    return how_it_stands(run.read_effective())


def stop_and_wait(run: Run, wanted: str) -> None:
    """Ask a run to stop until it has ended: a run that is just starting may miss the first request.

    Raises:
        OSError: the request cannot be written into its folder.
    """
    while run.alive():
        if run.stop_asked() not in (wanted, states.NOW):
            run.ask_stop(wanted)
        time.sleep(0.05)
    run.clear_stop()


def ask_to_stop(run: Run, wanted: str) -> None:
    """Ask a running run to stop and wait until it has stopped.

    Raises:
        Refused: the request cannot be written into its folder, for example on a full disk.
    """
    try:
        stop_and_wait(run, wanted)
    except OSError as error:
        record = run.read()
        pid = (record.get("pids") or {}).get("agent")
        by_signal = f", or on {record.get('host')}: kill {pid}" if pid else ""
        problem = f"the request to stop cannot be written into {run.folder} ({error.strerror})"
        raise Refused(f"{problem}; free space there, then: train stop {run.name}{by_signal}") from None


def how_it_stands(record: Record) -> tuple[int, str]:
    """Return an exit code and a line about a run that was asked to stop."""
    name = record["name"]
    if record["state"] == states.FAILED:
        return EXIT_FAILED, f"{name} failed: {record['reason']}"
    if record["state"] == states.FINISHED:
        return EXIT_FINISHED, f"{name} has finished"
    then = programs.of_record(record).after_stop(spec_of(record, {}), name)
    return EXIT_FINISHED, f"{name}: {record['reason'] or record['state']}; {then}"
