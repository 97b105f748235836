"""Bit-exactness on the device: a run that is killed and resumed ends with the weights of one that nobody disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gpu import compiler
from tests.gpu.harness import FAILED, OK, UNCHECKED, Case, Row, Scale, exact_flags, passing, train_forked
from train.run import states

STEPS = 12
KILLED = 10
"""The step in which it is killed; the checkpoint of step 8 may be on its way to the disk then."""


def part(scale: Scale) -> Iterator[Case]:
    """Every task in every precision, on one device."""
    for task in ("digits", "resnet", "gpt"):
        for precision in scale.precisions(task):
            flags = exact_flags(scale, task) | {"precision": precision, "steps": STEPS}
            if task == "resnet" and scale.is_gpu:
                flags["channels_last"] = "true"
            what = f"{task}, {precision}"
            yield Case(what, 7.6, compare, (scale, task, what, flags))


def compiled(scale: Scale) -> Iterator[Case]:
    """A compiled model: a part of its own, for it is compiled twice, by processes that know nothing of each other."""
    what = "gpt, bf16, compiled"
    yield Case(what, 37, _compiled, (scale, what))


def _compiled(scale: Scale, what: str) -> Row:
    missing = compiler.missing(scale)
    if missing:
        return Row(what, missing, UNCHECKED)
    flags = exact_flags(scale, "gpt") | {"precision": "bf16", "steps": STEPS, "compile": "true"}
    return compare(scale, "gpt", what, flags, is_compiled=True)


def compare(
    scale: Scale, task: str, what: str, flags: dict[str, Any], ranks: int = 1, is_compiled: bool = False,
) -> Row:  # fmt: skip
    """An undisturbed run beside one that is killed and resumed.

    Args:
        is_compiled: it is resumed with empty caches of the compiler, so that what was chosen before is chosen anew.
    """
    caches = [_caches(scale, name) if is_compiled else {} for name in ("before", "after")]
    with passing(scale, task, flags, ranks) as run:
        whole = train_forked(run, ranks, environment=caches[0])
    if whole["state"] != states.FINISHED:
        return Row(what, f"{whole['state']}: {reason(whole)}", FAILED)
    with passing(scale, task, flags, ranks) as run:
        record = train_forked(run, ranks, f"step:{KILLED}:kill", caches[0])
        if record["state"] != states.INTERRUPTED:
            return Row(what, f"killed, it is {record['state']}: {reason(record)}", FAILED)
        resumed = train_forked(run, ranks, environment=caches[1])
    if resumed["state"] != states.FINISHED:
        return Row(what, f"resumed, it is {resumed['state']}: {reason(resumed)}", FAILED)
    start = resumed["attempts"][-1]["from_step"]
    digests = [record["weights_sha256"] for record in (whole, resumed)]
    if digests[0] != digests[1] or not start:
        return Row(what, f"resumed at step {start}: {digests[0][:12]} and {digests[1][:12]}", FAILED, "equal digests")
    found = f"killed in step {KILLED}, resumed after step {start}: equal"
    return Row(what, found, OK, "equal digests", {"sha256": digests[0]})


def _caches(scale: Scale, name: str) -> dict[str, str]:
    """Where torch's compiler and Triton keep what they have made."""
    folder = scale.folder.absolute() / "compiled" / name
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def reason(record: dict[str, Any]) -> str:
    """Why a run ended, in a line."""
    return str(record.get("reason") or record["attempts"][-1].get("reason") or "")[:300]
