"""The memory for copies of a run's state, as the process that starts the ranks owns it (checkpoint/buffers.py)."""

from __future__ import annotations

import os
import tomllib

from train.checkpoint.buffers import ENVIRONMENT, SnapshotMemory
from train.config import SPREAD
from train.record.store import Run


def memory_of(run: Run, ranks: int) -> SnapshotMemory | None:
    """The memory, for a run of a task that is started again after a death."""
    record = run.read()
    if record.get("script") or not int(record.get("max_restarts", 1)):
        return None
    content = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
    if not content.get("checkpoint", {}).get("snapshots", True):
        return None
    return SnapshotMemory(ranks if content.get("parallel", {}).get("strategy") in SPREAD else 1)


def lend(memory: SnapshotMemory | None) -> None:
    """Put its address into the environment of ranks that are started from now on."""
    os.environ.pop(ENVIRONMENT, None)  # of a run around this one
    if memory is not None:
        os.environ[ENVIRONMENT] = memory.address
