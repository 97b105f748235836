"""Bit-exactness on the device: a run that is killed and resumed ends with the weights of one that nobody disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gpu.harness import FAILED, OK, Row, Scale, exact_flags, made, train_forked
from train.record import store

STEPS = 24
KILL = "step:19:kill"
"""In its 19th step; the checkpoint of step 16 may be on its way to the disk then."""


def part(scale: Scale) -> Iterator[Row]:
    """Every task in every precision, on one device."""
    for task in ("digits", "resnet", "gpt"):
        for precision in scale.precisions(task):
            flags = exact_flags(scale, task) | {"precision": precision, "steps": STEPS}
            if task == "resnet" and scale.is_gpu:
                flags["channels_last"] = "true"
            yield compare(scale, task, f"{task}, {precision}", flags)


def compare(scale: Scale, task: str, what: str, flags: dict[str, Any], ranks: int = 1) -> Row:
    """An undisturbed run beside one that is killed and resumed."""
    whole = train_forked(made(scale, task, flags, ranks), ranks)
    if whole["state"] != store.FINISHED:
        return Row(what, f"{whole['state']}: {reason(whole)}", FAILED)
    run = made(scale, task, flags, ranks)
    killed = train_forked(run, ranks, KILL)
    if killed["state"] != store.INTERRUPTED:
        return Row(what, f"killed, it is {killed['state']}: {reason(killed)}", FAILED)
    resumed = train_forked(run, ranks)
    if resumed["state"] != store.FINISHED:
        return Row(what, f"resumed, it is {resumed['state']}: {reason(resumed)}", FAILED)
    start = resumed["attempts"][-1]["from_step"]
    digests = [record["weights_sha256"] for record in (whole, resumed)]
    if digests[0] != digests[1] or not start:
        return Row(what, f"resumed at step {start}: {digests[0][:12]} and {digests[1][:12]}", FAILED, "equal digests")
    return Row(
        what, f"killed in step 19, resumed after step {start}: equal", OK, "equal digests", {"sha256": digests[0]}
    )


def reason(record: dict[str, Any]) -> str:
    """Why a run ended, in a line."""
    return str(record.get("reason") or record["attempts"][-1].get("reason") or "")[:300]
