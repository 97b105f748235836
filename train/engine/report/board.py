"""TensorBoard event files."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.engine.report.pictures import pictures
from train.engine.report.shown import EVALUATION, last_shown
from train.record.metrics import Line, Place, Training, is_evaluation

_EVERY = 2.0
"""Seconds between two times that lines are handed over: each time wakes a thread, which costs more than a step."""
_STEP_TIMES = 50
"""Lines whose step times make a histogram."""
_TAGS = {key: f"train/{key}" for key in Training.__annotations__ if key not in ("step", "epoch")}


class Board:
    """Curves for TensorBoard. It must not end a run: where it cannot write, it is given up, in a line."""

    def __init__(
        self, folder: Path, done: int, say: Callable[[str], None], settings: Mapping[str, Any] | None = None,
        lines_after: Callable[[Place], Sequence[Line]] = lambda place: (), evaluations: int = 0,
    ) -> None:  # fmt: skip
        """Events of steps after `done`, which an attempt before this one may have written, are hidden.

        Args:
            settings: hyper-parameters to be shown beside the results.
            lines_after: gives the lines on record behind a place: a kill has taken their events along.
            evaluations: how many are on record.
        """
        self._say, self._settings = say, settings
        self._is_pictured = False
        self._step_times: list[float] = []
        self._at = done
        self._writer: Any = None
        self._lines: list[tuple[Training, float]] = []
        self._next = 0.0
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            say("warning: no TensorBoard events: the package tensorboard is not installed (--log.tensorboard false)")
            return
        _hush_tensorboard()
        self._summary = Summary
        try:
            place = min(last_shown(folder), (done, True))
        except (OSError, ValueError):  # curves with a gap are better than none
            place = (done, True)
        self._writer = SummaryWriter(str(folder), purge_step=place[0] + 1, max_queue=1000)
        self._make_up_for(lines_after(place), evaluations)

    def _make_up_for(self, lines: Sequence[Line], evaluations: int) -> None:
        """Show what an attempt before this one had no time to."""
        if evaluations > sum(map(is_evaluation, lines)):  # shown with the first of them
            self._settings, self._is_pictured = None, True
        for line in lines:
            if is_evaluation(line):
                figures = {name: math.nan if value is None else value for name, value in line["eval"].items()}
                self.evaluation(line["step"], figures)
            elif all(isinstance(line.get(key), (int, float)) for key in _TAGS):  # a file that somebody edited
                self.training(line)

    def training(self, line: Training) -> None:
        """The figures of a training line."""
        if self._writer is None:
            return
        now = time.time()
        self._lines.append((line, now))
        self._step_times.append(1000 * line["step_time"])
        self._at = line["step"]
        if len(self._step_times) >= _STEP_TIMES:
            self._hand_over()
            self._histogram()
        if now >= self._next:
            self._next = now + _EVERY
            self._hand_over()

    def _hand_over(self) -> None:
        """Lines as events, one each: the thread that writes them is woken for many at once."""
        lines, self._lines = self._lines, []
        for line, when in lines:
            if self._writer is not None:
                values = [self._summary.Value(tag=tag, simple_value=line[key]) for key, tag in _TAGS.items()]  # type: ignore[literal-required]
                self._try(self._writer.file_writer.add_summary, self._summary(value=values), line["step"], when)

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures of an evaluation after this step: one event, behind those of all lines before it (shown.py)."""
        self._hand_over()
        results = {f"{EVALUATION}{name}": value for name, value in figures.items()}
        self._hyper_parameters(results)
        if self._writer is not None:
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in results.items()]
            self._try(self._writer.file_writer.add_summary, self._summary(value=values), step)

    def samples(self, batch: Any) -> None:
        """Samples of an evaluation, once in a run, where they are images."""
        if self._writer is None or self._is_pictured:
            return
        self._is_pictured = True
        try:
            found = pictures(batch)
        except Exception as error:  # what a task calls a batch can be anything
            self._say(f"warning: no pictures of samples for TensorBoard: {error}")
            return
        if found is not None:
            self._try(self._writer.add_images, "eval/samples", found, self._at)

    def _histogram(self) -> None:
        """The times of the steps, in ms, that the last lines speak for."""
        values, self._step_times = self._step_times, []
        if self._writer is not None and values:
            self._try(self._writer.add_histogram, "train/step_time_ms", np.array(values), self._at, 30)

    def _hyper_parameters(self, results: Mapping[str, float]) -> None:
        """The configuration, for the page that compares runs; their results are the curves of these names."""
        if self._writer is None or self._settings is None:
            return
        from torch.utils.tensorboard.summary import hparams

        settings, self._settings = self._settings, None
        for summary in hparams(dict(settings), dict(results))[:2]:
            self._try(self._writer.file_writer.add_summary, summary)

    def finished(self) -> None:
        """The run has come to its end."""
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        if self._writer is None:
            return
        self._hyper_parameters({"train/loss": 0.0})
        end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
        content = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
        value = self._summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=content, tensor=metadata.NULL_TENSOR)
        self._try(self._writer.file_writer.add_summary, self._summary(value=[value]))

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        if self._writer is None:
            return
        try:
            write(*arguments)
        except OSError as error:
            self._writer = None
            self._say(f"warning: no more TensorBoard events: {error}")

    def close(self) -> None:
        """Write what is left."""
        self._hyper_parameters({"train/loss": 0.0})
        self._histogram()
        self._hand_over()
        if self._writer is not None:
            self._writer.close()


def _hush_tensorboard() -> None:
    """When the disk fails, TensorBoard's thread dies with a page of text; `Board` says so in a line."""
    otherwise = threading.excepthook

    def hook(happened: threading.ExceptHookArgs) -> None:
        of_tensorboard = type(happened.thread).__module__.startswith("tensorboard")
        if not (of_tensorboard and issubclass(happened.exc_type, OSError)):
            otherwise(happened)

    threading.excepthook = hook
