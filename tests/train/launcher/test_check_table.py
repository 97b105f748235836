"""The table of checks: who is checked, in which order, and what reaches the user."""

from __future__ import annotations

import pytest

from train import config as configuration
from train.errors import Refused
from train.launcher import checks
from train.launcher.case import Case, Kind
from train.launcher.checks import Check, Needs
from train.tasks import load


def a_case(kind: Kind) -> Case:
    return Case(kind=kind, task=load("digits"), config=configuration.build({"epochs": 1.0}), asked={}, reads="x".__eq__)


def refuse(case: Case) -> None:
    raise Refused("no")


def test_checks_of_a_launch_are_made_by_need_then_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        Check(Kind.NEW | Kind.FORK, Needs.READS, lambda case: ["last"]),
        Check(Kind.RESUME, Needs.CONFIG, refuse),
        Check(Kind.NEW, Needs.DATA, lambda case: ["second", "third"]),
        Check(Kind.NEW, Needs.CONFIG, lambda case: None),
        Check(Kind.NEW | Kind.FORK, Needs.CONFIG, lambda case: ["first"]),
    )
    monkeypatch.setattr(checks, "CHECKS", rows)
    new, fork = a_case(Kind.NEW), a_case(Kind.FORK)
    for case in (new, fork):
        checks.run(case)
    assert (new.warnings, fork.warnings) == (["first", "second", "third", "last"], ["first", "last"])
    with pytest.raises(Refused, match="no"):
        checks.run(a_case(Kind.RESUME))


def test_what_a_task_reads_is_known_before_the_checks_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, bool] = {}

    def look(case: Case) -> None:
        found.update({name: case.reads(name) for name in ("task.shift", "data.name", "x")})

    case = a_case(Kind.NEW)
    case.config.task = load("digits").Settings()  # type: ignore[misc]
    case.config.data.seed, case.config.micro_batch_size = 0, 8
    rows = (
        Check(Kind.NEW, Needs.READS, look),
        Check(Kind.NEW, Needs.DATA, lambda case: [f"{case.samples > 0}"]),
    )
    monkeypatch.setattr(checks, "CHECKS", rows)
    checks.run(case)
    assert case.warnings == ["True"]
    assert found == {"task.shift": True, "data.name": False, "x": True}
