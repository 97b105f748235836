"""How the ranks of an attempt live as processes: forked here, under torchrun's agent, or as this very process.

Each way knows how to start them, who they are, how to signal them and what they exited with, and nothing of why or of
what follows: that is runs/supervise.py's.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from train.record.outcome import Outcome


class Guard(Protocol):
    """What looks after living ranks, and ends those that hang, or wait for a peer that is gone."""

    hang: str
    """That they hang, and how; '' while they do not."""

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        """Called a few times a second.

        Args:
            living: the ranks that live. Of those that have ended the ids may be others' by now.
            started: all ranks, once all have been started; before, [].
            exits: codes of those that were seen to fail.
            is_stopping: whether they were asked to stop.
        """

    @property
    def is_ending(self) -> bool:
        """Whether it is ending them."""

    def end(self) -> None:
        """End them: ranks of another machine are gone."""

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
        """Process ids of those that are known to have been started, by rank once that is all of them. Not to be
        signalled: one that has ended leaves its id to others."""

    def living(self) -> list[int]:
        """Process ids of those that live, which are nobody else's."""

    def signal(self, number: int) -> None:
        """Send a signal to those that live."""

    def exits(self) -> Mapping[int, int]:
        """The codes, by rank, of those that failed first; of a signal: negative."""

    def kept(self) -> int:
        """The newest step whose state all ranks have copied into memory; 0: none."""

    def told(self) -> Mapping[int, Outcome]:
        """What is known of their ends without reading files."""


_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables of the flight recorder: their names in newer releases of torch, and before."""


def flight_recorder(logs: Path) -> dict[str, str]:
    """What the environment of a rank says to NCCL's flight recorder; runs/watch.py asks for its trace.

    Under the names that this torch knows: a newer one warns, on each rank, of those that it has given up. What the user
    has set of its size, under either, stays.
    """
    which = 0 if _SIZES[0] in _header() else 1
    values = {} if any(name in os.environ for name in _SIZES) else {_SIZES[which]: "2000"}
    values |= {_FILES[which]: str(logs / "nccl-trace-rank"), "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(logs / "nccl-rank")}
    return {"TORCH_NCCL_DUMP_ON_TIMEOUT": os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"), **values}


@functools.cache
def _header() -> str:
    """Where torch declares its flight recorder, as it lies beside the library; '' where it does not."""
    with contextlib.suppress(OSError):
        for folder in getattr(find_spec("torch"), "submodule_search_locations", None) or ():
            file = Path(folder) / "include/torch/csrc/distributed/c10d/FlightRecorder.hpp"
            return file.read_text(encoding="utf-8")
    return ""
