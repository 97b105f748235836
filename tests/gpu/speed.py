"""Speed beside a hand-written loop of the same settings, and beside what the device can multiply."""

from __future__ import annotations

import gc
import importlib
import statistics
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.gpu import bare
from tests.gpu.harness import BELOW, FIGURE, OK, UNCHECKED, Row, Scale, Stretch, made, mebibytes, train_here

GOAL = 0.99
_WARM, _STEPS = 8, 40
"""Steps before and while time is taken."""


def part(scale: Scale) -> Iterator[Row]:
    """ResNet-50 and the GPT in bf16, compiled and not; then what exactness costs."""
    rate = matmul_rate(scale, torch.bfloat16)
    work = {task: operations(scale, task) for task in ("resnet", "gpt")}
    for task in work:
        flags = _flags(scale, task) | {"compile": "false"}
        yield from _beside(scale, task, f"{task}, bf16, not compiled", flags, work[task], rate)
    for task in work:
        exact = _ours(scale, task, _flags(scale, task))[0]
        free = _ours(scale, task, _flags(scale, task) | {"deterministic": "false"})[0]
        found = f"{exact / free:.3f} of the time with --deterministic false"
        yield Row(f"{task}: what exactness takes", found, figures={"ratio": exact / free})
    for task in work:  # last: what is not compiled yet may take minutes
        what = f"{task}, bf16, compiled"
        if scale.is_small:
            yield Row(what, "small, it would be compiled for longer than it trains", UNCHECKED)
            continue
        try:
            yield from _beside(scale, task, what, _flags(scale, task) | {"compile": "true"}, work[task], rate)
        except RuntimeError as error:
            yield Row(what, f"torch.compile does not work here: {str(error)[:200]}", UNCHECKED)


def precisions(scale: Scale) -> Iterator[Row]:
    """Speed and memory of each precision beside fp32's."""
    names = ("fp32", "tf32", "bf16", "fp16") if scale.is_gpu else ("fp32", "bf16")
    for task in ("resnet", "gpt"):
        base: tuple[float, int] | None = None
        for name in names:
            flags = _flags(scale, task) | {"precision": name}
            if scale.is_gpu and task == "resnet":
                flags["batch_size"] = 128
            seconds, memory = _ours(scale, task, flags, steps=20)
            base = base or (seconds, memory)
            found = f"{flags['batch_size'] / seconds:.1f} samples/s, {base[0] / seconds:.2f} times fp32"
            found += f", {mebibytes(memory)}" if scale.is_gpu else ""
            figures = {"seconds": seconds, "memory": memory}
            yield Row(f"{task}, {name}", found, FIGURE, figures=figures)
    if not scale.is_gpu:
        yield Row("tf32, fp16", "they need a GPU", UNCHECKED)


def rates(scale: Scale) -> Iterator[Row]:
    """How fast the device multiplies matrices."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in kinds.items():
        if name == "fp16" and not scale.is_gpu:
            continue
        rate = matmul_rate(scale, dtype)
        yield Row(f"matrix products, {name}", f"{rate / 1e12:.2f} TFLOP/s", figures={"flops": rate})
    if scale.is_gpu:
        torch.backends.cuda.matmul.allow_tf32 = True
        rate = matmul_rate(scale, torch.float32)
        torch.backends.cuda.matmul.allow_tf32 = False
        yield Row("matrix products, tf32", f"{rate / 1e12:.2f} TFLOP/s", figures={"flops": rate})


def _flags(scale: Scale, task: str) -> dict[str, Any]:
    flags = scale.flags(task) | {"precision": "bf16"}
    if task == "resnet":
        flags["channels_last"] = "true"
    return flags


def _beside(scale: Scale, task: str, what: str, flags: dict[str, Any], work: float, rate: float) -> Iterator[Row]:
    """Ours and the hand-written loop in turn, so that a slow moment meets both."""
    turns = 2 if flags["compile"] == "true" or scale.is_small else 3
    pairs = []
    for _ in range(turns):
        theirs = _measured(scale, lambda steps: bare.loop(task, flags, steps))[0]
        pairs.append((_ours(scale, task, flags)[0], theirs))
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    ours = min(one for one, _ in pairs)
    used = work / ours / rate
    found = (
        f"{flags['batch_size'] / ours:.1f} samples/s, {ratio:.3f} of a hand-written loop, uses {used:.0%} of the rate"
    )
    verdict = (OK if ratio >= GOAL else BELOW) if scale.is_gpu else FIGURE
    figures = {"seconds": [one for one, _ in pairs], "bare_seconds": [two for _, two in pairs], "ratio": ratio}
    yield Row(what, found, verdict, f"{GOAL} of it", figures | {"flops_a_step": work, "utilisation": used})


def _ours(scale: Scale, task: str, flags: dict[str, Any], steps: int = _STEPS) -> tuple[float, int]:
    def loop(count: int) -> None:
        train_here(made(scale, task, flags | {"steps": count}))

    return _measured(scale, loop, steps)


def _measured(scale: Scale, loop: Callable[[int], None], steps: int = _STEPS) -> tuple[float, int]:
    """Seconds a step of a loop, and the device's memory at most."""
    warm, steps = (2, 6) if scale.is_small else (_WARM, steps)
    torch.compiler.reset()
    with Stretch(warm, warm + steps, scale.device) as stretch:
        loop(warm + steps + 1)
    if not stretch.seconds:
        raise RuntimeError(f"the loop made {len(stretch.at)} steps of {warm + steps}")
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
