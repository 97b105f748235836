"""A rank that runs out of memory: which batch it had, how much it took, and which micro batch would fit."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

from train.record.store import Run
from train.runs import memory

if TYPE_CHECKING:
    from train.engine.setup import Job


class Scale:
    """Weighs a rank between its setting up, when no batch is there yet, and its end."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begun = self._now()[0]
        self._has_state = bool(job.optimizer.state)

    def tell(self, error: BaseException) -> None:
        """If memory was refused, say what is known of it in the exception's `shortage`."""
        import torch

        text = str(error)
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not memory.is_refused(text):
            return
        config = self._job.config
        assert isinstance(config.micro_batch_size, int)
        load = memory.Load(config.batch_size, config.micro_batch_size, self._job.world.size)
        _, peak, limit = self._now()
        words = memory.shortage(load, peak + memory.wanted(text), self._begun + self._to_come(), limit)
        error.shortage = words  # type: ignore[attr-defined]

    def _now(self) -> tuple[float, float, float | None]:
        """Bytes that are taken, that were at most, and that there are: of a GPU, or of what is limited here."""
        device = self._job.world.device
        if device.type == "cuda":
            import torch

            free, _ = torch.cuda.mem_get_info(device)
            limit = free + torch.cuda.memory_reserved(device)
            return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device), limit
        room, peaks, now = memory.room(1), memory.peaks(), memory.taken()
        if room.address_space is not None:
            return now.address_space, peaks.address_space, room.address_space
        return now.resident, peaks.resident, None if room.resident is None else room.resident + now.resident

    def _to_come(self) -> float:
        """Bytes that training adds to a rank whatever the batch: gradients, and the optimizer's state where none was
        read with a checkpoint."""
        from train.parallel.strategy import local

        gradients = sum(local(p).nbytes for p in self._job.strategy.module.parameters() if p.requires_grad)
        defaults: dict[str, Any] = self._job.optimizer.defaults
        state = 2 if "betas" in defaults else int(bool(defaults.get("momentum")))  # Adam and its kin; SGD
        return gradients * (1 if self._has_state else 1 + state)


def of_run(run: Run, ranks: int) -> str:
    """The same where a rank could not say it: the kernel took it. '' for a script, or where its folder is gone."""
    try:
        config = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
        return memory.shortage(memory.Load(config["batch_size"], config["micro_batch_size"], ranks))
    except (OSError, ValueError, KeyError, TypeError):
        return ""
