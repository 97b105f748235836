"""Finds the files that a task or script imports and reads, and copies them into the run.

A run of a task keeps copies of the modules that its task imports from folders that people edit: beside the task, on
PYTHONPATH, and in libraries under development (`pip install -e`). It also keeps the small files that the task reads
beside itself. When the digest of an original changes, the copies are used (changes.py). Of other files the run keeps
only the digests, and warns when they change. A run of a script has no copies.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import io
import os
import sys
import sysconfig
import time
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath
from typing import Any

from ..run.ownership import MODULES
from ..tasks import Task
from .changes import SUFFIXES, digest

_MOST = 500
"""Maximum number of files to copy of a library."""
_LARGEST = 2**20
"""Maximum number of bytes to copy of a library: reading them for imports takes about a second."""
_MOST_DATA = 100
"""Maximum number of files to keep that a task reads. A task that reads more has a dataset there."""
_LARGEST_DATA = 8 * 2**20
"""Maximum number of bytes of those files."""
_INSTALLED = {"site-packages", "dist-packages"}


@dataclasses.dataclass(frozen=True)
class Needed:
    """The files that a program needs, with their content at launch."""

    copied: dict[str, tuple[Path, bytes]]
    """Maps a name in MODULES to the path and the content of the file."""
    watched: dict[str, str]
    """Maps the path of a file without a copy to its digest."""

    def record(self) -> dict[str, dict[str, str]]:
        """Return the fields of run.json."""
        copied = {str(path): hashlib.sha256(content).hexdigest() for path, content in self.copied.values()}
        return {"task_imports": copied, "task_watched": self.watched}

    def files(self) -> dict[str, bytes]:
        """Return {MODULES: content}; {} if nothing is copied.

        A zip file with names by which Python finds modules. The comment of an entry is the path of its original.
        """
        if not self.copied:
            return {}
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
            for folder in {str(one): None for name in self.copied for one in PurePosixPath(name).parents if one.name}:
                made.mkdir(folder)  # Python needs it for a package without __init__.py in a zip file
            for name, (path, content) in sorted(self.copied.items()):
                entry = zipfile.ZipInfo(name)
                entry.compress_type, entry.comment = zipfile.ZIP_DEFLATED, os.fsencode(path)
                made.writestr(entry, content)
        return {MODULES: packed.getvalue()}


class _Watch:
    """Records which modules and files the process loads and opens. Only for a temporary process: the hook stays."""

    def __init__(self) -> None:
        self.began, self.loaded, self.opened = time.time(), frozenset(sys.modules), dict[str, None]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            self.opened[os.fspath(arguments[0])] = None


_watch: _Watch | None = None


def watch() -> None:
    """Record from now on which modules this process loads and which files it opens, for `read`."""
    global _watch  # noqa: PLW0603 - a hook cannot be removed: a process has one
    _watch = _watch or _Watch()


def read(program: Path, beside: Path, data: str = "") -> Needed:
    """Find the files that a program needs now.

    Finds imports by reading the source and, if `watch` was called, from the loaded modules.

    Args:
        data: The folder of the datasets, from which nothing is kept.
    """
    loaded = list(_loaded())
    found = _imported(program, beside, _too_large({name: path for _, name, path in loaded}))
    tops = {top(name) for name in found}
    for module, name, path in loaded:
        is_wanted = top(name) in tops or (_watch is not None and module not in _watch.loaded)
        if is_wanted and path not in found.values():
            found[name] = path
    found = {name: path for name, path in found.items() if path != program and path.is_file()}
    other = {top(name) for name in found if name.endswith(tuple(EXTENSION_SUFFIXES))} | _too_large(found)
    modules = {top(name) for name in found}
    for name, path in _data(program, beside, modules, data):
        if path not in found.values() and path != program:
            found.setdefault(name, path)
    size, copied, watched = 0, dict[str, tuple[Path, bytes]](), dict[str, str]()
    for name, path in found.items():
        is_data = not name.endswith(SUFFIXES)
        size += _size(path) if is_data else 0
        if top(name) in other or (is_data and size > _LARGEST_DATA):
            watched[str(path)] = digest(path)
        else:
            with contextlib.suppress(OSError):
                copied[name] = path, path.read_bytes()
    return Needed(copied, watched | {str(path): digest(path) for path in _read_by_relative_path(program, beside)})


def sources(program: Path, beside: Path) -> list[bytes]:
    """Return the text of the modules that a program imports, found only by reading the source."""
    paths = {path for path in _imported(program, beside).values() if path.suffix == ".py" and path != program}
    return [path.read_bytes() for path in sorted(paths) if path.is_file()]


def top(name: str) -> str:
    """Return the top-level module of a name in the copy."""
    return name.partition("/")[0].partition(".")[0]


def _imported(program: Path, beside: Path, large: Collection[str] = ()) -> dict[str, Path]:
    """Map names in the copy to the files that a program imports, directly and indirectly.

    Args:
        large: Libraries that are not read.
    """
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [beside, *(Path(part).absolute() for part in parts if part)]
    found: dict[str, Path] = {}
    waiting, sizes = [("", program)], dict[str, int]()
    while waiting:
        name, file = waiting.pop()
        sizes[top(name)] = sizes.get(top(name), 0) + _size(file)
        if name and (file.suffix != ".py" or sizes[top(name)] > _LARGEST or top(name) in large):
            continue
        with contextlib.suppress(OSError):
            for module in _names(name, file.read_bytes()):
                new = {one: path for one, path in _files(module, folders).items() if one not in found}
                found |= new
                waiting += new.items()
    return found


def _too_large(found: Mapping[str, Path]) -> set[str]:
    """Return the libraries with too many bytes or files to copy."""
    counts, sizes = dict[str, int](), dict[str, int]()
    for name, path in found.items():
        counts[top(name)] = counts.get(top(name), 0) + 1
        sizes[top(name)] = sizes.get(top(name), 0) + _size(path)
    return {name for name in counts if counts[name] > _MOST or sizes[name] > _LARGEST}


@functools.cache
def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _names(name: str, content: bytes) -> Iterator[str]:
    """Yield the dotted names that a file of this name imports."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = name.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            if module:
                yield module
            yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*")


