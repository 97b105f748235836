"""Trainstation: exact, unkillable, observable training runs.

Importing this package imports no torch: `train ls`, `train show` and `--help` answer at once. A task may use
`train.gather`, `train.progress` and `train.shards`. Python starts and finds runs by `launch`, `find` and `runs`.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


_FOR_TASKS = {
    "gather": ".parallel.gather", "progress": ".data.progress", "shards": ".data.shards",
    "session": ".sessions.session",
}  # fmt: skip
_FOR_PYTHON = ("launch", "find", "runs", "plot", "prove", "sweep", "Run", "Sweep", "Refused")
"""Names of api.py. They are always this package's own, so that `Refused` is what `launch` raises."""


def _running(module: str) -> Any:
    """Return a module as the run around this code has imported it, under either name of this package; None if none
    has. A second copy of it would not know the run."""
    for package in ("train", "trainstation"):
        found = sys.modules.get(package + module)
        if found is not None and Path(str(found.__file__)).is_relative_to(__path__[0]):
            return found
    return None


def __dir__() -> list[str]:
    """Return the names that a prompt completes."""
    return sorted([*globals(), *_FOR_TASKS, *_FOR_PYTHON])


def __getattr__(name: str) -> Any:
    if name in _FOR_TASKS:
        return getattr(_running(_FOR_TASKS[name]) or importlib.import_module(_FOR_TASKS[name], __name__), name)
    if name in _FOR_PYTHON:
        return getattr(importlib.import_module(".api", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
