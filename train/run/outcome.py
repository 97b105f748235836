"""The outcome of a rank: a small file beside its log in which the rank records how it ended.

A rank records only its own end. The supervisor, which sees all ranks, decides what happens to the run. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import durable

_SUFFIX = ".outcome.json"


class Kind(enum.StrEnum):
    """What happened to a rank."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """Saved and ended early, on request."""
    FAILED = "failed"
    """Training cannot continue, and every rank would report that: NaN loss, last checkpoint not saved."""
    REFUSED = "refused"
    """The request is wrong."""
    DIED = "died"
    """Ended by an exception."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one rank."""

    rank: int
    kind: Kind
    step: int = 0
    """The last step that the rank made, counted from 1."""
    reason: str = ""
    """Why the rank failed, died or finished early; if it stopped, what asked it: a signal or another rank."""
    by: str = ""
    """Who asked it to stop, if the rank itself knows: RUNG of signals.py."""
    recurs: bool = False
    """Whether a new attempt would fail or die in the same way."""
    is_of_system: bool = False
    """Whether the cause is an OSError, whose reason needs no traceback."""
    is_own: bool = False
    """Whether the reason is in the words of the task's own `raise`, which say nothing about the machine."""
    traceback: str = ""
    time: float = dataclasses.field(default_factory=time.time)
    """Seconds since the epoch."""
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    """From rank 0: values for run.json (epoch, checkpoints, best, weights_sha256, metrics)."""

    @property
    def is_fault(self) -> bool:
        """Whether something was wrong."""
        return self.kind in (Kind.FAILED, Kind.REFUSED, Kind.DIED)


def write(logs: Path, outcome: Outcome) -> None:
    """Write an outcome into the folder of the attempt's logs. Raises OSError if that fails."""
    text = json.dumps(dataclasses.asdict(outcome)) + "\n"
    durable.write_atomically(logs / f"rank{outcome.rank}{_SUFFIX}", text, durable=False)


def read(logs: Path, rank: int) -> Outcome | None:
    """Return the outcome of a rank; None while it runs, or if it was killed."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((logs / f"rank{rank}{_SUFFIX}").read_text(encoding="utf-8"))
        return Outcome(**found | {"kind": Kind(found["kind"])})
    return None


def read_all(logs: Path) -> dict[int, Outcome]:
    """Map all ranks that wrote an outcome to it."""
    ranks = []
    with contextlib.suppress(OSError):
        ranks = [path.name.removeprefix("rank").removesuffix(_SUFFIX) for path in logs.glob(f"rank*{_SUFFIX}")]
    found = {int(rank): read(logs, int(rank)) for rank in sorted(ranks) if rank.isdecimal()}
    return {rank: outcome for rank, outcome in found.items() if outcome is not None}


def first_fault(outcomes: Mapping[int, Outcome]) -> Outcome | None:
    """Return the fault that caused the others: ranks may lose their connections before a failing rank has ended."""
    faults = [outcome for outcome in outcomes.values() if outcome.is_fault]
    return min(faults, key=lambda outcome: (not outcome.recurs, outcome.time), default=None)