def _files(module: str, folders: Iterable[Path]) -> dict[str, Path]:
    """Map names in the copy to the files that importing a dotted name executes, packages first."""
    parts = module.split(".")
    for place in [*(folder / parts[0] for folder in folders), *_places(parts[0])]:
        found: dict[str, Path] = {}
        for depth in range(len(parts)):
            stem, name = place.joinpath(*parts[1 : depth + 1]), "/".join(parts[: depth + 1])
            found |= {name + end: Path(f"{stem}{end}") for end in SUFFIXES if os.path.isfile(f"{stem}{end}")}  # noqa: PTH113 # a name of any length
        if found:
            return {} if any(map(_is_installed, found.values())) else found
    return {}


@functools.cache
def _places(top: str) -> tuple[Path, ...]:
    """Return where Python finds a module under development: its folders, or its file without the suffix."""
    if top in sys.stdlib_module_names:
        return ()
    spec = None
    with contextlib.suppress(Exception):  # a library's own finder may raise anything
        spec = importlib.util.find_spec(top)
    if spec is None:
        return ()
    if spec.submodule_search_locations is not None:
        places = [Path(place).absolute() for place in spec.submodule_search_locations]
        return tuple(place for place in places if place.is_dir() and not _is_installed(place))
    origin = spec.origin or ""
    stem = next((origin.removesuffix(end) for end in SUFFIXES if origin.endswith(end)), "")
    return () if not stem or _is_installed(Path(origin)) else (Path(stem),)


def _loaded() -> Iterator[tuple[str, str, Path]]:
    """Yield the loaded modules under development: Python's name, the name in the copy, and the path."""
    for module, loaded in list(sys.modules.items()):
        origin = getattr(getattr(loaded, "__spec__", None), "origin", None)
        if not isinstance(origin, str) or not origin.endswith(SUFFIXES) or "/site-packages/" in origin:
            continue
        if not _is_installed(Path(origin)):
            end = next(end for end in SUFFIXES if origin.endswith(end))
            yield module, module.replace(".", "/") + end, Path(origin)


