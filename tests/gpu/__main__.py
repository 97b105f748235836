"""Proof on a GPU in minutes: python -m tests.gpu [--device cpu --small] [--parts exact,speed] [--json FILE]"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

import train
from tests.gpu import apart
from tests.gpu.harness import FAILED, Row, Scale
from train.errors import Refused
from train.gpus import Card, number_by_bus
from train.parallel.devices import check_kernels

PARTS = {
    "steps": 0.9, "inputs": 0.3, "exact": 2.0, "checkpoint": 0.8, "memory": 1.0, "recovery": 1.5, "speed": 2.9,
    "ranks": 0.6,
}  # fmt: skip
"""Maps each part, in their order, to its minutes: five for the first five parts, and five for the others."""
MINUTES_OF_RANKS = 4.0
"""Minutes of the part `ranks` on several GPUs."""
PATIENCE = 120.0
"""Seconds after which a case hangs. The longest takes a minute on one H100, by estimate."""
FILE = "test-gpu.json"
MOST = 4
"""GPUs, however many there are: enough for two copies of a model on two each."""
DISK = 8 * 10**9
"""Bytes that runs need at a time: the largest are three checkpoints of 1.5 GB and one that is being written."""
LEFT_OUT = 3
"""The exit code where nothing failed, but something was left out for lack of time."""


def main() -> int:
    """Make the parts, print the table, write JSON.

    Returns:
        1 where one of them failed, 2 where none can be made, LEFT_OUT where there was not the time for all, 130 after
        Ctrl-C.
    """
    began, options = _start(), _options()
    number_by_bus()  # before any process here opens the driver, or cards that differ have two orders
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch looks once in a process, at the first product
    try:
        found = Found(machine(options.device), options.device, options.small, options.json, began)
        found.write()
        needed, free = DISK // 50 if options.small else DISK, shutil.disk_usage(options.folder).free
        if free < needed:
            there = f"{Path(options.folder).absolute()} has {free / 1e9:.1f}"
            raise Refused(f"runs need {needed / 1e9:.1f} GB of disk, {there}; another: --folder")
        # on its way to the disk something may still be when a part was ended
        folder = tempfile.TemporaryDirectory(prefix=".test-gpu-", dir=options.folder, ignore_cleanup_errors=True)
    except (Refused, OSError) as error:
        print(f"tests.gpu: {error}", file=sys.stderr)
        return 2
    gpus = len(found.machine["gpus"])
    if gpus > MOST:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
        gpus, os.environ["CUDA_VISIBLE_DEVICES"] = MOST, ",".join(visible[:MOST])
    minutes = options.minutes or (3 * sum(PARTS.values()) if options.small else None)  # a CPU may be busy
    ends = time_limits(options.parts, gpus, began, minutes)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with folder as name:
        scale = Scale(options.device, options.small, gpus, Path(name))
        try:
            apart.make(scale, ends, options.patience, found.add)
        except KeyboardInterrupt:
            found.is_interrupted = True
        print(found.table(), flush=True)
    return found.code()


def _start() -> float:
    """Return when this process started, by time.monotonic(): imports take some of the time too."""
    return time.monotonic() - max(time.time() - psutil.Process().create_time(), 0.0)


def time_limits(parts: Sequence[str], gpus: int, began: float, minutes: float | None) -> dict[str, float]:
    """Map each part to the time at which it ends. A part that ends early leaves its time to those after it.

    Args:
        began: by time.monotonic(), as the result.
        minutes: for all parts together; None: the sum of their own.
    """
    shares = {name: MINUTES_OF_RANKS if name == "ranks" and gpus > 1 else PARTS[name] for name in parts}
    total = max(sum(shares.values()), 0.5)
    ends = itertools.accumulate(60 * share * (minutes or total) / total for share in shares.values())
    return {name: began + end for name, end in zip(shares, ends, strict=True)}


@dataclasses.dataclass
class Found:
    """What was found so far."""

    machine: dict[str, Any]
    device: str
    is_small: bool
    file: str = os.devnull
    """Where it is written after each row: whoever ends this keeps what was found."""
    began: float = dataclasses.field(default_factory=time.monotonic)
    rows: list[Row] = dataclasses.field(default_factory=list)
    is_interrupted: bool = False

    def add(self, row: Row) -> None:
        """Keep a row, in the file too."""
        self.rows.append(dataclasses.replace(row, at=time.monotonic() - self.began))
        try:
            self.write()
        except OSError as error:
            print(f"tests.gpu: {self.file} could not be written: {error.strerror}", file=sys.stderr)

    def write(self) -> None:
        """
        Raises:
            OSError: there is no room for it, or it cannot be there.
        """
        content = {
            "machine": self.machine, "device": self.device, "small": self.is_small,
            "seconds": time.monotonic() - self.began, "rows": list(map(dataclasses.asdict, self.rows)),
        }  # fmt: skip
        beside = Path(f"{self.file}.new")
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.file)  # a disk that is full leaves what was found before

    @property
    def failed(self) -> int:
        return sum(row.verdict == FAILED for row in self.rows)

    def code(self) -> int:
        if self.failed:
            return 1
        if self.is_interrupted:
            return 130
        return LEFT_OUT if any(row.late for row in self.rows) else 0

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
        lines += [f"| {r.part} | {r.what} | {r.found} | {r.goal} | {r.verdict} |" for r in self.rows]
        seconds = time.monotonic() - self.began
        lines += ["", f"{len(self.rows)} lines, {self.failed} failed, in {seconds:.0f} s"]
        if self.is_interrupted:
            lines += ["It was interrupted: what is not in the table was not made."]
        elif any(row.late for row in self.rows):
            lines += ["There was not the time for all: --minutes gives more."]
        return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Proof on a GPU in minutes.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    text = "models that a CPU trains in a minute, and is always given: proves no speed"
    parser.add_argument("--small", action="store_true", help=text)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    text = f"after so many it ends (the sum of its parts: {', '.join(f'{n} {m:g}' for n, m in PARTS.items() if m)})"
    parser.add_argument("--minutes", type=float, help=text)
    parser.add_argument("--json", metavar="FILE", default=FILE, help=f"write all figures there ({FILE})")
    parser.add_argument("--folder", default=".", help="a folder on the disk that runs are kept on")
    text = f"a case that takes longer hangs ({PATIENCE:g})"
    parser.add_argument("--patience", type=float, metavar="S", default=PATIENCE, help=text)
    options = parser.parse_args()
    if not Path(options.folder).is_dir():
        parser.error(f"--folder: there is no folder {options.folder}")
    options.small |= options.device == "cpu"  # or each case would take so long there that it seems to hang
    options.parts = list(dict.fromkeys(options.parts.split(",")))
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"--parts: there is no {name}; there are {', '.join(PARTS)}")
    return options


def machine(device: str) -> dict[str, Any]:
    """What this is proven on.

    Raises:
        Refused: it cannot be.
    """
    found: dict[str, Any] = {
        "train": train.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "cores": len(os.sched_getaffinity(0)), "gpus": [],
    }  # fmt: skip
    if device == "cpu":
        return found
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
        found["gpus"].append(f"{card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}")
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["cudnn"] = torch.backends.cudnn.version()
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before anything was found
        sys.exit(130)
