"""Out of memory: whether the kernel has killed for it, at which limit, and what to do. Imports no torch.

The kernel kills with a plain SIGKILL; only `memory.events` of a control group (cgroup version 2) tells why. The doctor
reads limits by this module on hosts whose Python may be 3.8: `chain` and `size` must run there.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from train.format import UNITS, size

ADVICE = (
    "halve the batch of a rank (of a task: --micro_batch_size, in a new run), use fewer loader workers or ranks, "
    "or raise the limit"
)
"""What a user can do about it."""
ADVICE_ON_GPU = "halve --micro_batch_size in a new run, or resume with --parallel.recompute auto"

_REFUSED = re.compile(
    r"MemoryError|std::bad_alloc|[Cc]annot allocate memory|can't allocate memory|\bENOMEM\b"
    r"|Unable to allocate .+ for an array"
)
"""What Python, C++, the C library, torch's CPU allocator and NumPy say when memory is refused to them."""
_DEVICE_FULL = re.compile(
    r"Tried to allocate ([\d.]+) (\w+)\. GPU \d+ has a total capacity of ([\d.]+) (\w+).*"
    r"Of the allocated memory ([\d.]+) (\w+) is allocated by PyTorch, .*?and ([\d.]+) (\w+) is reserved by PyTorch"
)
_LOOK_EVERY = 30.0
"""Seconds between two looks at the counters: in so long who was killed is gone, and its death was noticed."""


@dataclass(frozen=True)
class Group:
    """A control group at one moment."""

    folder: Path
    limit: int | None
    """Bytes that its processes may take; None: no limit."""
    kills: int
    """How many of its processes the kernel has killed for lack of memory."""


def chain(process: Path = Path("/proc/self"), top: Path = Path("/sys/fs/cgroup")) -> list[Group]:
    """The control group of a process and those around it, as far as they can be seen; none without version 2.

    Args:
        process: its folder in /proc.
        top: where control groups are mounted.
    """
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return []
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None or not (top / "cgroup.controllers").exists():
        return []
    folder = top / path.lstrip("/")
    if ".." in path or not folder.is_dir():  # of a container that sees its own group alone
        folder = top
    groups = [_look(folder)]
    while folder != top:
        folder = folder.parent
        groups.append(_look(folder))
    return groups


def _look(folder: Path) -> Group:
    kills = _counters(folder / "memory.events").get("oom_kill", 0)
    return Group(folder, _number(folder / "memory.max"), kills)


def _counters(path: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # `max` is no limit


class Kills:
    """Counts the kernel's kills for lack of memory in the control groups of processes, in the last seconds.

    A group may have many others in it, as that of a container has, and a run may take days: what was killed on another
    day says nothing of who dies now. So the beginning moves on while all is well.

    Args:
        process: whose group is counted in from the start, as its folder in /proc.
        top: where control groups are mounted.
    """

    def __init__(self, process: Path = Path("/proc/self"), top: Path = Path("/sys/fs/cgroup")) -> None:
        self._top = top
        self._looks: list[dict[Path, int]] = [{}]
        self._looked = time.monotonic()
        self._add(process)

    def _add(self, process: Path) -> None:
        for group in chain(process, self._top)[:1]:
            for look in self._looks:
                look.setdefault(group.folder, group.kills)

    def among(self, pids: Iterable[int]) -> None:
        """Count in the groups of processes that may live in others than this one."""
        for pid in pids:
            self._add(Path("/proc") / str(pid))

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self._looked >= _LOOK_EVERY

    def look(self) -> None:
        """To be called while all live: what was there before the last look is no cause of what comes.

        Before the last one: a kill that this look finds may be one whose death is not noticed yet.
        """
        self._looks = [self._looks[-1], {folder: _look(folder).kills for folder in self._looks[-1]}]
        self._looked = time.monotonic()

    def limit(self) -> str | None:
        """The limit at which there was a kill, as text, or None if there was none."""
        for folder, before in self._looks[0].items():
            if _look(folder).kills > before:
                around = [folder, *(parent for parent in folder.parents if parent.is_relative_to(self._top))]
                return _least([_look(one) for one in around])
        return None


def _least(groups: list[Group]) -> str:
    """The least limit of control groups, else the machine's memory, as text."""
    limited = [group for group in groups if group.limit]
    if not limited:
        return f"the {size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} of this machine"
    least = min(limited, key=lambda group: group.limit or 0)
    return f"the limit of {size(least.limit or 0)} of its container or control group ({least.folder})"


def refused_at() -> str:
    """The limit that an allocation of this process, or of one that it starts, can be refused for, as text."""
    for number, name in ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")):
        soft = resource.getrlimit(number)[0]
        if soft != resource.RLIM_INFINITY:
            return f"the limit of {size(soft)} a process ({name})"
    return _least(chain())


def left(process: Path = Path("/proc/self"), top: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that a process can still get, by its control groups and by the machine's own count."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for group in chain(process, top):
        if group.limit:  # files that it keeps in memory can be given back at once
            files = _counters(group.folder / "memory.stat").get("inactive_file", 0)
            free.append(max(group.limit - (_number(group.folder / "memory.current") or 0) + files, 0))
    return min(free, default=2**60)


def is_refused(text: str) -> bool:
    """Whether a message says that memory of the host was refused."""
    return bool(_REFUSED.search(text)) and "CUDA" not in text


def device_is_too_small(text: str) -> bool:
    """Whether torch's message of a full GPU means that it would be full again: were all other processes gone, what was
    asked for would not fit beside what torch has here."""
    found = _DEVICE_FULL.search(text)
    if found is None:
        return False
    pairs = zip(found.groups()[::2], found.groups()[1::2], strict=True)
    asked, total, allocated, reserved = (float(number) * 2 ** UNITS.get(unit, 0) for number, unit in pairs)
    return asked > total - allocated - reserved


def lower_than_agent() -> None:
    """Let the kernel take this process before the one that can say why: its score is raised by a tenth of all."""
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(int(path.read_text()) + 100, 1000)))
