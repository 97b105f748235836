"""What a shell offers for the value of an argument; see completion.py."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Offer = Callable[..., Iterable[str]]
"""Returns what an argument may be: argcomplete calls it with prefix=, parsed_args=, action= and parser=."""


def run_names(parsed_args: Namespace, **_: Any) -> list[str]:
    """Names of the runs there are."""
    from train.run import folders

    folder = _folder(parsed_args)
    return [run.name for run in folders.every(folder)] if folder else []


def _folder(parsed_args: Namespace) -> Path | None:
    from train.errors import Refused
    from train.run import folders

    given = getattr(parsed_args, "runs", None)
    try:
        return folders.runs_folder(given and str(Path(given).expanduser()))  # the line is as typed: ~ stands for itself
    except Refused:
        return None


def task_names(prefix: str, **_: Any) -> list[str]:
    """The tasks that come with the package, and Python files."""
    from train.tasks import BUILT_IN

    return [*BUILT_IN, *file_names("py")(prefix=prefix)]


def checkpoint_steps(parsed_args: Namespace, **_: Any) -> list[str]:
    """The steps of a run's checkpoints, and `best`."""
    from train.run.run_folder import Run

    folder, name = _folder(parsed_args), getattr(parsed_args, "name", None)
    return ["best", *map(str, Run(folder / name).steps_saved() if folder and name else [])]


def file_names(*suffixes: str) -> Offer:
    """Files with these suffixes, or any; folders to go on in."""

    def offer(prefix: str, **_: Any) -> list[str]:
        from argcomplete.completers import FilesCompleter

        return FilesCompleter(suffixes)(prefix)

    return offer


def folder_names(prefix: str, **_: Any) -> list[str]:
    """Folders."""
    return [path for path in file_names()(prefix=prefix) if path.endswith("/")]


def words(*choices: str) -> Offer:
    """One of these."""
    return lambda **_: choices
