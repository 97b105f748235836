"""Records which fields of a configuration a task's functions read while a launch is checked.

    with recording(config) as reads:
        objects.make_datasets(task, config)
    reads.has("data.root")

The task's code runs inside `objects.refusing`, and only reads inside it count. What cannot be known counts as read: the
fields of a part that the task keeps, copies, or gives to an installed library or to another process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..config import Config

_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_WHOLE = ""
"""Name of the configuration itself among its parts. The other parts are its groups: optim, data, task, ..."""


class Reads:
    """The fields of a configuration that code of a task has read, or may read later."""

    def __init__(self, config: Config) -> None:
        values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        self.parts = {_WHOLE: config} | {name: one for name, one in values.items() if dataclasses.is_dataclass(one)}
        self._names = {id(one): name for name, one in self.parts.items()}
        self._fields, self._open = set[tuple[str, str]](), set[str]()
        self._depth = 0

    def has(self, field: str) -> bool:
        """Whether a field, GROUP.NAME, has been read or may be read later."""
        group, _, rest = field.partition(".")
        return not self._open.isdisjoint((_WHOLE, group)) or (group, rest.partition(".")[0]) in self._fields

    def note(self, one: object, name: str, reader: str) -> None:
        """Record that code in the file `reader` reads an attribute."""
        part = self._names.get(id(one))
        if part is None or not self._depth:
            return
        is_copied = name.startswith("__") and name != "__class__"  # vars(), pickle, copy and dataclasses read these
        if is_copied or ("-packages/" in reader and not reader.startswith(_OWN)):
            self._open.add(part)
        self._fields.add((part, name))

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Context manager in which the task's code runs. A part with more references afterwards is kept by it."""
        before = self._references()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._open |= {name for name, count in self._references().items() if count > before[name]}

    def open_all(self) -> None:
        """Count every field as read if the task's code runs: it starts a process, whose reads are not seen."""
        if self._depth:
            self._open.add(_WHOLE)

    def _references(self) -> dict[str, int]:
        return {name: sys.getrefcount(one) for name, one in self.parts.items()}


_current: Reads | None = None


def noting() -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which the reads of a task's code are recorded, if `recording` is entered."""
    return _current.noting() if _current is not None else contextlib.nullcontext()


@contextlib.contextmanager
def recording(config: Config) -> Iterator[Reads]:
    """Context manager that records the reads of this configuration by the task's code."""
    global _current  # noqa: PLW0603 - `objects.refusing` is entered far below
    reads = _current = Reads(config)
    with contextlib.ExitStack() as undo:
        for kind in {type(one) for one in reads.parts.values()}:
            own = vars(kind).get("__getattribute__")
            undo.callback(*((setattr, kind, "__getattribute__", own) if own else (delattr, kind, "__getattribute__")))
            kind.__getattribute__ = _noted(reads, kind.__getattribute__)  # type: ignore[method-assign]
        try:
            yield reads
        finally:
            _current = None


def _noted(reads: Reads, plain: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def read(one: Any, name: str) -> Any:
        reads.note(one, name, sys._getframe(1).f_code.co_filename)
        return plain(one, name)

    return read


os.register_at_fork(before=lambda: _current.open_all() if _current is not None else None)
