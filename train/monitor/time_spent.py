"""Where the time of a run went, from its creation to its end. The parts add up to the whole.

The times of the attempts in run.json (started, ready, ended) cut the whole into pieces. The measurements of rank 0
(`times` of an attempt) divide the training between two of them. Time that was not measured is shown as such.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from .. import programs
from ..run import heartbeat
from ..run.record import Attempt, Record, Times
from ..run.run_folder import Run, seconds_of
from ..run.states import COPY, CREATED, INTERRUPTED, QUEUED, RUNNING

PARTS = {
    "compute": ("computing", "Forward, backward and optimizer, and the engine's work between them."),
    "communication": (
        "communication",
        "Waiting for the gradients of other ranks after the last backward pass. Includes waiting for a slower rank, "
        "but not what is sent during computation. One step in 16 is measured.",
    ),
    "data": ("data", "Training waited for its next batch. Excludes the time in which a GPU computed meanwhile."),
    "checkpoints": ("checkpoints", "Training waited for a checkpoint. Excludes writing in the background."),
    "evaluation": ("evaluation", "Evaluations, including their data and communication."),
    "start": (
        "starting and ending",
        "From the creation or a resume to the first step (imports, datasets, model, waiting for the other ranks), and "
        "from the last step to the end.",
    ),
    "lost": (
        "lost to crashes",
        "Steps that were trained again, and the time from the last sign of life before a crash until training "
        "continued.",
    ),
    "idle": ("stopped or queued", "Waiting in the queue, and from a stop or a failure to the next resume."),
    "unknown": ("not measured", "Time for which there are no measurements."),
}  # fmt: skip
"""Maps a part to its name and what it includes."""
_TRAINING = ("compute", "communication", "data")
"""The parts of a training step."""
_REMEDIES = {
    "communication": (
        0.3, "give each rank more work (a larger batch_size, fewer ranks); check the links and look for a slow rank: "
        "train doctor --job, train bench collective",
    ),
    "data": (0.3, "raise --data.workers, or make samples cheaper to read; measure with: train bench input"),
    "checkpoints": (
        0.1, "save less often (--checkpoint.every_minutes), keep --checkpoint.asynchronous true, or use a faster "
        "disk; measure it with: train doctor --only 'write speed'",
    ),
    "evaluation": (0.25, "evaluate less often (--eval.every_epochs) or less (--eval.limit_batches)"),
    "start": (
        0.3, "let a keeper run, which keeps the imports ready (train keeper); a dataset that lists many files can "
        "cache the list",
    ),
    "lost": (0.1, "see why the attempts died: train show; a lower --checkpoint.every_minutes limits the loss"),
}  # fmt: skip
"""Maps a part to the share of the time above which it is reported, and to its remedy. Stopped time does not count."""
_SHORT = 60.0
"""Seconds; the start is not reported for a run that was shorter."""


@dataclass
class TimeSpent:
    """Where the time of a run went."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Maps the keys of PARTS to seconds."""
    again: float = 0.0
    """Seconds of the lost time that went into redone steps."""
    redone: int = 0
    """Number of redone steps."""
    notes: list[str] = field(default_factory=list)
    """Limits of these numbers, as sentences for the reader."""

    @property
    def whole(self) -> float:
        """Seconds from the creation to the end, or until now."""
        return sum(self.parts.values())

    def as_json(self) -> dict[str, Any]:
        """Return the parts for JSON."""
        parts = {name: round(seconds, 3) for name, seconds in self.parts.items()}
        return {"seconds": round(self.whole, 3), **parts, "steps_redone": self.redone, "notes": self.notes}


def of_run(run: Run, record: Record) -> TimeSpent:
    """Return where the time of a run went; for a live run, until now.

    Args:
        record: run.json with the effective state.
    """
    attempts, seen = record["attempts"], 0.0
    if record["state"] in (INTERRUPTED, COPY, QUEUED):  # queued: by its cluster, after its processes died
        signs = [heartbeat.last_sign(run.logs(len(attempts)))]
        signs += [path.stat().st_mtime for path in (run.folder / "run.json", run.metrics) if path.exists()]
        seen = max(signs)
    return time_spent(record, time.time(), seen, run.newest_checkpoint)


def restarts(record: Record) -> int:
    """Return how many attempts were started after another one had died. The death of an agent is not recorded."""
    return sum(attempt["end"] in (None, "died") for attempt in record["attempts"][:-1])


