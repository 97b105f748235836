"""Warns that the ranks of a script have not met, so that each of them does the whole work.

Ranks that join a process group, or a session, write into the store that the launcher hosts. A script that asks which
rank it is may share the work in another way, and is not watched. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ..run.run_folder import Run
from ..supervise import timeouts
from .command import source

_LOOK_EVERY = 2.0
_ASKS = re.compile(rb"\b((LOCAL|GROUP|GLOBAL|NODE|ROLE)_)?RANK\b|\b((LOCAL|GROUP|ROLE)_)?WORLD_SIZE\b")
"""Where a source reads a variable of its rank."""


def asks_rank(files: Iterable[Path]) -> bool:
    """Whether one of these sources asks which rank it is, or of how many."""
    return any(_ASKS.search(source(file)) for file in files)


class Meeting:
    """Watches in one attempt whether the ranks meet: says once that they have not, and that they have met after all.

    Args:
        have_met: Whether a rank has written into the store.
    """

    def __init__(self, run: Run, log: Path, ranks: int, have_met: Callable[[], bool]) -> None:
        self._run, self._log, self._ranks, self._have_met = run, log, ranks, have_met
        self._is_told = self._is_over = False
        self._look_at = time.monotonic() + timeouts.MEET

    def look(self) -> None:
        """Look at the running ranks. Call this several times per second."""
        if not self._is_over and time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + _LOOK_EVERY
            self._look()

    def end(self) -> None:
        """Look a last time, before the store ends."""
        if not self._is_over:
            self._look()

    def _look(self) -> None:
        if not self._have_met():
            warning = f"{self._ranks} ranks, but they have not met: without torch.distributed.init_process_group each "
            warning += "rank trains the same; see: docs/scripts.md"
            if not self._is_told and self._run.note(unmet=warning):
                self._is_told = True
                self._write(f"warning: {warning}")
        elif not self._is_told:
            self._is_over = True
        elif self._run.note(unmet=""):
            self._is_over = True
            self._write(f"the {self._ranks} ranks have met after all")

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError), self._log.open("ab+") as log:
            if log.tell():
                log.seek(-1, os.SEEK_END)
                line = line if log.read() in (b"\n", b"\r") else f"\n{line}"  # below a progress bar
            log.write(f"{line}\n".encode())
