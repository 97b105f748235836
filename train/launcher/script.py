"""Checks scripts, which run where they are, and finds which of their files have changed. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..gpus import seen_here
from ..run import imports, owner
from ..run.run_folder import Run
from ..run.spec import read_spec
from ..supervise import programs
from . import provenance


def check(script: str, arguments: list[str], flags: dict[str, str]) -> dict[str, Any]:
    """Check a new script and its limits. Returns fields of run.json.

    Raises:
        Refused: the file cannot be read, or a field is not for scripts.
    """
    watch, path = watch_flags(flags), Path(script).absolute()
    check_readable(path, "--script")
    return {
        "watch": watch, "script": str(path), "script_arguments": arguments, "script_files": imports.of_script(path),
        "cwd": os.getcwd(), "versions": provenance.versions(seen_here()),
    }  # fmt: skip


def check_again(run: Run, flags: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Check a script that is started again. Returns fields of run.json, and a warning for each file that has changed.

    Raises:
        Refused: the file cannot be read any more, or a field is not for scripts.
    """
    watch, spec = watch_flags(flags), read_spec(run)
    check_readable(Path(spec.script), f"{run.name} runs", "; put it back")
    return {"watch": dict(spec.watch) | watch}, programs.SCRIPT.edited(spec, run.name)


def check_readable(path: Path, what: str, remedy: str = "") -> None:
    """Raise Refused if a script is gone, unreadable or must not be run. `what` precedes its path in the message."""
    try:
        path.open("rb").close()
    except OSError as error:
        if not remedy and not path.exists():
            raise Refused(f"there is no file {path}; give the path of your script: --script FILE") from None
        reason = error.strerror if path.exists() else "there is no such file"
        raise Refused(f"{what} {path}: {reason}{remedy}") from None
    owner.check_program(path)


def watch_flags(flags: dict[str, str]) -> dict[str, Any]:
    """Return the limits of a script's run from `--watch.NAME VALUE`.

    Raises:
        Refused: another field, or a wrong value.
    """
    from .. import config

    for name in flags:
        if not name.startswith("watch."):
            raise Refused(f"--{name} is for tasks, not for scripts; put arguments of the script after --")
    return {name.removeprefix("watch."): value for name, value in config.check_flags(flags).items()}
