"""What a run tells while it trains: metrics.jsonl, TensorBoard, sample logs, run.json, and lines or a bar."""

from __future__ import annotations

import contextlib
import time
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from train.config import Config
from train.engine.report.board import Board
from train.engine.report.progress import Progress
from train.parallel.world import World
from train.record.metrics import Evaluation, Lines, Training, metrics_text, samples_file, samples_text
from train.record.store import Run

_PROGRESS_EVERY = 0.5
"""Seconds between two updates of run.json's progress."""


class Report:
    """One rank's reporting. Rank 0 writes metrics and progress; every rank its own sample log, if asked for."""

    def __init__(self, run: Run, world: World, config: Config, total_steps: int, done: int, bar: bool) -> None:
        self.run = run
        self._next_note = 0.0
        self._samples = Lines(samples_file(run, world.rank)) if config.log.samples else None
        self._metrics = Lines(run.metrics) if world.is_first else None
        tensorboard = world.is_first and config.log.tensorboard
        self._board = Board(run.folder / "tensorboard", done, self.say) if tensorboard else None
        self._progress = Progress(run.name, total_steps, done, bar) if world.is_first else None

    def samples(self, step: int, indices: list[npt.NDArray[np.int64]]) -> None:
        """Note which samples this rank consumed in a step (counted from 1)."""
        if self._samples is not None:
            self._samples.add(samples_text(step, (index for part in indices for index in part.tolist())))

    def training(self, line: dict[str, Any]) -> None:
        """A training line of metrics.jsonl (its keys: record.metrics.Training). Rank 0 only."""
        assert self._metrics is not None
        self._metrics.add(metrics_text(cast(Training, line)))
        if self._board is not None:
            self._board.training(cast(Training, line))

    def evaluation(self, step: int, epoch: int, samples: int, figures: dict[str, float]) -> None:
        """An evaluation line of metrics.jsonl. Rank 0 only."""
        assert self._metrics is not None
        line: Evaluation = {"step": step, "epoch": epoch, "samples": samples, "eval": {**figures}}
        self._metrics.add(metrics_text(line))
        self._metrics.flush()
        if self._board is not None:
            self._board.evaluation(step, figures)
        text = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        self.say(f"evaluation after step {step} (epoch {epoch}, {samples} samples): {text}")

    def progress(self, step: int, epoch: int, loss: float, samples_per_s: float) -> None:
        """Show how far it is: to who watches, and now and then in run.json for other processes. Rank 0 only."""
        assert self._metrics is not None and self._progress is not None
        self._progress.show(step, epoch, loss, samples_per_s)
        now = time.monotonic()
        if now >= self._next_note:
            self._next_note = now + _PROGRESS_EVERY
            self._metrics.flush()
            # on a full disk the next one may get through
            self.run.note(step=step, epoch=epoch, loss=loss, samples_per_s=round(samples_per_s, 1))

    def say(self, text: str) -> None:
        """A line for people, from rank 0, that does not tear the bar."""
        if self._progress is not None:
            self._progress.say(text)

    def sync(self) -> str:
        """Make this rank's lines durable: a published checkpoint must find those of all steps before it.

        Returns what is in the way; '' when nothing is.
        """
        failed = [file for file in (self._metrics, self._samples) if file is not None and not file.sync()]
        return failed[0].problem if failed else ""

    def close(self) -> None:
        """Write what is left and take the bar away."""
        for sink in (self._metrics, self._samples, self._board, self._progress):
            if sink is not None:
                with contextlib.suppress(OSError):
                    sink.close()
