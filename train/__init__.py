"""Trainstation: exact, unkillable, observable training runs.

Importing this package imports no torch: `train ls`, `train show` and `--help` answer at once. A task may use
`train.gather` and `train.shards`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"


_FOR_TASKS = {"gather": ".parallel.gather", "shards": ".data.shards"}


def __getattr__(name: str) -> Any:
    if name in _FOR_TASKS:
        return getattr(importlib.import_module(_FOR_TASKS[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
