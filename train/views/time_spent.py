"""Where the time of a run went, from its creation to its end: parts that add up to the whole.

The marks of the attempts in run.json (started, ready, ended) cut the whole into pieces; rank 0's measurements between
two marks (`times` of an attempt) divide a piece of training. Time that was not measured is shown as such.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from train.run import heartbeat
from train.run.record import Attempt, Record, Times
from train.run.run_folder import Run, seconds_of
from train.run.states import COPY, INTERRUPTED, RUNNING

PARTS = {
    "compute": ("computing", "Forward, backward and optimizer, and what the engine does between them."),
    "communication": (
        "communication",
        "Waiting for other ranks' gradients after the last backward pass has computed its own; what travels while it "
        "computes costs nothing and is not in it. Waiting for a slower rank is in it. One step in 16 is measured.",
    ),
    "data": ("data", "Training stood still until its next batch came. What a GPU computed meanwhile is not in it."),
    "checkpoints": ("checkpoints", "Training waited for a checkpoint; what is written in the background is not in it."),
    "evaluation": ("evaluation", "Evaluations, with their own data and communication."),
    "start": (
        "starting and ending",
        "From the creation or a resume to the first step: imports, data sets, model, meeting the others; and from the "
        "last step to the end.",
    ),
    "lost": (
        "lost to deaths",
        "Steps that had to be made again, and the time from the last sign of life before a death until training "
        "went on.",
    ),
    "idle": ("stopped", "From a stop, or a failure, to the resume after it."),
    "unknown": ("not told apart", "Nobody has measured what this was."),
}  # fmt: skip
"""Every part: its name, and what is in it."""
_TRAINING = ("compute", "communication", "data")
"""What steps are made of."""
_REMEDIES = {
    "communication": (
        0.3, "give each rank more to compute (a larger batch_size, fewer ranks), and see what the links give: train "
        "doctor --job, train bench collective; a rank that is slower than the others counts here, too",
    ),
    "data": (0.3, "raise data.workers, or make samples cheaper to read: train bench input"),
    "checkpoints": (
        0.1, "save less often (--checkpoint.every_minutes), keep --checkpoint.asynchronous true, or write to a faster "
        "disk: train doctor --only 'write speed'",
    ),
    "evaluation": (0.25, "evaluate less often (--eval.every_epochs) or less (--eval.limit_batches)"),
    "start": (
        0.3, "a keeper holds what a start imports ready (train keeper); a data set that lists its files for long may "
        "keep the list",
    ),
    "lost": (0.1, "see why the attempts died; --checkpoint.every_minutes says how much a death can cost"),
}  # fmt: skip
"""From which share of the time in which a run was wanted a part is worth a sentence, and what helps."""
_SHORT = 60.0
"""Seconds; the start of a run that is shorter says nothing."""


@dataclass
class TimeSpent:
    """Where the time went."""

    whole: float = 0.0
    """Seconds from the creation to the end, or to now."""
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds by the names of PARTS; together `whole`."""
    again: float = 0.0
    """Of what is lost: steps that were made again."""
    redone: int = 0
    """How many they were."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know of these figures."""

    def as_json(self) -> dict[str, Any]:
        """For JSON."""
        parts = {name: round(seconds, 3) for name, seconds in self.parts.items()}
        return {"seconds": round(self.whole, 3), **parts, "steps_redone": self.redone, "notes": self.notes}


def of_run(run: Run, record: Record) -> TimeSpent:
    """Where the time of a run went; of one that lives, up to now.

    Args:
        record: run.json with the effective state.
    """
    attempts, seen = record["attempts"], 0.0
    if record["state"] in (INTERRUPTED, COPY):
        signs = [heartbeat.last_sign(run.logs(len(attempts)))]
        signs += [path.stat().st_mtime for path in (run.folder / "run.json", run.metrics) if path.exists()]
        seen = max(signs)
    return time_spent(record, time.time(), seen, next(iter(run.steps_saved()), 0))


def time_spent(record: Record, now: float, seen: float, saved: int) -> TimeSpent:
    """Where the time of a run went, from its record alone.

    Args:
        record: run.json with the effective state.
        now, seen: seconds since the epoch: this moment, and the last sign of life of an interrupted run.
        saved: the step of the newest checkpoint.
    """
    attempts = record["attempts"]
    line = _Marks(seconds_of(record.get("created") or (attempts[0].get("started") if attempts else None)))
    found = line.spent
    is_script, before = bool(record.get("script")), ""
    for place, attempt in enumerate(attempts):
        is_last = place == len(attempts) - 1
        away = "start" if not before else "lost" if before == "died" else "idle"
        line.to(seconds_of(attempt.get("started")), away)
        back = "lost" if before == "died" else "start"
        if attempt.get("ready"):
            line.to(seconds_of(attempt["ready"]), back)
        ends = seconds_of(attempt.get("ended"))
        if not attempt.get("ended") and is_last:
            ends = now if record["state"] in (RUNNING, "created") else seen
        before = attempt.get("end") or ("" if record["state"] == RUNNING and is_last else "died")
        seconds = line.to(ends, None)
        if attempt.get("ready"):
            next_from = saved if is_last else attempts[place + 1].get("from_step")
            lives = is_last and record["state"] == RUNNING
            _training(found, attempt, seconds, before, None if lives or before == "finished" else next_from)
        elif is_script:
            found.parts["unknown"] += seconds
        else:
            found.parts["lost" if before == "died" else "start"] += seconds
    if attempts:
        line.to(seconds_of(record.get("ended")), "start" if before in ("finished", "stopped", "failed") else "lost")
    else:
        line.to(now if record["state"] == "created" else seconds_of(record.get("ended")), "start")
    found.whole = line.length
    found.notes += _notes(record, attempts)
    return found


