"""A checkpoint is committed or it does not exist.

Commit: every rank writes its shards with torch.distributed.checkpoint into a fresh `.partial-…` folder, hashed on
their way and fsynced (disk.py); rank 0 writes the manifest last; one rename publishes the folder; its parent is
fsynced. Old checkpoints are pruned only after that. Loading verifies every hash and falls back to the newest
checkpoint that is whole.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from train.config import Config
from train.engine import fault
from train.engine.disk import DurableWriter
from train.engine.manifest import DAMAGED, FORMAT, MANIFEST, PARTIAL, manifest_text, set_aside
from train.engine.parallel import World
from train.errors import one_line
from train.runs.best import pick, scores_of
from train.runs.store import Run, sync_folder

log = logging.getLogger("train")

# torch warns about its own use of storages, and that one process alone is one process alone
warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CannotSave(OSError):
    """This checkpoint could not be written; the ones before are untouched."""


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Model and optimizer state under names that do not depend on how the model is spread."""
    state: dict[str, Any] = {"model": get_model_state_dict(module)}
    if optimizer is not None:
        state["optim"] = get_optimizer_state_dict(module, optimizer)
    return state


def size_of(state: Any) -> int:
    """Bytes of the tensors in a state."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(map(size_of, state.values()))
    return 0


class Saver:
    """Writes the checkpoints of a run, on every rank, one at a time.

    With `asynchronous` the state is copied to host memory and training goes on while a thread writes, hashes and
    publishes it. The thread's collectives have a group of their own.
    """

    def __init__(self, run: Run, world: World, config: Config, attempt: int, saved: Callable[[int], None]) -> None:
        """`saved` is called on rank 0 with the step of each checkpoint once it is durable; maybe from a thread."""
        self.run, self.attempt, self.config, self._saved = run, attempt, config, saved
        self.world = world.with_own_group()
        self._stage = Stage() if config.checkpoint.asynchronous else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.is_prepared = False

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Make room for copies in the background: the first touch of memory costs more than many copies into it.

        After the first step: torch initializes the state of an optimizer that has none yet with a step of its own.
        """
        self.is_prepared = True
        if self._stage is not None:
            state = state_of(module, optimizer)
            threading.Thread(target=self._stage.reserve, args=(state,), daemon=True, name="reserve").start()

    def save(self, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
        """Commit a checkpoint of this step, or begin to. A collective: all ranks call it.

        The optimizer's gradients must be None. With `asynchronous`, `settle` says how it went.

        Args:
            facts: plain values for the manifest, for example the configuration.

        Raises:
            CannotSave: on every rank alike; what was there before is untouched.
        """
        self.settle()
        state = state_of(module, optimizer)
        if self._stage is None:
            self._commit(step, state, facts)
            return
        state = self._stage.copy(state)
        fault.here("save.staged")

        def work() -> None:
            try:
                self._commit(step, state, facts)
            except BaseException as error:  # also that of a peer's death: this rank must not believe it has saved
                self._error = error

        self._thread = threading.Thread(target=work, name="save")
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing in the background."""
        return self._thread is not None and self._thread.is_alive()

    def settle(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CannotSave: it could not be written; on every rank alike.
            RuntimeError: another rank is gone; nobody knows whether it was written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _commit(self, step: int, state: dict[str, Any], facts: dict[str, Any]) -> None:
        final = self.run.checkpoint(step)
        partial = self.run.checkpoints / f"{PARTIAL}{final.name}-{self.attempt}"
        try:
            fault.here("save.begin")
            self.world.on_first(lambda: self._begin(partial, size_of(state)))
            writer = DurableWriter(partial)
            # DCP gathers the errors of all ranks and raises on each of them
            dcp.save(state, storage_writer=writer, process_group=self.world.group)
            fault.here("save.shards")
            parts = self.world.gather(writer.entries)
            listed = {name: entry for part in parts for name, entry in part.items()}
            manifest = manifest_text(facts | {"format": FORMAT, "step": step, "files": listed})
            self.world.on_first(lambda: self._publish(partial, final, manifest))
        except (OSError, dcp.api.CheckpointException) as error:
            self._abandon(partial)
            raise CannotSave(_reason(error)) from error
        if self.world.is_first:
            self._saved(step)

    def _begin(self, partial: Path, size: int) -> None:
        self.run.checkpoints.mkdir(exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(self.run.checkpoints).free
        needed = size * 1.05 + 2**20
        if free < needed:
            raise OSError(errno.ENOSPC, f"no space left: {needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free")
        partial.mkdir()

    def _publish(self, partial: Path, final: Path, manifest: str) -> None:
        with (partial / MANIFEST).open("wb") as file:
            file.write(manifest.encode())
            fault.here("save.manifest")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(partial)
        fault.here("save.synced")
        if final.exists():  # the same step, written again: only when it was found damaged or its run was edited
            set_aside(self.run, int(final.name.removeprefix("step-")))
        partial.rename(final)
        fault.here("save.renamed")
        sync_folder(self.run.checkpoints)
        fault.here("save.published")
        # durable from here on; only now may older ones go
        prune(self.run, self.config.checkpoint.keep, self.config.checkpoint.best)

    def _abandon(self, partial: Path) -> None:
        if self.world.is_first:
            shutil.rmtree(partial, ignore_errors=True)


class Stage:
    """Host memory into which a state is copied, reused from one checkpoint to the next."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, ...], Tensor] = {}
        self._lock = threading.Lock()

    def reserve(self, state: dict[str, Any]) -> None:
        """Allocate and touch the memory that a copy of this state needs."""
        with self._lock:
            self._walk(state, (), lambda tensor, buffer: buffer.zero_())

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state that training cannot change. Valid until the next call."""
        with self._lock:
            copied = self._walk(state, (), lambda tensor, buffer: buffer.copy_(tensor.detach(), non_blocking=True))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return dict(copied)

    def _walk(self, value: Any, path: tuple[str, ...], fill: Callable[[Tensor, Tensor], Any]) -> Any:
        if isinstance(value, dict):
            return {key: self._walk(inner, (*path, str(key)), fill) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._walk(inner, (*path, str(place)), fill) for place, inner in enumerate(value))
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            pin = value.device.type == "cuda"
            buffer = self._buffers[path] = torch.empty(value.shape, dtype=value.dtype, pin_memory=pin)
        fill(value, buffer)
        return buffer


def prune(run: Run, keep: int, best: str) -> None:
    """Remove all checkpoints but the newest `keep` and the one with the best value of the metric `best`."""
    kept: set[int | None] = set(run.steps_saved()[:keep])
    if best:
        scores, saved = scores_of(run, best), run.steps_saved()
        kept |= {pick(best, {step: score for step, score in scores.items() if step in saved})}
    for step in run.steps_saved():
        if step in kept:
            continue
        old = run.checkpoint(step)
        doomed = old.with_name(f"{PARTIAL}removing-{old.name}")
        with contextlib.suppress(OSError):  # what cannot be removed now is removed by the next start
            old.rename(doomed)
            fault.here("prune.renamed")
            shutil.rmtree(doomed)
            fault.here("prune.removed")
    for name in os.listdir(run.checkpoints):
        if name.startswith(DAMAGED):
            shutil.rmtree(run.checkpoints / name, ignore_errors=True)


def _reason(error: BaseException) -> str:
    """The innermost cause of a failed save: DCP wraps an OSError in several layers of its own."""
    error = _cause(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f": {error.filename}" if error.filename else "")
    return one_line(error)[:300]


def _cause(error: BaseException) -> BaseException:
    """What is inside the layers of DCP."""
    if isinstance(error, dcp.api.CheckpointException):
        for inner in error.failures.values():
            return inner[0] if isinstance(inner, tuple) else inner
    return error


def load(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read a verified checkpoint into a model and, if given, its fresh optimizer. A collective under several ranks.

    Raises:
        ValueError: names or shapes of the model differ from those in the checkpoint.
    """
    for parameter in module.parameters():
        parameter.grad = None  # a gradient here would make torch skip the optimizer's state silently
    state = state_of(module, optimizer)
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    except (dcp.api.CheckpointException, RuntimeError, ValueError, KeyError) as error:
        if isinstance(_cause(error), OSError):  # of the disk, and may pass
            raise OSError(f"{folder.name} cannot be read: {_reason(error)}") from error
        raise ValueError(f"the model does not fit the checkpoint {folder.name}: {_reason(error)}") from error
    set_model_state_dict(module, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(module, optimizer, state["optim"])


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model's state on the CPU, contiguous, under clean names."""
    state = get_model_state_dict(module)
    return {name: t.detach().cpu().contiguous() for name, t in state.items() if isinstance(t, Tensor)}


def weights_sha256(state: dict[str, Tensor]) -> str:
    """SHA-256 over the names in sorted order: UTF-8 `name\\ndtype\\nd0,d1\\n`, then the little-endian bytes.

    The dtype is written as `float32`; nothing stands between tensors.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\n{str(tensor.dtype).removeprefix('torch.')}\n{shape}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()
