"""The memory that outlives the ranks of a run, as the process that starts them has it (checkpoint/shared.py)."""

from __future__ import annotations

import os
import tomllib

from train.checkpoint.shared import ENVIRONMENT, Owned
from train.config import SPREAD
from train.record import metrics
from train.record.store import Run


def memory_of(run: Run, ranks: int) -> Owned | None:
    """What outlives the ranks of a run here, if it is to be started again and its state can be kept."""
    record = run.read()
    if record.get("script") or not int(record.get("max_restarts", 1)):
        return None
    content = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
    if not content.get("checkpoint", {}).get("snapshots", True):
        return None
    return Owned(ranks if content.get("parallel", {}).get("strategy") in SPREAD else 1)


def write_lines(run: Run, memory: Owned | None) -> None:
    """Write down what the disk has refused to ranks that are gone. Raises OSError where it still does.

    Those of steps that the disk has a checkpoint of were on it before.
    """
    if memory is None:
        return
    if memory.step > next(iter(run.steps_saved()), 0):
        metrics.bring_home(run, memory.lines)
    memory.forget_lines()


def lend(memory: Owned | None) -> None:
    """Tell ranks that are started from now on where it is."""
    os.environ.pop(ENVIRONMENT, None)  # of a run around this one
    if memory is not None:
        os.environ[ENVIRONMENT] = memory.address
