"""Finds the newest state of a run, in memory or on the disk, for tasks and sessions alike."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from ..parallel.world import World
from ..run.run_folder import Run
from . import manifest as manifests
from . import snapshot
from .serialize import Content
from .shares import Shares
from .snapshot import Copies

log = logging.getLogger("train")


@dataclasses.dataclass(frozen=True)
class ResumeState:
    """The state that an attempt continues from."""

    step: int = 0
    """The attempt continues after this step; 0: from the beginning."""
    saved: int = 0
    """The step of the newest checkpoint on the disk."""
    _: dataclasses.KW_ONLY
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The manifest of the checkpoint of `step`; {}: the state is not from a checkpoint."""
    from_memory: bool = False


def newest_valid(
    run: Run, mend: manifests.Mend | None = None, *, sets_aside: bool = False,
    check: manifests.CheckFiles = manifests.check_files,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Return the step and manifest of the newest whole checkpoint; 0 and {} without one. Warns of newer damaged
    ones."""
    step, manifest, unused = manifests.newest_valid(run, sets_aside=sets_aside, check=check, mend=mend)
    for line in unused:
        log.warning("warning: %s", line)
    return step, manifest


def newest_state(
    run: Run, world: World, copies: Copies | None, *, beat: Callable[[], None], mend: manifests.Mend | None = None
) -> tuple[ResumeState, Content | None]:
    """Find the newest state that is whole, and invalidate copies of later steps. A collective.

    Args:
        copies: this rank's copies in memory; None: there are none.
        beat: gives a sign of life of this rank.
        mend: writes a damaged file of frozen weights again.

    Returns:
        Which state it is, and its content if it is in memory.
    """
    parts, shares, content = copies.parts if copies is not None else None, Shares(run, world, beat), None
    # reads every byte of it
    newest = functools.cache(lambda: newest_valid(run, mend, sets_aside=True, check=shares.check))
    while True:
        step = snapshot.newest_common(parts, world) if parts is not None else 0

        def choose(step: int = step) -> ResumeState:
            manifests.clean(run)  # what a kill left
            saved = run.newest_checkpoint
            if not step or saved > step:
                saved = newest()[0]
            if step and step >= saved:  # a damaged checkpoint is not newer
                return ResumeState(step, saved, from_memory=True)
            return ResumeState(saved, saved, manifest=newest()[1])

        start = shares.on_first(choose)
        if parts is None or copies is None or not start.from_memory:
            break
        content = snapshot.read(parts, world=world, step=start.step, fingerprint=copies.fingerprint)
        if content is not None:
            break
        if world.is_first:
            log.warning("warning: the snapshot of step %d is damaged or of other ranks, and is not used", start.step)
    if parts is not None:  # later steps will be made again
        snapshot.wipe(parts, world, first=start.step + start.from_memory)
    return start, content
