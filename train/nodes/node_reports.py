"""The reports of nodes about how their ranks ended, and the facts that node 0 makes of them for its decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..run.outcome import Kind, Outcome
from ..supervise.decide import Decision, Facts, StopCause
from .rendezvous import Public

_LAST = 4000
"""Number of characters of a failed rank's log that a node sends to node 0."""


def decision_of(plain: Mapping[str, Any]) -> Decision:
    """Return node 0's decision from its published form."""
    return Decision(**{key: value for key, value in plain.items() if key != "round"})


def of_rank_0(facts: Facts) -> dict[int, Outcome]:
    """Return the outcome of this node's first rank as that of rank 0: all ranks have stopped after the same step."""
    first = next(iter(facts.outcomes.values()), None)
    return {0: dataclasses.replace(first, rank=0)} if first is not None else {}


def is_bad(facts: Facts) -> bool:
    """Whether a rank of this node has failed or died."""
    return bool(facts.exits or facts.hang or facts.problem or any(one.is_fault for one in facts.outcomes.values()))


def report_of(facts: Facts, leaves: str) -> Public:
    """Return this node's report for node 0 about how its ranks ended."""
    asked = facts.asked
    return {
        "outcomes": [dataclasses.asdict(one) for one in facts.outcomes.values()],
        "exits": {str(rank): code for rank, code in facts.exits.items()},
        "logs": {str(rank): text[-_LAST:] for rank, text in facts.logs.items() if rank in facts.exits},
        "hang": facts.hang, "problem": facts.problem, "killed_at": facts.killed_at,
        "asked": {"by": asked.by, "text": asked.text} if asked and not facts.leaves else None,
        "leaves": leaves,
    }  # fmt: skip


def merged(facts: Facts, reports: list[Public], lost: list[str]) -> Facts:
    """Return node 0's facts, merged with the reports of the other nodes.

    Args:
        lost: Names of the nodes that are gone.
    """
    outcomes = dict(facts.outcomes)
    exits, logs, asked = dict(facts.exits), dict(facts.logs), facts.asked
    for report in reports:
        for found in report["outcomes"]:
            outcomes[found["rank"]] = Outcome(**found | {"kind": Kind(found["kind"])})
        exits |= {int(rank): code for rank, code in report["exits"].items()}
        logs |= {int(rank): text for rank, text in report["logs"].items()}
        if report["asked"] and (asked is None or facts.leaves):  # a stop of the whole run has priority
            asked = StopCause(**report["asked"])

    def first(name: str, own: Any) -> Any:
        return own or next((report[name] for report in reports if report[name]), own)

    return dataclasses.replace(
        facts, outcomes=outcomes, exits=exits, logs=logs, asked=asked, hang=first("hang", facts.hang),
        problem=first("problem", facts.problem), killed_at=first("killed_at", facts.killed_at),
        regroup=first("leaves", facts.regroup), leaves=facts.leaves and asked is facts.asked, lost=" and ".join(lost),
    )  # fmt: skip
