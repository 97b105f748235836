"""What a run tells while it trains: metrics.jsonl, TensorBoard, sample logs, run.json, and lines or a bar.

What is written to metrics.jsonl and the sample logs depends on the step alone, never on the attempt: on resume both
are cut to the step of the loaded checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from train.config import Config
from train.parallel.world import World
from train.record.store import Run
from train.screen import Bar

log = logging.getLogger("train")

_PROGRESS_EVERY = 0.5
"""Seconds between two updates of run.json's progress."""
_LINE_EVERY = 2.0
"""Seconds between two progress lines in a log file or pipe."""


def cut(run: Run, step: int) -> None:
    """Cut metrics.jsonl and every rank's sample log to the lines of steps 1 to `step`. For rank 0, before training."""

    def metric(line: bytes) -> int:
        return int(json.loads(line)["step"])

    def sample(line: bytes) -> int:
        return int(line.split(b" ", 1)[0])

    files = [(run.metrics, metric)] + [(path, sample) for path in run.folder.glob("samples.rank*.log")]
    for path, step_of in files:
        if not path.exists():
            continue
        end = 0
        with path.open("rb") as file:
            for line in file:
                try:
                    if not line.endswith(b"\n") or step_of(line) > step:
                        break
                except (ValueError, KeyError, TypeError):  # a line that a kill cut in half
                    break
                end += len(line)
        if end < path.stat().st_size:
            os.truncate(path, end)


