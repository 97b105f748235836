"""When and how a run is broken off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.errors import Refused
from train.proof.moments import ALL, KINDS, SAVE, choose, saves


@given(st.integers(3, 200), st.integers(1, 12), st.integers(1, 4), st.integers(0, 99))
def test_breaks_lie_between_the_first_update_and_the_last_in_order(
    updates: int, kills: int, ranks: int, seed: int
) -> None:
    if kills > updates - 2:
        with pytest.raises(Refused, match="give more --updates"):
            choose(updates, kills, ranks, seed)
        return
    breaks = choose(updates, kills, ranks, seed)
    at = [one.update for one in breaks]
    assert at == sorted(set(at)) and at[0] >= 2 and at[-1] < updates
    assert all(0 <= one.rank < ranks for one in breaks)
    assert [one.kind for one in breaks][:4] == [*KINDS[:4]][:kills]
    assert breaks == choose(updates, kills, ranks, seed)


@given(st.integers(8, 200), st.integers(4, 6), st.integers(0, 99))
def test_a_checkpoint_is_there_before_everything_is_killed_and_in_each_save(
    updates: int, kills: int, seed: int
) -> None:
    breaks = choose(updates, kills, 2, seed)
    found = saves(breaks)
    assert {one.update for one in breaks if one.kind == SAVE} <= {*found}
    for one in breaks:
        if one.kind == ALL:
            assert any(save < one.update for save in found)


def test_other_seeds_break_at_other_updates() -> None:
    assert len({tuple(choose(60, 4, 2, seed)) for seed in range(20)}) == 20
