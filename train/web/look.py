"""One look at the runs, shared by all pages. It happens in a thread of its own, so kernels of the server never wait."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..errors import Refused
from ..monitor.machine import Machine
from ..monitor.runs import Runs
from ..monitor.status import RunStatus
from ..run import folders
from .texts import Texts

P = ParamSpec("P")
T = TypeVar("T")
_EVERY = 1.5
"""Seconds for which a look at the runs is used."""
_REMEMBERED = 120.0
"""Seconds for which a page shows what a command has said."""
_PATIENCE = 15.0
"""Seconds that a request waits for the thread."""
_LONGEST = 15.0
"""Maximum number of seconds for which a look is used because it costs much."""
_SHARE = 20
"""A look is used for at least so many times as long as it took: then looks take a twentieth of a core at most."""


@dataclasses.dataclass(frozen=True)
class Place:
    """What a page is made from: what is known of the runs, the language, and addresses on this server."""

    look: Look
    t: Texts
    base: str
    _: dataclasses.KW_ONLY
    lab: str
    """Of JupyterLab; '': there is none."""
    files: str
    """Of the files below `root`; '': the server sends none."""
    root: str
    """The server's folder."""

    @property
    def lesson(self) -> str:
        """The address of the first lesson in JupyterLab."""
        folder = "zh/" if self.t.language != "en" else ""
        return f"{self.lab}/tree/projects/course/{folder}01-the-station.ipynb"

    def run(self, name: str) -> str:
        """Return the address of a run; '' if it has no legal name."""
        return f"{self.base}run/{name}" if folders.is_name(name) else ""


def key_of(what: str, one: RunStatus, *more: str) -> tuple[str, ...]:
    """Return the key of what is kept of a run. Another run may get its name."""
    return what, one.name, str(one.record.get("created")), *more


class _Job(Future[T]):
    """A call for the thread of the pages."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self._call = call

    def carry_out(self) -> None:
        if self.set_running_or_notify_cancel():
            try:
                self.set_result(self._call())
            except BaseException as error:
                self.set_exception(error)


class Look:
    """What the pages know of a folder of runs. All methods but `call` are for its thread."""

    def __init__(self, runs: Path) -> None:
        self.folder = runs
        self.machine = Machine(runs)
        self._said: dict[str, tuple[float, str]] = {}
        self._runs = Runs(runs)
        self._found: list[RunStatus] = []
        self._until = 0.0
        self._kept: dict[tuple[str, ...], tuple[float, object]] = {}
        self._jobs = queue.SimpleQueue[_Job[Any]]()
        self._thread = threading.Thread(target=self._work, daemon=True, name="page")  # daemon: a disk may never answer
        self._thread.start()
        for work in (self.found, self.machine.facts):  # the first look takes longest: before the first page
            self._submit(work)

    async def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function in the thread.

        Raises:
            TimeoutError: the thread is busy; the call is withdrawn if it has not begun.
        """
        future = self._submit(functools.partial(function, *arguments, **named))
        return await asyncio.wait_for(asyncio.wrap_future(future), _PATIENCE)

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        job = _Job[T](call)
        self._jobs.put(job)
        return job

    def _work(self) -> None:
        while True:
            self._jobs.get().carry_out()

    def found(self) -> list[RunStatus]:
        """Return how the runs stand: live runs first, then those that ended last."""
        if time.monotonic() >= self._until:
            began = time.thread_time()
            self._found = self._runs.look()
            self._until = time.monotonic() + min(max(_EVERY, _SHARE * (time.thread_time() - began)), _LONGEST)
        return self._found

    @property
    def damaged(self) -> int:
        """Number of run folders that cannot be read."""
        return self._runs.damaged

    def kept(self, key: tuple[str, ...], seconds: float, make: Callable[[], T]) -> T:
        """Return what `make` returns, or returned at most so many seconds ago for this key; longer ago if it costs much
        time of the processor."""
        until, known = self._kept.get(key, (0.0, None))
        if time.monotonic() >= until:
            began = time.thread_time()
            known = make()
            cost = time.thread_time() - began
            self._kept = {one: value for one, value in self._kept.items() if value[0] > time.monotonic()}
            self._kept[key] = time.monotonic() + max(seconds, min(_SHARE * cost, _LONGEST)), known
        return known  # type: ignore[return-value]

    def remember(self, name: str, said: str) -> None:
        """Keep what a command of the page has said of a run ('': of the demo's start), and look again the next time."""
        now = time.monotonic()
        self._said = {one: told for one, told in self._said.items() if now - told[0] < _REMEMBERED} | {
            name: (now, said)
        }
        self._until = 0.0
        self._kept.clear()

    def said(self, name: str) -> str:
        """Return what the last command of the page has said of a run lately."""
        at, text = self._said.get(name, (0.0, ""))
        return text if time.monotonic() - at < _REMEMBERED else ""

    def one(self, name: str) -> RunStatus:
        """Return how the run of this name stands now.

        Raises:
            Refused: there is none, or its record cannot be read.
        """
        if not folders.is_name(name):
            raise Refused("this is no name of a run")
        found = self._runs.look_at(folders.find(self.folder, name))
        if found is None:
            raise Refused(f"the record of {name} cannot be read; see: train ls")
        return found
