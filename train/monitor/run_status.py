"""The present status of runs, from run.json, the last line of metrics.jsonl and the signs of life.

The run itself is not asked, so that looking costs training nothing, and runs that died are found, too. The engine of a
cluster is asked only now and then.
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

from ..cluster import jobs
from ..cluster.engine import JobStatus, engine
from ..errors import Refused
from ..run import folders, heartbeat, metrics, run_folder, states
from ..run.heartbeat import Beat
from ..run.record import Record
from ..run.run_folder import Run
from ..supervise import programs

ALIVE = (states.CREATED, states.QUEUED, states.RUNNING)
_ENDED = (states.STOPPED, states.FAILED, states.FINISHED)
_BEAT = re.compile(r"rank(\d{1,6})\.beat")
ASK_EVERY = 15.0
"""Seconds between an answer of an engine and the next query."""
_STARTED_BY = 60.0
"""Seconds after the start of an attempt in which the agent starts its ranks."""
MOST_RANKS = 1024
"""Maximum number of ranks of a run on one machine. A damaged run.json may contain any number."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank of the current attempt on this machine."""

    number: int
    beat: Beat | None
    """The last sign of life; None: there was none yet."""
    beaten: float
    """Time of the last sign of life, in seconds since the epoch; 0.0: never."""
    pid: int | None = None
    """Id of the process, as the agent has recorded it; None: unknown."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress and speed of a run. None: unknown."""

    step: int
    total: int | None
    loss: float | None
    rate: float | None
    """Learning rate."""
    samples_per_s: float | None
    waits: float | None
    """Share of a step in which rank 0 waited for data, from 0 to 1."""
    step_time: float | None
    """Seconds of a step."""
    memory: float | None
    """Peak memory in bytes: of rank 0's GPU, or of its process on a CPU."""


@dataclasses.dataclass
class _EngineStatus:
    """The last answer of a cluster's engine about its jobs. The engine is asked in the background."""

    name: str
    at: str | None
    jobs: Mapping[str, JobStatus] | None = None
    """The last answer; None: none yet."""
    asked: float = 0.0
    """Time of the query behind the last answer, in seconds since the epoch."""
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
        except Refused:  # keep the last answer
            pass
        finally:
            self.due = time.monotonic() + ASK_EVERY


