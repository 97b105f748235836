"""What a run was made with: versions, the commit, and the files that a user's own task or script imports.

A run keeps no copy of those files, nor of a script, for a package is more than its files; their digests tell when they
have changed.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import train
from train import gpus

_MOST = 500
"""So many imported files are looked at."""


def digests(file: Path, beside: Path) -> dict[str, str]:
    """The files that a program imports, and those that they import, from `beside` and from PYTHONPATH, with digests.

    Found by reading, not by running: an import whose name is computed is not seen.
    """
    return {str(path): digest(path) for path in _imported(file, beside)}


def changed(known: dict[str, str] | None) -> str:
    """Which of these files are not what they were, as the beginning of a sentence; '' where all are."""
    found = [path for path, before in (known or {}).items() if digest(Path(path)) != before]
    if not found:
        return ""
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{', '.join(found[:3])}{more}"


def _imported(script: Path, beside: Path) -> list[Path]:
    folders = [beside]
    folders += [Path(part).absolute() for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    found: dict[Path, None] = {}
    waiting = [script]
    while waiting and len(found) < _MOST:
        file = waiting.pop()
        for name, base in _names(file):
            for path in _files(name, [base] if base else folders):
                if path not in found and path != script and not _is_ours(path):
                    found[path] = None
                    waiting.append(path)
    return sorted(found)


def _names(file: Path) -> Iterator[tuple[str, Path | None]]:
    """Dotted names that a file imports, with the folder that a relative one starts from."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else None
            module = node.module or ""
            if module:
                yield module, base
            yield from ((f"{module}.{alias.name}".lstrip("."), base) for alias in node.names if alias.name != "*")


def _files(name: str, folders: list[Path]) -> Iterator[Path]:
    """The files that importing a dotted name executes, its packages first."""
    parts = name.split(".")
    for folder in folders:
        files = []
        for depth in range(1, len(parts) + 1):
            place = folder.joinpath(*parts[:depth])
            files += [path for path in (place / "__init__.py", place.with_name(place.name + ".py")) if path.is_file()]
        if files:
            yield from files
            return


def _is_ours(path: Path) -> bool:
    return "site-packages" in path.parts or Path(__file__).parents[1] in path.parents


def digest(path: Path) -> str:
    """SHA-256 of a file; '' where it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""


def versions(found: Sequence[gpus.Card] = ()) -> dict[str, str]:
    """What computes: recorded with the run.

    Args:
        found: the GPUs; asking torch for a name would open one in this process.
    """
    import torch

    return {
        "train": train.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a class of its own, which would bring torch wherever this is unpickled
        "cuda": torch.version.cuda or "none",
        "gpu": found[0].name if found else "none",
    }


def git_revision() -> str | None:
    """The commit of the current folder, and whether files differ from it; None: it is in no checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10).strip() or None
    return None
