"""A checkpoint is committed or it does not exist.

Every rank writes its shards with torch.distributed.checkpoint, hashed on their way and fsynced (writer.py); commit.py
publishes them as a whole. Loading verifies every hash and falls back to the newest checkpoint that is whole
(manifest.py). On several machines checkpoints lie in node 0's run folder: with ddp rank 0 writes them alone, with fsdp
and hsdp all ranks do, into a folder that all machines share.
"""

from __future__ import annotations

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
from ..run.run_folder import Run
from .commit import CannotSave, Committer, Content
from .extra import packed
from .frozen import Frozen
from .load import reason_of
from .staging import Staging
from .state_dict import TrainState, size_of
from .writer import DurableWriter


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
        self.config = config
        self.world = world.with_own_group()
        self._committer = Committer(run, self.world, kept=config.checkpoint, attempt=attempt, saved=saved)
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

    def close(self) -> None:
        """Take no more work and free the memory, unless a write still runs: it may wait for a peer that is gone."""
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
        """Remove an older checkpoint, as `Committer.make_room` does. A collective."""
        return self._committer.make_room(error)

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
        def prepare() -> Content:
            kept, frozen, left_out = self._frozen.leave_out(state, live, self._committer.check_room)
            more = {"frozen": frozen} if frozen else {}
            return Content(size - left_out, lambda partial: self._write(partial, kept), facts | more)

        self._committer.commit(step, prepare)

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
