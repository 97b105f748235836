"""Decides whether a run may be resumed by its user or by the keeper, and when the keeper gives up. Imports no torch.

For the checks of a resume, and for the fields that it may change, see resume.py.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from .. import programs
from ..errors import Refused
from ..run import heartbeat, run_folder, states
from ..run.record import Record
from ..run.run_folder import Run
from ..run.spec import spec_of


def is_resumable(record: Record) -> bool | None:
    """Whether `train resume --all` and the keeper resume this run. They skip runs that a user stopped or that failed.

    None: they would resume it if it had been started on this station.

    Args:
        record: run.json with the effective state.
    """
    if is_kept_elsewhere(record):
        return False
    if record["state"] == states.COPY:
        return None
    return record["state"] == states.INTERRUPTED or states.rests_by_itself(record)


def is_kept_elsewhere(record: Record) -> bool:
    """Whether something else resumes this run: the cluster that it was submitted to (or its user), or another machine
    of a run on several machines, which sees the same folder."""
    is_elsewhere = record.get("cluster") and record.get("host") != socket.gethostname()
    return bool(record.get("submitted") or record.get("submission") or is_elsewhere)


def check_flags(run: Run, config_now: Mapping[str, Any], flags: dict[str, str]) -> None:
    """Raise Refused if a resume may not change fields to these values, as far as is known without the task.

    Args:
        config_now: The run's fields and their values.
    """
    from .. import config
    from ..config.resolve import check_changes

    before, given = dict(config_now), config.check_flags(flags)
    # a field that is missing in the file may have its default or be none
    after = before | {name: value for name, value in given.items() if name in before}
    check_changes(before, after, what=f"cannot change {run.name}", way=fork_of(run, flags))


def fork_of(run: Run, flags: dict[str, str]) -> str:
    """Return the end of a refusal: the command that continues with these fields in a new run."""
    typed = " ".join(f"--{name} {shlex.quote(text)}" for name, text in flags.items())
    return f"continue in a new run: train fork {run.name} --name NEW {typed}"


def nothing_left(record: Record, flags: dict[str, str]) -> str:
    """Return what to print instead of resuming a finished run; '' if the run is not finished or gets more to do.

    Args:
        record: run.json with the effective state.

    Raises:
        Refused: the run is running, or waits.
    """
    name = record["name"]
    if record["state"] == states.RUNNING:
        raise Refused(f"{name} is running; see: train show {name}")
    if record["state"] == states.QUEUED:
        raise Refused(f"{name} waits already; see: train queue; take it out: train stop {name}")
    if record["state"] != states.FINISHED or gives_more(flags):
        return ""
    why = f" ({record['reason']})" if record.get("reason") else ""
    more = programs.of_record(record).train_more(name, record.get("reason") or "")
    return f"{name} has already finished{why}{f'; to train longer: {more}' if more else ''}"


def gives_more(flags: Iterable[str]) -> bool:
    """Whether one of these fields can give a finished run more to do."""
    return any(name in ("epochs", "steps") or name.startswith("early_stopping.") for name in flags)


def keeper_count(run: Run, record: Record) -> dict[str, int]:
    """Return the keeper's count for a run that it resumes now: interruptions in a row without a new checkpoint.

    Stops do not count, nor does a death in the queue, nor an end before the first attempt, while the run waited for
    other machines.
    """
    cluster = record.get("cluster")
    saved = int(record["step"]) if cluster and cluster["node"] else run.newest_checkpoint  # node 0 saves
    counted = record.get("kept") or {"step": -1, "times": 0}
    before = counted["times"] if counted["step"] == saved and not _ran_well(run, record) else 0
    is_death = record["state"] not in (states.STOPPED, states.QUEUED) and not _has_only_waited(
        record, counted.get("attempts", 0)
    )
    return {"step": saved, "times": before + is_death, "attempts": len(record["attempts"])}


def why_given_up(record: Record, count: dict[str, int]) -> str:
    """Return why the keeper gives up a run, given its count; '' if it still resumes the run."""
    spec = spec_of(record, {})
    program = programs.of(spec)
    tries = program.keeper_tries(spec)
    if count["times"] <= tries:
        return ""
    after = f" after step {count['step']}" if program.reports_steps(record["attempts"]) else ""
    times = f"{tries} time{'s' if tries != 1 else ''}"
    return f"interrupted {times} in a row {program.no_progress(spec)}{after}"


def keeper_may_start(record: Record) -> bool:
    """Whether the keeper starts a run again at all."""
    spec = spec_of(record, {})
    return not record["attempts"] or programs.of(spec).keeper_tries(spec) > 0


def _has_only_waited(record: Record, attempts: int) -> bool:
    """Whether a run on several machines gave up waiting for them, without a new attempt since there were `attempts`.

    A run that was killed while it waited has not recorded its end.
    """
    return record.get("cluster") is not None and len(record["attempts"]) == attempts and bool(record.get("ended"))


def _ran_well(run: Run, record: Record) -> bool:
    """Whether the last attempt ran so long that earlier interruptions do not count."""
    if not record["attempts"]:
        return False
    attempt = record["attempts"][-1]
    began = run_folder.seconds_of(attempt["started"])
    last = max(run_folder.seconds_of(attempt.get("ended")) or 0.0, heartbeat.last_sign(run.logs(attempt["number"])))
    spec = spec_of(record, {})
    return began is not None and programs.of(spec).ran_well(spec, last - began)
