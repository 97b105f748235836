"""Proof on a GPU in minutes: python -m tests.gpu [--device cpu --small] [--parts exact,speed] [--json FILE]

Parts share a few processes, small all of them one. Where a case hangs, ends in an error or breaks its process, another
process makes those after it: apart.py.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu import apart
from train.errors import Refused
from train.gpus import Card, number_by_bus

if TYPE_CHECKING:
    from tests.gpu.harness import Case, Scale

PARTS = {
    "rates": ("speed", "rates", 7),
    "inputs": ("inputs", "part", 24),
    "steps": ("steps", "part", 38),
    "exact": ("exact", "part", 69),
    "compiled": ("exact", "compiled", 37),
    "memory": ("memory", "part", 17),
    "recovery": ("recovery", "part", 45),
    "checkpoint": ("checkpoint", "part", 50),
    "precisions": ("speed", "precisions", 32),
    "ranks": ("ranks", "part", 200),
    "speed": ("speed", "part", 151),
}
"""In the order in which they are made: module, function, and about how many seconds it takes on one H100, by estimate.
The last one compiles four times: what is not ready when time is over is left of it."""
ROUNDS = (
    (("rates", "inputs", "steps"),), (("exact",), ("compiled",)), (("memory", "recovery", "checkpoint", "precisions"),),
    (("ranks",),), (("speed",),),
)  # fmt: skip
"""One after the other: processes side by side, where nothing is timed, and the parts that each of them makes."""
MINUTES, MINUTES_FOR_RANKS = 8.0, 4.0
"""On one GPU; how many more on several."""
DISK = 8 * 10**9
"""Bytes that runs need at a time: the largest are three checkpoints of 1.5 GB and one that is being written."""
LEFT_OUT = 3
"""The exit code where nothing failed, but something was left out for lack of time."""


_BEGAN = time.monotonic()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch looks once in a process, at the first product


def main() -> int:
    """Make the parts, print the table, write JSON.

    Returns:
        1 where one of them failed, 2 where none can be made, LEFT_OUT where there was not the time for all, 130 after
        Ctrl-C.
    """
    options = _options()
    number_by_bus()  # before any process here opens the driver, or cards that differ have two orders
    if options.serve is not None:
        _serve(options)
        return 0
    try:
        found = Found(_machine(options.device), options.device, options.small, file=options.json)
        _look_for_room(options)
    except (Refused, OSError) as error:
        return _refused(str(error))
    if options.minutes is None:
        options.minutes = MINUTES + (MINUTES_FOR_RANKS if len(found.machine["gpus"]) > 1 else 0.0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    # on its way to the disk something may still be when a part was ended
    with tempfile.TemporaryDirectory(prefix=".test-gpu-", dir=options.folder, ignore_cleanup_errors=True) as folder:
        _all(found, options, folder)
        problem = found.write(options.json)
        print(found.table(), flush=True)
        if problem:
            _refused(problem)
    return found.code()


def _all(found: Found, options: argparse.Namespace, folder: str) -> None:
    pace, is_over = apart.Pace(), threading.Event()
    try:
        for processes in rounds(options.parts, options.small, len(found.machine["gpus"])):
            if len(processes) == 1:
                _make(processes[0], found, options, folder, pace, is_over)
            else:  # each with a pace of its own: beside the other it is no measure of what is made alone
                works = [
                    functools.partial(_make, parts, found, options, folder, copy.copy(pace), is_over)
                    for parts in processes
                ]
                _side_by_side(works, is_over)
    except KeyboardInterrupt:
        found.is_interrupted = True


def rounds(parts: Sequence[str], is_small: bool, gpus: int) -> list[list[list[str]]]:
    """What is made one after the other, side by side, and by one process."""
    if is_small:
        return [[list(parts)]]
    made = [[[name for name in process if name in parts] for process in one] for one in ROUNDS]
    if gpus == 1 and "ranks" in parts:  # where all that it says is that it needs more: no process for that
        made = [one for one in made if one != [["ranks"]]]
        made[-1][0].insert(0, "ranks")
    return [kept for one in made if (kept := [process for process in one if process])]


def _side_by_side(works: Sequence[Callable[[], None]], is_over: threading.Event) -> None:
    """Do each on a thread, until all are over.

    Args:
        is_over: set where Ctrl-C is to end them.

    Raises:
        KeyboardInterrupt: Ctrl-C, when all have ended.
    """

    def until_interrupted(work: Callable[[], None]) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            work()

    threads = [threading.Thread(target=until_interrupted, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        is_over.set()
        for thread in threads:
            thread.join()
        raise


def _look_for_room(options: argparse.Namespace) -> None:
    """Whether there is a place for runs, and for what is found.

    Raises:
        Refused: there is not.
        OSError: nothing can be written there.
    """
    needed, free = DISK // 50 if options.small else DISK, shutil.disk_usage(options.folder).free
    where = Path(options.folder).absolute()
    if free < needed:
        raise Refused(f"runs need {needed / 1e9:.1f} GB of disk, {where} has {free / 1e9:.1f}; another: --folder")
    if not os.access(where, os.W_OK | os.X_OK):
        raise Refused(f"{where} cannot be written to; another place: --folder")
    if options.json:
        Path(options.json).open("a", encoding="utf-8").close()


def _refused(text: str) -> int:
    print(f"tests.gpu: {text}", file=sys.stderr)
    return 2


@dataclasses.dataclass
class Found:
    """What was found so far."""

    machine: dict[str, Any]
    device: str
    is_small: bool
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    is_interrupted: bool = False
    began: float = _BEGAN
    file: str | None = None
    """Where it is written after each row."""
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row. From any thread."""
        with self._lock:
            self.rows.append(row)
            self.rows.sort(key=lambda one: list(PARTS).index(one["part"]))  # of processes side by side
            self.write(self.file)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def _of(self, verdict: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["verdict"] == verdict]

    def code(self) -> int:
        if self._of("FAILED"):
            return 1
        if self.is_interrupted:
            return 130
        return LEFT_OUT if any(row["late"] for row in self.rows) else 0

    def write(self, file: str | None) -> str:
        """After each row: whoever ends this keeps what was found. Returns why it cannot be, '' if it can."""
        if not file:
            return ""
        content = {"machine": self.machine, "device": self.device, "small": self.is_small, "seconds": self.seconds(),
                   "rows": self.rows}  # fmt: skip
        is_plain = Path(file).is_file() or not Path(file).exists()
        beside = Path(f"{file}.new" if is_plain else file)
        try:
            beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            beside.replace(file)  # a disk that is full leaves what was found before
        except OSError as error:
            with contextlib.suppress(OSError):
                if is_plain:
                    beside.unlink()
            return f"{file} could not be written: {error.strerror}"
        return ""

    def table(self) -> str:
        machine = self.machine
        where = ", ".join(machine["gpus"]) or "no GPU"
        lines = [f"{where}; torch {machine['torch']}, CUDA {machine['cuda']}, Python {machine['python']}, "
                 f"{machine['cores']} cores", ""]  # fmt: skip
        if self.device == "cpu":
            lines = ["NOT RUN ON A DEVICE: on the CPU the code runs; of a GPU nothing here says anything.", *lines]
        elif self.is_small:
            lines = ["SMALL: these sizes say nothing of speed.", *lines]
        lines += ["| part | what | found | goal | verdict |", "|---|---|---|---|---|"]
        lines += [f"| {r['part']} | {r['what']} | {r['found']} | {r['goal']} | {r['verdict']} |" for r in self.rows]
        unchecked = self._of("not checked")
        if unchecked:
            lines += ["", "Could not be checked here:"]
            lines += [f"- {row['part']}, {row['what']}: {row['found']}" for row in unchecked]
        lines += ["", f"{len(self.rows)} lines, {len(self._of('FAILED'))} failed, in {self.seconds():.0f} s"]
        if self.is_interrupted:
            lines += ["It was interrupted: what is not in the table was not made."]
        elif any(row["late"] for row in self.rows):
            lines += ["There was not the time for all: --minutes gives more."]
        return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Proof on a GPU in minutes.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    text = "models that a CPU trains in a minute, and is always given: proves no speed"
    parser.add_argument("--small", action="store_true", help=text)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    text = f"parts that do not fit any more are left out ({MINUTES:g}, with several GPUs {MINUTES_FOR_RANKS:g} more)"
    parser.add_argument("--minutes", type=float, help=text)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--folder", default=".", help="a folder on the disk that runs are kept on")
    text = f"a case may take so many seconds, or {apart.TIMES:g} times its estimate ({apart.PATIENCE:g}; on a CPU "
    text += f"{apart.PATIENCE_ON_CPU:g})"
    parser.add_argument("--patience", type=float, metavar="S", help=text)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not Path(options.folder).is_dir():
        parser.error(f"--folder: there is no folder {options.folder}")
    if options.patience is None:
        options.patience = apart.PATIENCE if options.device == "cuda" else apart.PATIENCE_ON_CPU
    options.small |= options.device == "cpu"  # or each case would take so long there that it seems to hang
    options.parts = options.parts.split(",")
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"--parts: there is no {name}; there are {', '.join(PARTS)}")
    return options


