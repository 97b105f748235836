"""How a rank ended, in its own words: a small file beside its log, which outlives it.

A rank says what happened to it and no more; what becomes of the run is decided by who has seen all ranks (see
supervise/attempts.py). Nothing here imports torch.
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

from train.record import durable

_SUFFIX = ".outcome.json"


class Kind(enum.StrEnum):
    """What happened to a rank."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """Saved and ended early, because somebody had asked for it."""
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
    """Why it failed or died; of one that stopped, what asked it to: a signal, or another rank."""
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
    """Leave it in the folder of the attempt's logs. Raises OSError where the disk does not take it."""
    text = json.dumps(dataclasses.asdict(outcome)) + "\n"
    durable.write_atomically(logs / f"rank{outcome.rank}{_SUFFIX}", text, durable=False)


def read(logs: Path, rank: int) -> Outcome | None:
    """How a rank of an attempt ended, or None while it has not said so, or could not."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((logs / f"rank{rank}{_SUFFIX}").read_text(encoding="utf-8"))
        return Outcome(**found | {"kind": Kind(found["kind"])})
    return None


def read_all(logs: Path) -> dict[int, Outcome]:
    """The ends of all ranks that have said how they ended, by rank."""
    ranks = []
    with contextlib.suppress(OSError):
        ranks = [path.name.removeprefix("rank").removesuffix(_SUFFIX) for path in logs.glob(f"rank*{_SUFFIX}")]
    found = {int(rank): read(logs, int(rank)) for rank in sorted(ranks) if rank.isdecimal()}
    return {rank: outcome for rank, outcome in found.items() if outcome is not None}


def first_fault(outcomes: Mapping[int, Outcome]) -> Outcome | None:
    """The cause, among the faults that ranks left behind.

    The peers of a rank that fails lose their connections and say so, maybe before it has ended.
    """
    faults = [outcome for outcome in outcomes.values() if outcome.is_fault]
    return min(faults, key=lambda outcome: (not outcome.recurs, outcome.time), default=None)
