"""Runs as they stand at one moment: what run.json, the last line of metrics.jsonl and the signs of life say.

The run itself is not asked, and the engine of a cluster that has it only now and then: looking costs training nothing,
and finds also runs that died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.cluster import jobs
from train.cluster.engine import JobStatus, engine
from train.errors import Refused
from train.run import folders, heartbeat, metrics, run_folder, states
from train.run.heartbeat import Beat
from train.run.record import Record
from train.run.run_folder import Run

ALIVE = (states.CREATED, states.QUEUED, states.RUNNING)
_ENDED = (states.STOPPED, states.FAILED, states.FINISHED)
_BEAT = re.compile(r"rank(\d{1,6})\.beat")
ASK_EVERY = 15.0
"""Seconds between an answer of an engine and the next question."""
MOST_RANKS = 1024
"""Of one run on one machine. A damaged run.json may say any number."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank of the attempt that runs, on this machine."""

    number: int
    beat: Beat | None
    """None: it has shown no sign of life yet."""
    beaten: float
    """When it showed the last one, in seconds since the epoch; 0.0: never."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is, and how fast. None: it is not known."""

    step: int
    total: int | None
    loss: float | None
    rate: float | None
    """Learning rate."""
    samples_per_s: float | None
    waits: float | None
    """The share of a step in which rank 0 waited for data, from 0 to 1."""
    step_time: float | None
    """Seconds."""
    memory: float | None
    """Bytes, the highest so far: of rank 0's GPU, or of its process on a CPU."""


@dataclasses.dataclass
class _EngineStatus:
    """The last answer of a cluster's engine about its jobs; it is asked in the background."""

    name: str
    at: str | None
    jobs: Mapping[str, JobStatus] | None = None
    """The last answer; None: there was none yet."""
    asked: float = 0.0
    """When that was asked, in seconds since the epoch."""
    due: float = 0.0
    thread: threading.Thread | None = None

    def ask_if_due(self) -> None:
        if (self.thread is None or not self.thread.is_alive()) and time.monotonic() >= self.due:
            self.thread = threading.Thread(target=self._ask, daemon=True, name=f"ask-{self.name}")
            self.thread.start()

    def _ask(self) -> None:
        begun = time.time()
        try:
            self.jobs, self.asked = engine(self.name).jobs(self.at), begun
        except Refused:  # the last answer is what there is
            pass
        finally:
            self.due = time.monotonic() + ASK_EVERY


class Engines:
    """The engines that have runs of a folder. Gives their last answer, and waits for no cluster."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str | None], _EngineStatus] = {}

    def seen(self, record: Record, changed: float) -> Record:
        """A record with its effective state, as far as it is known.

        Args:
            record: as the run folder shows it.
            changed: when it was written last, in seconds since the epoch. An answer from before that does not count.
        """
        if not jobs.is_submitted(record) or record["state"] in (states.FINISHED, states.FAILED):
            return record
        name, at = record["submitted"]["engine"], record["submitted"].get("at")
        place = self._places.setdefault((name, at), _EngineStatus(name, at))
        place.ask_if_due()
        return jobs.with_job_status(record, place.jobs if place.asked > changed else None)

    def wait(self, seconds: float) -> None:
        """Until those that are being asked have answered, at most so long."""
        until = time.monotonic() + seconds
        for place in self._places.values():
            if place.thread is not None:
                place.thread.join(max(until - time.monotonic(), 0.0))


class Runs:
    """Looks at a folder of runs again and again. What cannot have changed is not read again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged = 0
        """Run folders that could not be read when they were last looked at."""
        self._known: dict[str, tuple[tuple[int, ...], Record]] = {}
        self.engines = Engines()

    def records(self, names: list[str] | None = None) -> list[Record]:
        """run.json with the effective state: of those that live first, then of those that ended last.

        Args:
            names: of these runs alone.

        Raises:
            OSError: the folder is there and cannot be read.
        """
        found, self.damaged = {}, 0
        with contextlib.suppress(FileNotFoundError):  # before the first run
            os.scandir(self.folder).close()
        for run in folders.every(self.folder):
            if names and run.name not in names:
                continue
            try:
                record = self.engines.seen(*self._record(run))
                if record["state"] not in states.ALL:
                    raise Refused(f"an unknown state: {record['state']}")
                found[run.name] = record
            except Exception:  # being removed, or damaged (train ls says so): it must not hide the others
                self.damaged += run.folder.exists()
        self._known = {name: known for name, known in self._known.items() if name in found}
        newest_first = sorted(found.values(), key=self._last_change, reverse=True)
        return sorted(newest_first, key=lambda record: record["state"] not in ALIVE)  # stable

    def _last_change(self, record: Record) -> float:
        """When a run ended. One that was killed could not say so: the file of its record was written last before."""
        if record["state"] in (states.INTERRUPTED, states.COPY):
            with contextlib.suppress(OSError):
                return (self.folder / record["name"] / "run.json").stat().st_mtime
        return run_folder.seconds_of(record.get("ended") or record.get("started")) or 0.0

    def _record(self, run: Run) -> tuple[Record, float]:
        """What the folder of a run shows, and when that was written, in seconds since the epoch."""
        status = (run.folder / "run.json").stat()
        mark = (status.st_mtime_ns, status.st_ino, status.st_size)
        known = self._known.get(run.name)
        if known is not None and known[0] == mark:
            return known[1], status.st_mtime
        record = run.read_effective()
        if record["state"] in _ENDED:  # any other state can change without this file
            self._known[run.name] = mark, record
        return record, status.st_mtime


