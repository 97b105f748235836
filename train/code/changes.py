"""Which files of a run's code have changed since its launch."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from ..run.ownership import MODULES
from ..run.run_folder import Run
from ..run.spec import Spec

SUFFIXES = ("/__init__.py", ".py", *EXTENSION_SUFFIXES)
"""Ends of the paths of modules."""


def edited(run: Run, spec: Spec) -> list[str]:
    """Return lines about files of a run's task that have changed since the launch, and how to use the new version."""
    lines = []
    source = spec.task_source
    own = f"its own copy; to use the new version: {fork_with(run.name, source)}"
    if source and digest(Path(source)) not in ("", spec.task_sha256):
        lines.append(f"{source} has changed since the launch; {run.name} continues with {own}")
    kept = own if (run.folder / MODULES).is_file() else "the new version"
    for known, which in ((spec.task_imports, kept), (spec.task_watched, "the new version")):
        found = differing(known)
        modules = [path for path in found if path.endswith(SUFFIXES)]
        for verb, paths in (("imported", modules), ("read", [path for path in found if path not in modules])):
            if paths:
                what = f"{_listed(paths)} ({verb} by the task) changed since the launch or is gone"
                lines.append(f"{what}; {run.name} continues with {which}")
    return lines


def fork_with(name: str, source: str) -> str:
    """Return the command that continues a run with the present version of its task's file."""
    return f"train fork {shlex.quote(name)} --name NEW --task {shlex.quote(source)}"


def changed(known: Mapping[str, str] | None) -> str:
    """Return which of these files have changed, as the start of a sentence; '' if none has."""
    return _listed(differing(known))


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"{', '.join(paths[:3])}{more}"


def differing(known: Mapping[str, str] | None) -> list[str]:
    """Return the paths of the files that have changed."""
    return [path for path, before in (known or {}).items() if digest(Path(path)) != before]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file; '' if it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""