class _Marks:
    """Goes through the time from mark to mark, never backwards, and adds each piece to a part."""

    def __init__(self, begin: float | None) -> None:
        self.spent = TimeSpent()
        self._begin = self._at = begin

    @property
    def length(self) -> float:
        return 0.0 if self._at is None or self._begin is None else self._at - self._begin

    def to(self, at: float | None, part: str | None) -> float:
        """Move to a mark and add the seconds since the last one to this part, if one is named. Returns them."""
        if at is None:
            return 0.0
        if self._at is None:
            self._begin = self._at = at
        seconds = max(at - self._at, 0.0)
        self._at += seconds
        if part is not None:
            self.spent.parts[part] += seconds
        return seconds


def _training(found: TimeSpent, attempt: Attempt, seconds: float, end: str, next_from: int | None) -> None:
    """Divide the time of an attempt since it was ready.

    Args:
        end: how it ended; '': it lives.
        next_from: its steps after this one are made again; None: none of them is.
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
        for part, value in noted.items():  # at most what there was: the marks are of another process, and clock
            own[part] = min(max(value, 0.0), left)
            left -= own[part]
        steps = sum(own[part] for part in _TRAINING)
        made = times["step"] - (begin or 0)
        if end not in ("finished", "stopped") and to is not None and made > 0 and steps:
            # steps that it made after it last noted its times took as long as those before, if there was time
            later = min(left, max(to - times["step"], 0) * steps / made)
            for part in _TRAINING:
                own[part] *= 1 + later / steps
            left -= later
    if next_from is not None and begin is not None and to is not None and to > max(next_from, begin):
        _lose(found, own, to - max(next_from, begin), to - begin)
    own["lost" if end == "died" else "unknown" if not end else "start"] += left
    for part, value in own.items():
        found.parts[part] += value


def _lose(found: TimeSpent, own: dict[str, float], steps: int, made: int) -> None:
    """Move the time of the last steps of an attempt, by their share, to what is lost."""
    for part in (*_TRAINING, "unknown"):
        lost = own[part] * steps / made
        own[part] -= lost
        own["lost"] += lost
        found.again += lost
    found.redone += steps


def measured(attempt: Attempt) -> Times | None:
    """What an attempt has noted of its times; None: nothing, or not all of them: it was of an earlier release."""
    times: Times | None = attempt.get("times")
    return times if times is not None and times.keys() >= Times.__annotations__.keys() else None


def _notes(record: Record, attempts: list[Attempt]) -> list[str]:
    """What a reader must know."""
    notes = []
    ready = [attempt for attempt in attempts if attempt.get("ready")]
    noted = [found for attempt in ready if (found := measured(attempt)) is not None]
    if record.get("script"):
        notes.append("a script: what it did while it ran, and which steps it made again, only it knows")
    elif len(noted) < len(ready):
        notes.append("an attempt has not noted its times: it was of an earlier release, or died too soon")
    if any(times["communication"] is None for times in noted):
        notes.append("communication is not told apart from computing here: fsdp, hsdp and dp do both at once")
    if record["state"] in (INTERRUPTED, COPY):
        notes.append("interrupted: told up to its last sign of life; a resume may find newer steps in memory")
    if record["state"] in (RUNNING, "created"):
        notes.append("not ended yet: told up to now")
    if not record.get("created"):
        notes.append("when it was created is not known: told from its first attempt")
    return notes


def verdict(account: TimeSpent, record: Record) -> list[str]:
    """Sentences: how much was computing, and of what else was much, what helps."""
    wanted = account.whole - account.parts["idle"]
    if account.whole <= 0 or wanted <= 0:
        return []
    if account.parts["unknown"] > 0.5 * wanted:
        return [f"{account.parts['unknown'] / wanted:.0%} of its time cannot be told apart"]
    share = {part: seconds / wanted for part, seconds in account.parts.items()}
    others = {part: value for part, value in share.items() if part not in ("compute", "idle")}
    largest = max(others, key=others.__getitem__)
    rest = f"; most of the rest: {PARTS[largest][0]}, {others[largest]:.0%}" if others[largest] >= 0.01 else ""
    but = " of the time in which it was wanted" if account.parts["idle"] > 0.01 * account.whole else ""
    sentences = [f"{share['compute']:.0%}{but} was computing{rest}"]
    for part, (least, remedy) in _REMEDIES.items():
        if share[part] > least and not (part == "start" and account.whole < _SHORT):
            known = record.get("data_wait") if part == "data" else None
            sentences.append(f"{PARTS[part][0]}: {known or remedy}")
    return sentences
