"""Machines that have joined a run which others train already, and cannot do the work: they go, and the run goes on.

Pure, as runs/verdict.py: all nodes come to the same from what all have said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.runs.verdict import Facts


def among(reports: Mapping[str, Mapping[str, Any]], least: int) -> dict[int, str]:
    """The ranks of nodes that are in a round for the first time, with the name of their node; {} where the others alone
    could not go on: without node 0 none does, nor do fewer than `least`.

    Args:
        reports: what each node says of itself in a round, by node.
    """
    new = {node for node, report in reports.items() if report.get("is_new")}
    if "0" not in reports or "0" in new or len(reports) - len(new) < least:
        return {}
    return {rank: reports[node]["name"] for node in new for rank in reports[node]["ranks"]}


def at_fault(facts: Facts, rank: int | None, recurs: bool) -> list[str]:
    """The names of the newcomers because of which an attempt has died; [] where it is another's fault as well.

    What a newcomer meets once it trains may be the task's own fault: then the others meet it again without it.

    Args:
        rank: the one that died first, if that is known.
        recurs: whether it would die so again.
    """
    faulty = {each.rank for each in facts.outcomes.values() if each.is_fault and each.recurs}
    is_theirs = not (faulty or recurs or facts.is_ready or facts.lost)
    if rank is not None:
        faulty.add(rank)
    names = {facts.newcomers[rank] for rank in faulty if rank in facts.newcomers}
    if facts.is_ready and not faulty <= facts.newcomers.keys():
        return []
    if is_theirs and not names:
        # time and again not one came so far as to train, as the others did before: a firewall lets nobody reach the
        # newcomers' ranks, or what these wait for never comes, and the others are the first who see it
        return sorted(set(facts.newcomers.values()))
    # before they train, what all ranks refuse is their number, or what else came with the newcomer
    return sorted(names)