class _Lines:
    """Appends whole lines to a file. What a full disk refuses stays here and is tried again, in order."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._good = self._synced = path.stat().st_size
        self._is_doubtful = False
        self._pending: list[bytes] = []
        self.problem = ""
        """Why the last flush or sync failed."""

    def add(self, line: str) -> None:
        self._pending.append(line.encode() + b"\n")

    def flush(self) -> bool:
        """Hand the lines to the system. Whether it took them all."""
        if not self._pending:
            return True
        text = b"".join(self._pending)
        try:
            taken = 0
            while taken < len(text):  # a disk that fills up takes a part and then fails
                taken += self._file.write(text[taken:]) or 0
        except OSError as error:
            self.problem = str(error.strerror)
            with contextlib.suppress(OSError):
                self._file.truncate(self._good)
            return False
        self._good += len(text)
        self._pending = []
        return True

    def sync(self) -> bool:
        """Make the lines durable. Whether they are."""
        try:
            if self._is_doubtful:
                self._take_back()
            if not self.flush():
                return False
            os.fsync(self._file.fileno())
        except OSError as error:
            self.problem = str(error.strerror)
            self._is_doubtful = True
            return False
        self._synced = self._good
        return True

    def _take_back(self) -> None:
        """What a failed fsync left is no longer counted on: it is cut off and written anew.

        Linux takes the pages for written then, and the next fsync would succeed (fsync(2), EIO). Nor would the same
        bytes over the same place help: on ext4 the blocks still count as never written, and read as zeros later.
        """
        with Path(f"/proc/self/fd/{self._file.fileno()}").open("rb") as file:
            file.seek(self._synced)
            text = file.read()
        self._file.truncate(self._synced)
        self._pending.insert(0, text)
        self._good = self._synced
        self._is_doubtful = False

    def close(self) -> None:
        self.flush()
        self._file.close()


class Report:
    """One rank's reporting. Rank 0 writes metrics and progress; every rank its own sample log, if asked for."""

    def __init__(self, run: Run, world: World, config: Config, total_steps: int, done: int, bar: bool) -> None:
        self.run, self.world, self.total_steps = run, world, total_steps
        self._metrics: _Lines | None = None
        self._samples: _Lines | None = None
        self._board: Any = None
        self._bar: Bar | None = None
        self._next_progress = self._next_line = 0.0
        if config.log.samples:
            self._samples = _Lines(run.folder / f"samples.rank{world.rank}.log")
        if not world.is_first:
            return
        self._metrics = _Lines(run.metrics)
        if config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            _hush_tensorboard()
            self._board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=done + 1)
        if bar:
            self._bar = Bar(run.name, total_steps, done, sys.stderr)

    def samples(self, step: int, indices: list[npt.NDArray[np.int64]]) -> None:
        """Note which samples this rank consumed in a step (counted from 1)."""
        if self._samples is not None:
            ids = [str(index) for part in indices for index in part.tolist()]
            self._samples.add(" ".join([str(step), *ids]))

    def training(self, line: dict[str, Any]) -> None:
        """A training line of metrics.jsonl. Rank 0 only."""
        self._write(line)
        names = ("loss", "lr", "samples_per_s", "data_wait", "step_time", "memory")
        self._show({f"train/{name}": line[name] for name in names}, line["step"])

    def evaluation(self, step: int, epoch: int, samples: int, figures: dict[str, float]) -> None:
        """An evaluation line of metrics.jsonl. Rank 0 only."""
        self._write({"step": step, "epoch": epoch, "samples": samples, "eval": figures})
        assert self._metrics is not None
        self._metrics.flush()
        self._show({f"eval/{name}": value for name, value in figures.items()}, step)
        text = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        self.say(f"evaluation after step {step} (epoch {epoch}, {samples} samples): {text}")

    def _show(self, values: dict[str, float], step: int) -> None:
        """Hand values to TensorBoard. It must not end a run: where it cannot write, it is given up."""
        if self._board is None:
            return
        try:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:
            self._board = None
            self.say(f"warning: no more TensorBoard events: {error}")

    def _write(self, line: dict[str, Any]) -> None:
        assert self._metrics is not None
        # JSON has no NaN; a reader should not have to know Python's dialect
        text = json.dumps(line, allow_nan=False) if _finite(line) else json.dumps(_without_nan(line))
        self._metrics.add(text)

    def progress(self, step: int, epoch: int, loss: float, samples_per_s: float) -> None:
        """Show how far it is: the bar or a line now and then, and run.json for other processes. Rank 0 only."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.show(step, self.total_steps, epoch, loss, samples_per_s)
        elif now >= self._next_line:
            self._next_line = now + _LINE_EVERY
            log.info(
                "step %d/%d  epoch %d  loss %.4f  %.0f samples/s", step, self.total_steps, epoch, loss, samples_per_s
            )
        if now >= self._next_progress:
            self._next_progress = now + _PROGRESS_EVERY
            if self._metrics is not None:
                self._metrics.flush()
            # on a full disk the next one may get through
            self.run.note(step=step, epoch=epoch, loss=loss, samples_per_s=round(samples_per_s, 1))

    def say(self, text: str) -> None:
        """A line for people, from rank 0, that does not tear the bar."""
        if not self.world.is_first:
            return
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            if self._bar is not None:
                self._bar.write(text)
            else:
                log.info(text)

    def sync(self) -> str:
        """Make this rank's lines durable: a published checkpoint must find those of all steps before it.

        Returns what is in the way; '' when nothing is.
        """
        failed = [file for file in (self._metrics, self._samples) if file is not None and not file.sync()]
        return failed[0].problem if failed else ""

    def close(self) -> None:
        for file in (self._metrics, self._samples, self._board, self._bar):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


def _hush_tensorboard() -> None:
    """When the disk fails, TensorBoard's thread dies with a page of text; `_show` says so in a line."""
    otherwise = threading.excepthook

    def hook(happened: threading.ExceptHookArgs) -> None:
        of_tensorboard = type(happened.thread).__module__.startswith("tensorboard")
        if not (of_tensorboard and issubclass(happened.exc_type, OSError)):
            otherwise(happened)

    threading.excepthook = hook


def _finite(line: dict[str, Any]) -> bool:
    values = [*line.values(), *line.get("eval", {}).values()]
    return all(np.isfinite(value) for value in values if isinstance(value, float))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value
