"""The files that a user's own task or script imports: which they are, which have changed, and a run's copy of them.

Digests of those files tell when they have changed. For then, and for where they are not, a run of a task has a copy of
them; while they are as they were the originals are imported, for a package is more than its files. A script has none.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

MODULES = "modules.zip"
"""In the run folder: the files that its task imports, under the names by which Python finds them there."""
_MOST = 500
"""So many imported files are looked at; where there are more no copy is kept, for it would lack some."""


def digests(file: Path, beside: Path) -> dict[str, str]:
    """The files that a program imports, and those that they import, from `beside` and from PYTHONPATH, with digests.

    Found by reading, not by running: an import whose name is computed is not seen.
    """
    return {str(path): digest(path) for path in _imported(file, beside)}


def copies(file: Path, beside: Path) -> dict[str, bytes]:
    """The files of `digests` as a zip file from which Python imports them, by its name; {} where there are none."""
    found = _imported(file, beside)
    kept: dict[Path, Path] = {}
    for folder in _folders(beside):
        for path in found:
            if folder in path.parents:
                kept.setdefault(path.relative_to(folder), path)
    if not kept or len(found) >= _MOST:
        return {}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as made:
        for folder in {folder: None for name in kept for folder in name.parents if folder.name}:
            made.mkdir(str(folder))  # without it Python finds no package that lacks __init__.py
        for name, path in kept.items():
            made.writestr(str(name), path.read_bytes())
    return {MODULES: content.getvalue()}


def changed(known: dict[str, str] | None) -> str:
    """Which of these files are not what they were, as the beginning of a sentence; '' where all are."""
    found = [path for path, before in (known or {}).items() if digest(Path(path)) != before]
    if not found:
        return ""
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{', '.join(found[:3])}{more}"


def _folders(beside: Path) -> list[Path]:
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [beside, *(Path(part).absolute() for part in parts if part)]


def _imported(script: Path, beside: Path) -> list[Path]:
    folders = _folders(beside)
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
    """Whether it is installed, or of this package."""
    return bool({"site-packages", "dist-packages"} & {*path.parts}) or Path(__file__).parents[1] in path.parents


def digest(path: Path) -> str:
    """SHA-256 of a file; '' where it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""