def is_alive(record: Record) -> bool:
    """Whether the run has not ended, or is about to begin."""
    return record["state"] in ALIVE


def is_at_work(record: Record) -> bool:
    """Whether an attempt runs. Else what the last one left (its start, its ranks' signs of life) is no news of the run.

    One that an engine has put back, or whose nodes gather, or that is being resumed waits: nothing of it stands still.
    """
    attempt = record["attempts"][-1] if record["attempts"] else None
    return record["state"] == states.RUNNING and attempt is not None and attempt["end"] is None


def progress(run: Run, record: Record) -> Progress:
    """How far a run is. Of one that has ended the speed is left out."""
    record = metrics.up_to_date(run, record)
    line: Any = (metrics.last_training(run) if is_alive(record) else None) or {}
    logs = last_logs(run, record) if is_alive(record) else None
    step = max(record["step"], heartbeat.reached(logs)) if logs else record["step"]
    step_time, waited = line.get("step_time"), line.get("data_wait")
    return Progress(
        step=step, total=record.get("total_steps"), loss=record.get("loss"),
        rate=line.get("lr"),
        samples_per_s=line.get("samples_per_s"), step_time=step_time, memory=line.get("memory"),
        waits=min(waited / step_time, 1.0) if waited is not None and step_time else None,
    )  # fmt: skip


def last_logs(run: Run, record: Record) -> Path | None:
    """Where the ranks of the last attempt write; None: there was none."""
    return run.logs(record["attempts"][-1]["number"]) if record["attempts"] else None


def ranks(run: Run, record: Record) -> list[Rank]:
    """The ranks of the attempt that runs, those that have shown no sign of life yet among them.

    Of a run on several machines, those that have shown one here: which others are to is not written down.
    """
    logs = last_logs(run, record)
    if logs is None:
        return []
    expected = 0 if record.get("cluster") else min(record["world_size"] or 1, MOST_RANKS)
    numbers = set(range(expected))
    with contextlib.suppress(OSError):
        numbers |= {int(match[1]) for path in logs.iterdir() if (match := _BEAT.fullmatch(path.name))}
    found = []
    for rank in sorted(numbers)[:MOST_RANKS]:
        path = logs / f"rank{rank}.beat"
        beat, beaten = heartbeat.read(path), 0.0
        if beat is not None:
            with contextlib.suppress(OSError):
                beaten = path.stat().st_mtime
        found.append(Rank(rank, beat, beaten))
    return found


def moved(record: Record, found: list[Rank]) -> float | None:
    """When a run at work last showed progress, in seconds since the epoch; None: a script's steps are its own.

    Whichever rank it was: one that is through with its part waits for the others without a sign.
    """
    if record.get("script") or not record["attempts"]:
        return None
    last = max((rank.beaten for rank in found), default=0.0)
    return max(last, run_folder.seconds_of(record["attempts"][-1]["started"]) or 0.0) or None


def doing(found: list[Rank]) -> str:
    """What a run does, one of heartbeat.NAMES: of its ranks the one that is behind tells."""
    beats = [rank.beat for rank in found if rank.beat is not None]
    behind = min(beats, key=lambda beat: (beat.step, beat.count), default=None)
    phase = behind.phase if behind is not None else heartbeat.STARTING
    return heartbeat.NAMES[phase if 0 <= phase < len(heartbeat.NAMES) else heartbeat.STARTING]


def process(record: Record, rank: Rank) -> Any:
    """psutil's view of a rank; None where it is not seen from here: on another machine, beyond a container's wall."""
    import psutil

    if rank.beat is None or record.get("host") != socket.gethostname():
        return None
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        found = psutil.Process(rank.beat.pid)
        if found.create_time() <= rank.beaten + 1:  # else it is dead, and its number another's
            return found
    return None


def saved(run: Run) -> tuple[int, float] | None:
    """Step of the newest checkpoint, and when it was made, in seconds since the epoch."""
    for step in run.steps_saved():
        with contextlib.suppress(OSError):
            return step, run.checkpoint(step).stat().st_mtime
    return None


def deaths(record: Record) -> int:
    """How many attempts died. One that was killed as a whole is recorded only when the next begins."""
    ends = [attempt["end"] for attempt in record["attempts"]]
    unsaid = record["state"] in (states.INTERRUPTED, states.COPY) and ends[-1:] == [None]
    return ends.count("died") + unsaid
