"""Proof on a GPU in minutes: python -m tests.gpu [--device cpu --small] [--parts exact,speed] [--json FILE]

Every part is a process of its own, so that what one of them breaks is broken for it alone; small, they share one.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PARTS = {
    "rates": ("speed", "rates", 10),
    "steps": ("steps", "part", 30),
    "exact": ("exact", "part", 80),
    "memory": ("memory", "part", 20),
    "checkpoint": ("checkpoint", "part", 55),
    "inputs": ("inputs", "part", 30),
    "precisions": ("speed", "precisions", 40),
    "compiled": ("exact", "compiled", 40),
    "ranks": ("ranks", "part", 200),
    "speed": ("speed", "part", 175),
}
"""In the order in which they are made: module, function, and about how many seconds it takes on one H100, by estimate.
The last one compiles four times: what is not ready when time is over is left of it."""
MINUTES, MINUTES_FOR_RANKS = 8.0, 4.0
"""On one GPU; how many more on several."""
DISK = 8 * 10**9
"""Bytes that runs need at a time: the largest are three checkpoints of 1.5 GB and one that is being written."""
LEFT_OUT = 3
"""The exit code where nothing failed, but something was left out for lack of time."""


os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch looks once in a process, at the first product


def main() -> int:
    """Make the parts, print the table, write JSON.

    Returns:
        1 where one of them failed, 2 where none can be made, LEFT_OUT where there was not the time for all, 130 after
        Ctrl-C.
    """
    options = _options()
    if options.part:
        _one_part(options)
        return 0
    import torch

    device, gpus = options.device, torch.cuda.device_count()
    if device == "cuda" and not gpus:
        return _refused("torch sees no GPU here; to try the parts on the CPU: --device cpu --small")
    needed, free = DISK // 50 if options.small else DISK, shutil.disk_usage(options.folder).free
    if free < needed:
        where = Path(options.folder).absolute()
        return _refused(
            f"runs need {needed / 1e9:.1f} GB of disk, {where} has {free / 1e9:.1f}; another place: --folder"
        )
    if options.minutes is None:
        options.minutes = MINUTES + (MINUTES_FOR_RANKS if device == "cuda" and gpus > 1 else 0.0)
    found = Found(_machine(device), device, options.small)
    # on its way to the disk something may still be when a part was ended
    with tempfile.TemporaryDirectory(prefix=".test-gpu-", dir=options.folder, ignore_cleanup_errors=True) as folder:
        try:
            for name in options.parts:
                left = options.minutes * 60 - found.seconds()
                _make(name, found, options, folder, left)
                found.write(options.json)
        except KeyboardInterrupt:
            found.rows.append(_row(name, "the rest, and all parts after it", "interrupted", "not checked"))
            found.is_interrupted = True
        print(found.table())
        found.write(options.json)
    return found.code()


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
    began: float = dataclasses.field(default_factory=time.monotonic)

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

    def write(self, file: str | None) -> None:
        """After each part: whoever ends this keeps what was found."""
        if not file:
            return
        content = {"machine": self.machine, "device": self.device, "small": self.is_small, "seconds": self.seconds(),
                   "rows": self.rows}  # fmt: skip
        Path(file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

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
        if any(row["late"] for row in self.rows):
            lines += ["There was not the time for all: --minutes gives more."]
        return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Proof on a GPU in minutes.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="models that a CPU trains in a minute: proves no speed")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    text = f"parts that do not fit any more are left out ({MINUTES:g}, with several GPUs {MINUTES_FOR_RANKS:g} more)"
    parser.add_argument("--minutes", type=float, help=text)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--folder", default=".", help="a folder on the disk that runs are kept on")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not Path(options.folder).is_dir():
        parser.error(f"--folder: there is no folder {options.folder}")
    options.parts = options.parts.split(",")
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"--parts: there is no {name}; there are {', '.join(PARTS)}")
    return options


def _make(name: str, found: Found, options: argparse.Namespace, folder: str, left: float) -> None:
    """Make a part, and add its rows."""
    print(f"tests.gpu: {name} …", file=sys.stderr, flush=True)
    if left < PARTS[name][2] / 4:
        words = f"no time was left of {options.minutes:g} minutes (--minutes)"
        found.rows.append(_row(name, "left out", words, "not checked", late=True))
    elif options.small or (name == "ranks" and len(found.machine["gpus"]) < 2):  # which says that it needs more
        found.rows += _rows(name, found.device, options.small, folder)
    else:
        file = Path(folder) / f"{name}.jsonl"
        # one that hangs is not to take the others' time
        end = _in_a_process(name, found, file, min(left, 3 * PARTS[name][2]))
        if end is not None:
            found.rows.append(end)


def _in_a_process(name: str, found: Found, file: Path, limit: float) -> dict[str, Any] | None:
    """Make a part in a process of its own, and add its rows. Returns one that says how it ended before its end."""
    command = [sys.executable, "-m", "tests.gpu", "--part", name, "--device", found.device]
    command += ["--folder", str(file.parent), "--json", str(file)]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": _first_gpus()} if name == "ranks" else {})
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=limit, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return _row(name, "the rest of it", f"it was not done after {limit:.0f} s", "not checked", late=True)
    finally:  # also after Ctrl-C
        if file.exists():
            found.rows += map(json.loads, file.read_text(encoding="utf-8").splitlines())
    if done.returncode:
        return _row(name, "the rest of it", f"the part ended with code {done.returncode}", "FAILED")
    return None


def _first_gpus() -> str:
    """Those that `ranks` may use: it is made for four at most, and dp takes all that it sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    return ",".join(visible.split(",")[:4])


def _one_part(options: argparse.Namespace) -> None:
    with Path(options.json).open("a", encoding="utf-8", buffering=1) as file:
        for row in _rows(options.part, options.device, options.small, options.folder):
            file.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads that listen for a stop of the runs that were made here need no goodbye


def _rows(name: str, device: str, is_small: bool, folder: str) -> Iterator[dict[str, Any]]:
    import torch

    from tests.gpu import harness

    harness.hush()
    harness.warm_up()
    scale = harness.Scale(device, is_small, torch.cuda.device_count() if device == "cuda" else 0, Path(folder))
    module, function, _ = PARTS[name]
    part: Callable[[harness.Scale], Iterator[harness.Row]] = getattr(
        importlib.import_module(f"tests.gpu.{module}"), function
    )
    try:
        for row in part(scale):
            print(f"tests.gpu:   {row.what}: {row.found} ({row.verdict})", file=sys.stderr, flush=True)
            yield dataclasses.asdict(row) | {"part": name, "late": False}
    except Exception as error:  # of one part: the others are made all the same
        traceback.print_exc()
        yield _row(name, "the rest of it", f"{type(error).__name__}: {error}"[:300], "FAILED")


def _row(part: str, what: str, found: str, verdict: str, late: bool = False) -> dict[str, Any]:
    return {"part": part, "what": what, "found": found, "verdict": verdict, "goal": "", "figures": {}, "late": late}


def _machine(device: str) -> dict[str, Any]:
    import torch

    import train

    machine: dict[str, Any] = {
        "train": train.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "cores": len(os.sched_getaffinity(0)), "gpus": [],
    }  # fmt: skip
    if device == "cuda":
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            machine["gpus"].append(f"{card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}")
        machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        machine["cudnn"] = torch.backends.cudnn.version()
    return machine


if __name__ == "__main__":
    sys.exit(main())
