"""What a shell offers for the value of an argument, where that is no file; see completion.py."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for the doctor's Python 3.8
    Offer = Callable[..., Iterable[str]]
    """Returns what an argument may be: argcomplete calls it with prefix=, parsed_args=, action= and parser=."""


def run_names(parsed_args: Namespace, **_: Any) -> list[str]:
    """Names of the runs there are."""
    from train.run import folders

    return [run.name for run in folders.every(_folder(parsed_args))]


def _folder(parsed_args: Namespace) -> Path:
    given = getattr(parsed_args, "runs", None)
    return Path(given or os.environ.get("TRAIN_RUNS") or "runs").expanduser()  # the line is as typed: with its ~


def task_names(prefix: str, **_: Any) -> list[str]:
    """The tasks that come with the package, and Python files."""
    from argcomplete.completers import FilesCompleter

    from train.tasks import BUILT_IN

    return [*BUILT_IN, *FilesCompleter(("py",))(prefix)]


def checkpoint_steps(parsed_args: Namespace, **_: Any) -> list[str]:
    """The steps of a run's checkpoints, and `best`."""
    from train.run.run_folder import Run

    name = getattr(parsed_args, "name", None)
    return ["best", *map(str, Run(_folder(parsed_args) / name).steps_saved() if name else [])]


def words(*choices: str) -> Offer:
    """One of these."""
    return lambda **_: choices
