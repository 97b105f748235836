"""What a run tells while it trains: metrics.jsonl, TensorBoard, sample logs, run.json, and lines or a bar.

What is written to metrics.jsonl and the sample logs depends on the step alone, never on the attempt: on resume both
are cut to the step of the loaded checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from train.config import Config
from train.engine.parallel import World
from train.runs.store import Run

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


def last_evaluation(run: Run) -> dict[str, Any] | None:
    """The last evaluation line of metrics.jsonl."""
    found = None
    if run.metrics.exists():
        for line in run.metrics.read_text().splitlines():
            if '"eval"' in line:
                found = json.loads(line)
    return found


class Report:
    """One rank's reporting. Rank 0 writes metrics and progress; every rank its own sample log, if asked for."""

    def __init__(self, run: Run, world: World, config: Config, total_steps: int, done: int, bar: bool) -> None:
        self.run, self.world, self.total_steps = run, world, total_steps
        self._metrics: IO[str] | None = None
        self._samples: IO[str] | None = None
        self._board: Any = None
        self._bar: Any = None
        self._next_progress = self._next_line = 0.0
        if config.log.samples:
            self._samples = (run.folder / f"samples.rank{world.rank}.log").open("a", encoding="ascii")
        if not world.is_first:
            return
        self._metrics = run.metrics.open("a", encoding="utf-8")
        if config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=done + 1)
        if bar:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_steps, initial=done, desc=run.name, unit="step", dynamic_ncols=True, file=sys.stderr
            )

    def samples(self, step: int, indices: list[npt.NDArray[np.int64]]) -> None:
        """Note which samples this rank consumed in a step (counted from 1)."""
        if self._samples is not None:
            ids = [str(index) for part in indices for index in part.tolist()]
            self._samples.write(" ".join([str(step), *ids]) + "\n")

    def training(self, line: dict[str, Any]) -> None:
        """A training line of metrics.jsonl. Rank 0 only."""
        self._write(line)
        if self._board is not None:
            for name in ("loss", "lr", "samples_per_s", "data_wait", "step_time", "memory"):
                self._board.add_scalar(f"train/{name}", line[name], line["step"])

    def evaluation(self, step: int, epoch: int, samples: int, figures: dict[str, float]) -> None:
        """An evaluation line of metrics.jsonl. Rank 0 only."""
        self._write({"step": step, "epoch": epoch, "samples": samples, "eval": figures})
        assert self._metrics is not None
        self._metrics.flush()
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(f"eval/{name}", value, step)
            self._board.flush()
        text = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        self.say(f"evaluation after step {step} (epoch {epoch}, {samples} samples): {text}")

    def _write(self, line: dict[str, Any]) -> None:
        assert self._metrics is not None
        # JSON has no NaN; a reader should not have to know Python's dialect
        text = json.dumps(line, allow_nan=False) if _finite(line) else json.dumps(_without_nan(line))
        self._metrics.write(text + "\n")

    def progress(self, step: int, epoch: int, loss: float, samples_per_s: float) -> None:
        """Show how far it is: the bar or a line now and then, and run.json for other processes. Rank 0 only."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"epoch {epoch}  loss {loss:.4f}  {samples_per_s:.0f} samples/s", refresh=False)
            self._bar.update(step - self._bar.n)
        elif now >= self._next_line:
            self._next_line = now + _LINE_EVERY
            log.info(
                "step %d/%d  epoch %d  loss %.4f  %.0f samples/s", step, self.total_steps, epoch, loss, samples_per_s
            )
        if now >= self._next_progress:
            self._next_progress = now + _PROGRESS_EVERY
            if self._metrics is not None:
                self._metrics.flush()
            self.run.update(durable=False, step=step, epoch=epoch, loss=loss, samples_per_s=round(samples_per_s, 1))

    def say(self, text: str) -> None:
        """A line for people, from rank 0, that does not tear the bar."""
        if not self.world.is_first:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            log.info(text)

    def sync(self) -> None:
        """Make this rank's lines durable: a published checkpoint must find the lines of all steps before it."""
        for file in (self._metrics, self._samples):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        for file in (self._metrics, self._samples, self._board, self._bar):
            if file is not None:
                file.close()


def _finite(line: dict[str, Any]) -> bool:
    values = [*line.values(), *line.get("eval", {}).values()]
    return all(np.isfinite(value) for value in values if isinstance(value, float))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value
