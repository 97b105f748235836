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


def read(program: Path, beside: Path) -> dict[Path, bytes]:
    """The files that a program imports, and those that they import, from `beside` and from PYTHONPATH, as they are now.

    Found by reading, not by running: an import whose name is computed is not seen.
    """
    folders = _folders(beside)
    found: dict[Path, bytes] = {}
    waiting = [program]
    while waiting and len(found) <= _MOST:  # the program is one more
        file = waiting.pop()
        with contextlib.suppress(OSError):
            found[file] = file.read_bytes()
            for name, base in _names(file, found[file]):
                paths = _files(name, [base] if base else folders)
                waiting += [path for path in paths if path not in found and path not in waiting and not _is_ours(path)]
    return {path: found[path] for path in sorted(found) if path != program}


def digests(read: dict[Path, bytes]) -> dict[str, str]:
    """What run.json has of them, for `changed`."""
    return {str(path): hashlib.sha256(content).hexdigest() for path, content in read.items()}


def copies(read: dict[Path, bytes], beside: Path) -> dict[str, bytes]:
    """The same files as a zip file from which Python imports them, by its name; {} where there are none."""
    kept: dict[Path, bytes] = {}
    for folder in _folders(beside):
        for path, content in read.items():
            if folder in path.parents:
                kept.setdefault(path.relative_to(folder), content)
    if not kept or len(read) >= _MOST:
        return {}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        for folder in {folder: None for name in kept for folder in name.parents if folder.name}:
            made.mkdir(str(folder))  # without it Python finds no package that lacks __init__.py
        for name, content in kept.items():
            made.writestr(str(name), content)
    return {MODULES: packed.getvalue()}


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


def _names(file: Path, content: bytes) -> Iterator[tuple[str, Path | None]]:
    """Dotted names that a file imports, with the folder that a relative one starts from."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
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
