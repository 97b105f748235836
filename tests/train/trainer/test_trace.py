"""A trace is what Chrome and Perfetto read, of the steps that were asked for, and changes nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from train.errors import Refused
from train.trainer.trace import steps_of


def _names(engine: Any, run: str, file: str) -> set[str]:
    found = json.loads((engine.station.runs / run / "trace" / file).read_text())
    assert all("ph" in event for event in found["traceEvents"])
    return {event.get("name", "") for event in found["traceEvents"]}


def test_rank_0_traces_forward_and_backward_of_these_steps(engine: Any) -> None:
    engine.run("untraced", 2, steps=5)
    engine.run("traced", 2, steps=5, trace="2:3")
    names = _names(engine, "traced", "steps-2-3.json")
    assert {"aten::addmm", "AddmmBackward0"} <= names
    assert len(list((engine.station.runs / "traced" / "trace").iterdir())) == 1
    assert engine.outcome("traced") == engine.outcome("untraced")


def test_a_resume_traces_what_is_left(engine: Any) -> None:
    engine.run("traced-stopped", 1, ["3 0 SIGTERM"], steps=5, trace="2:4")
    assert "aten::addmm" in _names(engine, "traced-stopped", "steps-2-3.json")
    engine.resume("traced-stopped", 1)
    assert "aten::addmm" in _names(engine, "traced-stopped", "steps-4-4.json")
    with pytest.raises(Refused, match=re.escape("the run makes steps 6 to 9; give some of them")):
        engine.resume("traced-stopped", 1, trace="4:5", steps=9)


@pytest.mark.parametrize("text", ["20", "3:2", "0:2", "-1:2", "a:b", "1:2:3", "1:500", "٣:٤"])
def test_what_is_no_range_of_steps_is_refused(text: str) -> None:
    with pytest.raises(Refused, match=re.escape(f"--trace {text}: ")):
        steps_of(text)


def test_steps_that_a_new_run_does_not_make_are_refused(engine: Any) -> None:
    with pytest.raises(Refused, match="--trace 9:11: the run makes steps 1 to 10"):
        engine.run("never-traced", 1, trace="9:11")
