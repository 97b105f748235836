"""Out of memory: whether the kernel has killed a process, at which limit, and what to do. Imports no torch.

The kernel kills with a plain SIGKILL; only a counter of the control group shows the reason (cgroup version 2, and
version 1, which an engine without systemd uses). The
doctor reads limits with this module on machines whose Python may be 3.8: `limits` and `size` must run there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

from ..format import size

_LOOK_EVERY = 30.0
"""Seconds between two looks at the counters: enough for a killed process to end and its death to be noticed."""


@dataclasses.dataclass(frozen=True)
class _Names:
    """Names of files in a control group, and of lines in them."""

    limit: str
    used: str
    kills: str
    """The file with the line `oom_kill N`."""
    cached: str
    """The line of memory.stat with the file cache, which the kernel frees on demand."""


_NAMES = (
    _Names("memory.max", "memory.current", "memory.events", "inactive_file"),
    _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file"),
)
"""Names in cgroup version 2, and in version 1."""
_NO_LIMIT = 2**60
"""Bytes from which on a limit is none. Version 1 writes the largest number of pages."""


@dataclasses.dataclass(frozen=True)
class _Group:
    """The control group of a process."""

    folder: Path
    top: Path
    """The highest group that this process sees."""
    names: _Names

    def around(self) -> list[Path]:
        """Return its folder and those of the groups around it."""
        above = [one for one in self.folder.parents if one == self.top or self.top in one.parents]
        return [self.folder, *above]

    def limits(self) -> dict[Path, int]:
        """Map it and the groups around it to their limits in bytes, if they have one."""
        found = {}
        for one in self.around():
            with contextlib.suppress(OSError, ValueError):  # `max` means no limit
                found[one] = int((one / self.names.limit).read_text())
        return {one: limit for one, limit in found.items() if limit < _NO_LIMIT}

    def left(self) -> list[int]:
        """Return the bytes that are free in each of these groups."""
        free = []
        for folder, limit in self.limits().items():
            cached = _counter(folder / "memory.stat", self.names.cached)
            with contextlib.suppress(OSError):
                free.append(max(limit - int((folder / self.names.used).read_text()) + cached, 0))
        return free

    def kills(self) -> int:
        """Return how many processes the kernel has killed in it."""
        return _counter(self.folder / self.names.kills, "oom_kill")


def _group(process: Path, top: Path) -> _Group | None:
    """Return the control group of a process that limits its memory; None if there is none.

    Args:
        process: The process's folder in /proc.
        top: Mount point of the control groups.
    """
    try:
        rows = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
    except OSError:
        return None
    is_second = (top / "cgroup.controllers").exists()
    top = top if is_second else top / "memory"
    path = next((row[2] for row in rows if (row[0] == "0" if is_second else "memory" in row[1].split(","))), None)
    if path is None or not top.is_dir():
        return None
    folder = top / path.lstrip("/")
    # a container sees only its own group
    return _Group(folder if ".." not in path and folder.is_dir() else top, top, _NAMES[0 if is_second else 1])


def limits(process: Path = Path("/proc/self"), top: Path = Path("/sys/fs/cgroup")) -> dict[Path, int]:
    """Map the control group of a process and its parents to their memory limits in bytes, if they have one."""
    group = _group(process, top)
    return group.limits() if group is not None else {}


def _counter(path: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


class Kills:
    """Counts the kernel's recent kills for lack of memory in the control group of a process.

    A group may contain many other processes, as in a container, and a run may take days. A kill on another day does not
    explain a death now, so the start of the count moves forward while all ranks run.
    """

    def __init__(self, process: Path = Path("/proc/self"), top: Path = Path("/sys/fs/cgroup")) -> None:
        self._place, self._group = (process, top), _group(process, top)
        self._before = self._last = self._count()
        self._looked = time.monotonic()

    def _count(self) -> int:
        return self._group.kills() if self._group is not None else 0

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self._looked >= _LOOK_EVERY

    def look(self) -> None:
        """Forget kills from before the last look; call this while all ranks run.

        Kills since the last look still count: the death of that process may not be noticed yet.
        """
        self._before, self._last, self._looked = self._last, self._count(), time.monotonic()

    def limit(self) -> str | None:
        """Return the limit at which a process was killed, as text; None: no kill."""
        return _least(limits(*self._place)) if self._count() > self._before else None


def _least(limited: Mapping[Path, int]) -> str:
    """Return the lowest limit of the control groups, else the machine's memory, as text."""
    if not limited:
        return f"the {size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} of this machine"
    least, folder = min((limit, folder) for folder, limit in limited.items())
    return f"the limit of {size(least)} of its container or control group ({folder})"


def refused_at() -> str:
    """Return the memory limit that applies to this process and to those it starts, as text."""
    for number, name in ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")):
        soft = resource.getrlimit(number)[0]
        if soft != resource.RLIM_INFINITY:
            return f"the limit of {size(soft)} per process ({name})"
    return _least(limits())


def left(process: Path = Path("/proc/self"), top: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that a process can still get, by its control groups and the machine's free memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    group = _group(process, top)
    free += group.left() if group is not None else []
    return min(free, default=2**60)


def lower_than_agent(by: int = 100) -> None:
    """Raise this process's oom_score_adj, so that the kernel kills it before the agent.

    Args:
        by: of 1000; 1000: it is killed before all others.
    """
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(int(path.read_text()) + by, 1000)))
