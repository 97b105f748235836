"""Speed beside a hand-written loop of the same settings, and beside what the device can multiply."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import statistics
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.gpu import bare, compiler
from tests.gpu.harness import (
    BELOW,
    FAILED,
    FIGURE,
    OK,
    UNCHECKED,
    Case,
    Row,
    Scale,
    Stretch,
    mebibytes,
    passing,
    train_here,
)
from train.parallel.precision import allow_tf32
from train.signals import USER, StopRequest

GOAL = 0.99
_STEPS = 40
"""While time is taken."""
_MANY = 1_000_000
"""Steps that no loop here comes to: it is stopped when the stretch that is timed is over."""


def part(scale: Scale) -> Iterator[Case]:
    """ResNet-50 and the GPT in bf16, not compiled; what exactness costs; then compiled."""
    plain: dict[str, float] = {}
    for task in ("resnet", "gpt"):
        yield Case(f"{task}, bf16, not compiled", 25, _plain, (scale, task, plain))
    yield Case("resnet: what exactness takes", 8, _exactness, (scale, "resnet", plain))
    for task in ("gpt", "resnet"):  # which takes longer to compile
        yield Case(f"{task}, bf16, compiled", 46, _compiled, (scale, task))


def _plain(scale: Scale, task: str, plain: dict[str, float]) -> Row:
    """Not compiled; the seconds of a step are noted."""
    row = Beside(scale, task, _flags(scale, task) | {"compile": "false"}).row(f"{task}, bf16, not compiled", turns=2)
    if "seconds" in row.figures:
        plain[task] = min(row.figures["seconds"])
    return row


def _compiled(scale: Scale, task: str) -> Row:
    what, missing = f"{task}, bf16, compiled", compiler.missing(scale)
    if missing:
        return Row(what, missing, UNCHECKED)
    return Beside(scale, task, _flags(scale, task) | {"compile": "true"}).row(what, turns=1)


def _exactness(scale: Scale, task: str, plain: dict[str, float]) -> Row:
    what = f"{task}: what exactness takes"
    if task not in plain:
        return Row(what, "there is nothing to compare with", UNCHECKED)
    ratio = plain[task] / _ours(scale, task, _flags(scale, task) | {"deterministic": "false"})[0]
    return Row(what, f"{ratio:.3f} of the time with --deterministic false", figures={"ratio": ratio})


def precisions(scale: Scale) -> Iterator[Case]:
    """Speed and memory of each precision beside fp32's; of the GPT, a third of its layers."""
    names = ("fp32", "tf32", "bf16", "fp16") if scale.is_gpu else ("fp32", "bf16")
    for task in ("resnet", "gpt"):
        base: list[float] = []
        for name in names:
            yield Case(f"{task}, {name}", 4, _in_precision, (scale, task, name, base))
    if not scale.is_gpu:
        yield Case("tf32, fp16", 0, Row, ("tf32, fp16", "they need a GPU", UNCHECKED))


def _in_precision(scale: Scale, task: str, name: str, base: list[float]) -> Row:
    """One of them; the seconds of a step in fp32 are noted."""
    flags = _flags(scale, task) | {"precision": name}
    if scale.is_gpu and task == "resnet":
        flags["batch_size"] = min(128, flags["batch_size"])
    if scale.is_gpu and task == "gpt":
        flags["task.layers"] = 4
    try:
        seconds, memory = _ours(scale, task, flags, 12)
    except torch.OutOfMemoryError as error:
        return Row(f"{task}, {name}", f"the device is too small: {error}"[:300], UNCHECKED)
    beside = f", {base[0] / seconds:.2f} times fp32" if base else ""
    if name == "fp32":
        base.append(seconds)
    found = f"{flags['batch_size'] / seconds:.1f} samples/s{beside}"
    found += f", {mebibytes(memory)}" if scale.is_gpu else ""
    return Row(f"{task}, {name}", found, figures={"seconds": seconds, "memory": memory})


def rates(scale: Scale) -> Iterator[Case]:
    """How fast the device multiplies matrices."""
    for name in ("fp32", "tf32", "bf16", "fp16") if scale.is_gpu else ("fp32", "bf16"):
        yield Case(f"matrix products, {name}", 1.5, _products, (scale, name))


def _products(scale: Scale, name: str) -> Row:
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    allow_tf32(name == "tf32")
    rate = matmul_rate(scale, kinds.get(name, torch.float32))
    allow_tf32(False)
    return Row(f"matrix products, {name}", f"{rate / 1e12:.2f} TFLOP/s", figures={"flops": rate})


def _flags(scale: Scale, task: str) -> dict[str, Any]:
    flags = scale.flags(task) | {"precision": "bf16"}
    if task == "resnet":
        flags["channels_last"] = "true"
    return flags


