"""The loggers of one rank: metrics.jsonl, its sample log, run.json, the console, TensorBoard, W&B, samples left out."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from ... import config as configuration
from ... import format
from ...config import Config
from ...data.fetch import TRAINING, BadSample
from ...errors import nearest, one_line
from ...parallel.world import World
from ...run import best, durable, metrics
from ...run.metrics import Evaluation, Lines, Training, metrics_text, samples_file, samples_text
from ...run.record import Record, Times
from ...run.run_folder import Run
from ...screen import Bar, has_bar
from ..media import Media
from .tensorboard import TensorBoard
from .wandb import WandbProcess

log = logging.getLogger("train")

SKIPPED = "skipped.jsonl"
"""Name of the file in the run folder with one line for each sample that is left out: {"set": "training", "index": 7,
"file": "…", "reason": "…"}."""
_NAMED = 20
"""Maximum number of left-out samples that a rank names in its log; the file has all of them."""
_LINE_EVERY = 2.0
"""Seconds between two progress lines in a log file or pipe."""
_PROGRESS_EVERY = 0.5
"""Seconds between two updates of run.json's progress."""


class Loggers:
    """One rank's loggers. Rank 0 writes metrics, the first rank of a machine writes progress, each rank its samples if
    asked for."""

    def __init__(
        self,
        run: Run,
        *,
        unused: Collection[str],
        world: World,
        config: Config,
        total_steps: int,
        done: int,
        bar: bool,
    ) -> None:
        """
        Args:
            unused: fields of the configuration whose values have no effect.
            done: the step that this attempt continues after.
        """
        self.run, self._is_lead, self._total_steps = run, world.is_lead, total_steps
        self._next_note = self._next_line = 0.0
        self._best = config.checkpoint.best  # until an evaluation was held against it
        self._samples = Lines(samples_file(run, world.rank)) if config.log.samples else None
        self._metrics = Lines(run.metrics) if world.is_first else None
        self._bar = Bar(run.name, total_steps, done=done, stream=sys.stderr) if bar and has_bar(sys.stderr) else None
        self._wandb = self._start_wandb(config.log.wandb) if world.is_first and config.log.wandb else None
        self._tensorboard: TensorBoard | None = None
        if world.is_first and config.log.tensorboard:
            settings = _hyper_parameters(config, world.size, unused)
            self._tensorboard = TensorBoard(run.folder / "tensorboard", metrics.recent(run), done, self.say, settings)

    def _start_wandb(self, project: str) -> WandbProcess | None:
        """Start the process that sends curves. Training continues without it."""
        try:
            return WandbProcess(self.run, project, self.run.folder / "logs" / "wandb.log")
        except OSError as error:
            self.say(f"warning: nothing is sent to Weights & Biases: {error}")
            return None

    def samples(self, step: int, indices: list[npt.NDArray[np.int64]]) -> None:
        """Write which samples this rank consumed in a step (counted from 1).

        This happens before the ranks add up the step, because a snapshot after the step must find the line.
        """
        if self._samples is not None:
            self._samples.add(samples_text(step, (index for part in indices for index in part.tolist())))
            self._samples.flush()

    def training(self, line: Training, times: Callable[[], Times]) -> None:
        """Write a training line into metrics.jsonl and on the console, and now and then the progress into run.json.
        Only for the first rank of a machine.
        """
        if self._metrics is not None:
            self._metrics.add(metrics_text(line))
            self._metrics.flush()  # before the state after its step is copied
        if self._tensorboard is not None:
            self._tensorboard.training(line)
        step, epoch, loss, speed = line["step"], line["epoch"], line["loss"], line["samples_per_s"]
        now = time.monotonic()
        if self._bar is not None:
            self._bar.show(step, self._total_steps, epoch=epoch, loss=format.figure(loss), speed=speed)
        elif now >= self._next_line:
            self._next_line = now + _LINE_EVERY
            made = f"step {step}/{self._total_steps}  epoch {epoch}  loss {format.figure(loss)}"
            log.info("%s  %.0f samples/s", made, speed)
        if now >= self._next_note:
            self._next_note = now + _PROGRESS_EVERY
            shown = loss if math.isfinite(loss) else None  # run.json is JSON, too
            # on a full disk the next one may get through
            self.run.note(_with_times(times()), step=step, epoch=epoch, loss=shown, samples_per_s=round(speed, 1))

    def evaluation(self, step: int, epoch: int, samples: int, figures: dict[str, float]) -> None:
        """Write an evaluation line into metrics.jsonl. Only for the first rank of a machine."""
        line: Evaluation = {"step": step, "epoch": epoch, "samples": samples, "eval": {**figures}}
        if self._metrics is not None:
            self._metrics.add(metrics_text(line))
            self._metrics.flush()
        if self._tensorboard is not None:
            self._tensorboard.evaluation(line)
        self.say(f"evaluation after step {step} (epoch {epoch}, {samples} samples): {format.figures(figures)}")
        wanted, self._best = self._best, ""
        metric = best.aim_of(wanted).metric
        if wanted and metric not in figures:
            self.say(
                f"warning: no evaluation gives {metric}, which checkpoint.best names{nearest(metric, figures)} "
                f"(there are: {', '.join(figures)}); the checkpoint with the lowest loss is kept instead; to "
                f"choose another: train stop {self.run.name}, then train resume {self.run.name} --checkpoint.best "
                "NAME"
            )

    def media(self, step: int, made: dict[str, Media]) -> None:
        """Write the pictures, texts and sounds of an evaluation. Those of rank 0 are kept."""
        if self._metrics is None:
            return
        try:
            self.run.images.mkdir(exist_ok=True)
            for name, one in made.items():
                path = self.run.images / f"{name}-step-{step:08d}.{one.suffix}"
                durable.write_atomically(path, one.content, durable=False)
        except OSError as error:
            self.say(f"warning: pictures of step {step} could not be written: {one_line(error)}")
        if self._tensorboard is not None:
            self._tensorboard.media(step, made)

    def times(self, times: Times) -> None:
        """Record where the time of this attempt went."""
        if self._is_lead:
            self.run.note(_with_times(times))

    def say(self, text: str) -> None:
        """Print a line for people, from the first rank of a machine, without breaking the progress bar."""
        if not self._is_lead:
            return
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            if self._bar is not None:
                self._bar.write(text)
            else:
                log.info(text)

    def is_written(self) -> bool:
        """Whether the disk has taken all of this rank's lines."""
        return all(file is None or file.is_written for file in (self._metrics, self._samples))

    def sync(self) -> str:
        """Make this rank's lines durable, because a published checkpoint must find the lines of all steps before it.
        Returns what prevents this; '' if nothing does.
        """
        failed = [file for file in (self._metrics, self._samples) if file is not None and not file.sync()]
        return failed[0].problem if failed else ""

    def close(self) -> None:
        """Write the rest and remove the bar."""
        for sink in (self._metrics, self._samples, self._tensorboard, self._wandb, self._bar):
            if sink is not None:
                with contextlib.suppress(OSError):
                    sink.close()


