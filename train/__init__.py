"""Trainstation: exact, unkillable, observable training runs.

Importing this package imports no torch: `train ls`, `train show` and `--help` answer at once. A task may use
`train.gather`.
"""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "gather":
        from train.parallel.gather import gather

        return gather
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