@dataclasses.dataclass
class Beside:
    """A task in our loop and in a hand-written one."""

    scale: Scale
    task: str
    flags: dict[str, Any]

    def row(self, what: str, turns: int) -> Row:
        """Both in turn, so that a slow moment meets both, and the other one first every second time: a card that has
        become warm is slower. What the hand-written loop cannot do either is not ours to answer for; what it can, is.
        """
        bares, owns = list[float](), list[float]()
        for turn in range(turns):
            for is_bare in (True, False) if turn % 2 == 0 else (False, True):
                try:
                    if is_bare:
                        bares.append(self._bare())
                    else:
                        owns.append(_ours(self.scale, self.task, self.flags)[0])
                except Exception as error:
                    if is_bare:
                        return Row(what, f"the hand-written loop fails: {_words(error)}", UNCHECKED)
                    return Row(what, f"ours, where the hand-written loop trains: {_words(error)}", FAILED)
        pairs = list(zip(owns, bares, strict=True))
        return self._compared(what, pairs)

    def _bare(self) -> float:
        def loop(stretch: Stretch) -> None:
            bare.loop(self.task, self.flags, lambda: stretch.is_over)

        return _measured(self.scale, loop)[0]

    def _compared(self, what: str, pairs: list[tuple[float, float]]) -> Row:
        ratio = statistics.median(theirs / ours for ours, theirs in pairs)
        ours = min(one for one, _ in pairs)
        work, rate = operations(self.scale, self.task), matmul_rate(self.scale, torch.bfloat16)
        used = work / ours / rate
        found = f"{self.flags['batch_size'] / ours:.1f} samples/s, {ratio:.3f} of a hand-written loop, "
        found += f"uses {used:.0%} of the rate; without snapshots in memory"
        verdict = (OK if ratio >= GOAL else BELOW) if self.scale.is_gpu else FIGURE
        figures = {
            "seconds": [one for one, _ in pairs], "bare_seconds": [two for _, two in pairs], "ratio": ratio,
            "flops_a_step": work, "utilisation": used,
        }  # fmt: skip
        return Row(what, found, verdict, f"{GOAL} of it", figures)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:260]


def _ours(
    scale: Scale, task: str, flags: dict[str, Any], steps: int = _STEPS, settle: float = 1.0
) -> tuple[float, int]:
    def loop(stretch: Stretch) -> None:
        stop = StopRequest(())
        stretch.then = lambda: stop.ask(USER, "enough was seen")
        with passing(scale, task, flags | {"steps": _MANY}) as run:
            train_here(run, stop)

    return _measured(scale, loop, steps, settle)


def _measured(
    scale: Scale, loop: Callable[[Stretch], None], steps: int = _STEPS, settle: float = 1.0
) -> tuple[float, int]:
    """Seconds a step of a loop, which ends when the stretch is over, and the device's memory at most."""
    steps, least = (6, 2) if scale.is_small else (steps, 8)
    torch.compiler.reset()
    try:
        with Stretch(scale, steps, least=least, settle=settle) as stretch:
            loop(stretch)
    finally:
        gc.collect()
        if scale.is_gpu:
            torch.cuda.empty_cache()
    return stretch.seconds, stretch.memory


def operations(scale: Scale, task_name: str) -> float:
    """Floating-point operations of a step, by torch's own count on tensors without content."""
    flags = scale.flags(task_name)
    task = importlib.import_module(f"tests.gpu.tasks.{task_name}")
    own = {name.removeprefix("task."): value for name, value in flags.items() if name.startswith("task.")}
    settings = task.Settings(**own | {"count": 1})
    with torch.device("meta"):
        model = task.model(types.SimpleNamespace(task=settings))
        if task_name == "gpt":
            text = torch.zeros(1, settings.context, dtype=torch.long)
            batch = [text, text]
        else:
            pictures = torch.zeros(1, 3, settings.size, settings.size, dtype=torch.uint8)
            batch = [pictures, torch.zeros(1, dtype=torch.long)]
    model.eval()  # BatchNorm has no mean over one pixel of one picture
    with FlopCounterMode(display=False) as counter:
        task.loss(model, batch).backward()
    return float(counter.get_total_flops() * flags["batch_size"])


def matmul_rate(scale: Scale, dtype: torch.dtype) -> float:
    """Floating-point operations a second in the products of large square matrices; the best of a few."""
    size, times = (256, 3) if not scale.is_gpu else (8192, 10)
    left, right = (torch.randn(size, size, device=scale.device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        seconds = _seconds(scale, lambda: [left @ right for _ in range(times)]) / times
        best = min(best, seconds)
    return float(2 * size**3 / best)


def _seconds(scale: Scale, work: Callable[[], Any]) -> float:
    if not scale.is_gpu:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
