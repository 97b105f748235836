"""The states of a run, the rule for the effective state, and the kinds of stop requests."""

from collections.abc import Callable

from .. import signals
from .record import Record

CREATED, RUNNING, STOPPED, FAILED, FINISHED = "created", "running", "stopped", "failed", "finished"
POLITE, NOW, FOR_KEEPER, PLACED, OF_SWEEP = "polite", "now", "keeper", "placed", "sweep"
"""Stop requests. POLITE: save first. NOW: at once. FOR_KEEPER: save first; the keeper will resume the run. PLACED: save
first; the cluster has started the run elsewhere. OF_SWEEP: save first; its sweep was stopped."""
WHO = {
    POLITE: "train stop",
    NOW: "train stop --now",
    FOR_KEEPER: "the keeper",
    PLACED: "the cluster has started it on another machine",
    OF_SWEEP: "its sweep was stopped",
}
"""How run.json's reason names each request."""
BY = {
    POLITE: signals.USER, NOW: signals.USER, FOR_KEEPER: signals.KEEPER, PLACED: signals.SIGNAL,
    OF_SWEEP: signals.SWEEP,
}  # fmt: skip
"""Maps each request to run.json's `stopped_by`."""
REFUSED = "refused"
"""Field of run.json of a failed run whose other machines refused this machine."""
INTERRUPTED = "interrupted"
"""Effective only: recorded as running, but no process of the run is alive."""
COPY = "copy"
"""Effective only: it would be resumed automatically if this station had started it (ownership.py)."""
QUEUED = "queued"
"""It waits for GPUs, for cores or for other runs. Effective, of a submitted run: the cluster has not started it yet, or
will start it again."""
OTHER_FORMAT = "other-format"
"""Effective only: the run has another format (record.FORMAT), so this version only shows and removes it."""
CHECKING = "checking"
"""Effective only: the launch is still being checked, so there is no run folder yet."""
ALL = (CHECKING, CREATED, QUEUED, RUNNING, STOPPED, INTERRUPTED, COPY, FAILED, FINISHED, OTHER_FORMAT)
"""Every effective state, in the order of `train ls --sort state`."""


def effective(record: Record, is_alive: bool, *, was_started_here: Callable[[], bool], other_user: str) -> Record:
    """Return a record with the effective state.

    A run that is recorded as running or queued but not alive is interrupted. A run that would be resumed automatically
    but was not started here is a copy.

    Args:
        other_user: The owner of the run folder, if that is another user; else ''.
    """
    record.pop("owner", None)  # the run itself does not decide this
    if other_user:
        record["owner"] = other_user
    # at a resume a run is recorded as created for a moment
    was_running = record["state"] == RUNNING or (record["state"] == CREATED and bool(record["attempts"]))
    if gives_way(record) and is_alive:
        record["state"] = QUEUED  # for a moment, until its agent has queued it
    if record["state"] == QUEUED and not is_alive:
        record |= {"state": INTERRUPTED, "reason": f"killed while it waited; to wait again: {_again(record)} --queue"}
    elif was_running and not is_alive:
        record["state"] = INTERRUPTED
        record["reason"] = record.get("reason") or f"its processes died; continue with: {_again(record)}"
    is_resumed = record["state"] == INTERRUPTED or rests_by_itself(record)
    if is_resumed and not record.get("submitted") and not was_started_here():
        how = "it comes from elsewhere, or was copied, edited, moved or renamed by hand"
        reason = f"{how}; to adopt it: train resume {record['name']}"
        if other_user:  # a resume would not adopt it
            reason = "it belongs to another user; copy its folder to get a run of yours"
        record |= {"state": COPY, "reason": reason}
    return record


def _again(record: Record) -> str:
    return f"train resume {record['name']}"


def gives_way(record: Record) -> bool:
    """Whether a run has stopped by itself for another one. Its agent then queues it again."""
    return record["state"] == STOPPED and record["stopped_by"] == signals.WAY


def rests_by_itself(record: Record) -> bool:
    """Whether a run was stopped by something other than its user, its sweep, or a run for which it waited."""
    for_good = signals.USER, signals.CTRL_C, signals.SWEEP, signals.RUNG, signals.AFTER
    return record["state"] == STOPPED and record["stopped_by"] not in for_good
