"""Which trials of a sweep continue after a rung: a function of what they had measured by then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train import signals
from train.run import states
from train.sweeps import kept
from train.sweeps.kept import Sweep, Trial
from train.sweeps.space import Space

RUNG = 4


def sweep(**values: Any) -> Sweep:
    trials = {f"s-{number:03d}": {"lr": str(number // 2), "seed": str(number % 2)} for number in range(8)}
    space = Space({"lr": ["0", "1", "2", "3"]}, {}, {"seed": ["0", "1"]})
    plain: dict[str, Any] = {"id": "x", "launch": {"rungs": [RUNG, 8]}, "space": space, "metric": "", "at_once": 1}
    return Sweep(**plain, trials=trials, **values)


def at_rung(runs: Path, scores: dict[str, list[tuple[int, float]]]) -> list[Trial]:
    """Trials that have measured these values after these steps, and stopped at the rung."""
    for name, values in scores.items():
        (runs / name).mkdir()
        lines = [{"step": step, "epoch": 1, "eval": {"score": value}} for step, value in values]
        (runs / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stopped: Any = {"stopped_by": signals.RUNG, "rung": RUNG}
    return [Trial(name, sweep().trials[name], states.STOPPED, record=stopped) for name in scores]


def test_the_best_mean_of_those_that_repeat_continues_with_all_of_them(tmp_path: Path) -> None:
    scores = {f"s-{number:03d}": [(4, 0.1)] for number in range(8)}
    scores |= {"s-002": [(4, 0.9)], "s-003": [(4, 0.2)], "s-006": [(4, 0.6)], "s-007": [(4, 0.6)]}
    found = kept.best_at(RUNG, tmp_path, sweep(by="score"), entered=at_rung(tmp_path, scores))
    assert found == ["s-006", "s-007"]  # a mean of 0.6, and not the 0.9 of one seed


def test_what_a_trial_measures_later_does_not_count_and_equal_ones_go_by_their_number(tmp_path: Path) -> None:
    scores = {f"s-{number:03d}": [(2, 0.5), (4, 0.4)] for number in range(8)} | {"s-006": [(4, 0.4), (6, 0.9)]}
    trials = at_rung(tmp_path, scores)
    assert kept.best_at(RUNG, tmp_path, sweep(by="score"), entered=trials) == ["s-000", "s-001"]
    assert kept.best_at(RUNG, tmp_path, sweep(by="last:min:score"), entered=trials[4:]) == ["s-004", "s-005"]


def test_one_that_failed_or_that_its_user_has_stopped_does_not_continue(tmp_path: Path) -> None:
    trials = at_rung(tmp_path, {f"s-{number:03d}": [(4, number / 10)] for number in range(8)})
    by_user: Any = {"stopped_by": signals.USER, "rung": RUNG}
    trials[7] = Trial("s-007", trials[7].parameters, states.FAILED)
    trials[6] = Trial("s-006", trials[6].parameters, states.STOPPED, record=by_user)
    trials[5] = Trial("s-005", trials[5].parameters, states.FAILED)
    assert kept.best_at(RUNG, tmp_path, sweep(by="score"), entered=trials) == ["s-004"]
    nothing = [Trial(one.name, one.parameters, states.FAILED) for one in trials]
    assert kept.best_at(RUNG, tmp_path, sweep(by="score"), entered=nothing) == []


def test_one_that_finished_early_is_chosen_by_what_it_has_measured_alone(tmp_path: Path) -> None:
    trials = at_rung(tmp_path, {f"s-{number:03d}": [(3, number / 10)] for number in range(8)})
    trials[0] = Trial("s-000", trials[0].parameters, states.FINISHED, record=trials[0].record, value=9.0)
    assert kept.best_at(RUNG, tmp_path, sweep(by="score"), entered=trials) == ["s-006", "s-007"]


def test_a_trial_that_continues_stands_before_those_that_were_left_out(tmp_path: Path) -> None:
    at_rung(tmp_path, {"s-000": [(4, 0.5), (6, 0.4)], "s-001": [(4, 0.3)]})
    record: dict[str, Any] = {"format": 2, "state": states.STOPPED, "stopped_by": signals.RUNG, "rung": 4, "step": 4}
    record |= {"trial_of": "x", "attempts": [], "epoch": 1, "metrics": {}, "name": ""}
    for name, more in (("s-000", {"state": states.FAILED, "stopped_by": None}), ("s-001", {})):
        (tmp_path / name / "run.json").write_text(json.dumps({**record, **more}))
    known: Any = {"rungs": {"4": ["s-001"]}}
    failed, chosen = (kept.look(tmp_path, name, sweep(by="score"), known=known) for name in ("s-000", "s-001"))
    assert (failed.value, chosen.value, chosen.reached) == (None, 0.3, 4.5)
    assert not kept.is_left_out(chosen, known["rungs"]) and kept.is_left_out(chosen, {"4": ["s-000"]})


def test_a_trial_stops_at_the_first_rung_after_which_it_does_not_continue() -> None:
    made = sweep()
    assert kept.next_rung(made, "s-000", {}) == 4
    assert kept.next_rung(made, "s-000", {"4": ["s-000"]}) == 8
    assert kept.next_rung(made, "s-001", {"4": ["s-000"]}) == 4
    assert kept.next_rung(made, "s-000", {"4": ["s-000"], "8": ["s-000"]}) == 0


def test_a_row_takes_the_mean_of_those_that_came_furthest() -> None:
    one = Trial("s-000", {"lr": "0", "seed": "0"}, states.FINISHED, value=0.9)
    other = Trial("s-001", {"lr": "0", "seed": "1"}, states.RUNNING, value=0.95, reached=RUNG + 0.5)
    last = Trial("s-002", {"lr": "1", "seed": "0"}, states.STOPPED, value=0.99, reached=RUNG)
    first, second = kept.rows([last, one, other], ["seed"], kept.Metric.read("score"))
    assert (first.values, first.mean, first.best(kept.Metric.read("score"))) == ([0.9], 0.9, one)
    assert (second.mean, second.best(kept.Metric.read("score"))) == (0.99, last)
