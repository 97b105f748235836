"""Publishes checkpoints: whatever is written becomes visible as a whole, or not at all.

Commit: the ranks write into a fresh `.partial-…` folder, and fsync what they write; rank 0 writes the manifest last;
one rename publishes the folder; its parent is fsynced. Old checkpoints are pruned only after that.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from .. import faults
from ..config.schema import Checkpoint
from ..parallel.world import World
from ..run.durable import sync
from ..run.record import FORMAT
from ..run.run_folder import Run
from .load import reason_of
from .manifest import MANIFEST, PARTIAL, Files, manifest_text, set_aside
from .prune import make_room, prune


class CannotSave(OSError):
    """This checkpoint could not be written; the ones before are untouched."""


@dataclasses.dataclass(frozen=True)
class Content:
    """What a checkpoint will hold."""

    size: int
    """Bytes of it, over all ranks."""
    write: Callable[[Path], Files]
    """Writes it into a folder. Returns the manifest's entries of all files, on rank 0 at least. A collective."""
    facts: dict[str, Any]
    """Plain values for the manifest."""


class Committer:
    """Publishes checkpoints of a run, one at a time, and prunes older ones."""

    def __init__(
        self, run: Run, world: World, *, kept: Checkpoint, attempt: int, saved: Callable[[int], None]
    ) -> None:  # fmt: skip
        """
        Args:
            kept: which checkpoints to keep.
            attempt: rank 0's number of the attempt.
            saved: called on rank 0 with the step of each checkpoint once it is durable.
        """
        self.run, self.world, self.kept, self._attempt, self._saved = run, world, kept, attempt, saved
        self._margin: float = 2**20
        """Bytes that a save must leave free, for example to record the end of a run. Less than 0: the save may use all
        space, and older checkpoints are removed after it."""

    def commit(self, step: int, prepare: Callable[[], Content]) -> None:
        """Write and publish a checkpoint. A collective.

        Args:
            prepare: returns what to write. A collective; it may raise OSError on all ranks.

        Raises:
            CannotSave: on all ranks; older checkpoints are untouched.
        """
        final = self.run.checkpoint(step)
        partial = self.run.checkpoints / f"{PARTIAL}{final.name}-{self._attempt}"
        try:
            faults.here("save.begin")
            content = prepare()
            self.world.on_first(lambda: self._begin(partial, content.size))
            listed = content.write(partial)
            faults.here("save.shards")
            manifest = manifest_text(content.facts | {"format": FORMAT, "step": step, "files": listed})
            self.world.on_first(lambda: self._publish(partial, final, manifest))
        except (OSError, dcp.api.CheckpointException) as error:
            if self.world.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise CannotSave(reason_of(error)) from error
        if self.world.is_first:
            self._saved(step)

    def make_room(self, error: CannotSave) -> int:
        """Remove an older checkpoint if a full disk prevented a run's last one. Returns its step; 0: none was removed,
        so a second try makes no sense. A collective."""
        is_full = any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
        if not self.world.any(is_full):
            return 0
        spare = self.world.on_first(lambda: make_room(self.run, self.kept.best))
        if len(spare) == 1:  # it was the last that could go
            self._margin = -math.inf
        return spare[-1] if spare else 0

    def check_room(self, folder: Path, size: int) -> None:
        """Check that the disk has room for this many bytes. Raises OSError if not."""
        free = shutil.disk_usage(folder).free
        needed = size * 1.05 + self._margin
        if free < needed:
            full = f"{os.strerror(errno.ENOSPC)}: {needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free"
            raise OSError(errno.ENOSPC, full)

    def _begin(self, partial: Path, size: int) -> None:
        self.run.checkpoints.mkdir(exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        self.check_room(self.run.checkpoints, size)
        partial.mkdir()

    def _publish(self, partial: Path, final: Path, manifest: str) -> None:
        with (partial / MANIFEST).open("wb") as file:
            file.write(manifest.encode())
            faults.here("save.manifest")
            file.flush()
            os.fsync(file.fileno())
        sync(partial)
        faults.here("save.synced")
        if final.exists():  # the same step, written again: it was found damaged, or its run was edited
            set_aside(self.run, int(final.name.removeprefix("step-")))
        partial.rename(final)
        faults.here("save.renamed")
        sync(self.run.checkpoints)
        faults.here("save.published")
        # durable from here on; only now may older ones go
        kept, is_tight = self.kept, self._margin < 0
        prune(self.run, 1 if is_tight else kept.keep, kept.best, 1 if is_tight else kept.keep_best)
