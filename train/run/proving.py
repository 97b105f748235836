"""What `train prove` asks of the ranks of a run: digests of the state, saves and a stop after given updates.

It travels in an environment variable from the command to the ranks. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from .run_folder import Run

VARIABLE = "TRAIN_PROVE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What the ranks of a run do, besides training."""

    stop: int
    """Number of updates after which all ranks save and stop."""
    saves: tuple[int, ...] = ()
    """Numbers of updates after which a checkpoint is saved."""
    pace: float = 0.0
    """Minimum seconds between two updates, so that a signal from outside meets the update that it is meant for."""
    dump: int = 0
    """Number of updates after which each rank writes its whole state; 0: never."""

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def asked() -> Asked | None:
    """Return what the ranks of this run are asked for; None: nothing."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    fields = json.loads(text)
    return Asked(**fields | {"saves": tuple(fields["saves"])})


def take() -> Asked | None:
    """Return what this rank is asked for, and remove it from the environment of what the rank starts; None: nothing."""
    found = asked()
    os.environ.pop(VARIABLE, None)
    return found


def digests_file(run: Run, rank: int) -> Path:
    """Return the file for the digests of a rank: one line of JSON per update and attempt."""
    return run.folder / f"digests.rank{rank}.jsonl"


def dump_file(run: Run, rank: int) -> Path:
    """Return the file for the whole state of a rank."""
    return run.folder / f"state.rank{rank}.pt"
