"""Reads and writes a run's lines: metrics.jsonl, and the logs of the samples that each step consumed.

Their content depends only on the step, never on the attempt: a resume cuts them to the step of the loaded checkpoint.
Only a script without a session can write a step again: of each figure the last value of a step then counts.
Imports no torch.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

from . import durable
from .record import Record
from .run_folder import Run
from .states import CREATED, RUNNING

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class Speed(TypedDict):
    """The speed of the steps since the previous line."""

    samples_per_s: float
    data_wait: float
    """Seconds per step that rank 0 waited for data; on a GPU the seconds in which it computed nothing."""
    step_time: float
    """Seconds per step."""
    memory: float
    """Peak bytes so far: of the GPU, or of rank 0's process on the CPU."""
    counted_per_s: NotRequired[float]
    """Units per second of a loss that returns its own count, such as tokens."""
    mfu: NotRequired[float]
    """Model FLOP utilisation, from 0 to 1."""


class Training(Speed):
    """A training line: a step's loss, learning rate and speed.

    For a task with several updates `loss` is the sum, and there is also `loss.NAME` for each.
    """

    step: int
    """Counted from 1, as everywhere."""
    epoch: int
    loss: float
    lr: float
    grad_norm: NotRequired[float]
    """The global 2-norm of the gradients, before clipping (log.gradients)."""
    skipped: NotRequired[bool]
    """Whether the step's update was skipped (on_nan)."""


class Evaluation(TypedDict):
    """An evaluation line. A value that is not finite is None."""

    step: int
    """The step after which the evaluation was made."""
    epoch: int
    samples: int
    eval: dict[str, float | None]
    """`loss`, and the values of the task's metrics()."""


Line = Training | Evaluation

IN_EPOCH = "step_in_epoch"
"""Field of a line in metrics.jsonl: the step as the script has counted it, if that differs from `step`."""
_PLACE = ("step", IN_EPOCH, "epoch", "total_steps", "wall_time", "samples", "skipped", "eval")
"""Fields of a line that say where or when it stands. All its other numbers are figures."""
_JSON = json.JSONEncoder(allow_nan=False)


def is_evaluation(line: Line) -> TypeIs[Evaluation]:
    """Whether this is an evaluation line; all others are training lines."""
    return "eval" in line


