"""How a rank ended: a small file beside its log, written by the rank, which outlives it.

A rank records only what happened to itself; the supervisor, which sees all ranks, decides what becomes of the run.
Imports no torch.
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

from train.run import durable

_SUFFIX = ".outcome.json"


class Kind(enum.StrEnum):
    """What happened to a rank."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """Saved and ended early, on request."""
    FAILED = "failed"
    """Training cannot go on, and every rank would say so: the loss is nan, the last checkpoint cannot be saved."""
    REFUSED = "refused"
    """What it was to train is wrong."""
    DIED = "died"
    """Of an exception."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one rank."""

    rank: int
    kind: Kind
    step: int = 0
    """The last one it made, counted from 1."""
    reason: str = ""
    """Why it failed, died or finished early; of one that stopped, what asked it to: a signal, or another rank."""
    recurs: bool = False
    """Whether it would fail or die so again."""
    is_of_system: bool = False
    """Whether the system refused something (OSError): the reason says it all."""
    traceback: str = ""
    time: float = dataclasses.field(default_factory=time.time)
    """Seconds since the epoch."""
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of rank 0: what run.json is to have of it (epoch, checkpoints, best, weights_sha256, metrics)."""

    @property
    def is_fault(self) -> bool:
        """Whether something was wrong."""
        return self.kind in (Kind.FAILED, Kind.REFUSED, Kind.DIED)


def write(logs: Path, outcome: Outcome) -> None:
    """Write it into the folder of the attempt's logs. Raises OSError where the disk does not take it."""
    text = json.dumps(dataclasses.asdict(outcome)) + "\n"
    durable.write_atomically(logs / f"rank{outcome.rank}{_SUFFIX}", text, durable=False)


def read(logs: Path, rank: int) -> Outcome | None:
    """How a rank of an attempt ended; None while it runs, or where it was killed."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((logs / f"rank{rank}{_SUFFIX}").read_text(encoding="utf-8"))
        return Outcome(**found | {"kind": Kind(found["kind"])})
    return None


def read_all(logs: Path) -> dict[int, Outcome]:
    """The outcomes of all ranks that wrote one, by rank."""
    ranks = []
    with contextlib.suppress(OSError):
        ranks = [path.name.removeprefix("rank").removesuffix(_SUFFIX) for path in logs.glob(f"rank*{_SUFFIX}")]
    found = {int(rank): read(logs, int(rank)) for rank in sorted(ranks) if rank.isdecimal()}
    return {rank: outcome for rank, outcome in found.items() if outcome is not None}


def first_fault(outcomes: Mapping[int, Outcome]) -> Outcome | None:
    """The fault that caused the others: peers of a failing rank lose their connections, maybe before it has ended."""
    faults = [outcome for outcome in outcomes.values() if outcome.is_fault]
    return min(faults, key=lambda outcome: (not outcome.recurs, outcome.time), default=None)
