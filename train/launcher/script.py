"""Checks scripts, which run where they are, and finds which of their files have changed. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..gpus import seen_here
from ..run import imports, owner
from ..run.run_folder import Run
from ..run.spec import spec_of
from ..supervise import programs
from . import provenance
from .request import LaunchRequest


def check(launch: LaunchRequest, run: Run | None) -> tuple[dict[str, Any], list[str]]:
    """Check a script and its limits, for a new run or a resumed one.

    Returns:
        Fields of run.json, and warnings.

    Raises:
        Refused: the file cannot be read, or a field is not for scripts.
    """
    watch = watch_flags(launch.flags)
    if run is not None:
        record = run.read()
        check_readable(Path(record["script"]), f"{run.name} runs", "; put it back")
        return {"watch": (record.get("watch") or {}) | watch}, programs.SCRIPT.edited(spec_of(record, {}), run.name)
    path = Path(launch.script[0]).absolute()
    check_readable(path, "--script")
    needed = imports.read(path, path.resolve().parent).record()
    files = {str(path): imports.digest(path)} | needed["task_imports"] | needed["task_watched"]
    fields = {
        "watch": watch, "script": str(path), "script_arguments": launch.script[1:], "script_files": files,
        "cwd": os.getcwd(), "versions": provenance.versions(seen_here()),
    }  # fmt: skip
    return fields, []


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