def figures_of(line: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures of a line by name. Of an evaluation, those in `eval`. None: the value is not finite."""
    inner = line.get("eval")
    given = inner if isinstance(inner, dict) else {name: line[name] for name in line if name not in _PLACE}
    known = {name: value for name, value in given.items() if value is None or _is_number(value)}
    return {name: value if _is_finite(value) else None for name, value in known.items()}


def samples_file(run: Run, rank: int) -> Path:
    """Return the file for the samples that a rank consumed (log.samples)."""
    return run.folder / f"samples.rank{rank}.log"


def metrics_text(line: Line) -> str:
    """Return a line of metrics.jsonl. Values that are not finite become null, because JSON has no NaN."""
    try:
        return _JSON.encode(line)
    except ValueError:
        return _JSON.encode(_finite(line))


def samples_text(step: int, indices: Iterable[int]) -> str:
    """Return a line of a sample log: the step, counted from 1, and the dataset indices of the samples it consumed."""
    return " ".join(map(str, [step, *indices]))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Lines:
    """Appends lines to a file. Lines that a full disk refuses stay in memory and are tried again, in order."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._synced = path.stat().st_size
        self._is_doubtful = False
        self._pending = bytearray()
        self.problem = ""
        """Why the last flush or sync failed."""

    def add(self, line: str) -> None:
        """Keep a line for the next flush."""
        self._pending += line.encode() + b"\n"

    def flush(self) -> bool:
        """Write the lines. Returns whether the system accepted all of them."""
        try:
            while self._pending:  # a disk that fills up accepts a part first; the rest follows later
                del self._pending[: self._file.write(self._pending) or 0]
        except OSError as error:
            self.problem = str(error.strerror)
        return self.is_written

    @property
    def is_written(self) -> bool:
        """Whether the system has accepted every line."""
        return not self._pending

    def sync(self) -> bool:
        """Make the lines durable. Returns whether that succeeded."""
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
        self._synced = os.fstat(self._file.fileno()).st_size
        return True

    def _take_back(self) -> None:
        """Cut off the bytes after the last successful fsync, and write them again.

        After a failed fsync Linux counts the pages as written, so the next fsync would succeed (fsync(2), EIO). Writing
        the same bytes in the same place would not help either: on ext4 the blocks still count as unwritten and later
        read as zeros.
        """
        with Path(f"/proc/self/fd/{self._file.fileno()}").open("rb") as file:
            file.seek(self._synced)
            text = file.read()
        self._file.truncate(self._synced)
        self._pending[:0] = text
        self._is_doubtful = False

    def close(self) -> None:
        """Write the remaining lines and close the file."""
        self.flush()
        self._file.close()


def cut(run: Run, step: int, made_here: float = math.inf) -> None:
    """Cut metrics.jsonl and every rank's sample log to the lines of steps 1 to `step`. For rank 0, before training.

    Args:
        made_here: The last step in which this machine's ranks took part; later steps were made by other machines.
    """
    _cut(run.metrics, step, lambda line: int(json.loads(line)["step"]))
    for path in run.folder.glob("samples.rank*.log"):  # also of ranks that no longer exist
        cut_samples(path, min(step, made_here))


def cut_samples(path: Path, step: float) -> None:
    """Cut a sample log to the lines of steps 1 to `step`."""
    _cut(path, step, lambda line: int(line.split(b" ", 1)[0]))


def _cut(path: Path, step: float, step_of: Callable[[bytes], int]) -> None:
    if not path.exists():
        return
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


def each(run: Run) -> Iterator[Line]:
    """Yield all lines in order, one by one: a long run has too many for memory.

    Skips a line that is just being written.

    Raises:
        OSError: the lines cannot be read.
    """
    return _parsed(_texts(run))


def lines(run: Run) -> list[Line]:
    """Return all lines by step, one of a kind per step.

    A script that goes back to an earlier step replaces the later values of the figures that it writes again. Other
    figures stay: a library may count the steps of its figures separately.

    Raises OSError as `each`.
    """
    kept: dict[bool, list[Any]] = {False: [], True: []}
    last: dict[tuple[bool, str], int] = {}
    for line in each(run):
        kind, step = is_evaluation(line), line["step"]
        own: Any = kept[kind]
        again = {name for name in figures_of(line) if last.get((kind, name), 0) > step}
        if again:
            _forget(own, step, again)
        last |= {(kind, name): step for name in figures_of(line)}
        at = bisect.bisect_right(own, step, key=itemgetter("step")) if own and own[-1]["step"] > step else len(own)
        if at and own[at - 1]["step"] == step:
            inner = {"eval": {**own[at - 1]["eval"], **line["eval"]}} if is_evaluation(line) else {}
            own[at - 1] = {**own[at - 1], **line, **inner}
        else:
            own.insert(at, line)
    return sorted([*kept[False], *kept[True]], key=lambda line: line["step"])  # stable: evaluations come second


def _forget(own: list[Any], step: int, names: set[str]) -> None:
    """Remove figures of these names from lines of one kind after a step, and lines without any figure left."""
    for at in range(len(own) - 1, -1, -1):
        if own[at]["step"] <= step:
            return
        given = own[at].get("eval", own[at])
        for name in names & given.keys():
            del given[name]
        if not figures_of(own[at]):
            del own[at]


def evaluations(run: Run) -> list[Evaluation]:
    """Return the evaluation lines. Fast, because only they are parsed."""
    return [line for line in _parsed(text for text in _texts(run) if b'"eval"' in text) if is_evaluation(line)]


def past(line: Evaluation) -> dict[str, Any]:
    """Return an evaluation as schedule() gets it: its step, its epoch and its figures, all in one dict."""
    return {**line["eval"], "step": line["step"], "epoch": line["epoch"]}


def history(run: Run, step: int | None = None) -> list[dict[str, Any]]:
    """Return the evaluations so far, or those up to a step, each as `past` gives it."""
    return [past(line) for line in evaluations(run) if step is None or line["step"] <= step]


def skipped_steps(run: Run) -> list[int]:
    """Return the steps whose updates were skipped (on_nan)."""
    return [line["step"] for line in _parsed(text for text in _texts(run) if b'"skipped"' in text)]


def last_evaluation(run: Run) -> Evaluation | None:
    """Return the last evaluation line."""
    return next(iter(reversed(evaluations(run))), None)


_LAST = 1 << 14
"""Bytes at the end of metrics.jsonl in which to look first for the last training line; a line has about 200."""
_LINE = 1 << 24
"""Maximum number of bytes of a line."""
WHOLE = 1 << 19
"""Bytes at the end of metrics.jsonl that count as recent."""
_FAR = 1 << 24
"""Bytes at the end in which a training line is looked for at most."""
_PIECES = 64
"""Number of pieces of a long file that `sampled` reads."""


def last_training(run: Run) -> Training | None:
    """Return the last training line, without reading all lines."""
    most = _LAST
    while True:
        texts = _last_texts(run, most)
        found = next((line for line in _parsed(reversed(texts)) if not is_evaluation(line)), None)  # parses one or two
        if found is not None or sum(map(len, texts)) + len(texts) < most // 2 or most > _FAR:
            return found
        most *= 8  # only evaluations follow it


def up_to_date(record: Record, line: Training | None) -> Record:
    """Return a record with the step and metrics of the last training line: run.json is updated only now and then."""
    if line is None:
        return record
    if "loss" in line:
        record = {**record, "loss": line["loss"]}
    if (known := record.get("last_figures")) is not None:  # of a script
        record = {**record, "last_figures": {**known, **figures_of(line)}}
    step, epoch = line["step"], line.get("epoch", record["epoch"])
    return {**record, "step": step, "epoch": epoch} if step > record["step"] else record


def loss_of(record: Record) -> float | None:
    """Return the loss that views show of a run: of the last training line, and at the end of the last evaluation."""
    measured = record.get("metrics") or {}
    if record["state"] in (RUNNING, CREATED) and record.get("loss") is not None:
        return record.get("loss")
    return measured.get("loss", record.get("loss"))


def recent(run: Run) -> list[Line]:
    """Return all lines of the last steps, about 2,000 at most."""
    lines = list(_parsed(_last_texts(run, WHOLE)))
    is_part = run.metrics.exists() and run.metrics.stat().st_size > WHOLE
    return [line for line in lines if not is_part or line["step"] > lines[0]["step"]]


def sampled(run: Run) -> list[Line]:
    """Return the lines of the whole run, about 2,000 at most: of a long file only pieces at equal distances."""
    lines: list[Line] = []
    with contextlib.suppress(OSError), durable.open_regular(run.metrics) as file:
        size = os.fstat(file.fileno()).st_size
        pieces = 1 if size <= WHOLE else _PIECES
        length = size if pieces == 1 else WHOLE // pieces
        for number in range(pieces):
            file.seek(begin := number * (size - length) // max(pieces - 1, 1))
            texts = file.read(length).splitlines(keepends=True)
            lines += _parsed(text for text in texts[begin > 0 :] if text.endswith(b"\n"))
    return lines


def _last_texts(run: Run, most: int) -> list[bytes]:
    try:
        return _whole(durable.read_tail(run.metrics, most)).splitlines()
    except OSError:
        return []


def _whole(text: bytes) -> bytes:
    """Return the text without an unfinished last line."""
    return text[: text.rfind(b"\n") + 1]


class Tail:
    """Reads the lines that are added to metrics.jsonl from now on."""

    def __init__(self, run: Run) -> None:
        self._path = run.metrics
        self.at = self._size = self._path.stat().st_size if self._path.exists() else 0
        """Number of bytes that were read."""
        self.rejected = b""
        """The last line that could not be read; b"": none."""

    def new(self) -> list[Line]:
        """Return the complete lines that are new since the last call."""
        try:
            if (size := self._path.stat().st_size) == self._size:
                return []
            self._size, self.at = size, min(self.at, size)  # smaller: cut by a resume
            with durable.open_regular(self._path) as file:
                file.seek(self.at)
                text = file.read()
        except OSError:
            return []
        whole = _whole(text)
        self.at += len(whole)
        lines = [(text, _read(text)) for text in whole.splitlines() if text.strip()]
        self.rejected = next((text for text, line in reversed(lines) if line is None), self.rejected)
        return [line for _, line in lines if line is not None]


def _texts(run: Run) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), durable.open_regular(run.metrics) as file:  # no line was written yet
        while text := file.readline(_LINE):  # a line without an end could fill the memory
            yield text


def _parsed(texts: Iterable[bytes]) -> Iterator[Line]:
    """Yield the complete, valid lines. Skips lines that a kill or an editor has damaged."""
    return (line for line in map(_read, texts) if line is not None)


def _read(text: bytes) -> Line | None:
    """Return a line. None: it is no JSON object with a step. A known figure that is no finite number becomes None."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not _is_step(line.get("step")):
        return None
    if not _is_step(line.get("epoch", 1)):
        del line["epoch"]
    figures, names = line.get("eval", line), Training.__annotations__.keys() & line.keys()
    if not isinstance(figures, dict):
        return None
    for name in figures if "eval" in line else names:
        if not _is_finite(figures[name]):
            figures[name] = None
    return cast(Line, line)


def _is_step(step: Any) -> bool:
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 53


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(figure: Any) -> bool:
    return figure is None or (isinstance(figure, int | float) and abs(figure) <= sys.float_info.max)
