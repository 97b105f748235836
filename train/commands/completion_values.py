"""Values that a shell completes for an argument that is not a file; see completion.py."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Python 3.8, which the doctor supports, cannot evaluate the type
    Offer = Callable[..., Iterable[str]]
    """Returns the possible values. argcomplete calls it with prefix=, parsed_args=, action= and parser=."""


def run_names(parsed_args: Namespace, **_: Any) -> list[str]:
    """Return the names of all runs."""
    from ..run import folders

    return [run.name for run in folders.every(_folder(parsed_args))]


def _folder(parsed_args: Namespace) -> Path:
    given = getattr(parsed_args, "runs", None)
    return Path(given or os.environ.get("TRAIN_RUNS") or "runs").expanduser()  # the shell has not expanded ~ yet


def task_names(prefix: str, **_: Any) -> list[str]:
    """Return the built-in tasks and Python files."""
    from argcomplete.completers import FilesCompleter

    from ..tasks import BUILT_IN

    return [*BUILT_IN, *FilesCompleter(("py",))(prefix)]


def checkpoint_steps(parsed_args: Namespace, **_: Any) -> list[str]:
    """Return `best` and the steps of a run's checkpoints."""
    from ..run.run_folder import Run

    name = getattr(parsed_args, "name", None)
    return ["best", *map(str, Run(_folder(parsed_args) / name).steps_saved() if name else [])]


def words(*choices: str) -> Offer:
    """Return a function that offers these words."""
    return lambda **_: choices
