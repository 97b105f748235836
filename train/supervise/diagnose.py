"""Finds out why a process died, whether that would recur, and which check of `train doctor` finds the cause.

Judges by the exception that a rank of a task has raised, or by the last lines of a log, which show for certain only a
lack of memory or of another resource. All functions are pure except `failure_of`, which needs an exception that is
being handled. Knows messages of torch, NCCL, CUDA, the kernel and this package.
"""

from __future__ import annotations

import dis
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import causes
from ..errors import described, one_line
from . import last_words, memory

_OF_MACHINE = ("distributed", "cuda", "utils/data", "_inductor")
"""Parts of torch that write messages about networks, devices and other processes in Python."""
LAST_LINES = 8
"""Number of lines of a dead rank's log that run.json keeps."""
_LAST = 20
"""Number of last lines of a log to search for a cause."""


@dataclass(frozen=True)
class Verdict:
    """Why a process ended, in one line, and whether that would recur."""

    reason: str
    recurs: bool


def _raised_in(error: BaseException) -> str:
    """Return the file whose `raise` made an exception; '': C code made it, or it was never raised."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return ""
    code = place.tb_frame.f_code
    return code.co_filename if dis.opname[code.co_code[place.tb_lasti]] == "RAISE_VARARGS" else ""


def _speaker(error: BaseException, folders: tuple[Path, ...]) -> BaseException | None:
    """Return the exception whose message was written by C code or in these folders: this one, or one behind it. None:
    the message is in the task's own words, which say nothing about the machine."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        file = _raised_in(now)
        if not file or any(Path(file).is_relative_to(folder) for folder in folders):
            return now if now is error or isinstance(now, RuntimeError) else None
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)
    return None


def _worker_behind(error: BaseException) -> BaseException:
    """Return the death of a data worker that torch has turned into another exception, else the exception itself.

    torch raises it in a signal handler, between any two lines. If these are in torch.ops (torch/_ops.py,
    OpOverloadPacket.__getattr__), each RuntimeError becomes an AttributeError.
    """
    behind = error.__context__
    is_turned = isinstance(error, AttributeError) and "has no overload name" in str(error)
    is_death = isinstance(behind, RuntimeError) and str(behind).startswith("DataLoader worker (pid")
    return behind if is_turned and is_death and behind is not None else error


def failure_of(error: BaseException, task_file: Path | None, snapshot: Path | None = None) -> dict[str, Any]:
    """Return `reason`, `recurs`, `traceback` and `is_own` of the exception that ends a rank, for its outcome.

    `recurs` says whether a new attempt would fail in the same way. Randomness is deterministic here, so an exception of
    the task recurs. An error of the network, of the machine, or from another rank's death may not.

    Args:
        snapshot: File for a record of the memory in use, if a GPU is full.
    """
    import torch
    import torch.distributed as dist

    from ..parallel.torch_private import dump_gpu_memory
    from ..tasks import where

    error = _worker_behind(error)
    text = one_line(described(error))
    of_sample = getattr(error, "sample", "")  # and the error is not temporary: see data/fetch.py
    library, package = Path(torch.__file__).parent, Path(__file__).parents[1]
    speaker = _speaker(error, (library, package))
    is_own = speaker is None
    if is_own and isinstance(error, (MemoryError, torch.OutOfMemoryError)):  # certain, whoever raises it
        speaker = error
    said = one_line(described(speaker)) if speaker is not None else ""
    cause = causes.certain(said)
    line = where(error, task_file) if task_file is not None else ": ".join(filter(None, [of_sample, text]))
    if cause is not None and cause.has_words:
        line, recurs = cause.told(said, line, memory.refused_at()), cause.would_recur(said)
    else:
        recurs = not isinstance(error, (dist.DistError, OSError, EOFError))
        if isinstance(error, RuntimeError) and "Original Traceback" not in text:  # an error of the dataset
            machine = _speaker(error, (*(library / name for name in _OF_MACHINE), package))
            recurs &= machine is None or not causes.is_of_others(str(machine))
    if isinstance(error, torch.OutOfMemoryError) and snapshot is not None and dump_gpu_memory(snapshot):
        line += f"; memory in use: {snapshot.parent.name}/{snapshot.name}, for https://pytorch.org/memory_viz"
    recurs |= bool(of_sample)
    return {"reason": line[:900], "recurs": recurs, "traceback": traceback.format_exc(), "is_own": is_own}


def in_log(text: str, raised: str = "", limit: str = "") -> Verdict | None:
    """Return what the end of a log shows for certain about the death of its process; None: nothing.

    Args:
        text: End of its output, with carriage returns resolved.
        raised: The exception that has ended it, wherever in the output it stands; '': none.
        limit: Text of the memory limit that applied to it; '': that of this process.
    """
    lines = [last_words.without_prefix(line) for line in text.splitlines() if line.strip()][-_LAST:]
    for said in map(one_line, [raised, *reversed(lines)]):
        cause = causes.certain(said)
        if cause is not None and cause.has_words:
            return Verdict(cause.told(said, limit=limit or memory.refused_at()), cause.would_recur(said))
    return None


def last_lines(log: str) -> list[str]:
    """Return the last lines of a rank's log, for `train show`."""
    return [line.rstrip()[:1000] for line in log.splitlines() if line.strip()][-LAST_LINES:]
