"""Reads the figures of a script that writes no lines (--figures): from its output, or TensorBoard's files.

    python -P …/train/module_runner.py train.scripts.reader RUN_FOLDER ATTEMPT PID_OF_THE_AGENT

It appends lines to metrics.jsonl while the attempt runs, and reads the rest when the agent closes its input. It is a
separate process, because a regular expression may take for ever, and files of events may be large. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from ..errors import Refused, one_line, shortened
from ..run import metrics
from ..run.log_limit import Place
from ..run.metrics import Lines, metrics_text
from ..run.progress_lines import Folding
from ..run.run_folder import Run, seconds_of
from ..run.spec import RUN, read_spec
from ..signals import end_with_parent
from .epoch_steps import EpochSteps

TENSORBOARD = "tensorboard:"
"""Prefix of --figures for a file or folder that TensorBoard's writer has written."""
_LOOK_EVERY = 0.25
"""Seconds between two looks."""
_SEARCH_EVERY = 2.0
"""Seconds between two searches for new files of events."""
_REDRAWN_EVERY = 1.0
"""Seconds between two looks at a line of output that is still redrawn, such as a progress bar."""
_PATIENCE = 30.0
"""Seconds without any figure after which the run says so."""
_LONGEST = 10_000
"""Maximum number of characters of a line of output that is searched."""
_COLOUR = re.compile(r"\x1b\[[0-9;:]*[A-Za-z]")
"""Control sequences for colours and the like."""
_WHOLE = ("step", "epoch", "total_steps")
"""Groups whose values are whole numbers."""

Line = dict[str, Any]


def check(texts: Sequence[str]) -> None:
    """Check the values of --figures.

    Raises:
        Refused: one is no regular expression with the groups that are needed, or names no path.
    """
    for text in texts:
        if text.startswith(TENSORBOARD):
            if find_spec("tensorboard") is None:
                raise Refused(f"--figures {text} needs a package; install it: uv pip install tensorboard")
            if not text.removeprefix(TENSORBOARD).strip():
                raise Refused(f"--figures {text}: give a file or folder, such as tensorboard:{RUN}/tb")
            continue
        _expression(text)


