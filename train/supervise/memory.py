"""Out of memory: whether the kernel has killed a process, at which limit, and what to do. Imports no torch.

The kernel kills with a plain SIGKILL; only `memory.events` of a control group (cgroup version 2) shows the reason. The
doctor reads limits with this module on machines whose Python may be 3.8: `limits` and `size` must run there.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Mapping
from pathlib import Path

from ..format import UNITS, size

ADVICE = (
    "halve the micro batch (of a task: --micro_batch_size in a new run), use fewer data workers or ranks, "
    "or raise the limit"
)
"""What a user can do about it, as the end of a message."""
ADVICE_ON_GPU = "halve --micro_batch_size in a new run, or resume with --parallel.recompute auto"

_REFUSED = re.compile(
    r"MemoryError|std::bad_alloc|[Cc]annot allocate memory|can't allocate memory|\bENOMEM\b"
    r"|Unable to allocate .+ for an array"
)
"""Messages of Python, C++, the C library, torch's CPU allocator and NumPy if an allocation fails."""
_DEVICE_FULL = re.compile(
    r"Tried to allocate ([\d.]+) (\w+)\. GPU \d+ has a total capacity of ([\d.]+) (\w+).*"
    r"Of the allocated memory ([\d.]+) (\w+) is allocated by PyTorch, .*?and ([\d.]+) (\w+) is reserved by PyTorch"
)
_LOOK_EVERY = 30.0
"""Seconds between two looks at the counters: enough for a killed process to end and its death to be noticed."""


def group(process: Path = Path("/proc/self"), top: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Return the folder of a process's control group; None without cgroup version 2.

    Args:
        process: The process's folder in /proc.
        top: Mount point of the control groups.
    """
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None or not (top / "cgroup.controllers").exists():
        return None
    folder = top / path.lstrip("/")
    # a container sees only its own group
    return folder if ".." not in path and folder.is_dir() else top


def limits(process: Path = Path("/proc/self"), top: Path = Path("/sys/fs/cgroup")) -> dict[Path, int]:
    """Map the control group of a process and its parents to their memory limits in bytes, if they have one."""
    folder, found = group(process, top), {}
    for one in [folder, *folder.parents] if folder is not None else []:
        with contextlib.suppress(OSError, ValueError):  # `max` means no limit
            found[one] = int((one / "memory.max").read_text())
        if one == top:
            break
    return found


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
        self._place, self._group = (process, top), group(process, top)
        self._before = self._last = self._count()
        self._looked = time.monotonic()

    def _count(self) -> int:
        return _counter(self._group / "memory.events", "oom_kill") if self._group is not None else 0

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
    for folder, limit in limits(process, top).items():
        files = _counter(folder / "memory.stat", "inactive_file")  # file cache, which the kernel frees on demand
        with contextlib.suppress(OSError):
            free.append(max(limit - int((folder / "memory.current").read_text()) + files, 0))
    return min(free, default=2**60)


def is_refused(text: str) -> bool:
    """Whether a message says that an allocation of main memory failed."""
    return bool(_REFUSED.search(text)) and "CUDA" not in text


def device_is_too_small(text: str) -> bool:
    """Whether torch's message about a full GPU means that the GPU is too small.

    It is if the request would not fit beside torch's own memory even with all other processes gone.
    """
    found = _DEVICE_FULL.search(text)
    if found is None:
        return False
    pairs = zip(found.groups()[::2], found.groups()[1::2], strict=True)
    asked, total, allocated, reserved = (float(number) * 2 ** UNITS.get(unit, 0) for number, unit in pairs)
    return asked > total - allocated - reserved


def lower_than_agent(by: int = 100) -> None:
    """Raise this process's oom_score_adj, so that the kernel kills it before the agent.

    Args:
        by: of 1000; 1000: it is killed before all others.
    """
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(int(path.read_text()) + by, 1000)))
