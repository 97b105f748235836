"""Fields and values of earlier versions: what to type instead, and how an old run folder is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Refused

_ADAPT = "adapt_state_dict(state, model) of the task"
_INSTEAD = {
    "init.file": "its name is init now",
    "init.skip": "its name is init_skip now",
    "init.rename": f"rename the weights in {_ADAPT}",
    "init.partial": f"leave out weights by init_skip, or change them in {_ADAPT}",
    "log.trace": "its name is trace now",
}
"""Maps a removed field to what to type instead."""
_VALUES = {
    ("schedule.scaling", "sqrt"): "multiply optim.lr by the square root of batch_size / base_batch_size yourself"
}
"""Maps a removed value of a field to what to type instead."""
GROUPS = ("init",)
"""Tables of old TOML files that are no groups of fields any more."""
_NOW = {"init.file": "init", "init.skip": "init_skip", "log.trace": "trace"}
"""Maps a removed field to the field that has its value now. The others had an effect at the launch only."""
_WITH_BETAS = ("adam", "adamax", "adamw", "nadam", "radam")
"""Optimizers that once read optim.momentum as beta1. Their beta2 is 0.999 by default."""
_MOMENTUM = 0.9
"""The default of optim.momentum, as of beta1."""


def hint(name: str) -> str:
    """Return the end of a message about a removed field: what to type instead; '' for any other name."""
    return f" is gone; {_INSTEAD[name]}" if name in _INSTEAD else ""


def check(given: Mapping[str, Any], source: str = "") -> None:
    """Check that a request names nothing that earlier versions had. Raises Refused: it begins with `source`."""
    for name, value in given.items():
        if name in _INSTEAD:
            raise Refused(f"{source}{name}{hint(name)}")
        if isinstance(value, str) and (name, value) in _VALUES:
            raise Refused(f"{source}{name} {value} is gone; {_VALUES[name, value]}")


def modern(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a run of any version under their present names. The run continues with the same bits."""
    if not flat.keys() & _INSTEAD.keys():
        return flat
    made = {_NOW.get(name, name): value for name, value in flat.items() if name in _NOW or name not in _INSTEAD}
    momentum = made.get("optim.momentum", _MOMENTUM)
    if made.get("optim.name") in _WITH_BETAS and momentum != _MOMENTUM:
        made.setdefault("optim.args.betas", [momentum, 0.999])
    return made
