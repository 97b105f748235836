"""Which ranks have no data in a step: in the last round of a global batch whose micro batches do not divide evenly.

They take part in the reduction with weight 0 and call nothing of the task. Nothing here imports torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from train.data.sharing import Sharing, share
from train.record import heartbeat

if TYPE_CHECKING:
    from train.data.plan import Plan
    from train.record.heartbeat import Beat

EVERY, LAST, EVALUATION = "every_batch", "last_batch", "evaluation"
"""Keys of `survey`: full global batches, the short one at the end of an epoch, evaluations."""


def idle(micros: int, world: int, is_ordered: bool = False) -> list[int]:
    """The ranks without a micro batch in the last round of `micros` among `world` ranks."""
    rounds = math.ceil(micros / world)
    if not is_ordered:
        return list(range(micros % world or world, world))
    return [rank for rank in range(world) if len(share(rank, micros, world, True)) < rounds]


def survey(plan: Plan, evaluation: Plan | None, world: int, is_ordered: bool = False) -> dict[str, list[int]]:
    """Which ranks have no data, by where; without those places in which every rank has some."""
    micros = {LAST: plan.micro_batches(plan.steps_per_epoch - 1)}
    if plan.steps_per_epoch > 1:
        micros[EVERY] = plan.micro_batches(0)
    if evaluation:
        micros[EVALUATION] = math.ceil(evaluation.evaluated / evaluation.micro_batch_size)
    found = {place: idle(count, world, is_ordered) for place, count in micros.items()}
    return {place: ranks for place, ranks in found.items() if ranks}


def waits(plan: Plan, world: int, first: int, last: int) -> bool:
    """Whether a rank has no data in any of the steps first <= step < last, counted from 0."""
    ends = plan.steps_per_epoch - 1 - first % plan.steps_per_epoch  # steps until the last one of this epoch
    steps = {first, first + ends, first + ends + 1}
    return any(idle(plan.micro_batches(step), world) for step in steps if step < last)


def names(ranks: list[int]) -> str:
    """`rank 2`, `ranks 1 and 2`, `ranks 5 to 7`, `ranks 1, 3 and 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def sentence(found: dict[str, list[int]]) -> str:
    """What the log says of a `survey` at the start of an attempt; '' where all ranks always have data."""
    parts = []
    for place, what in ((EVERY, "every batch"), (LAST, "the last batch of an epoch"), (EVALUATION, "an evaluation")):
        if place in found and not (place == LAST and found.get(EVERY) == found[LAST]):
            parts.append(f"{names(found[place])} in {what}")
    return f"no data in the last round of micro batches: {'; '.join(parts)}" if parts else ""


def doubt(plan: Plan, sharing: Sharing, step: int, total: int, is_first: bool, is_last_slot: bool) -> str:
    """For whom a task that communicates now would wait, in this step or a later one; '' where for nobody.

    Args:
        step: counted from 0.
        is_first: of this attempt: what would come to grief at the end of the epoch is found in it.
    """
    world, is_ordered = sharing.world, sharing.is_ordered
    if world == 1 or sharing.lends:
        return ""
    if is_last_slot and (ranks := idle(plan.micro_batches(step), world, is_ordered)):
        return f"{names(ranks)}, without data in step {step + 1}"
    if not is_first or not waits(plan, world, step, total):
        return ""
    found = survey(plan, None, world, is_ordered)
    where = "the last batch of an epoch" if LAST in found else "every batch"
    return f"{names(found.get(LAST) or found[EVERY])}, without data in {where}"


def remark(record: dict[str, Any], beat: Beat | None) -> str:
    """Of a step that did not come to its end: which ranks had no data in it, or ''.

    Args:
        record: run.json, in which rank 0 has noted `survey` as `without_data`.
        beat: the last sign of life of the rank that is behind.
    """
    noted = record.get("without_data") or {}
    if beat is None or beat.phase not in (heartbeat.TRAINING, heartbeat.EVALUATING):
        return ""
    if beat.phase == heartbeat.EVALUATING:
        place, where = EVALUATION, "in this evaluation"
    else:
        is_last = (beat.step + 1) % (record.get("steps_per_epoch") or 1) == 0
        place, where = (LAST if is_last else EVERY), f"in step {beat.step + 1}"
    if place not in noted:
        return ""
    return f"{names(noted[place])} had no data {where} (a loss or metric that communicates waits for them for ever)"