def _is_installed(path: Path) -> bool:
    """Whether a file belongs to an installed package, to Python, or to this package."""
    if _INSTALLED & {*path.parts}:
        return True
    return any(folder in (path, *path.parents) for folder in _of_python())


@functools.cache
def _of_python() -> list[Path]:
    own = Path(__file__).parents[1]
    standard = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return [*standard, own, own.parent / "trainstation"]


def _data(program: Path, beside: Path, tops: set[str], data: str) -> Iterator[tuple[str, Path]]:
    """Yield names in the copy and paths of data files, smallest first; nothing if they look like a dataset.

    Data files were read by an absolute path (`Path(__file__).parent / …`), beside the task or in a copied library.
    """
    roots = [(beside, ""), *((place, f"{top}/") for top in tops for place in _places(top))]
    found: dict[str, Path] = {}
    for text in _watch.opened if _watch is not None else ():
        path = Path(os.path.normpath(text))
        root = next(((folder, name) for folder, name in roots if folder in path.parents), None)
        if not path.is_absolute() or root is None or (data and Path(data).absolute() in path.parents):
            continue
        inside = path.relative_to(root[0])
        if _is_kept(path, inside, program):
            found[f"{root[1]}{inside}"] = path
    if len(found) <= _MOST_DATA:
        yield from sorted(found.items(), key=lambda one: _size(one[1]))


def _is_kept(path: Path, inside: Path, program: Path) -> bool:
    """Whether a file that was read may be copied.

    Not copied: hidden files, files of runs, files written meanwhile, and files that only their owner may read while
    others may read the program.
    """
    assert _watch is not None
    with contextlib.suppress(OSError):
        found = path.stat()
        is_private = not found.st_mode & 0o077 and program.stat().st_mode & 0o077
        is_open = path.is_file() and not is_private and found.st_ctime < _watch.began
        is_hidden = any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
        of_run = any((folder / "run.json").exists() for folder in list(path.parents)[: len(inside.parts)])
        return is_open and not is_hidden and not of_run and not _is_installed(path)
    return False


def _read_by_relative_path(program: Path, beside: Path) -> list[Path]:
    """Return files beside the task that were read by a relative path: copies elsewhere would not be found."""
    opened = [Path.cwd() / text for text in (_watch.opened if _watch is not None else ()) if not text.startswith("/")]
    found = {path for path in opened if beside in path.parents and _is_kept(path, path.relative_to(beside), program)}
    return sorted(found) if len(found) <= _MOST_DATA else []


def of_script(path: Path) -> dict[str, str]:
    """Map a script and the files that it imports to their digests."""
    needed = read(path, path.resolve().parent).record()
    return {str(path): digest(path)} | needed["task_imports"] | needed["task_watched"]


def kept(task: Task, given: Path, data: str) -> tuple[dict[str, str | bytes], dict[str, Any]]:
    """Return the files and the fields of run.json with which a new run keeps the code of its task.

    Call it when the task has built everything, because it looks at the modules that this process has loaded.

    Args:
        given: The file that the user named. Modules are found beside it.
        data: The folder of the datasets, from which nothing is kept.
    """
    source = None if task.is_built_in else given.absolute()
    needed = Needed({}, {}) if source is None else read(task.file, source.parent, data)
    record = {
        "task": task.name if source is None else "task.py",
        "task_source": str(source) if source else None,
        "task_sha256": task.sha256,
        **needed.record(),
    }
    return ({} if source is None else {"task.py": task.file.read_bytes(), **needed.files()}), record


def python_files(record: Mapping[str, Any]) -> list[Path]:
    """Return the Python files of a run's task or script, as they lay at the launch."""
    program = [path for path in (record.get("task_source"), record.get("script")) if path]
    beside = [*record.get("task_imports", ()), *record.get("task_watched", ()), *record.get("script_files", ())]
    return [Path(path) for path in {**dict.fromkeys(program), **dict.fromkeys(beside)} if path.endswith(".py")]