class Skipped:
    """Lists the samples that a run leaves out because they cannot be read, each once, over all ranks and attempts.

    The loader calls it. Ranks share the list, under the lock of run.json.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._named = run, 0
        self._listed: set[tuple[str, int]] = set()
        self._read_to = 0

    def __call__(self, bad: Sequence[BadSample]) -> None:
        """Count and list the samples that are new."""
        new = [one for one in bad if (one.set, one.index) not in self._listed]
        if not new:
            return
        for one in new:
            self._log(one)
        self._run.note(lambda record: self._add(record, new))  # a disk that is full is tried again later

    def _log(self, bad: BadSample) -> None:
        self._named += 1
        if self._named <= _NAMED:
            log.warning("warning: left out: %s: %s", bad, bad.reason)
        elif self._named == _NAMED + 1:
            log.warning("warning: more samples are left out; %s in the run folder lists all of them", SKIPPED)

    def _add(self, record: Record, new: list[BadSample]) -> None:
        with (self._run.folder / SKIPPED).open("a+b") as file:
            file.seek(self._read_to)
            line = b"\n"
            for line in file:  # of other ranks, and of attempts before
                self._read_to += len(line)
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    self._listed.add((entry["set"], entry["index"]))
            if not line.endswith(b"\n"):  # a kill cut it
                file.write(b"\n")
                self._read_to += 1
            for one in new:
                if (one.set, one.index) not in self._listed:
                    entry = {"set": one.set, "index": one.index, "file": one.file, "reason": one.reason}
                    line = json.dumps(entry).encode() + b"\n"
                    file.write(line)
                    file.flush()
                    self._listed.add((one.set, one.index))
                    self._read_to += len(line)
        counts = Counter(part for part, _ in self._listed)
        record["skipped"] = dict(sorted(counts.items(), key=lambda one: one[0] != TRAINING))


def _hyper_parameters(config: Config, ranks: int, unused: Collection[str]) -> dict[str, str | float | bool]:
    """Return the fields that may influence the result, as plain values."""
    flat = configuration.to_flat(config) | {"ranks": ranks}
    chosen = {name: value for name, value in flat.items() if not name.startswith(("log.", "watch."))}
    chosen = {name: value for name, value in chosen.items() if name not in unused}
    return {n: v if isinstance(v, (bool, int, float, str)) else str(v) for n, v in chosen.items() if v is not None}


def _with_times(times: Times) -> Callable[[Record], None]:
    """Return a change of the record: the times of the attempt."""
    return lambda record: record["attempts"][-1].update({"times": times})
