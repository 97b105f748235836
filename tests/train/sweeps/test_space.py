"""The space of a sweep: which trials it has, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from train.errors import Refused
from train.sweeps.space import Space, numbered


def read(**options: Any) -> Space:
    return Space.read(**options)


def test_a_grid_has_each_value_with_each_other_and_repeats_side_by_side() -> None:
    cells = read(grid=["optim.lr=1e-3,1e-2", "batch_size=32,64"], repeat=["seed=0..1"]).cells()
    assert len(cells) == 8
    assert cells[:3] == [
        {"optim.lr": "1e-3", "batch_size": "32", "seed": "0"},
        {"optim.lr": "1e-3", "batch_size": "32", "seed": "1"},
        {"optim.lr": "1e-3", "batch_size": "64", "seed": "0"},
    ]
    assert numbered("lr", 1000)[::999] == ["lr-001", "lr-1000"]


def test_a_list_is_one_value() -> None:
    cells = read(grid=["optim.args.betas=[0.9, 0.95],[0.8,0.9]", 'task.words="a,b",c']).cells()
    assert {cell["optim.args.betas"] for cell in cells} == {"[0.9, 0.95]", "[0.8,0.9]"}
    assert {cell["task.words"] for cell in cells} == {'"a,b"', "c"}


def test_a_draw_depends_on_the_seed_and_its_number_alone() -> None:
    options: dict[str, Any] = {"search": ["optim.lr=log:1e-5..1e-2", "batch_size=32,64", "task.dropout=0..0.5"]}
    few, many = read(**options, draws=5).cells(), read(**options, draws=40).cells()
    assert many[:5] == few
    assert read(search=options["search"][::-1], draws=5).cells() == few
    assert read(**options, draws=5, seed=1).cells() != few
    rates = sorted(float(cell["optim.lr"]) for cell in many)
    assert 1e-5 <= rates[0] < 1e-4 and 1e-3 < rates[-1] <= 1e-2
    assert {cell["batch_size"] for cell in many} == {"32", "64"}
    assert all(0 <= float(cell["task.dropout"]) <= 0.5 for cell in many)
    whole = read(search=["task.width=1..8", "optim.lr=1.0..2"], draws=30).cells()
    assert {int(cell["task.width"]) for cell in whole} == set(range(1, 9))


def test_each_draw_is_another_one() -> None:
    cells = read(search=["a=1..8", "b=x,y"], draws=16).cells()
    assert len({tuple(cell.values()) for cell in cells}) == 16
    assert read(search=["a=1..8", "b=x,y"], draws=9).cells() == cells[:9]
    with pytest.raises(Refused, match="--trials 3: only 2 different ones were found, as values have 4 digits"):
        read(search=["a=1.0001..1.001"], draws=3).cells()


def test_repeats_of_a_draw_have_its_values() -> None:
    cells = read(search=["optim.lr=log:1e-5..1e-2"], repeat=["seed=0..2"], draws=2).cells()
    assert [cell["seed"] for cell in cells] == ["0", "1", "2"] * 2
    assert len({cell["optim.lr"] for cell in cells[:3]}) == 1
    assert cells[0]["optim.lr"] != cells[3]["optim.lr"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "no trials"),
        ({"grid": ["a=1"], "search": ["b=1,2"], "draws": 2}, "exclude each other"),
        ({"repeat": ["seed=0..2"]}, "no trials"),
        ({"grid": ["a"]}, "NAME=VALUES"),
        ({"grid": ["a="]}, "NAME=VALUES"),
        ({"grid": ["=1"]}, "NAME=VALUES"),
        ({"grid": ["a=1,,2"]}, "with commas"),
        ({"grid": ["a=0.1,1e-1"]}, "1e-1 is there twice"),
        ({"grid": ["a=x,x"]}, "x is there twice"),
        ({"grid": ["a=[1,2],[1, 2]"]}, "is there twice"),
        ({"grid": ["a=1", "a=2"]}, "given twice"),
        ({"grid": ["a=1"], "repeat": ["a=2"]}, "given twice"),
        ({"grid": ["a=0..0.5"]}, "whole ends"),
        ({"grid": ["a=log:1..2"]}, "with commas|whole ends"),
        ({"grid": ["a=4..0"]}, "smaller end first"),
        ({"grid": ["a=0..99", "b=0..10"]}, "1100 trials; a sweep has at most 1000"),
        ({"grid": ["a=1"], "draws": 3}, "--trials is for --search"),
        ({"grid": ["a=1"], "seed": 3}, "--search-seed is for --search"),
        ({"search": ["a=1..2"]}, "number of draws"),
        ({"search": ["a=log:0..2"], "draws": 3}, "above 0"),
        ({"search": ["a=log:3"], "draws": 3}, "two ends"),
        ({"search": ["a=2.5..1"], "draws": 3}, "smaller end first"),
        ({"search": ["a=1,2", "b=3,4"], "draws": 5}, "only 4 different ones"),
        ({"search": ["a=0..1.5"], "draws": 1001}, "at most 1000"),
    ],
)
def test_a_space_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        read(**options)


def test_a_space_gets_more_values_and_keeps_what_it_has() -> None:
    grid = read(grid=["optim.lr=1e-3,1e-2"], repeat=["seed=0..1"])
    assert len(grid.extended(["optim.lr=3e-3", "seed=2"]).cells()) == 9
    search = read(search=["optim.lr=log:1e-5..1e-2"], draws=3)
    assert search.extended([], 5).cells()[:3] == search.cells()
    for more, draws, why in (
        (["batch_size=3"], None, "it has optim.lr, seed"),
        (["optim.lr=0.001"], None, "0.001 is there twice"),
        ([], 5, "more by --add"),
    ):
        with pytest.raises(Refused, match=why):
            grid.extended(more, draws)
    with pytest.raises(Refused, match="has 3 already"):
        search.extended([], 3)
