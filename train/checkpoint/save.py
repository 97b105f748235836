"""A checkpoint is committed or it does not exist.

Commit: every rank writes its shards with torch.distributed.checkpoint into a fresh `.partial-…` folder, hashed on
their way and fsynced (writer.py); rank 0 writes the manifest last; one rename publishes the folder; its parent is
fsynced. Old checkpoints are pruned only after that. Loading verifies every hash and falls back to the newest checkpoint
that is whole (manifest.py). On several machines checkpoints lie in node 0's run folder: with ddp rank 0 writes
them alone, with fsdp and hsdp all ranks do, into a folder that all machines share.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from .. import faults
from ..config import Config
from ..parallel.world import World
from ..run.durable import sync
from ..run.run_folder import Run
from .extra import packed
from .frozen import Frozen
from .load import reason_of
from .manifest import FORMAT, MANIFEST, PARTIAL, WHOLE, manifest_text, set_aside
from .prune import make_room, prune
from .staging import Staging
from .state_dict import TrainState, size_of
from .writer import DurableWriter


class CannotSave(OSError):
    """This checkpoint could not be written; the ones before are untouched."""


class Saver:
    """Writes the checkpoints of a run, on every rank, one at a time.

    With `asynchronous` the state is copied to host memory and training continues while a thread writes, hashes
    and publishes it. The thread's collectives have a group of their own.
    """

    def __init__(
        self, run: Run, world: World, *, config: Config, attempt: int, saved: Callable[[int], None],
        all_write: bool = True, frozen: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            run: where checkpoints lie.
            attempt: rank 0's number of the attempt.
            saved: called on rank 0 with the step of each checkpoint once it is durable, maybe from a thread.
            all_write: whether all ranks see the folder and write a part. Otherwise rank 0 writes alone.
            frozen: names in the model's state of weights to write once. None of them may be spread over ranks.
        """
        self.run, self.attempt, self.config, self._saved = run, attempt, config, saved
        self.world = world.with_own_group()
        self._all_write = all_write
        self._frozen = Frozen(run, frozen, self.world)
        self._writes = world.is_first or all_write
        writers = world if all_write else world.of_rank_0()
        staged = config.checkpoint.asynchronous and self._writes
        self._staging = Staging(writers.rank, writers.size) if staged else None
        self._pool = ThreadPoolExecutor(1, "save")
        self._busy: Future[None] | None = None
        """The work of the thread: it reserves memory or writes a checkpoint."""
        self._is_prepared = False
        self._margin: float = 2**20
        """Bytes that a save must leave free, for example to record the end of a run. Less than 0: the save may use all
        space, and older checkpoints are removed after it."""

    def close(self) -> None:
        """Take no more work and free the memory, unless a write still goes on: it may wait for a peer that is gone."""
        self._pool.shutdown(wait=False)
        if self._staging is not None and (self._busy is None or self._busy.done()):
            self._staging.close()

    def prepare(self, state: TrainState) -> None:
        """Allocate memory for copies in the background, because the first touch of memory costs more than many copies
        into it.

        Called after each step. Does nothing until the optimizer has its state, because fp16 may skip the first steps.
        """
        if self._staging is not None and self._busy is None and not self._is_prepared and state.optimizer.state:
            self._is_prepared = True
            self._busy = self._pool.submit(self._staging.reserve, state.tree())

    def save(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Save a checkpoint of this step, or start to. A collective: all ranks call it.

        The optimizer's gradients must be None. With `asynchronous`, `wait` says how it went.

        Args:
            facts: plain values for the manifest, for example the configuration.

        Raises:
            CannotSave: on all ranks; older checkpoints are untouched.
        """
        self.wait()
        tree = state.tree() if self._writes else {}
        size = size_of(tree)  # of all of it, over all ranks
        live = self._frozen.live(tree)
        if not self.config.checkpoint.asynchronous:
            self._commit(step, tree, live, size, facts)
            return
        if self._staging is not None:
            tree = self._staging.copy(tree)
        faults.here("save.staged")

        def work() -> None:
            if self.world.device.type == "cuda":
                torch.cuda.set_device(self.world.device)  # a thread begins on the first one, and would open it
            self._commit(step, tree, live, size, facts)

        self._busy = self._pool.submit(work)

    def make_room(self, error: CannotSave) -> int:
        """Remove an older checkpoint if a full disk prevented a run's last one. Returns its step; 0: none was removed,
        so a second try makes no sense. A collective."""
        is_full = any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
        if not self.world.any(is_full):
            return 0
        spare = self.world.on_first(lambda: make_room(self.run, self.config.checkpoint.best))
        if len(spare) == 1:  # it was the last that could go
            self._margin = -math.inf
        return spare[-1] if spare else 0

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CannotSave: the checkpoint could not be written; on all ranks.
            RuntimeError: another rank is gone; whether the checkpoint was written is unknown.
        """
        busy, self._busy = self._busy, None
        if busy is not None:
            busy.result()

    def _commit(
        self, step: int, state: dict[str, Any], live: dict[str, Tensor], size: int, facts: dict[str, Any]
    ) -> None:
        final = self.run.checkpoint(step)
        partial = self.run.checkpoints / f"{PARTIAL}{final.name}-{self.attempt}"
        try:
            faults.here("save.begin")
            state, frozen, left_out = self._frozen.leave_out(state, live, self._check_room)
            self.world.on_first(lambda: self._begin(partial, size - left_out))
            listed = self._write(partial, state)
            faults.here("save.shards")
            form: dict[str, Any] = {"format": FORMAT, "frozen": frozen} if frozen else {"format": WHOLE}
            manifest = manifest_text(facts | form | {"step": step, "files": listed})
            self.world.on_first(lambda: self._publish(partial, final, manifest))
        except (OSError, dcp.api.CheckpointException) as error:
            if self.world.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise CannotSave(reason_of(error)) from error
        if self.world.is_first:
            self._saved(step)

    def _write(self, partial: Path, state: dict[str, Any]) -> dict[str, Any]:
        """Write the shards. Returns what the manifest lists."""
        writer, state = DurableWriter(partial), packed(state)
        if self._all_write:
            # DCP gathers the errors of all ranks and raises on each of them
            dcp.save(state, storage_writer=writer, process_group=self.world.group, no_dist=self.world.size == 1)
            return {name: entry for part in self.world.gather(writer.entries) for name, entry in part.items()}

        def alone() -> dict[str, Any]:
            try:
                dcp.save(state, storage_writer=writer, no_dist=True)
            except dcp.api.CheckpointException as error:
                raise OSError(reason_of(error)) from error
            return writer.entries

        return self.world.on_first(alone)

    def _begin(self, partial: Path, size: int) -> None:
        self.run.checkpoints.mkdir(exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        self._check_room(self.run.checkpoints, size)
        partial.mkdir()

    def _check_room(self, folder: Path, size: int) -> None:
        """Check that the disk has room for this many bytes. Raises OSError if not."""
        free = shutil.disk_usage(folder).free
        needed = size * 1.05 + self._margin
        if free < needed:
            full = f"{os.strerror(errno.ENOSPC)}: {needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free"
            raise OSError(errno.ENOSPC, full)

    def _publish(self, partial: Path, final: Path, manifest: str) -> None:
        with (partial / MANIFEST).open("wb") as file:
            file.write(manifest.encode())
            faults.here("save.manifest")
            file.flush()
            os.fsync(file.fileno())
        sync(partial)
        faults.here("save.synced")
        if final.exists():  # the same step, written again: only when it was found damaged or its run was edited
            set_aside(self.run, int(final.name.removeprefix("step-")))
        partial.rename(final)
        faults.here("save.renamed")
        sync(self.run.checkpoints)
        faults.here("save.published")
        # durable from here on; only now may older ones go
        kept, is_tight = self.config.checkpoint, self._margin < 0
        prune(self.run, 1 if is_tight else kept.keep, kept.best, 1 if is_tight else kept.keep_best)
