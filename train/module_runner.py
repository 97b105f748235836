"""A module of this package as a program of its own, whatever lies in the current folder.

    python -P …/train/module_runner.py MODULE [ARGS…]
    python -P -m train.module_runner MODULE [ARGS…]           where another machine's Python knows where the package is

`python -m` looks in the current folder first, where a train.py of the user's would be executed in place of this
package, and a profile.py or select.py in place of Python's. Here the package is the one that this file belongs to, and
the current folder comes last, for what users' own files import. What lies beside a task comes first once the task is
loaded (tasks/__init__.py).
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path


def command(module: str, *arguments: str) -> list[str]:
    """The command line that executes a module of this package."""
    return [sys.executable, "-P", __file__, module, *arguments]


def take_package() -> None:
    """Import this package, from where this file lies."""
    root = str(Path(__file__).parents[1])
    sys.path.insert(0, root)
    importlib.import_module("train")  # from here on its modules are found through itself
    sys.path.remove(root)


def add_current_folder() -> None:
    """Let the current folder come last where modules are searched for."""
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.append(os.getcwd())


def main() -> None:
    """Execute the module that the first argument names, with the others as its own."""
    take_package()
    add_current_folder()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
