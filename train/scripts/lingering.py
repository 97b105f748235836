"""Finds a script whose work is done, but that does not end: a thread or a process that it has started still runs.

Python waits for such threads and processes at its exit, without a word. A main thread that has used no CPU for a minute
is looked at by py-spy, where that is installed and allowed. A session ends such a process itself (sessions/ending.py).
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_IDLE = 60.0
"""Seconds without any use of the CPU after which a main thread is looked at."""
_LOOK_EVERY = 2.0
_AT_EXIT = re.compile(r"(_shutdown \(threading\.py|_exit_function \(multiprocessing/util\.py)[^\n]*$")
"""The outermost function of a main thread that waits at Python's exit."""
_THREAD = re.compile(r'^Thread .*: "(.*)"$', re.MULTILINE)
_MOST = 3
"""Maximum number of threads that are named."""


def spy(pid: int) -> list[str]:
    """Return the command that prints the stacks of a process."""
    found = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    return [found or "py-spy", "dump", "--pid", str(pid)]


class Lingering:
    """Says once in an attempt that a rank has done its work and does not end.

    Args:
        tell: Shows a line to the user.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell, self._is_told, self._look_at = tell, False, 0.0
        self._used: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._spy: tuple[int, subprocess.Popen[str]] | None = None

    def look(self, pids: Mapping[int, int]) -> None:
        """Look at the ranks that still run. Call this several times per second.

        Args:
            pids: Maps ranks to process ids.
        """
        now = time.monotonic()
        if self._is_told or now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY
        self._read_spy()
        for rank, pid in pids.items():
            used = _used(pid)
            if used != self._used.get(rank):
                self._used[rank], self._since[rank] = used, now
            elif now - self._since[rank] > _IDLE and self._spy is None:
                self._since[rank] = now
                with contextlib.suppress(OSError):
                    command = [*spy(pid), "--nonblocking"]
                    null, pipe = subprocess.DEVNULL, subprocess.PIPE
                    self._spy = rank, subprocess.Popen(command, stdin=null, stdout=pipe, stderr=null, text=True)

    def _read_spy(self) -> None:
        if self._spy is not None and self._spy[1].poll() is not None:
            rank, process = self._spy
            self._spy, (text, _) = None, process.communicate()
            names = waits_for(text)
            if names is not None:
                self._say(rank, f" ({', '.join(names[:_MOST])})" if names else "")

    def _say(self, rank: int, names: str) -> None:
        self._is_told = True
        self._tell(f"rank {rank} has done its work, but a thread or process that it has started does not end{names}")

    def close(self) -> None:
        if self._spy is not None:
            self._spy[1].kill()
            self._spy[1].communicate()


def waits_for(dump: str) -> list[str] | None:
    """Return the names of the other threads if the main thread waits at Python's exit, given py-spy's text; else
    None."""
    threads = [text.strip() for text in re.split(r"\n(?=Thread )", dump) if text.startswith("Thread ")]
    main = next((text for text in threads if _THREAD.findall(text)[:1] == ["MainThread"]), "")
    if not _AT_EXIT.search(main):
        return None
    return [name for text in threads for name in _THREAD.findall(text)[:1] if name != "MainThread"]


def _used(pid: int) -> int:
    """Return the CPU time that the main thread of a process has used, in ticks of the kernel."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return -1