class Engines:
    """The engines of the submitted runs in a folder. Returns their last answer without waiting for a cluster."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str | None], _EngineStatus] = {}

    def seen(self, record: Record, changed: float) -> Record:
        """Return a record with its effective state, as far as known.

        Args:
            record: the record in the run folder.
            changed: time of its last change, in seconds since the epoch. Older answers are ignored.
        """
        if not jobs.is_submitted(record) or record["state"] in (states.FINISHED, states.FAILED):
            return record
        name, at = record["submitted"]["engine"], record["submitted"].get("at")
        place = self._places.setdefault((name, at), _EngineStatus(name, at))
        place.ask_if_due()
        return jobs.with_job_status(record, place.jobs if place.asked > changed else None)

    def wait(self, seconds: float) -> None:
        """Wait until the queried engines have answered, at most so many seconds."""
        until = time.monotonic() + seconds
        for place in self._places.values():
            if place.thread is not None:
                place.thread.join(max(until - time.monotonic(), 0.0))


class Runs:
    """Reads a folder of runs repeatedly. Skips records that cannot have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged = 0
        """Number of run folders that could not be read the last time."""
        self._known: dict[str, tuple[tuple[int, ...], Record]] = {}
        self.engines = Engines()

    def records(self, names: list[str] | None = None) -> list[Record]:
        """Return the records with their effective state: live runs first, then those that ended last.

        Args:
            names: only these runs.

        Raises:
            OSError: the folder exists and cannot be read.
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
            except Exception:  # a run that is being removed or is damaged (train ls says so) must not hide the others
                self.damaged += run.folder.exists()
        self._known = {name: known for name, known in self._known.items() if name in found}
        newest_first = sorted(found.values(), key=self._last_change, reverse=True)
        return sorted(newest_first, key=lambda record: record["state"] not in ALIVE)  # stable

    def _last_change(self, record: Record) -> float:
        """Return when a run ended. For a killed run, return when its record was last written."""
        if record["state"] in (states.INTERRUPTED, states.COPY):
            with contextlib.suppress(OSError):
                return (self.folder / record["name"] / "run.json").stat().st_mtime
        return run_folder.seconds_of(record.get("ended") or record.get("started")) or 0.0

    def _record(self, run: Run) -> tuple[Record, float]:
        """Return the record of a run, and when the record was written, in seconds since the epoch."""
        status = (run.folder / "run.json").stat()
        mark = (status.st_mtime_ns, status.st_ino, status.st_size)
        known = self._known.get(run.name)
        if known is not None and known[0] == mark:
            return known[1], status.st_mtime
        record = run.read_effective(of_any_format=True)
        if record["state"] in _ENDED:  # other states can change without this file
            self._known[run.name] = mark, record
        return record, status.st_mtime


def is_alive(record: Record) -> bool:
    """Whether the run has not ended, or is about to start."""
    return record["state"] in ALIVE


def is_at_work(record: Record) -> bool:
    """Whether an attempt runs. If not, the signs of life of the last attempt say nothing about the present.

    No attempt runs while an engine has the run queued again, while its nodes gather, or while it is being resumed.
    """
    attempt = record["attempts"][-1] if record["attempts"] else None
    return record["state"] == states.RUNNING and attempt is not None and attempt["end"] is None


def progress(run: Run, record: Record) -> Progress:
    """Return the progress of a run. For an ended run the speed is None."""
    record = metrics.up_to_date(run, record)
    line: Any = (metrics.last_training(run) if is_alive(record) else None) or {}
    logs = last_logs(run, record) if is_alive(record) else None
    step = max(record["step"], heartbeat.reached(logs)) if logs else record["step"]
    step_time, waited = line.get("step_time"), line.get("data_wait")
    if step_time is None and is_alive(record):
        step_time = record.get("step_time")
    return Progress(
        step=step, total=record.get("total_steps"), loss=record.get("loss"),
        rate=line.get("lr"),
        samples_per_s=line.get("samples_per_s"), step_time=step_time, memory=line.get("memory"),
        waits=min(waited / step_time, 1.0) if waited is not None and step_time else None,
    )  # fmt: skip


def last_logs(run: Run, record: Record) -> Path | None:
    """Return the folder with the logs of the last attempt; None if there was no attempt."""
    return run.logs(record["attempts"][-1]["number"]) if record["attempts"] else None


def ranks(run: Run, record: Record) -> list[Rank]:
    """Return the ranks of the current attempt, including those without a sign of life yet.

    For a run on several machines, return only ranks with a sign of life here: which others belong here is not recorded.
    """
    logs = last_logs(run, record)
    if logs is None:
        return []
    expected = 0 if record.get("cluster") else min(record["world_size"] or 1, MOST_RANKS)
    numbers = set(range(expected))
    with contextlib.suppress(OSError):
        numbers |= {int(match[1]) for path in logs.iterdir() if (match := _BEAT.fullmatch(path.name))}
    found, pids = [], (record.get("pids") or {}).get("ranks")
    started = pids if expected and isinstance(pids, list) else []
    for rank in sorted(numbers)[:MOST_RANKS]:
        path = logs / f"rank{rank}.beat"
        beat, beaten = heartbeat.read(path), 0.0
        if beat is not None:
            with contextlib.suppress(OSError):
                beaten = path.stat().st_mtime
        pid = started[rank] if rank < len(started) and isinstance(started[rank], int) else None
        found.append(Rank(rank, beat, beaten, beat.pid if beat is not None else pid))
    return found


def moved(record: Record, found: list[Rank]) -> float | None:
    """Return when a run at work last showed progress, in seconds since the epoch; None: its steps are unknown.

    The latest sign of any rank counts: a rank that has done its part waits for the others without a sign.
    """
    if not record["attempts"] or not programs.of_record(record).reports_steps(record["attempts"]):
        return None
    last = max((rank.beaten for rank in found), default=0.0)
    return max(last, run_folder.seconds_of(record["attempts"][-1]["started"]) or 0.0) or None


def doing(found: list[Rank]) -> str:
    """Return what a run does, one of heartbeat.NAMES, as shown by the rank that is furthest behind."""
    beats = [rank.beat for rank in found if rank.beat is not None]
    behind = min(beats, key=lambda beat: (beat.step, beat.count), default=None)
    phase = behind.phase if behind is not None else heartbeat.STARTING
    return heartbeat.NAMES[phase if 0 <= phase < len(heartbeat.NAMES) else heartbeat.STARTING]


def process(record: Record, rank: Rank) -> Any:
    """Return psutil's view of a rank; None if it is not visible: on another machine, or outside this container."""
    import psutil

    if rank.pid is None or record.get("host") != socket.gethostname():
        return None
    started = record["attempts"][-1]["started"] if record["attempts"] else None
    seen = rank.beaten or (run_folder.seconds_of(started) or 0.0) + _STARTED_BY
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        found = psutil.Process(rank.pid)
        if found.create_time() <= seen + 1:  # otherwise the rank is dead, and another process has its number
            return found
    return None


def saved(run: Run) -> tuple[int, float] | None:
    """Return the step of the newest checkpoint, and when it was written, in seconds since the epoch."""
    for step in run.steps_saved():
        with contextlib.suppress(OSError):
            return step, run.checkpoint(step).stat().st_mtime
    return None


def deaths(record: Record) -> int:
    """Return how many attempts died. The death of a killed agent is recorded only when the next attempt starts."""
    ends = [attempt["end"] for attempt in record["attempts"]]
    unsaid = record["state"] in (states.INTERRUPTED, states.COPY) and ends[-1:] == [None]
    return ends.count("died") + unsaid
