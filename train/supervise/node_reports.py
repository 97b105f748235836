"""What nodes tell each other of how their ranks ended, put together into the facts that node 0 decides by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from train.run.outcome import Kind, Outcome
from train.supervise.decide import Asked, Decision, Facts
from train.supervise.rendezvous import Public

_LAST = 4000
"""Characters of the log of a rank that failed, which node 0 gets."""


def decision_of(plain: Mapping[str, Any]) -> Decision:
    """Node 0's decision, as it was published."""
    return Decision(**{key: value for key, value in plain.items() if key != "round"})


def of_rank_0(facts: Facts) -> dict[int, Outcome]:
    """Outcomes of the ranks of this node, as if the first of them were rank 0: all have stopped after the same step."""
    first = next(iter(facts.outcomes.values()), None)
    return {0: dataclasses.replace(first, rank=0)} if first is not None else {}


def is_bad(facts: Facts) -> bool:
    """Whether a rank of this node has failed or died."""
    return bool(facts.exits or facts.hang or facts.problem or any(one.is_fault for one in facts.outcomes.values()))


def report_of(facts: Facts, leaves: str) -> Public:
    """What node 0 is to know of how the ranks of this node ended."""
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
    """Node 0's facts with what other nodes report.

    Args:
        lost: nodes that are gone.
    """
    outcomes = dict(facts.outcomes)
    exits, logs, asked = dict(facts.exits), dict(facts.logs), facts.asked
    for report in reports:
        for found in report["outcomes"]:
            outcomes[found["rank"]] = Outcome(**found | {"kind": Kind(found["kind"])})
        exits |= {int(rank): code for rank, code in report["exits"].items()}
        logs |= {int(rank): text for rank, text in report["logs"].items()}
        if report["asked"] and (asked is None or facts.leaves):  # what all are to do goes before
            asked = Asked(**report["asked"])

    def first(name: str, own: Any) -> Any:
        return own or next((report[name] for report in reports if report[name]), own)

    return dataclasses.replace(
        facts, outcomes=outcomes, exits=exits, logs=logs, asked=asked, hang=first("hang", facts.hang),
        problem=first("problem", facts.problem), killed_at=first("killed_at", facts.killed_at),
        regroup=first("leaves", facts.regroup), leaves=facts.leaves and asked is facts.asked, lost=" and ".join(lost),
    )  # fmt: skip
