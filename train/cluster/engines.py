"""The engines that a run can be handed to, by the name that --on takes."""

from __future__ import annotations

import importlib
from typing import cast

from train.cluster.submission import Engine

ENGINES = {"slurm": "train.cluster.slurm", "kubernetes": "train.cluster.kubernetes"}


def engine(name: str) -> Engine:
    """The engine of that name."""
    return cast(Engine, importlib.import_module(ENGINES[name]))
