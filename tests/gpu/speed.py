"""Speed beside a hand-written loop of the same settings, and what snapshots, exactness and each precision do to it."""

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
    snapshots,
    train_here,
)
from train.signals import USER, StopRequest

GOAL = 0.99
LITTLE = "launch-bound"
"""A GPT whose kernels take the device less time than it takes the host to start them."""
_MANY = 1_000_000
"""Steps that no loop here comes to: it is stopped when the stretch that is timed is over."""


def part(scale: Scale) -> Iterator[Case]:
    """What shows most first. Only the GPT is compiled, a third of its layers: the compiler takes its time by layers."""
    plain: dict[str, float] = {}
    yield Case("gpt, bf16", beside, (scale, "gpt", "not compiled", plain))
    yield Case(f"gpt of 2 layers, bf16, {LITTLE}", beside, (scale, "gpt", LITTLE, plain))
    yield Case("gpt, bf16, with snapshots", _with_snapshots, (scale, plain))
    for precision in ("fp32", "tf32", "bf16") if scale.is_gpu else ("fp32", "bf16"):
        yield Case(f"gpt, {precision}", _in_precision, (scale, precision, plain))
    yield Case("gpt, deterministic", _deterministic, (scale, "gpt", plain))
    yield Case("resnet, bf16", beside, (scale, "resnet", "not compiled", plain))
    if scale.is_gpu:
        yield Case("resnet, deterministic", _deterministic, (scale, "resnet", plain))
    yield Case("gpt, bf16, compiled", _compiled, (scale, plain))


def sizes(scale: Scale, task: str, how: str) -> dict[str, Any]:
    """The flags of a run in bf16."""
    flags = scale.flags(task) | {"precision": "bf16", "compile": "true" if how == "compiled" else "false"}
    if task == "resnet":
        flags["channels_last"] = "true"
    if scale.is_small:
        return flags
    if how == LITTLE:
        flags |= {"batch_size": 8, "task.layers": 2, "task.context": 128, "task.width": 256, "task.heads": 4,
                  "task.vocabulary": 4096}  # fmt: skip
    return flags | ({"task.layers": 4} if how == "compiled" else {})


def beside(scale: Scale, task: str, how: str, plain: dict[str, float]) -> Row:
    """A task in our loop and in a hand-written one.

    Both in turn, so that a slow moment meets both, and the other one first every second time: a card that has become
    warm is slower. What the hand-written loop cannot do either is not ours to answer for; what it can, is.
    """
    name = "gpt of 2 layers" if how == LITTLE else task
    what, flags = f"{name}, bf16, {how}", sizes(scale, task, how)
    bares, owns, memory = list[float](), list[float](), dict[bool, int]()
    turns = 1 if scale.is_small or how == "compiled" else 4 if how == LITTLE else 2
    for turn in range(turns):
        for is_bare in (True, False) if turn % 2 == 0 else (False, True):
            try:
                found, memory[is_bare] = (_theirs if is_bare else _ours)(scale, task, flags, how)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"[:260]
                if is_bare:
                    return Row(what, f"the hand-written loop fails: {said}", UNCHECKED)
                return Row(what, f"ours, where the hand-written loop trains: {said}", FAILED)
            (bares if is_bare else owns).append(found)
    plain.setdefault(task, min(owns))
    ratio = statistics.median(theirs / ours for ours, theirs in zip(owns, bares, strict=True))
    said = f"{flags['batch_size'] / min(owns):.1f} samples/s, {ratio:.3f} of a hand-written loop"
    said += f"; {mebibytes(memory[False])}, there {mebibytes(memory[True])}" if scale.is_gpu else ""
    verdict = (OK if ratio >= GOAL else BELOW) if scale.is_gpu else FIGURE
    figures = {"seconds": owns, "bare_seconds": bares, "ratio": ratio, "memory": memory[False],
               "bare_memory": memory[True]}  # fmt: skip
    return Row(what, f"{said}; without snapshots", verdict, f"{GOAL} of it", figures)


def _with_snapshots(scale: Scale, plain: dict[str, float]) -> Row:
    """The same run without snapshots in memory, and with one always on its way, which is far more than any run has."""
    flags = sizes(scale, "gpt", "")
    without = plain.get("gpt") or _ours(scale, "gpt", flags)[0]
    with snapshots() as memory:
        within, _ = _ours(scale, "gpt", flags)
        kept = memory.step
    what = "gpt, bf16, a snapshot always on its way"
    if not kept:
        return Row(what, "no snapshot was taken", FAILED)
    found = f"{without / within:.3f} of the speed without; in a run they are as rare as 1 % of the time allows"
    return Row(what, found, figures={"seconds": within, "seconds_without": without, "newest": kept})


def _in_precision(scale: Scale, precision: str, plain: dict[str, float]) -> Row:
    """Speed and memory of a third of the GPT's layers."""
    flags = scale.flags("gpt") | {"precision": precision} | ({} if scale.is_small else {"task.layers": 4})
    seconds, memory = _ours(scale, "gpt", flags)
    base = plain.setdefault("fp32", seconds)
    found = f"{flags['batch_size'] / seconds:.1f} samples/s, {base / seconds:.2f} times fp32"
    found += f", {mebibytes(memory)}" if scale.is_gpu else ""
    return Row(f"gpt, {precision}", found, figures={"seconds": seconds, "memory": memory})


def _deterministic(scale: Scale, task: str, plain: dict[str, float]) -> Row:
    """What the same bits cost: the default, beside --deterministic false."""
    flags = sizes(scale, task, "")
    exactly = plain.get(task) or _ours(scale, task, flags)[0]
    freely, _ = _ours(scale, task, flags | {"deterministic": "false"})
    found = f"{freely / exactly:.3f} of the speed with --deterministic false"
    figures = {"seconds": exactly, "seconds_not_deterministic": freely}
    return Row(f"{task}, bf16, deterministic", found, figures=figures)


def _compiled(scale: Scale, plain: dict[str, float]) -> Row:
    missing = exact.no_compiler(scale)
    if missing:
        return Row("gpt, bf16, compiled", missing, UNCHECKED)
    return beside(scale, "gpt", "compiled", plain)


def _ours(scale: Scale, task: str, flags: dict[str, Any], how: str = "") -> tuple[float, int]:
    def loop(stretch: Stretch) -> None:
        with new_run(scale, task, flags | {"steps": _MANY}) as run:
            train_here(run, stop)

    stop = StopRequest(())
    return _measured(scale, how, loop, functools.partial(stop.ask, USER, "enough was seen"))


def _theirs(scale: Scale, task: str, flags: dict[str, Any], how: str) -> tuple[float, int]:
    return _measured(scale, how, lambda stretch: bare.loop(task, flags, lambda: stretch.is_over))


def _measured(
    scale: Scale, how: str, loop: Callable[[Stretch], None], then: Callable[[], None] = lambda: None
) -> tuple[float, int]:
    """Seconds a step of a loop, which ends when the stretch is over, and the device's memory at most."""
    first, last = (2, 8) if scale.is_small else (100, 600) if how == LITTLE else (15, 45)
    torch.compiler.reset()
    try:
        with Stretch(scale, first, last, then) as stretch:
            loop(stretch)
    finally:
        gc.collect()
        if scale.is_gpu:
            torch.cuda.empty_cache()
    return stretch.seconds, stretch.memory
