"""Programs of users' own, which run where they lie: their checks, and which of their files have changed. No torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from train.errors import Refused
from train.gpus import seen_here
from train.launcher import provenance
from train.launcher.request import LaunchRequest
from train.run import imports, owner
from train.run.record import Record
from train.run.run_folder import Run

AFTER_STOP = "starts it again: it goes on from what it has saved by itself, if it has"
"""What `train resume` does to a script that was stopped."""


def check(launch: LaunchRequest, run: Run | None) -> tuple[dict[str, Any], list[str]]:
    """Check a script and its limits, of a new run or of one that is resumed.

    Returns:
        Fields of run.json, and warnings.

    Raises:
        Refused: the file cannot be read, or a field is not of scripts.
    """
    watch = watch_flags(launch.flags)
    if run is not None:
        record = run.read()
        check_readable(Path(record["script"]), f"{run.name} runs", "; put it back")
        return {"watch": (record.get("watch") or {}) | watch}, warnings(record)
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
    """Raises Refused where a script is gone, may not be read or must not be run; `what` stands before its path."""
    try:
        path.open("rb").close()
    except OSError as error:
        reason = error.strerror if path.exists() else "there is no such file"
        raise Refused(f"{what} {path}: {reason}{remedy}") from None
    owner.check_program(path)


def watch_flags(flags: dict[str, str]) -> dict[str, Any]:
    """The limits of a script's run, as `--watch.NAME VALUE` gives them.

    Raises:
        Refused: another field, or no such value.
    """
    from train import config

    for name in flags:
        if not name.startswith("watch."):
            raise Refused(f"--{name} is for tasks; a script has the fields watch.*, and its arguments stand after --")
    return {name.removeprefix("watch."): value for name, value in config.check_flags(flags).items()}


def warnings(record: Record) -> list[str]:
    """Warnings about the script when it is started again."""
    changed = imports.changed(record.get("script_files"))
    return [f"{changed} changed since {record['name']} was launched; it runs as it is now"] if changed else []
