"""TensorBoard: curves of a run, pictures of its evaluations, and its configuration, as event files."""

from __future__ import annotations

import io
import math
import threading
import time
import wave
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import one_line
from ...run.metrics import Evaluation, Line, Training, is_evaluation
from ..media import Media

_EVERY = 2.0
"""Seconds between two hand-overs of lines to the writer, because each wakes a thread, which costs more than a step."""
_TAGS = {key: f"train/{key}" for key in Training.__annotations__ if key not in ("step", "epoch")}


class TensorBoard:
    """Writes events. If the disk refuses them, it warns and stops writing; the run continues."""

    def __init__(
        self, folder: Path, recent: Sequence[Line], done: int, say: Callable[[str], None], settings: Mapping[str, Any]
    ) -> None:
        """
        Args:
            recent: the last lines on record. They are written again, because a kill may have lost their events.
            done: the step that this attempt continues after. Events of later steps are hidden.
            settings: hyper-parameters to be shown beside the results.
        """
        self._say, self._settings = say, settings
        self._is_configured = False
        self._writer: Any = None
        self._lines: list[tuple[Line, float]] = [(line, time.time()) for line in recent]
        self._next = 0.0
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            say("warning: no TensorBoard events: the package tensorboard is not installed (--log.tensorboard false)")
            return
        _silence_writer_thread()
        self._summary = Summary
        hidden_from = min([done + 1, *(line["step"] for line in recent)])
        try:
            self._writer = SummaryWriter(str(folder), purge_step=hidden_from, max_queue=1000, flush_secs=int(_EVERY))
        except OSError as error:
            self._give_up(error)

    def training(self, line: Training) -> None:
        """Write the figures of a training line."""
        now = time.time()
        self._lines.append((line, now))
        if now >= self._next:
            self._next = now + _EVERY
            self._hand_over()

    def evaluation(self, line: Evaluation) -> None:
        """Write the figures of an evaluation."""
        self._lines.append((line, time.time()))
        self._configuration(line["eval"])
        self._hand_over()

    def media(self, step: int, made: Mapping[str, Media]) -> None:
        """Write the pictures, texts and sounds of an evaluation."""
        for name, one in made.items():
            if self._writer is not None:
                self._try(self._writer.file_writer.add_summary, self._of_media(name, one), step)

    def _of_media(self, name: str, one: Media) -> Any:
        """Return the event's content for one picture, text or sound."""
        content = one.content
        if one.suffix == "txt":
            from torch.utils.tensorboard.summary import text

            return text(f"text/{name}", content.decode())
        if one.suffix == "wav":
            with wave.open(io.BytesIO(content)) as sound:
                audio = self._summary.Audio(
                    sample_rate=sound.getframerate(), num_channels=sound.getnchannels(),
                    length_frames=sound.getnframes(), encoded_audio_string=content, content_type="audio/wav",
                )  # fmt: skip
            return self._summary(value=[self._summary.Value(tag=f"audio/{name}", audio=audio)])
        width, height = (int.from_bytes(content[place : place + 4]) for place in (16, 20))
        image = self._summary.Image(encoded_image_string=content, width=width, height=height, colorspace=3)
        return self._summary(value=[self._summary.Value(tag=f"images/{name}", image=image)])

    def _hand_over(self) -> None:
        """Hand lines to the writer as events, one per line, many at once, because each hand-over wakes its thread."""
        lines, self._lines = self._lines, []
        for line, when in lines:
            if is_evaluation(line):
                figures = {f"eval/{name}": math.nan if value is None else value for name, value in line["eval"].items()}
            else:
                tags = _TAGS | {key: f"train/{key}" for key in line if key.startswith("loss.")}
                figures = {tag: value for key, tag in tags.items() if isinstance(value := line.get(key), (int, float))}
            if self._writer is not None:
                values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
                self._try(self._writer.file_writer.add_summary, self._summary(value=values), line["step"], when)

    def _configuration(self, results: Mapping[str, Any]) -> None:
        """Write the configuration, for the page that compares runs; its results are the curves of these names."""
        if self._writer is None or self._is_configured:
            return
        from torch.utils.tensorboard.summary import hparams

        self._is_configured = True
        for summary in hparams(dict(self._settings), {f"eval/{name}": 0.0 for name in results}):
            self._try(self._writer.file_writer.add_summary, summary)

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            if self._writer is not None:
                write(*arguments)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        self._say(f"warning: no more TensorBoard events: {one_line(error)}")

    def close(self) -> None:
        """Write what is left."""
        self._configuration({})  # of a run without an evaluation
        self._hand_over()
        if self._writer is not None:
            self._writer.close()


def _silence_writer_thread() -> None:
    """Silence the traceback of TensorBoard's thread when the disk fails; `TensorBoard` warns in a line."""
    otherwise = threading.excepthook

    def hook(happened: threading.ExceptHookArgs) -> None:
        of_tensorboard = type(happened.thread).__module__.startswith("tensorboard")
        if not (of_tensorboard and issubclass(happened.exc_type, OSError)):
            otherwise(happened)

    threading.excepthook = hook
