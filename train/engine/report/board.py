"""TensorBoard event files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from train.record.metrics import Training


class Board:
    """Curves for TensorBoard. It must not end a run: where it cannot write, it is given up, in a line."""

    def __init__(self, folder: Path, done: int, say: Callable[[str], None]) -> None:
        """Events of steps after `done`, which an attempt before this one may have written, are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        _hush_tensorboard()
        self._say = say
        self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1)

    def training(self, line: Training) -> None:
        """The figures of a training line."""
        self._show({f"train/{key}": value for key, value in line.items() if key not in ("step", "epoch")}, line["step"])

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures of an evaluation after this step."""
        self._show({f"eval/{name}": value for name, value in figures.items()}, step)

    def _show(self, values: Mapping[str, object], step: int) -> None:
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            self._writer = None
            self._say(f"warning: no more TensorBoard events: {error}")

    def close(self) -> None:
        """Write what is left."""
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
