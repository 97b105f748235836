"""Ranks that make their updates in lockstep agree after which one they stop or save, whoever asks and when."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch.distributed as dist

from train.sessions import agreement
from train.sessions.agreement import Agreement
from train.sessions.place import SAVE, STOP


def _acts(
    seed: int, asked: dict[int, tuple[int, str]], updates: int = 60, size: int = 3
) -> list[list[tuple[int, str]]]:
    """Return what each rank does, and after which update. `asked`: rank -> the update from which it wants what."""
    store, border = dist.HashStore(), threading.Barrier(size)
    acts: list[list[tuple[int, str]]] = [[] for _ in range(size)]

    def rank(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        agreed = Agreement(store, rank=number, size=size)
        for update in range(1, updates + 1):
            time.sleep(rng.choice([0.0, 0.0, 0.002, 0.01]))
            border.wait()  # as the sum of the gradients
            time.sleep(rng.choice([0.0, 0.0, 0.001]))
            since, what = asked.get(number, (updates + 1, ""))
            done = [one for _, one in acts[number]]
            act = agreed.due(update, what if update >= since and what not in done else "")
            if act:
                acts[number].append((update, act))
            if agreed.comes_next:
                acts[number].append((update, f"next {agreed.comes_next}"))

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    return acts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("asked", [{0: (9, STOP)}, {2: (9, STOP)}, {0: (9, SAVE), 1: (12, STOP)}])
def test_all_ranks_act_after_the_same_update(
    seed: int, asked: dict[int, tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "LOOK_EVERY", 0.015)
    first, *others = _acts(seed, asked)
    assert all(one == first for one in others), (first, others)
    acted = [(update, what) for update, what in first if "next" not in what]
    assert {what for _, what in acted} == {what for _, what in asked.values()}
    assert all(update > 9 for update, _ in acted)
    assert [(update + 1, what.removeprefix("next ")) for update, what in first if "next" in what] == acted


def test_a_single_rank_acts_at_once() -> None:
    alone = Agreement(None, rank=0, size=1)
    assert (alone.due(1, ""), alone.due(2, STOP)) == ("", STOP)
