"""What engines of clusters say of runs that were handed to them: asked rarely, in the background, by nobody else here.

Who looks at runs every two seconds gets the last word that there is, and waits for no cluster. Nothing is written down.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping

from train.cluster.engine import JobStatus, engine
from train.errors import Refused
from train.record import store
from train.record.record import Record
from train.runs import jobs

ASK_EVERY = 15.0
"""Seconds between the end of a question and the next one to the same place."""


@dataclasses.dataclass
class _Place:
    """Where an engine knows runs."""

    name: str
    at: str | None
    jobs: Mapping[str, JobStatus] | None = None
    """The last answer; None: there was none yet."""
    asked: float = 0.0
    """When that was asked, in seconds since the epoch."""
    due: float = 0.0
    thread: threading.Thread | None = None

    def look_after(self) -> None:
        """Ask again, if it is time."""
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
    """All that runs here were handed to."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str | None], _Place] = {}

    def seen(self, record: Record, changed: float) -> Record:
        """A record with its effective state, as far as it is known.

        Args:
            record: as the run folder shows it.
            changed: when it was written last, in seconds since the epoch. An answer from before that does not count.
        """
        if not jobs.is_submitted(record) or record["state"] in (store.FINISHED, store.FAILED):
            return record
        name, at = record["submitted"]["engine"], record["submitted"].get("at")
        place = self._places.setdefault((name, at), _Place(name, at))
        place.look_after()
        return jobs.judged(record, place.jobs if place.asked > changed else None)

    def wait(self, seconds: float) -> None:
        """Until those that are being asked have answered, at most so long."""
        until = time.monotonic() + seconds
        for place in self._places.values():
            if place.thread is not None:
                place.thread.join(max(until - time.monotonic(), 0.0))