def _make(
    names: list[str], found: Found, options: argparse.Namespace, folder: str, pace: apart.Pace, is_over: threading.Event
) -> None:
    """Make parts, in one process, and add their rows."""
    print(f"tests.gpu: {', '.join(names)} …", file=sys.stderr, flush=True)
    left = options.minutes * 60 - found.seconds()
    if left < apart.START:
        words = f"no time was left of {options.minutes:g} minutes (--minutes)"
        for name in names:
            found.add(apart.row(name, "left out", words, "not checked", late=True))
        return
    own = Path(folder) / names[0]  # each process numbers its runs by itself
    own.mkdir()
    ends = time.monotonic() + left
    turn = apart.Turn(names, found.device, found.is_small, str(own), ends, options.patience, is_over=is_over)
    if names == ["ranks"]:
        turn.environment["CUDA_VISIBLE_DEVICES"] = _first_gpus()
    apart.make(turn, pace, found.add)


def _first_gpus() -> str:
    """Those that `ranks` may use: it is made for four at most, and dp takes all that it sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    return ",".join(visible.split(",")[:4])


def cases(name: str, scale: Scale) -> Iterator[Case]:
    """What a part is to find out, in order."""
    module, function, _ = PARTS[name]
    made: Iterator[Case] = getattr(importlib.import_module(f"tests.gpu.{module}"), function)(scale)
    return made


def _serve(options: argparse.Namespace) -> None:
    """Be the process that makes parts."""
    import torch

    from tests.gpu import harness

    harness.hush()
    harness.warm_up()
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    scale = harness.Scale(options.device, options.small, gpus, Path(options.folder))
    apart.serve(options.serve, {name: functools.partial(cases, name, scale) for name in options.parts}, options.begin)


def _machine(device: str) -> dict[str, Any]:
    """What this is proven on.

    Raises:
        Refused: it cannot be.
    """
    import torch

    import train
    from train.parallel.devices import check_kernels

    machine: dict[str, Any] = {
        "train": train.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "cores": len(os.sched_getaffinity(0)), "gpus": [],
    }  # fmt: skip
    if device == "cpu":
        return machine
    if not torch.cuda.device_count():
        raise Refused("torch sees no GPU here; to try the parts on the CPU: --device cpu --small")
    try:
        seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError as error:  # of a driver that is too old for this torch, most likely
        raise Refused(f"torch cannot use the GPU: {str(error).splitlines()[0]}") from None
    for index, card in enumerate(seen):
        try:
            check_kernels([Card(card.name, (card.major, card.minor))])
        except Refused as error:
            leave_out = f"; to leave out GPU {index}: CUDA_VISIBLE_DEVICES" if len(seen) > 1 else ""
            raise Refused(f"{error}{leave_out}") from None
        machine["gpus"].append(f"{card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}")
    machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    machine["cudnn"] = torch.backends.cudnn.version()
    return machine


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before anything was found
        sys.exit(130)
