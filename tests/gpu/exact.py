"""Bit-exactness on the device: a run that is killed and resumed ends with the weights of an undisturbed one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.gpu.harness import FAILED, OK, UNCHECKED, Case, Row, Scale, new_run, reason, train_forked
from train.run import states

FLAGS: dict[str, Any] = {"steps": 12, "checkpoint.every_steps": 4}
KILLED = 10
"""The step in which it is killed; the checkpoint of step 8 may be on its way to the disk then."""
_COMPILED, _PAIR = "gpt, bf16, compiled", "ddp, 2 ranks on one device over gloo"
ORDERED = {"parallel.reduce": "ordered"}


def part(scale: Scale) -> Iterator[Case]:
    """Tasks and precisions, what shows most first; two ranks, on one GPU where there are no more; a compiled model."""
    yield _case(scale, "gpt", "bf16")
    own = scale.exact_flags("own") | FLAGS | {"precision": "bf16", "ema.decay": 0.9, "log.gradients": "true"}
    own["data.on_device"] = "true"
    what = "updates, averages and state of a task's own, data kept on the device"
    yield Case(what, compare, (scale, "own", what, own))
    if scale.gpus < 2:  # else the part `ranks` has them, over NCCL
        flags = ranks_flags(scale)
        yield Case(_PAIR, compare, (scale, "gpt", _PAIR, flags | {"parallel.strategy": "ddp"}, 2))
        yield Case("ordered: 1 and 2 ranks", ordered_on_one, (scale, flags | ORDERED, 2))
    yield _case(scale, "resnet", "bf16")
    if scale.is_gpu:
        yield _case(scale, "gpt", "fp16")
        yield Case(_COMPILED, _compiled, (scale,))
        yield _case(scale, "gpt", "tf32")


def _case(scale: Scale, task: str, precision: str) -> Case:
    flags = scale.exact_flags(task) | FLAGS | {"precision": precision}
    if task == "resnet" and scale.is_gpu:
        flags["channels_last"] = "true"
    what = f"{task}, {precision}"
    return Case(what, compare, (scale, task, what, flags))


def ranks_flags(scale: Scale) -> dict[str, Any]:
    """The flags of a run on several ranks, which is killed."""
    return scale.exact_flags("gpt") | FLAGS | {"precision": "bf16", "micro_batch_size": 1, "batch_size": 4}


def ordered_on_one(scale: Scale, flags: dict[str, Any], ranks: int) -> Row:
    what = f"ordered: 1 and {ranks} ranks"
    kinds = {torch.cuda.get_device_name(index) for index in range(min(ranks, scale.gpus))}
    if len(kinds) > 1:
        return Row(what, f"cards of one kind compute alike; here are {' and '.join(sorted(kinds))}", UNCHECKED)
    digests = []
    for count in (1, ranks):
        with new_run(scale, "gpt", flags, count) as run:
            digests.append(train_forked(run, count).get("weights_sha256"))
    is_equal = digests[0] is not None and digests[0] == digests[1]
    return Row(what, "equal" if is_equal else str(digests), OK if is_equal else FAILED, "equal digests")


def _compiled(scale: Scale) -> Row:
    """Compiled twice, by processes that know nothing of each other: what was chosen before is chosen anew."""
    missing = no_compiler(scale)
    if missing:
        return Row(_COMPILED, missing, UNCHECKED)
    flags = scale.exact_flags("gpt") | FLAGS | {"precision": "bf16", "compile": "true"}
    before, after = (
        {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        for folder in (scale.folder.absolute() / "compiled" / name for name in ("before", "after"))
    )
    return compare(scale, "gpt", _COMPILED, flags, caches=(before, after))


def no_compiler(scale: Scale) -> str:
    """Why no compiled model can be looked at, in a line; '' if one can.

    By what anybody's torch.compile can: Triton, a C compiler or Python.h may be missing, or a card be too old for it.
    """
    if scale.is_small:
        return "small, it would be compiled for longer than it trains"
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(64, device=scale.device))
    except Exception as error:
        said = [line for line in str(error).splitlines() if line.strip()] or [""]
        return f"torch.compile fails of x * 2 + 1: {type(error).__name__}: {said[0]}"[:300]
    finally:
        torch.compiler.reset()
    return ""


def compare(
    scale: Scale, task: str, what: str, flags: dict[str, Any], ranks: int = 1,
    caches: tuple[dict[str, str], dict[str, str]] = ({}, {}), changes: Sequence[str] = (),
) -> Row:  # fmt: skip
    """An undisturbed run beside one that is killed and resumed.

    Args:
        caches: where the compiler keeps what it has made, before the kill and after it.
        changes: what is different in the ranks; see in_rank.py.
    """
    with new_run(scale, task, flags, ranks) as run:
        whole = train_forked(run, ranks, environment=caches[0], changes=changes)
    with new_run(scale, task, flags, ranks) as run:
        resumed = killed = train_forked(run, ranks, f"step:{KILLED}:kill", caches[0], changes=changes)
        if killed["state"] == states.INTERRUPTED:
            resumed = train_forked(run, ranks, environment=caches[1], changes=changes)
    for record, name in ((whole, "undisturbed"), (resumed, "killed and resumed")):
        if record["state"] != states.FINISHED:
            return Row(what, f"{name}, it is {record['state']}: {reason(record)}", FAILED)
    start = resumed["attempts"][-1]["from_step"]
    digests = [record["weights_sha256"] for record in (whole, resumed)]
    if digests[0] != digests[1] or not start:
        return Row(what, f"resumed at step {start}: {digests[0][:12]} and {digests[1][:12]}", FAILED, "equal digests")
    found = f"killed in step {KILLED}, resumed after step {start}: equal"
    return Row(what, found, OK, "equal digests", {"sha256": digests[0]})
