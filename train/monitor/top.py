"""The page of `train top`: the runs, their ranks and the GPUs at one moment, as rows of text. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
from pathlib import Path
from typing import Any

from .. import screen
from ..cluster import jobs
from ..errors import one_line
from ..format import figure
from ..gpus import Gpus, GpuState, process_of
from ..run import states
from .runs import Runs
from .status import Rank, RunStatus, doing

_NONE = "-"
_WAITING = (states.CREATED, states.QUEUED, states.INTERRUPTED, states.COPY)
STYLE = {"head": "bold", "rank": "dim", "gpu": "cyan", states.RUNNING: "green", states.FAILED: "red"}
STYLE |= dict.fromkeys(_WAITING, "yellow")
"""Maps a kind of line to its style in rich."""
_LARGE = 1e9
"""Larger numbers are shortened, and longer times (over thirty years) are not shown: run.json may contain anything."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the page."""

    text: str
    kind: str
    """Sets the colour: head, rank, gpu, or the state of a run."""


class Page:
    """Reads a folder of runs repeatedly. It remembers only what it needs to compute speeds."""

    def __init__(self, runs: Path, names: list[str] | None = None) -> None:
        self.runs, self.names = runs, names or []
        self._looked = Runs(runs)
        self._processes: dict[int, Any] = {}
        self._gpus = Gpus()
        self._cards: list[GpuState] = []

    def ask(self, seconds: float) -> None:
        """Wait at most so many seconds until clusters have reported the state of these runs."""
        self._looked.look(self.names)
        self._looked.engines.wait(seconds)

    def rows(self, columns: int, lines: int) -> list[Line]:
        """Return the current page, cut to what fits: live runs first, then those that ended last."""
        # names and reasons may contain control characters
        return [Line(screen.printable(row.text), row.kind) for row in self._rows(columns, lines)]

    def _rows(self, columns: int, lines: int) -> list[Line]:
        found, self._cards = self._looked.look(self.names), self._gpus.read()
        alive = sum(one.is_alive for one in found)
        rows = [Line(self._summary(len(found), alive), "head")]
        rows += [Line(_gpu_line(gpu), "gpu") for gpu in self._cards]
        rows.append(Line("", "head"))
        if not found:
            return [*rows, Line(f"no runs in {self.runs} yet; start one: train launch digits", "head")]
        heading = ["NAME", "STATE", "STEP", "LOSS", "SAMPLES/S", "WAIT", "LEFT"]
        body = [*map(_line_of, found)]
        shown = screen.table([heading, *body], columns, spare=(5, 6)).splitlines()
        rows.append(Line(shown[0], "head"))
        for one, text in zip(found, shown[1:], strict=True):
            rows.append(Line(text, one.state))
            if one.is_at_work:
                rows += [Line(rank, "rank") for rank in self._ranks(one)]
            if _is_explained(one):
                rows.append(Line(f"  {one_line(one.reason)}", "rank"))
        if len(rows) > lines:
            left_out = len(rows) - lines + 1
            rows = [*rows[: lines - 1], Line(f"… {left_out} more lines; to see one run: train top NAME", "head")]
        return rows

    def _summary(self, count: int, alive: int) -> str:
        import psutil

        damaged = f", {self._looked.damaged} damaged (train ls)" if self._looked.damaged else ""
        memory = psutil.virtual_memory()
        load = os.getloadavg()[0]
        return (
            f"train top {time.strftime('%H:%M:%S')}  {count} run{'s' if count != 1 else ''}, {alive} alive{damaged}  "
            f"load {load:.1f} of {os.cpu_count()}  memory {memory.used / 2**30:.1f} of {memory.total / 2**30:.0f} GiB"
        )

    def _ranks(self, one: RunStatus) -> list[str]:
        """Return one line per rank of the current attempt: what it does, and what it uses."""
        names, lines = one.gpus, []
        for place, rank in enumerate(one.ranks):  # index on this machine
            what = f"{doing([rank]):<10} step {rank.beat.step:<8}" if rank.beat else f"{one.program.unseen:<24}"
            card = _named(names[place], self._cards) if place < len(names) else None
            gpu = _use_by(rank, one, card) if card is not None and one.record.get("device") == "cuda" else ""
            lines.append(f"  rank {rank.number:<3} {what} {self._taken(one.process(rank))}{gpu}")
        return lines

    def _taken(self, found: Any) -> str:
        """Return CPU and memory of a process; '-' if it is not visible from here."""
        import psutil

        if found is not None:
            known = self._processes.get(found.pid)
            is_new = known is None or known != found  # psutil also compares the start times
            process = self._processes[found.pid] = found if known is None or is_new else known
            with contextlib.suppress(psutil.Error):
                percent, size = process.cpu_percent(), process.memory_info().rss
                if is_new:  # first look: the mean over its whole life
                    percent = 100 * sum(process.cpu_times()[:2]) / max(time.time() - process.create_time(), 0.01)
                return f"cpu {percent:4.0f} %  mem {size / 2**30:5.1f} GiB"
        return f"cpu {_NONE:>4}    mem {_NONE:>5}    "


def _is_explained(one: RunStatus) -> bool:
    """Whether to show the reason: why a run ended, or the state of a submitted run whose ranks are not visible."""
    unseen = one.is_alive and jobs.is_submitted(one.record) and not one.record["attempts"]
    return bool(one.reason) and (unseen or one.state in (states.FAILED, states.INTERRUPTED, states.COPY))


def _named(name: str, cards: list[GpuState]) -> GpuState | None:
    """Return the GPU with this number or UUID, which may be cut short; None for a MIG slice."""
    return next((card for card in cards if name == str(card.number) or card.uuid.startswith(name)), None)


def _line_of(one: RunStatus) -> list[str]:
    left = one.seconds_left
    return [
        one_line(one.name), one.state, one.done or _NONE, figure(one.loss) if one.loss is not None else _NONE,
        _figure(one.measured("samples_per_s"), ".0f"), f"{100 * one.waits:.0f} %" if one.waits is not None else _NONE,
        str(datetime.timedelta(seconds=round(left))) if left is not None and left < _LARGE else _NONE,
    ]  # fmt: skip


def _figure(value: float | None, form: str) -> str:
    if value is None:
        return _NONE
    return format(value, form) if abs(value) < _LARGE else f"{value:.1e}"


def _gpu_line(gpu: GpuState) -> str:
    if not gpu.answers:
        return f"GPU {gpu.number}  does not answer; see: train doctor"
    degrees = _NONE if gpu.celsius is None else f"{gpu.celsius:.0f}"
    return f"GPU {gpu.number}{_use(gpu)}  {degrees} C  {gpu.name}"


def _use_by(rank: Rank, one: RunStatus, gpu: GpuState) -> str:
    """Return the use of a rank's GPU and the rank's memory there, or the memory of all processes if unknown."""
    pid = process_of(rank.beat.pid, one.run.folder / "lock", gpu.processes) if rank.beat else None
    if pid is None:
        return _use(gpu) and f"{_use(gpu)} in all"
    return _use(dataclasses.replace(gpu, memory_used=gpu.processes[pid]))


def _use(gpu: GpuState) -> str:
    """Return use and memory of a GPU."""
    if gpu.use is None or gpu.memory_used is None or gpu.memory_size is None:
        return ""
    used, size = gpu.memory_used / 2**30, gpu.memory_size / 2**30
    return f"  gpu {100 * gpu.use:3.0f} %  {used:5.1f} of {size:.0f} GiB"
