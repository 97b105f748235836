"""Lets Python import a run's copies of the files that its task needs; see imports.py."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import sys
import tempfile
import zipfile
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from ..run.owner import TrustedRun
from ..run.ownership import MODULES
from ..run.run_folder import Run
from ..run.spec import Spec
from . import changes, imports

_LEVELS = 4
"""Number of folders, from the task's upwards, that the folder of copies links: `Path(__file__).parents[1] / "data"`."""


class Code(NamedTuple):
    """Where to find the code of a run's task."""

    seen_as: Path
    """The value of its `__file__`."""
    beside: list[Path]
    """The folders from which it imports, in order."""
    are_copies: bool
    """Whether the run's copies are among them."""


def tops(run: TrustedRun) -> set[str]:
    """Return the top-level modules of which a run has copies."""
    if not (run.folder / MODULES).is_file():
        return set()
    with zipfile.ZipFile(io.BytesIO(run.code(MODULES))) as kept:
        return {imports.top(name) for name in kept.namelist() if name.endswith(".py")}


def of_run(run: TrustedRun, spec: Spec) -> Code:
    """Find the code of a run's task.

    Unchanged originals are used, because a package is more than its modules. `__file__` is that of the original even if
    other files have changed, so that files beside it and above are found.
    """
    source = Path(spec.task_source)
    beside = [source.parent] if source.parent.is_dir() else []
    differ = changes.differing(spec.task_imports)
    has_copies = (run.folder / MODULES).is_file()
    if has_copies and not differ:
        _hook(_Edited(run.code(MODULES)))
    if not has_copies or not differ:
        return Code(source if beside else run.path / "task.py", beside, False)
    own = _unpacked(run, source)
    if own.is_dir():
        _prefer(own, tops(run))
    is_gone = not beside or any(not path.endswith(".py") for path in differ)
    return Code(own / source.name if is_gone else source, [own, *beside], True)


def clear(run: Run) -> None:
    """Remove what `of_run` has unpacked: it may have been edited. The caller must hold the run's lock."""
    for left in run.folder.glob(".code*"):
        shutil.rmtree(left, ignore_errors=True)


def _unpacked(run: TrustedRun, source: Path) -> Path:
    """Return a folder with the run's copies, and with links to all other files beside the originals and above.

    The first rank creates it. If the run folder is not writable, returns the zip file itself.
    """
    content = run.code(MODULES)
    name = f".code-{hashlib.sha256(content).hexdigest()[:8]}"
    inner = Path(*source.parent.parts[1:][-_LEVELS:])
    own = run.folder / name / inner
    with zipfile.ZipFile(io.BytesIO(content)) as kept:
        try:
            if not own.is_dir():
                made = Path(tempfile.mkdtemp(prefix=".code.", dir=run.folder))
                kept.extractall(made / inner)
                (made / inner / source.name).write_bytes(run.code("task.py"))
                try:
                    made.rename(run.folder / name)
                except OSError:  # another rank was faster
                    shutil.rmtree(made)
            above = range(len(inner.parts) - 1)
            originals = {own: source.parent} | {own.parents[up]: source.parent.parents[up] for up in above}
            for entry in kept.infolist():
                if entry.comment:
                    originals.setdefault((own / entry.filename).parent, Path(os.fsdecode(entry.comment)).parent)
            for folder, original in originals.items():
                _link(folder, original)
        except OSError:
            if not own.is_dir():
                return run.place_to_import(MODULES)
    run.check(name)
    return run.place_to_import(f"{name}/{inner}")


def _link(folder: Path, original: Path) -> None:
    """Link the files of a folder that its copy lacks, except byte code, which belongs to the originals."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in set(os.listdir(original)) - set(os.listdir(folder)) - {"__pycache__"}:
            with contextlib.suppress(FileExistsError):
                (folder / name).symlink_to(original / name)


def _prefer(own: Path, tops: set[str]) -> None:
    """Make Python import these modules from the copies, before any import hook and even if an original is loaded."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or str(own)
        if name.partition(".")[0] in tops and own not in Path(file).parents and Path(file) != own:
            del sys.modules[name]
    _hook(_Copies(own, tops))


def _hook(finder: _Copies | _Edited) -> None:
    """Put this finder first, in place of our earlier ones."""
    sys.meta_path[:] = [finder, *(one for one in sys.meta_path if not isinstance(one, (_Copies, _Edited)))]


class _Copies:
    """An import hook: finds modules in a folder of copies."""

    def __init__(self, own: Path, tops: set[str]) -> None:
        self._own, self._tops = str(own), tops

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Implement Python's interface. Leaves namespace packages, which may have parts elsewhere, to later finders."""
        if name.partition(".")[0] not in self._tops:
            return None
        spec = PathFinder.find_spec(name, [self._own] if path is None else path, target)
        return spec if spec is not None and spec.loader is not None else None


class _Edited:
    """An import hook: finds the copy of a module whose original was edited since the process started.

    A function may import the module hours later. `__file__` is that of the original.
    """

    def __init__(self, content: bytes) -> None:
        self._kept: dict[str, tuple[Path, bytes, str]] = {}
        with zipfile.ZipFile(io.BytesIO(content)) as kept:
            for entry in kept.infolist():
                if entry.comment and entry.filename.endswith(".py"):
                    name = entry.filename.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                    source = kept.read(entry)
                    self._kept[name] = Path(os.fsdecode(entry.comment)), source, hashlib.sha256(source).hexdigest()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Implement Python's interface."""
        file, source, digest = self._kept.get(name, (Path(), b"", ""))
        if not digest or changes.digest(file) == digest:
            return None
        inside = [str(file.parent)] if file.name == "__init__.py" else None
        loader = _Source(name, str(file), source)
        return spec_from_file_location(name, file, loader=loader, submodule_search_locations=inside)


class _Source(SourceFileLoader):
    """Loads a module from its saved text, not from the current content of its file."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_data(self, path: Any) -> bytes:
        return self._source if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)
