"""Speed beside a hand-written loop of the same settings, and that of each precision."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.gpu import bare, exact
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
    new_run,
    train_here,
)
from train.signals import USER, StopRequest

GOAL = 0.99
_MANY = 1_000_000
"""Steps that no loop here comes to: it is stopped when the stretch that is timed is over."""


def part(scale: Scale) -> Iterator[Case]:
    """The GPT in each precision; ResNet-50 and the GPT in bf16, not compiled; then compiled."""
    base: list[float] = []
    for precision in ("fp32", "tf32", "bf16", "fp16") if scale.is_gpu else ("fp32", "bf16"):
        yield Case(f"gpt, {precision}", _in_precision, (scale, precision, base))
    if not scale.is_gpu:
        yield Case("tf32, fp16", Row, ("tf32, fp16", "they need a GPU", UNCHECKED))
    for task in ("resnet", "gpt"):
        yield Case(f"{task}, bf16, not compiled", beside, (scale, task, "not compiled", 2))
    for task in ("gpt", "resnet"):  # which takes longer to compile
        yield Case(f"{task}, bf16, compiled", _compiled, (scale, task))


def _in_precision(scale: Scale, precision: str, base: list[float]) -> Row:
    """Speed and memory of a third of the GPT's layers; the seconds of a step in fp32 are noted."""
    flags = scale.flags("gpt") | {"precision": precision} | ({} if scale.is_small else {"task.layers": 4})
    seconds, memory = _ours(scale, "gpt", flags)
    compared = f", {base[0] / seconds:.2f} times fp32" if base else ""
    if precision == "fp32":
        base.append(seconds)
    found = f"{flags['batch_size'] / seconds:.1f} samples/s{compared}"
    found += f", {mebibytes(memory)}" if scale.is_gpu else ""
    return Row(f"gpt, {precision}", found, figures={"seconds": seconds, "memory": memory})


def _compiled(scale: Scale, task: str) -> Row:
    missing = exact.no_compiler(scale)
    return Row(f"{task}, bf16, compiled", missing, UNCHECKED) if missing else beside(scale, task, "compiled", 1)


def beside(scale: Scale, task: str, how: str, turns: int) -> Row:
    """A task in our loop and in a hand-written one.

    Both in turn, so that a slow moment meets both, and the other one first every second time: a card that has become
    warm is slower. What the hand-written loop cannot do either is not ours to answer for; what it can, is.
    """
    what = f"{task}, bf16, {how}"
    flags = scale.flags(task) | {"precision": "bf16", "compile": "true" if how == "compiled" else "false"}
    if task == "resnet":
        flags["channels_last"] = "true"
    bares, owns = list[float](), list[float]()
    for turn in range(turns):
        for is_bare in (True, False) if turn % 2 == 0 else (False, True):
            try:
                found, _ = (_theirs if is_bare else _ours)(scale, task, flags)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"[:260]
                if is_bare:
                    return Row(what, f"the hand-written loop fails: {said}", UNCHECKED)
                return Row(what, f"ours, where the hand-written loop trains: {said}", FAILED)
            (bares if is_bare else owns).append(found)
    ratio = statistics.median(theirs / ours for ours, theirs in zip(owns, bares, strict=True))
    said = f"{flags['batch_size'] / min(owns):.1f} samples/s, {ratio:.3f} of a hand-written loop; "
    verdict = (OK if ratio >= GOAL else BELOW) if scale.is_gpu else FIGURE
    figures = {"seconds": owns, "bare_seconds": bares, "ratio": ratio}
    return Row(what, f"{said}without snapshots in memory", verdict, f"{GOAL} of it", figures)


def _ours(scale: Scale, task: str, flags: dict[str, Any]) -> tuple[float, int]:
    def loop(stretch: Stretch) -> None:
        with new_run(scale, task, flags | {"steps": _MANY}) as run:
            train_here(run, stop)

    stop = StopRequest(())
    return _measured(scale, loop, functools.partial(stop.ask, USER, "enough was seen"))


def _theirs(scale: Scale, task: str, flags: dict[str, Any]) -> tuple[float, int]:
    return _measured(scale, lambda stretch: bare.loop(task, flags, lambda: stretch.is_over))


def _measured(
    scale: Scale, loop: Callable[[Stretch], None], then: Callable[[], None] = lambda: None
) -> tuple[float, int]:
    """Seconds a step of a loop, which ends when the stretch is over, and the device's memory at most."""
    first, last = (2, 8) if scale.is_small else (20, 60)
    torch.compiler.reset()
    try:
        with Stretch(scale, first, last, then) as stretch:
            loop(stretch)
    finally:
        gc.collect()
        if scale.is_gpu:
            torch.cuda.empty_cache()
    return stretch.seconds, stretch.memory
