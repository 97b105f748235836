"""Removes the checkpoints that a run does not keep."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

from .. import faults
from ..errors import Refused
from ..run.best import best, best_steps
from ..run.run_folder import Run
from .manifest import DAMAGED, PARTIAL, clean, frozen_files, frozen_name, newest_valid, read_manifest


def prune(run: Run, keep: int, metric: str, keep_best: int) -> None:
    """Remove all checkpoints except the newest `keep`, and the `keep_best` best ones if checkpoint.best names a metric.

    A function of the run folder: a prune that a kill interrupts is completed by the next one.
    """
    stay = set(run.steps_saved()[:keep])
    if metric:
        stay.update(best_steps(run, metric, keep_best))
    keep_only(run, stay)


def keep_only(run: Run, stay: Collection[int]) -> None:
    """Remove all checkpoints except those of these steps, and what interrupted saves and prunes left. Only for the
    holder of the run's lock. What cannot be removed stays."""
    for step in run.steps_saved():
        if step not in stay:
            with contextlib.suppress(OSError):  # what cannot be removed now is removed by the next start
                _take_away(run, step)
    with contextlib.suppress(OSError, ValueError, Refused):  # a checkpoint that cannot be read may need any of them
        _prune_frozen(run)
    clean(run)
    faults.here("prune.removed")


def _prune_frozen(run: Run) -> None:
    """Remove the files of frozen weights that no checkpoint refers to, not even one that was set aside."""
    if not (files := frozen_files(run)):
        return
    folders = [run.checkpoints / name for name in os.listdir(run.checkpoints)]
    entries = [read_manifest(one).get("frozen") for one in folders if not one.name.startswith((PARTIAL, DAMAGED))]
    for name in set(files) - {frozen_name(entry) for entry in entries if entry}:
        (run.folder / name).unlink()


def _take_away(run: Run, step: int) -> None:
    old = run.checkpoint(step)
    old.rename(old.with_name(f"{PARTIAL}removing-{old.name}"))
    faults.here("prune.renamed")


def make_room(run: Run, metric: str) -> list[int]:
    """Remove the oldest checkpoint that is neither the newest whole one nor the best. Returns the steps of those that
    could be removed, with the removed one last; []: there was none, or none can be removed."""
    with contextlib.suppress(OSError, Refused):
        found = best(run, metric) if metric else None
        stay = {newest_valid(run)[0], found.step if found is not None else 0}
        if spare := [step for step in run.steps_saved() if step not in stay]:
            _take_away(run, spare[-1])
            clean(run)
            return spare
    return []