def time_spent(record: Record, now: float, seen: float, saved: int) -> TimeSpent:
    """Return where the time of a run went, from its record alone.

    Args:
        record: run.json with the effective state.
        now: the present time, in seconds since the epoch.
        seen: the last sign of life of an interrupted run, in seconds since the epoch.
        saved: step of the newest checkpoint.
    """
    attempts, found, before = record["attempts"], TimeSpent(), ""
    parts, clock = found.parts, _Clock(seconds_of(record.get("created")))
    has_queued = record.get("submitted") or (record.get("wants") or {}).get("queue")
    waiting = {"": "idle" if has_queued else "start", "died": "lost"}
    for place, attempt in enumerate(attempts):
        is_last = place == len(attempts) - 1
        lives = is_last and record["state"] == RUNNING
        back = "lost" if before == "died" else "start"
        parts[waiting.get(before, "idle")] += clock.to(seconds_of(attempt.get("started")))
        parts[back] += clock.to(seconds_of(attempt.get("ready")))
        ends = seconds_of(attempt.get("ended"))
        if is_last and not attempt.get("ended"):
            ends = now if record["state"] in (RUNNING, CREATED) else seen
        seconds = clock.to(ends)
        before = attempt.get("end") or ("" if lives else "died")
        if attempt.get("ready"):
            next_from = saved if is_last else attempts[place + 1].get("from_step")
            _training(found, attempt, seconds, before, None if lives or before == "finished" else next_from)
        else:
            part = "lost" if before == "died" else "start"
            parts[part if programs.knows_steps(attempt) else "unknown"] += seconds
    ended = now if record["state"] == CREATED and not attempts else seconds_of(record.get("ended"))
    parts["start" if before != "died" else "lost"] += clock.to(ended)
    found.notes += _notes(record, attempts)
    return found


class _Clock:
    """Measures the time between successive marks. Never goes backwards."""

    def __init__(self, begin: float | None) -> None:
        self._at = begin

    def to(self, mark: float | None) -> float:
        """Move to a mark, unless it is None. Return the seconds since the previous mark."""
        if mark is None:
            return 0.0
        seconds = 0.0 if self._at is None else max(mark - self._at, 0.0)
        self._at = mark if self._at is None else self._at + seconds
        return seconds


def _training(found: TimeSpent, attempt: Attempt, seconds: float, end: str, next_from: int | None) -> None:
    """Divide the time of an attempt since it was ready.

    Args:
        end: how the attempt ended; '' if it runs.
        next_from: steps of the attempt after this one are redone; None: none is.
    """
    own = dict.fromkeys(PARTS, 0.0)
    times, left = measured(attempt), seconds
    begin, to = attempt.get("from_step"), attempt.get("to_step")
    if times is None:
        own["unknown"], left = seconds, 0.0
    else:
        noted = {
            "start": times["start"], "checkpoints": times["checkpoints"], "evaluation": times["evaluation"],
            "communication": times["communication"] or 0.0, "data": times["data"],
        }  # fmt: skip
        noted["compute"] = times["seconds"] - sum(noted.values())
        for part, value in noted.items():  # at most what is left: the marks come from another process and clock
            own[part] = min(max(value, 0.0), left)
            left -= own[part]
    if next_from is not None and begin is not None and to is not None and to > max(next_from, begin):
        redone = to - max(next_from, begin)
        found.redone += redone
        for part in (*_TRAINING, "unknown"):
            lost = own[part] * redone / (to - begin)
            own[part] -= lost
            own["lost"] += lost
            found.again += lost
    own["lost" if end == "died" else "unknown" if not end else "start"] += left
    for part, value in own.items():
        found.parts[part] += value


def measured(attempt: Attempt) -> Times | None:
    """Return the times that an attempt recorded; None if it recorded none."""
    return attempt.get("times")


def _notes(record: Record, attempts: list[Attempt]) -> list[str]:
    """Return the limits of these numbers."""
    notes = []
    ready = [attempt for attempt in attempts if attempt.get("ready")]
    noted = [found for attempt in ready if (found := measured(attempt)) is not None]
    program = programs.of_record(record)
    if not program.reports_steps(attempts):
        notes.append(f"a {program.name}: only it knows how it spent its time, and which steps it trained again")
    elif len(noted) < len(ready):
        notes.append("an attempt recorded no times: a session records none, or it ended too soon")
    if any(times["communication"] is None for times in noted):
        notes.append("communication is part of computing here: fsdp, hsdp and dp do both at once")
    if record["state"] in (INTERRUPTED, COPY):
        notes.append("interrupted: counted up to the last sign of life; a resume may find newer steps in memory")
    if record["state"] in (RUNNING, CREATED):
        notes.append("not ended yet: counted until now")
    return notes


def verdict(account: TimeSpent, record: Record) -> list[str]:
    """Return sentences: the share of computing, and a remedy for each other part that is large."""
    wanted = account.whole - account.parts["idle"]
    if account.whole <= 0 or wanted <= 0:
        return []
    unknown, computing = account.parts["unknown"], account.parts["compute"]
    if unknown > 0.5 * wanted or (unknown and not computing):  # a session's steps are not measured
        return [f"{unknown / wanted:.0%} of its time was not measured"]
    share = {part: seconds / wanted for part, seconds in account.parts.items()}
    others = {part: value for part, value in share.items() if part not in ("compute", "idle")}
    largest = max(others, key=others.__getitem__)
    rest = f"; most of the rest: {PARTS[largest][0]}, {others[largest]:.0%}" if others[largest] >= 0.01 else ""
    but = " of the time in which it was not stopped or queued" if account.parts["idle"] > 0.01 * account.whole else ""
    sentences = [f"{share['compute']:.0%}{but} was computing{rest}"]
    for part, (least, remedy) in _REMEDIES.items():
        if share[part] > least and not (part == "start" and wanted < _SHORT):
            known = record.get("data_wait") if part == "data" else None
            sentences.append(f"{PARTS[part][0]}: {known or remedy}")
    return sentences
