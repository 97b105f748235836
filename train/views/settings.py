"""The configuration of a run for people: what its user set, or what differs between runs. Runs no code of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import programs, screen
from ..errors import shortened
from ..run import environment
from ..run.spec import Spec

_MOST = 4
"""Maximum number of fields in the label of a run."""
_WORD = 24
"""Maximum number of characters of a value in the label."""


@dataclass(frozen=True)
class Setting:
    """A config field of a run."""

    name: str
    value: str
    default: str
    """'' if the field has no default, or the default is unknown."""
    is_set: bool
    """Whether the user has set it."""


def listed(spec: Spec) -> list[Setting]:
    """Return every field of a run, those that its user set first. Defaults of a task's settings are unknown here."""
    from .. import config as configuration  # late: most views need no fields, and it takes as long as all else

    values = spec.used_config
    known = {name: info for name, info in configuration.fields().items() if name not in spec.unused_fields}
    usual = {name: "chosen at launch" if info.default is None else shown(info.default) for name, info in known.items()}
    names = [*(name for name in values if name not in known), *(name for name in known if values)]
    found = [
        Setting(name, shown(values.get(name)), usual.get(name, ""), name in spec.set_by_user)
        for name in names
        if name in values or known[name].default is not None  # TOML has no none
    ]
    return sorted(found, key=lambda setting: not setting.is_set)


def as_flags(spec: Spec) -> str:
    """Return the fields that the user has set, as a command line takes them, with … in place of secrets."""
    values = spec.used_config
    known = {name: values[name] for name in spec.set_by_user if values.get(name) is not None}
    return environment.shown(word for name, value in known.items() for word in (f"--{name}", shown(value)))


def shown(value: Any) -> str:
    """Return a value as text, as a flag takes it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def differing(runs: Sequence[tuple[Spec, int | None]]) -> list[str]:
    """Return for each run how it differs from the others, as text; '' if it does not.

    Args:
        runs: What each runs, and its number of ranks.
    """
    flats = [compared(spec, ranks) for spec, ranks in runs]
    other = differing_names(flats)
    named, more = other[:_MOST], len(other) - _MOST
    labels = []
    for values in flats:
        parts = [f"{name.removeprefix('task.')}={shortened(shown(values.get(name)), _WORD)}" for name in named]
        labels.append(screen.printable("  ".join([*parts, *([f"and {more} more"] if more > 0 else [])])))
    return labels


def differing_names(flats: Sequence[dict[str, Any]]) -> list[str]:
    """Return the fields in which runs differ, given what `compared` returns for each."""
    names = sorted({name for values in flats for name in values})
    other = [name for name in names if len({shown(values.get(name)) for values in flats}) > 1]
    # micro_batch_size follows from these two, so naming them is enough
    other = [name for name in other if not (name == "micro_batch_size" and {"batch_size", "ranks"} & set(other))]
    if all(values.get("data.seed") == values.get("seed") for values in flats):
        other = [name for name in other if name != "data.seed"]
    return other


def compared(spec: Spec, ranks: int | None) -> dict[str, Any]:
    """Return in what a run can differ from others: its fields, its task, and its number of ranks."""
    code = programs.of(spec).source(spec)
    values = spec.used_config | {"task": Path(code).stem if code else None, "ranks": ranks}
    return {name: value for name, value in values.items() if not name.startswith(("log.", "watch."))}
