"""A checkpoint is committed or it does not exist.

Commit: every rank writes its shards with torch.distributed.checkpoint into a fresh `.partial-…` folder, hashes and
fsyncs them; rank 0 writes the manifest last; one rename publishes the folder; its parent is fsynced. Old checkpoints
are pruned only after that. Loading verifies every hash and falls back to the newest checkpoint that is whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import warnings
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

from train.engine.manifest import DAMAGED, FORMAT, MANIFEST, PARTIAL, file_digest, manifest_text, set_aside
from train.engine.parallel import World
from train.errors import one_line
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


def _size_of(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(map(_size_of, state.values()))
    return 0


class Saver:
    """Writes the checkpoints of a run, on every rank."""

    def __init__(self, run: Run, world: World, keep: int, attempt: int) -> None:
        self.run, self.world, self.keep, self.attempt = run, world, keep, attempt

    def save(self, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
        """Commit a checkpoint of this step. A collective: all ranks call it. The optimizer's gradients must be None.

        Args:
            facts: plain values for the manifest, for example the configuration.

        Raises:
            CannotSave: on every rank alike; what was there before is untouched.
        """
        final = self.run.checkpoint(step)
        partial = self.run.checkpoints / f"{PARTIAL}{final.name}-{self.attempt}"
        try:
            state = state_of(module, optimizer)
            self.world.on_first(lambda: self._begin(partial, _size_of(state)))
            writer = dcp.FileSystemWriter(partial, single_file_per_rank=True, sync_files=True, thread_count=1)
            # DCP gathers the errors of all ranks and raises on each of them
            dcp.save(state, storage_writer=writer)
            files, problem = {}, ""
            try:
                # of shards, those this rank wrote; of the rest, rank 0
                mine = [n for n in os.listdir(partial) if n.startswith(f"__{self.world.rank}_")]
                others = [n for n in os.listdir(partial) if not n.startswith("__")] if self.world.is_first else []
                files = {name: file_digest(partial / name) for name in mine + others}
            except OSError as error:
                problem = f"{error.strerror}: {error.filename}"
            parts = self.world.gather((files, problem))
            for _, said in parts:
                if said:
                    raise CannotSave(said)
            facts = facts | {
                "format": FORMAT,
                "step": step,
                "files": {k: v for part, _ in parts for k, v in part.items()},
            }
            self.world.on_first(lambda: self._publish(partial, final, manifest_text(facts)))
        except CannotSave:
            self._abandon(partial)
            raise
        except (OSError, dcp.api.CheckpointException) as error:
            self._abandon(partial)
            raise CannotSave(_reason(error)) from error

    def _begin(self, partial: Path, size: int) -> None:
        self.run.checkpoints.mkdir(exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(self.run.checkpoints).free
        if free < size * 1.05 + 2**20:
            raise OSError(errno.ENOSPC, f"no space left: {size / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
        partial.mkdir()

    def _publish(self, partial: Path, final: Path, manifest: str) -> None:
        for path in [*partial.iterdir(), partial / MANIFEST]:
            with path.open("ab" if path.name != MANIFEST else "wb") as file:
                if path.name == MANIFEST:
                    file.write(manifest.encode())
                    file.flush()
                os.fsync(file.fileno())
        sync_folder(partial)
        if final.exists():  # the same step, written again: only when it was found damaged or its run was edited
            set_aside(self.run, int(final.name.removeprefix("step-")))
        partial.rename(final)
        sync_folder(self.run.checkpoints)
        # durable from here on; only now may older ones go
        for step in self.run.steps_saved()[self.keep :]:
            old = self.run.checkpoint(step)
            doomed = old.with_name(f"{PARTIAL}removing-{old.name}")
            with contextlib.suppress(OSError):  # what cannot be removed now is removed by the next start
                old.rename(doomed)
                shutil.rmtree(doomed)
        for name in os.listdir(self.run.checkpoints):
            if name.startswith(DAMAGED):
                shutil.rmtree(self.run.checkpoints / name, ignore_errors=True)

    def _abandon(self, partial: Path) -> None:
        if self.world.is_first:
            shutil.rmtree(partial, ignore_errors=True)


def _reason(error: BaseException) -> str:
    """The innermost cause of a failed save: DCP wraps an OSError in several layers of its own."""
    if isinstance(error, dcp.api.CheckpointException):
        for inner in error.failures.values():
            cause = inner[0] if isinstance(inner, tuple) else inner
            return one_line(cause)[:300]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f": {error.filename}" if error.filename else "")
    return one_line(error)[:300]


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
