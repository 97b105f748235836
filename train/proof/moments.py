"""Chooses when and how a run is broken off. Pure functions."""

from __future__ import annotations

import dataclasses
import random

from ..errors import Refused

STOP, RANK, ALL, SAVE, AGENT, SERVER, WAY = "stop", "rank", "all", "save", "agent", "server", "way"
"""The run is stopped and resumed; a rank is killed; all ranks and the agent are; a rank is killed in a save; the agent
alone is killed; the tmux server is, which the run survives; the run gives way to another one that waits."""
KINDS = (STOP, RANK, ALL, SAVE, AGENT, SERVER, WAY)
_FIRST = 4
"""Number of breaks that are one of each kind, in the order of KINDS. Later ones are drawn."""


@dataclasses.dataclass(frozen=True)
class Break:
    """How a run is broken off."""

    kind: str
    update: int
    """Number of updates that the run has made by then."""
    rank: int
    """The rank that is killed."""


def choose(updates: int, kills: int, ranks: int, seed: int) -> list[Break]:
    """Choose the breaks of a run, in their order. The first four are one of each kind.

    Args:
        updates: number of updates of the run.
        seed: the same seed gives the same breaks.

    Raises:
        Refused: the run is too short for so many.
    """
    if kills > updates - 2:
        raise Refused(f"--kills {kills}: at most {max(updates - 2, 0)} fit into {updates} updates; give more --updates")
    draw = random.Random(seed)
    kinds = [KINDS[number] if number < _FIRST else draw.choice(KINDS) for number in range(kills)]
    last = max(kills + 2, updates * 9 // 10)  # a stop takes a few updates
    moments = sorted(draw.sample(range(2, min(last, updates)), kills))
    return [Break(kind, at, draw.randrange(ranks)) for kind, at in zip(kinds, moments, strict=True)]


def saves(breaks: list[Break]) -> tuple[int, ...]:
    """Return the updates after which the run saves: where a rank is killed in a save, and before each other break but
    those that save, so that a checkpoint is there to continue from."""
    found, before = [], 0
    for one in breaks:
        if one.kind == SAVE:
            found.append(one.update)
        elif one.kind not in (STOP, WAY):
            found.append((before + one.update) // 2)
        before = one.update
    return tuple(sorted({one for one in found if one}))
