"""Programs of users' own: their copies, whether they have changed since, what is executed. Imports no torch.

An edited script must not slip into a run by itself: people edit a file while a run of it trains, and a rank that dies
at night would come back as something else. So each attempt runs the file where it lies while it is the one that the
run was started with, and otherwise the copy in the run folder, in the original's place (see saved_script.py). `resume
--script FILE` is how a user takes the edited one. Modules that it imports are not copied, for a package is more than
its files; a change is reported.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from train.errors import Refused
from train.launcher import provenance
from train.run.record import Record
from train.run.run_folder import Run

COPY = "script.py"
"""In the run folder."""


def taken(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A script's text for the run folder, and what run.json says of it.

    Raises:
        Refused: it is no file that can be read.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        reason = error.strerror if path.exists() else "there is no such file"
        raise Refused(f"--script {path}: {reason}") from None
    script = path.absolute()
    return text, {"script": str(script), "script_imports": provenance.digests(script, script.resolve().parent)}


def replace(run: Run, path: Path) -> dict[str, Any]:
    """Let a run go on with another script; the copy of the one before stays beside. Returns what run.json says of it.

    Raises:
        Refused: it is no file that can be read, or the run folder cannot be written.
    """
    text, record = taken(path)
    copy = run.folder / COPY
    partial = copy.with_name(f".{COPY}.{os.getpid()}")
    try:
        if copy.exists() and copy.read_bytes() != text:
            number = len(run.read()["attempts"])
            copy.rename(copy.with_name(f"script.until-attempt-{number}.py"))
        partial.write_bytes(text)
        partial.replace(copy)
    except OSError as error:
        raise Refused(f"cannot write {copy}: {error.strerror}; change its owner or mode, or free space") from None
    return record


def differs(run: Run, record: Record) -> str:
    """How the script differs from the one that the run was started with: 'has changed', 'is gone', or ''."""
    copy = run.folder / COPY
    if not copy.is_file():  # put away by somebody: there is the original alone
        return ""
    try:
        return "" if Path(record["script"]).read_bytes() == copy.read_bytes() else "has changed since"
    except OSError:
        return "is gone"


def warnings(run: Run, record: Record) -> list[str]:
    """Warnings about the script when a run continues."""
    lines = []
    how = differs(run, record)
    if how:
        path = shlex.quote(record["script"])
        other = "" if how == "is gone" else f"; for the one of now: train resume {run.name} --script {path}"
        lines.append(f"{record['script']} {how}; {run.name} goes on with its own copy{other}")
    changed = provenance.changed(record.get("script_imports"), "script")
    if changed:
        lines.append(f"{changed}; no copy was kept, so {run.name} runs with it as it is now")
    return lines


def command(run: Run, record: Record) -> list[str]:
    """What follows `python -u`: the script where it lies, or its copy in its place."""
    script, arguments = record["script"], record["script_arguments"]
    if differs(run, record):
        return ["-P", str(Path(__file__).with_name("saved_script.py")), str(run.folder / COPY), script, *arguments]
    return [script, *arguments]


AFTER_STOP = "starts it again: it goes on from what it has saved by itself, if it has"
"""What `train resume` does to a script that was stopped."""
