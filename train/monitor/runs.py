"""Looks at a folder of runs repeatedly, for `train top` and Prometheus. Imports no torch.

The engine of a cluster is asked only now and then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from ..cluster import jobs
from ..cluster.engine import JobStatus, engine
from ..errors import Refused
from ..run import folders, states
from ..run.record import Record
from ..run.run_folder import Run
from .status import RunStatus

_ENDED = (states.STOPPED, states.FAILED, states.FINISHED)
_REST = (states.INTERRUPTED, states.COPY)
"""They change with the files of a run, too, so they are read again now and then."""
_READ_EVERY = 15.0
"""Seconds after which a run that rests is read again, although its record is the same and nothing holds its lock."""
ASK_EVERY = 15.0
"""Seconds between an answer of an engine and the next query."""


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
        self._known: dict[str, tuple[tuple[int, ...], RunStatus]] = {}
        self._read_at: dict[str, float] = {}
        self.engines = Engines()

    def look(self, names: list[str] | None = None) -> list[RunStatus]:
        """Return how they stand: live runs first, then those that ended last.

        Args:
            names: only these runs.

        Raises:
            OSError: the folder exists and cannot be read.
        """
        found, self.damaged = dict[str, RunStatus](), 0
        with contextlib.suppress(FileNotFoundError):  # before the first run
            os.scandir(self.folder).close()
        for run in folders.every(self.folder):
            if names and run.name not in names:
                continue
            try:
                found[run.name] = self._status(run)
            except Exception:  # a run that is being removed or is damaged (train ls says so) must not hide the others
                self.damaged += run.folder.exists()
        if not names:
            self._known = {name: known for name, known in self._known.items() if name in found}
            self._read_at = {name: when for name, when in self._read_at.items() if name in found}
        newest_first = sorted(found.values(), key=lambda one: one.last_change, reverse=True)
        return sorted(newest_first, key=lambda one: not one.is_alive)  # stable

    def look_at(self, run: Run) -> RunStatus | None:
        """Return how one run stands; None: it is damaged, or being removed."""
        with contextlib.suppress(Exception):
            return self._status(run)
        return None

    def _status(self, run: Run) -> RunStatus:
        """Return how a run stands. Raises Refused if its record cannot be read or has an unknown state."""
        file = (run.folder / "run.json").stat()
        mark = (file.st_mtime_ns, file.st_ino, file.st_size)
        before, known = self._known.get(run.name, (None, None))
        if known is not None and before == mark and not self._may_have_changed(known):
            return known
        record = self.engines.seen(run.read_effective(of_any_format=True), file.st_mtime)
        if record["state"] not in states.ALL:
            raise Refused(f"an unknown state: {record['state']}")
        found = RunStatus(run, record)
        if record["state"] in (*_ENDED, *_REST) and not jobs.is_submitted(record):  # others change without this file
            self._known[run.name], self._read_at[run.name] = (mark, found), time.monotonic()
        return found

    def _may_have_changed(self, known: RunStatus) -> bool:
        """Whether a run with the same record may be in another state."""
        if known.state not in _REST:
            return False
        return time.monotonic() - self._read_at[known.name] > _READ_EVERY or known.run.alive()
