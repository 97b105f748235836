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
import shutil
from pathlib import Path
from typing import Any

from train.errors import Refused
from train.gpus import seen_here
from train.launcher import provenance
from train.launcher.request import LaunchRequest
from train.run.record import Record
from train.run.run_folder import Run

COPY = "script.py"
"""In the run folder."""


def check(launch: LaunchRequest, run: Run | None) -> tuple[dict[str, str | bytes], dict[str, Any], list[str]]:
    """Check a script and its limits, of a new run or of one that is resumed.

    Returns:
        What is written into the run folder, fields of run.json, and warnings.

    Raises:
        Refused: the file cannot be read, or a field is not of scripts.
    """
    watch = _watch_flags(launch.flags)
    if run is not None:
        record = run.read()
        watch = (record.get("watch") or {}) | watch
        if not launch.script:
            return {}, {"watch": watch}, warnings(run, record)
    path = Path(launch.script[0]).absolute()
    try:
        text = path.read_bytes()
    except OSError as error:
        reason = error.strerror if path.exists() else "there is no such file"
        raise Refused(f"--script {path}: {reason}") from None
    imports = provenance.digests(path, path.resolve().parent)
    fields = {"watch": watch, "script": str(path), "script_imports": imports}
    if run is None:
        fields |= {"script_arguments": launch.script[1:], "cwd": os.getcwd()}
        fields["versions"] = provenance.versions(seen_here())
    return {COPY: text}, fields, []


def _watch_flags(flags: dict[str, str]) -> dict[str, Any]:
    """The limits of a script's run, as `--watch.NAME VALUE` gives them.

    Raises:
        Refused: another field, or no such value.
    """
    from train import config

    for name in flags:
        if not name.startswith("watch."):
            raise Refused(f"--{name}: a script has no configuration fields but watch.*")
    known = config.fields()
    return {
        name.removeprefix("watch."): config.parse_value(name, known[name].annotation, text)
        for name, text in flags.items()
    }


def keep_copy(run: Run) -> None:
    """Copy the copy of a script that another one takes the place of."""
    number = len(run.read()["attempts"])
    earlier = run.folder / f"script.until-attempt-{number}.py"
    if (run.folder / COPY).exists() and not earlier.exists():  # else a resume that began no attempt was here before
        shutil.copyfile(run.folder / COPY, earlier)


def differs(run: Run, record: Record) -> str:
    """How the script differs from the one that the run was started with: 'has changed', 'is gone', or ''."""
    copy = run.folder / COPY
    if not copy.is_file():  # removed from the run folder: there is the original alone
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
