"""Imports all strategies. A process imports this module before it forks ranks, so that each rank finds them loaded."""

from __future__ import annotations

import importlib

from ..config.strategies import STRATEGIES
from . import ordered as ordered

for _file in {one.made_by.partition(":")[0] for one in STRATEGIES}:
    importlib.import_module(f".{_file}", __package__)
