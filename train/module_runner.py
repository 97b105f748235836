"""Runs a module of this package as a program, independent of the files in the current folder.

    python -P …/train/module_runner.py MODULE [ARGS…]
    python -P -m train.module_runner MODULE [ARGS…]           if Python finds the package by itself

`python -m` searches the current folder first. There a user's train.py would be executed instead of this package, and a
profile.py or select.py instead of Python's. This module uses the package that contains this file and searches the
current folder last, for imports of users' files. When a task is loaded, its folder comes first (tasks/__init__.py).
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that executes a module of this package."""
    return [sys.executable, "-P", __file__, module, *arguments]


def take_package() -> None:
    """Import the package that contains this file."""
    root = str(Path(__file__).parents[1])
    sys.path.insert(0, root)
    importlib.import_module("train")  # from now on its modules are found through the package
    sys.path.remove(root)


def add_current_folder() -> None:
    """Add the current folder at the end of the search path for modules."""
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.append(os.getcwd())


def main() -> None:
    """Execute the module named by the first argument, with the remaining arguments."""
    take_package()
    add_current_folder()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
