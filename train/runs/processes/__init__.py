"""How the ranks of an attempt live as processes: under torchrun's agent, forked here, or as this very process.

Each way knows how to start them, who they are, how to signal them and what they exited with, and nothing of why or of
what follows: that is runs/supervise.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from train.record.outcome import Outcome


class Guard(Protocol):
    """What looks after living ranks, and ends those that hang, or wait for a peer that is gone."""

    hang: str
    """That they hang, and how; '' while they do not."""

    def look(self, pids: list[int], started: list[int], is_stopping: bool) -> None:
        """Called a few times a second.

        Args:
            pids: the ranks that are known to have been started.
            started: all ranks, once all have been started; before, [].
            is_stopping: whether they were asked to stop.
        """

    def close(self) -> None:
        """Called when none is left."""


class Processes(Protocol):
    """The ranks of one attempt after the other."""

    ranks: int
    problem: str
    """What the one who starts them has met himself, in a line; '': nothing."""
    repeats: bool
    """Whether a request to stop may be sent again: a rank that is starting may not listen yet."""

    def start(self, attempt: int) -> Guard | None:
        """Start them all. Returns what looks after them; None where they have ended meanwhile."""

    def wait(self) -> bool:
        """Wait a moment. Whether all have ended."""

    def pids(self) -> list[int]:
        """Process ids of those that are known to have been started, by rank once that is all of them."""

    def signal(self, number: int) -> None:
        """Send a signal to those that live."""

    def exits(self) -> Mapping[int, int]:
        """The codes, by rank, of those that failed first; of a signal: negative."""

    def told(self) -> Mapping[int, Outcome]:
        """What is known of their ends without reading files."""
