"""Which checkpoints a run keeps, and the removal of the others."""

from __future__ import annotations

import contextlib

from train import faults
from train.checkpoint.manifest import PARTIAL, clean
from train.run.best import best
from train.run.run_folder import Run


def prune(run: Run, keep: int, metric: str) -> None:
    """Remove all checkpoints but the newest `keep` and the best one, as checkpoint.best says."""
    stay = set(run.steps_saved()[:keep])
    found = best(run, metric) if metric else None
    if found is not None:
        stay.add(found.step)
    for step in run.steps_saved():
        if step in stay:
            continue
        old = run.checkpoint(step)
        with contextlib.suppress(OSError):  # what cannot be removed now is removed by the next start
            old.rename(old.with_name(f"{PARTIAL}removing-{old.name}"))
            faults.here("prune.renamed")
    clean(run)
    faults.here("prune.removed")
