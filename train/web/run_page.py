"""The page of a run."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import Refused
from . import rows
from .look import Look, Place


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the address of the page asks for."""

    others: tuple[str, ...] = ()
    """Names of runs to compare with."""
    rank: int = 0
    attempt: int = 0
    """0: the last one."""


def check_may(look: Look, name: str, what: str) -> None:
    """Raise Refused if there is no button for this."""
    if rows.may(look.one(name)) != what:
        raise Refused(f"{name}: train {what} is not possible now")


def content(place: Place, name: str, asked: Asked) -> dict[str, Any]:
    """Return what the page shows."""
    one = place.look.one(name)
    cells = rows.of(place, one)
    return {"values": {**cells, "said": place.look.said.get(name, "")}, "lists": {}}
