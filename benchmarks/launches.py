"""`python -m benchmarks.launches`: what a step costs the host on a GPU, beside a hand-written loop.

There is no GPU: the process starts with the stand-in driver of the tests (tests/cuda), whose kernels do nothing. So a
step takes the host's time alone, which decides the speed of a model with small kernels. A small GPT in bf16 is trained
by turns in a hand-written loop (tests/gpu/bare.py) and in the engine with a run folder. The figure is CPU time of all
threads, the least of all turns: other work on the machine can only add time.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import command
from tests.cuda import standin
from tests.gpu import bare
from tests.gpu.harness import Scale, new_run, train_here
from train.signals import USER, StopRequest

_FIRST = 30
"""Number of the step at which the measurement begins."""
_MANY = 1_000_000
"""Steps that no loop comes to, because it is stopped before."""


def bench(folder: Path, layers: int, steps: int, times: int) -> str:
    """Measure both loops this many times, in turn. Returns a table in Markdown."""
    if "STANDIN_LOG" not in os.environ:
        given = [f"--folder={folder}", f"--layers={layers}", f"--steps={steps}", f"--times={times}"]
        added = standin.environment() | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        run = [sys.executable, "-m", "benchmarks.launches", *given]
        done = subprocess.run(run, env=os.environ | added, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.rstrip()
    scale = Scale("cuda", True, 1, folder)
    flags = scale.flags("gpt") | {"task.layers": layers, "task.count": 4096, "precision": "bf16", "compile": "false"}
    ways: dict[str, Callable[[_Steps], None]] = {
        "a hand-written loop": lambda count: bare.loop("gpt", flags, lambda: count.is_over),
        "train": lambda count: _ours(scale, flags, count),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(times):
        for way in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            with _Steps(steps) as count:
                ways[way](count)
            found[way].append(count.seconds)
            gc.collect()
    least = {way: min(seconds) for way, seconds in found.items()}
    base = least["a hand-written loop"]
    lines = [f"| GPT of {layers} layers, no kernels | CPU, us a step | speed beside it |", "|---|---|---|"]
    lines += [f"| {way} | {1e6 * seconds:.0f} | {base / seconds:.3f} |" for way, seconds in least.items()]
    return "\n".join(lines)


def _ours(scale: Scale, flags: dict[str, Any], count: _Steps) -> None:
    stop = StopRequest(())
    count.then = lambda: stop.ask(USER, "enough was measured")
    with new_run(scale, "gpt", flags | {"steps": _MANY}) as run:
        train_here(run, stop)


class _Steps:
    """Measures the CPU time of a stretch of optimizer steps of this process, of any loop."""

    def __init__(self, steps: int) -> None:
        self.seconds = 0.0
        """Per step, once it is over."""
        self.then: Callable[[], object] = lambda: None
        self._steps, self._counted, self._began = steps, 0, 0.0

    @property
    def is_over(self) -> bool:
        return self.seconds > 0

    def __enter__(self) -> _Steps:
        self._handle = register_optimizer_step_post_hook(lambda *_: self._step())
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _step(self) -> None:
        self._counted += 1
        if self._counted == _FIRST:
            self._began = time.process_time()
        if self._counted == _FIRST + self._steps:
            self.seconds = (time.process_time() - self._began) / self._steps
            self.then()


if __name__ == "__main__":
    torch.set_num_threads(1)
    command.run(bench, layers=2, steps=300, times=3)
