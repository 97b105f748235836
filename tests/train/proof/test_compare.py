"""Where two runs differ first, and which tensors."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from train.proof.compare import Seen, Tensor, changes_by_itself, difference, listed, tensors
from train.run import proving
from train.run.run_folder import Run


def seen(*updates: dict[str, str], figures: list[dict[str, object]] | None = None, samples: str = "") -> Seen:
    digests = {(number, 0, number): [one] for number, one in enumerate(updates, 1)}
    return Seen([digests], figures or [], [[samples]])


CALM = seen({"model": "a", "optimizer": "b"}, {"model": "c", "optimizer": "d"}, {"model": "e", "optimizer": "f"})


def test_the_first_update_counts_and_the_objects_that_differ_there() -> None:
    other = seen({"model": "a", "optimizer": "b"}, {"model": "x", "optimizer": "d"}, {"model": "y", "optimizer": "z"})
    found = difference(CALM, other)
    assert found is not None
    assert (found.update, found.names, found.same) == (2, ("model",), ("optimizer", "metrics", "samples"))
    assert difference(CALM, CALM) is None


def test_an_update_that_was_made_again_with_other_bits_is_a_difference() -> None:
    other = seen(*(one[-1] for one in CALM.digests[0].values()))
    other.digests[0][2, 0, 2].insert(0, {"model": "before the kill", "optimizer": "d"})
    found = difference(CALM, other)
    assert found is not None and (found.update, found.names) == (2, ("model",))


def test_an_update_that_one_run_lacks_is_a_difference() -> None:
    found = difference(CALM, Seen([dict(list(CALM.digests[0].items())[:2])], [], [[""]]))
    assert found is not None and found.update == 3


def test_figures_and_samples_count_and_some_may_be_left_out() -> None:
    lines = [{"step": 1, "loss": 1.0, "seconds": 2.0}]
    one, two = seen({"model": "a"}, figures=lines), seen({"model": "a"}, figures=[{**lines[0], "seconds": 3.0}])
    found = difference(one, two)
    assert found is not None and (found.update, found.names, found.figures) == (0, ("metrics",), ("seconds",))
    assert found.logged == 1
    assert difference(one, two, but=["seconds"]) is None
    found = difference(seen({"model": "a"}, samples="1 5"), seen({"model": "a"}, samples="1 6"))
    assert found is not None and found.names == ("samples",)


def test_a_run_in_its_first_epoch_is_told_from_one_that_ended_an_epoch_or_has_none() -> None:
    def run(*points: tuple[int, int, int], samples: str = "1 5") -> Seen:
        return Seen([{point: [{"model": "a"}] for point in points}], [], [[samples] if samples else []])

    assert run((1, 0, 1), (2, 0, 2)).is_in_first_epoch
    assert not run((1, 0, 1), (1, 1, 0)).is_in_first_epoch
    assert not run((1, 0, 1), (2, 0, 2), samples="").is_in_first_epoch  # session.range()
    assert not run((1, 0, 0), (2, 0, 0)).is_in_first_epoch  # a task


def test_lines_after_other_updates_are_placed_at_the_first_that_differs() -> None:
    lines: list[dict[str, object]] = [{"step": step, "loss": 1.0} for step in (2, 4, 6)]
    found = difference(
        seen({"model": "a"}, figures=lines), seen({"model": "a"}, figures=[lines[0], {**lines[1], "step": 3}])
    )
    assert found is not None and (found.figures, found.logged) == (("step", "number of lines"), 3)
    found = difference(seen({"model": "a"}, figures=lines), seen({"model": "a"}, figures=lines[:2]))
    assert found is not None and (found.figures, found.logged) == (("number of lines",), 6)


def test_a_figure_or_a_value_that_differs_in_calm_runs_is_left_out_and_nothing_else() -> None:
    found = difference(seen({"model": "a", "values.at": "1"}), seen({"model": "a", "values.at": "2"}))
    assert found is not None and changes_by_itself(found) == ("values.at",)
    found = difference(seen({"model": "a", "values.at": "1"}), seen({"model": "b", "values.at": "2"}))
    assert found is not None and changes_by_itself(found) is None
    found = difference(seen({"model": "a"}, samples="1"), seen({"model": "a"}, samples="2"))
    assert found is not None and changes_by_itself(found) is None


def test_plain_values_are_listed_before_tensors_by_their_distance_and_nan_is_equal_to_itself(tmp_path: Path) -> None:
    kept = {f"w{number}": torch.zeros(3) for number in range(12)} | {"nan": torch.tensor([math.nan]), "lr": "0.1"}
    other = {name: one + torch.tensor([0.0, int(name[1:]), 0.0]) for name, one in kept.items() if name[0] == "w"}
    other |= {"nan": torch.tensor([math.nan]), "lr": "0.2"}
    runs = [Run(tmp_path / "one"), Run(tmp_path / "two")]
    for run, state in zip(runs, (kept, other), strict=True):
        run.folder.mkdir()
        torch.save({"model": state}, proving.dump_file(run, 0))
    lines = listed(tensors(*runs, 1))
    assert lines[:2] == ["model: lr (0.1, 0.2)", "model: w11 (1 of 3 elements, largest distance 1.1e+01)"]
    assert len(lines) == 11 and lines[-1] == "2 tensors more"
    assert listed(tensors(runs[0], runs[0], 1)) == []
    assert len(listed([Tensor(f"values.{number}", 0, 0, 0.0) for number in range(9)])) == 4
