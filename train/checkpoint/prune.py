"""Which checkpoints a run keeps, and the removal of the others."""

from __future__ import annotations

import contextlib

from train import faults
from train.checkpoint.manifest import PARTIAL, clean, newest_valid
from train.errors import Refused
from train.run.best import best
from train.run.run_folder import Run


def prune(run: Run, keep: int, metric: str) -> None:
    """Remove all checkpoints but the newest `keep` and the best one, as checkpoint.best says."""
    stay = set(run.steps_saved()[:keep])
    found = best(run, metric) if metric else None
    if found is not None:
        stay.add(found.step)
    for step in run.steps_saved():
        if step not in stay:
            with contextlib.suppress(OSError):  # what cannot be removed now is removed by the next start
                _take_away(run, step)
    clean(run)
    faults.here("prune.removed")


def _take_away(run: Run, step: int) -> None:
    old = run.checkpoint(step)
    old.rename(old.with_name(f"{PARTIAL}removing-{old.name}"))
    faults.here("prune.renamed")


def make_room(run: Run, metric: str) -> list[int]:
    """Remove the oldest checkpoint, but for the newest whole one and the best. The steps of those that could be spared,
    of which it was the last; []: there is none, or none can be removed."""
    with contextlib.suppress(OSError, Refused):
        found = best(run, metric) if metric else None
        stay = {newest_valid(run)[0], found.step if found is not None else 0}
        if spare := [step for step in run.steps_saved() if step not in stay]:
            _take_away(run, spare[-1])
            clean(run)
            return spare
    return []