def _expression(text: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings(action="ignore"):
            found = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise Refused(f"--figures '{text}' is no regular expression: {one_line(error)}") from None
    names, example = found.groupindex.keys(), r"'step (?P<step>\d+): loss (?P<loss>\S+)'"
    if "step" not in names:
        raise Refused(f"--figures '{text}' has no group named step; give one, as in {example}")
    if not names - set(_WHOLE):
        raise Refused(f"--figures '{text}' has no group for a metric; give one, as in {example}")
    return found


class Source(Protocol):
    """Where figures come from."""

    problem: str
    """Why there are none, as a line; '' if there are, or if it is too early to say."""

    def lines(self, is_last: bool) -> Iterator[Line]:
        """Yield the lines that are new since the last call. `is_last`: nothing will follow."""


class OutputReader:
    """Finds figures in the output of a rank by a regular expression.

    Args:
        before: The lines of earlier attempts.
    """

    def __init__(self, path: Path, text: str, before: Iterable[Any] = ()) -> None:
        self._steps = EpochSteps(before)
        self.problem = "" if self._steps.has_before else f"no line of the output of rank 0 matches '{text}'"
        self._path, self._expression, self._place = path, _expression(text), Place()
        self._folding = Folding(_REDRAWN_EVERY)

    def lines(self, is_last: bool) -> Iterator[Line]:
        new = b""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            self._place.enter(file)
            new = file.read()
            self._place.has_read(new)
        folded = self._folding.feed(new) + (self._folding.end() if is_last else b"")
        for text in folded.decode(errors="replace").splitlines():
            if found := self._expression.search(_COLOUR.sub("", text)[:_LONGEST]):
                line = self._line(found)
                if line:
                    yield self._steps.count(line)

    def _line(self, found: re.Match[str]) -> Line:
        line: Line = {}
        for name, text in found.groupdict().items():
            value = _number(text or "")
            if value is not None and name in _WHOLE:
                value = int(value) if value.is_integer() else None
            if value is not None:
                line[name] = value
            elif text is not None:
                self.problem = f"--figures: the group {name} has matched '{shortened(text, 40)}', which is no number"
        if "step" not in line or len(line) == 1:
            return {}
        if len(line) == sum(text is not None for text in found.groupdict().values()):
            self.problem = ""
        return line


_NUMBER = re.compile(r"[-+]?(\d+(,\d{3})+|\d*)(\.\d*)?([eE][-+]?\d+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE)


def _number(text: str) -> float | None:
    """Return the number in a text, which may be followed by punctuation or a percent sign; None: it is no number."""
    text = text.strip().rstrip(",;:%)]}|")
    if not _NUMBER.fullmatch(text):
        return None
    with contextlib.suppress(ValueError):
        return float(text.replace(",", ""))
    return None


class EventReader:
    """Reads scalars from the files of TensorBoard's writer (events.out.tfevents.…) in a folder and the folders below.

    Args:
        since: Files that were last written before this time are of earlier attempts. In seconds since the epoch.
    """

    def __init__(self, path: Path, since: float) -> None:
        self.problem = f"no files of TensorBoard in {path} that this attempt has written"
        self._path, self._since = path, since
        self._files: dict[Path, Any] = {}
        self._search_at = 0.0

    def lines(self, is_last: bool) -> Iterator[Line]:
        if is_last or time.monotonic() >= self._search_at:
            self._search_at = time.monotonic() + _SEARCH_EVERY
            self._search()
        for path, loader in self._files.items():
            try:
                yield from _by_step(loader.Load())
            except Exception as error:  # a damaged file
                self.problem = f"{path.name} cannot be read: {one_line(error)}"

    def _search(self) -> None:
        found = [self._path] if self._path.is_file() else sorted(self._path.rglob("*tfevents*"))
        for path in found:
            with contextlib.suppress(OSError):
                if path not in self._files and path.stat().st_size and path.stat().st_mtime >= self._since:
                    self._files[path] = _loader(path)
                    self.problem = ""


def _loader(path: Path) -> Any:
    """Return TensorBoard's reader of a file, which continues where it has stopped."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return LegacyEventFileLoader(str(path))


def _by_step(events: Iterable[Any]) -> Iterator[Line]:
    """Yield a line for each step, from events that each hold some scalars of a step."""
    line: Line = {}
    for event in events:
        scalars = {value.tag: number for value in event.summary.value if (number := _scalar(value)) is not None}
        if not scalars:
            continue
        if line and line["step"] != event.step:
            yield _named(line)
            line = {}
        line |= {**scalars, "step": event.step, "wall_time": event.wall_time}
    if line:
        yield _named(line)


def _scalar(value: Any) -> float | None:
    """Return the number of a scalar; None for images, texts and others."""
    if value.HasField("simple_value"):
        return float(f"{value.simple_value:.7g}")  # written with 32 bits
    if not value.HasField("tensor") or value.metadata.plugin_data.plugin_name not in ("", "scalars"):
        return None
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor)
    return float(array.item()) if array.size == 1 and array.dtype.kind in "fiu" else None


_ABOUT = {"train", "training", "step", "charts", "optimizer", "optim"}
"""Words of a tag that do not say what it measures."""
_MEANS = {("loss",): "loss", ("learning", "rate"): "lr", ("grad", "norm"): "grad_norm"}


def _named(line: Line) -> Line:
    """Return a line in which the training loss, the rate and the norm have their usual names.

    Lightning writes train_loss or train_loss_step, Hugging Face train/loss, cleanrl charts/learning_rate.
    """
    named = dict(line)
    for tag in line:
        words = [word for word in re.split(r"[^a-z0-9]+", tag.lower()) if word]
        for word in _ABOUT & {*words}:  # once: train/train_loss of Hugging Face is the mean of the whole training
            words.remove(word)
        usual = "lr" if words[:1] == ["lr"] else _MEANS.get(tuple(words))
        if usual is not None and usual not in named:
            named[usual] = named.pop(tag)
        elif words == ["epoch"]:  # a fraction, or counted from 0
            del named[tag]
    return named


def sources_of(run: Run, attempt: int) -> list[Source]:
    """Return the sources of the figures of an attempt.

    Raises:
        Refused: run.json cannot be read.
    """
    spec, record = read_spec(run), run.read()
    started = next((seconds_of(one["started"]) for one in record["attempts"] if one["number"] == attempt), None) or 0.0
    found: list[Source] = []
    for text in spec.figures:
        if text.startswith(TENSORBOARD):
            path = text.removeprefix(TENSORBOARD).replace(RUN, str(run.path))
            found.append(EventReader(Path(spec.cwd or "/", path), math.floor(started)))
        else:
            before = metrics.each(run) if attempt > 1 else ()
            found.append(OutputReader(run.logs(attempt) / "rank0.log", text, before))
    return found


def follow(run: Run, sources: Sequence[Source]) -> None:
    """Append lines until the agent closes the standard input of this process, then those that are left."""
    file, said, began = Lines(run.metrics), "", time.monotonic()
    while True:
        is_last = bool(select.select([sys.stdin], [], [], _LOOK_EVERY)[0])
        for source in sources:
            for line in source.lines(is_last):
                file.add(metrics_text(cast(metrics.Line, line)))
        file.flush()
        problem = "; ".join(source.problem for source in sources if source.problem)
        if problem != said and (is_last or not problem or time.monotonic() - began > _PATIENCE):
            said = problem
            run.note(figures_problem=problem)
        if is_last:
            return file.close()


def main() -> None:
    """Read the figures of an attempt of the run in the folder given as argument."""
    end_with_parent(int(sys.argv[3]))
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    run = Run(Path(sys.argv[1])).held()
    try:
        follow(run, sources_of(run, int(sys.argv[2])))
    except Exception as error:  # the disk fails, a package does not fit
        run.note(figures_problem=f"--figures: {type(error).__name__}: {one_line(error)}")


if __name__ == "__main__":
    main()
