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
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PARTS = {
    "rates": ("speed", "rates", 20),
    "steps": ("steps", "part", 60),
    "exact": ("exact", "part", 200),
    "memory": ("memory", "part", 30),
    "checkpoint": ("checkpoint", "part", 45),
    "speed": ("speed", "part", 200),
    "precisions": ("speed", "precisions", 60),
    "inputs": ("inputs", "part", 30),
    "ranks": ("ranks", "part", 150),
}
"""In the order in which they are made: module, function, and about how many seconds it takes on one H100."""


os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch looks once in a process, at the first product


def main() -> int:
    """Make the parts, print the table, write JSON. Returns 1 where one of them failed."""
    options = _options()
    if options.part:
        _one_part(options)
        return 0
    import torch

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() else "cpu"
    if device == "cuda" and not torch.cuda.device_count():
        print("tests.gpu: torch sees no GPU here; to try the parts on the CPU: --device cpu --small", file=sys.stderr)
        return 2
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix=".test-gpu-", dir=options.folder) as folder:
        for name in options.parts:
            left = options.minutes * 60 - (time.monotonic() - began)
            rows += _made(name, device, options, folder, left)
    machine = _machine(device)
    print(_table(machine, rows, device, options.small))
    seconds = time.monotonic() - began
    failed = [row for row in rows if row["verdict"] == "FAILED"]
    print(f"\n{len(rows)} lines, {len(failed)} failed, in {seconds:.0f} s")
    if options.json:
        content = {"machine": machine, "device": device, "small": options.small, "seconds": seconds, "rows": rows}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Proof on a GPU in minutes.")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--small", action="store_true", help="models that a CPU trains in a minute: proves no speed")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="parts that do not fit any more are left out")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--folder", default=".", help="a folder on the disk that runs are kept on")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"--parts: there is no {name}; there are {', '.join(PARTS)}")
    return options


def _made(name: str, device: str, options: argparse.Namespace, folder: str, left: float) -> list[dict[str, Any]]:
    """The rows of a part."""
    print(f"tests.gpu: {name} …", file=sys.stderr, flush=True)
    if left < PARTS[name][2] / 4:
        return [_row(name, "left out", f"no time was left of {options.minutes:g} minutes (--minutes)", "not checked")]
    if options.small:
        return list(_rows(name, device, True, folder))
    left = min(left, 3 * PARTS[name][2])  # one that hangs is not to take the others' time
    file = Path(folder) / f"{name}.jsonl"
    command = [sys.executable, "-m", "tests.gpu", "--part", name, "--device", device, "--folder", folder]
    problem, is_late = "", False
    try:
        done = subprocess.run([*command, "--json", str(file)], stdout=subprocess.DEVNULL, timeout=left, check=False)
        problem = f"the part ended with code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        is_late = True
        problem = f"it was not done after {left:.0f} s"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    if problem:
        rows.append(_row(name, "the rest of it", problem, "not checked" if is_late else "FAILED"))
    return rows


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
            yield dataclasses.asdict(row) | {"part": name}
    except Exception as error:  # of one part: the others are made all the same
        traceback.print_exc()
        yield _row(name, "the rest of it", f"{type(error).__name__}: {error}"[:300], "FAILED")


def _row(part: str, what: str, found: str, verdict: str) -> dict[str, Any]:
    return {"part": part, "what": what, "found": found, "verdict": verdict, "goal": "", "figures": {}}


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
        machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        machine["cudnn"] = torch.backends.cudnn.version()
    return machine


def _table(machine: dict[str, Any], rows: list[dict[str, Any]], device: str, is_small: bool) -> str:
    where = ", ".join(machine["gpus"]) or "no GPU"
    lines = [f"{where}; torch {machine['torch']}, CUDA {machine['cuda']}, Python {machine['python']}, "
             f"{machine['cores']} cores", ""]  # fmt: skip
    if device == "cpu":
        lines = ["NOT RUN ON A DEVICE: on the CPU the code runs; of a GPU nothing here says anything.", *lines]
    elif is_small:
        lines = ["SMALL: these sizes say nothing of speed.", *lines]
    lines += ["| part | what | found | goal | verdict |", "|---|---|---|---|---|"]
    lines += [f"| {r['part']} | {r['what']} | {r['found']} | {r['goal']} | {r['verdict']} |" for r in rows]
    unchecked = [row for row in rows if row["verdict"] == "not checked"]
    if unchecked:
        lines += ["", "Could not be checked here:"]
        lines += [f"- {row['what']}: {row['found']}" for row in unchecked]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
