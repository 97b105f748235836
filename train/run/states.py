"""The states of a run, the rule for the one that it is in, and the requests to stop one."""

from collections.abc import Callable

from train import signals
from train.run.record import Record

CREATED, RUNNING, STOPPED, FAILED, FINISHED = "created", "running", "stopped", "failed", "finished"
POLITE, NOW, FOR_KEEPER, PLACED = "polite", "now", "keeper", "placed"
"""Requests to stop: save first; at once; save first, for the keeper, which will continue the run; save first, for the
engine of a cluster, which has started the run elsewhere."""
WHO = {
    POLITE: "train stop",
    NOW: "train stop --now",
    FOR_KEEPER: "the keeper",
    PLACED: "its place is another machine's now",
}
"""How run.json's reason names each request."""
BY = {POLITE: signals.USER, NOW: signals.USER, FOR_KEEPER: signals.KEEPER, PLACED: signals.SIGNAL}
"""Who makes each request: run.json's `stopped_by`."""
REFUSED = "refused"
"""The field of run.json of a failed run whose other machines refused this one."""
INTERRUPTED = "interrupted"
"""Effective only: recorded as running, but no process of the run is alive."""
COPY = "copy"
"""Effective only: it would be resumed by itself if this station had started it (ownership.py)."""
QUEUED = "queued"
"""Effective only: the engine of a cluster that has the run has not started it yet, or will start it again."""
ALL = (CREATED, QUEUED, RUNNING, STOPPED, INTERRUPTED, COPY, FAILED, FINISHED)
"""Every effective state, in the order of `train ls --sort state`."""


def effective(record: Record, is_alive: bool, was_started_here: Callable[[], bool]) -> Record:
    """A record with the state that its run is in: what is recorded as running, and is not alive, is interrupted; what
    would be resumed by itself, and was started elsewhere, is a copy."""
    # one that was being resumed is recorded as created for a moment
    was_running = record["state"] == RUNNING or (record["state"] == CREATED and bool(record["attempts"]))
    if was_running and not is_alive:
        record["state"] = INTERRUPTED
        record["reason"] = record.get("reason") or "its processes died; train resume continues it"
    is_resumed = record["state"] == INTERRUPTED or rests_by_itself(record)
    if is_resumed and not record.get("submitted") and not was_started_here():
        how = f"not known as started here: from elsewhere, copied, renamed or edited; train resume {record['name']}"
        record |= {"state": COPY, "reason": f"{how} adopts it"}
    return record


def rests_by_itself(record: Record) -> bool:
    """Whether a run was stopped, and not by its user."""
    return record["state"] == STOPPED and record["stopped_by"] not in (signals.USER, signals.CTRL_C)
