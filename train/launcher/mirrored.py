"""Checks the mirror of a launch, and starts the mirrors of ended runs that are not complete. Imports no torch."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from ..errors import Refused
from ..mirror import remote
from ..mirror import state as states
from ..mirror.process import start_left_over
from ..run import environment
from ..run.record import Record
from ..run.run_folder import Run
from .request import Launch, Plan

_SECRETS = ("AWS_", "AZURE_", "FSSPEC_", "GOOGLE_")
"""Prefixes of variables of object stores that may hold a secret."""


def check(launch: Launch, plan: Plan) -> list[str]:
    """Check that the run can write to its mirror, if this launch names one. Returns warnings.

    A resume that does not name it is not checked: training continues without a network, and `train show` says so.

    Raises:
        Refused: it cannot, or the mirror is another run's.
    """
    text = plan.files.get("config.toml")
    group, _, name = states.FIELD.partition(".")
    url = tomllib.loads(text).get(group, {}).get(name, "") if isinstance(text, str) else ""
    is_named = not (launch.run.folder / "run.json").exists() or states.FIELD in getattr(launch, "flags", {})
    machines = launch.machines()
    if not url or not is_named or (machines and machines["node"]):
        return []
    _check_place(url, Path(launch.runs))
    remote.check(url, states.read(launch.run).id)
    warnings = []
    if url.startswith("memory://"):
        warnings.append(f"--checkpoint.mirror {url} is lost when the process that copies ends; it is only for tests")
    if held := [one for one in os.environ if one.startswith(_SECRETS) and environment.is_secret(one, os.environ[one])]:
        way = "for resumes by the keeper, use the library's own file, such as ~/.aws/credentials"
        warnings.append(f"the secrets of the mirror are not kept with the run ({', '.join(sorted(held))}); {way}")
    return warnings


def _check_place(url: str, runs: Path) -> None:
    """Refuse a folder inside the folder of runs."""
    path = Path(url.removeprefix("file://").removeprefix("local://"))
    if path.is_absolute() and runs.resolve() in (path.resolve(), *path.resolve().parents):
        raise Refused(
            f"--checkpoint.mirror {url} lies inside {runs}, where the runs are; give a folder on another disk"
        )


def complete_left_over(run: Run, record: Record) -> bool:
    """Start the copying of a run that ended before its mirror was complete. Returns whether that was needed."""
    is_mine = not run.alive() and run.was_started_here(record)
    return is_mine and start_left_over(run)
