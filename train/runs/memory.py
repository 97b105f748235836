"""Out of memory: whether the kernel has killed for it, at which limit, and what to do. Imports no torch.

The doctor reads limits by it on hosts whose Python may be 3.8: `chain` and `size` must run there.

The kernel kills with a plain SIGKILL; only its counters tell why. They lie in the control group (cgroup) of the process
that was killed: `memory.events` in version 2, `memory.oom_control` in version 1 (kernel documentation,
admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst); where a process has no such group, in /proc/vmstat.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ADVICE = "take a smaller (micro) batch, fewer loader workers or fewer ranks, or raise the limit"
"""What a user can do about it."""

_EXHAUSTED = re.compile(
    r"MemoryError|std::bad_alloc|[Cc]annot allocate memory|can't allocate memory|\bENOMEM\b"
    r"|Unable to allocate .+ for an array"
)
"""What Python, C++, the C library, torch's CPU allocator and NumPy say when memory is refused to them."""
_DEVICE_FULL = re.compile(r"Tried to allocate ([\d.]+) (\w+)\. GPU \d+ has a total capacity of ([\d.]+) (\w+)")
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (\w+)")
_DEVICE_OURS = re.compile(r"this process has ([\d.]+) (\w+) memory in use")
_DEVICE_TORCHS = re.compile(
    r"Of the allocated memory ([\d.]+) (\w+) is allocated by PyTorch, (?:with .{1,99}?, )?"
    r"and ([\d.]+) (\w+) is reserved by PyTorch but unallocated"
)
"""What of it is torch's. In a container, where its number is not the host's, torch takes itself for another process."""
_UNITS = {"bytes": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_UNLIMITED = 2**60
"""Version 1 has no word for it, but the largest number of pages."""
MARGIN = 0.1
"""Of what there is, the share that a try must leave free on a CPU: loader workers, checkpoints and evaluations come."""
_LOOK_EVERY = 30.0
"""Seconds between two looks at the counters: in so long who was killed has given its memory back and is gone, or a rank
has come back from a long backward and noticed that its loader was."""


@dataclass(frozen=True)
class Use:
    """Memory of a process on a CPU, in bytes."""

    resident: int
    address_space: int


@dataclass(frozen=True)
class Room:
    """The bytes that there are for each rank; None: no limit. On a CPU."""

    resident: float | None = None
    address_space: float | None = None

    def holds(self, use: Use, margin: float = MARGIN) -> bool:
        """Whether so much fits, and leaves this share free."""
        pairs = ((use.resident, self.resident), (use.address_space, self.address_space))
        return all(room is None or used <= room * (1 - margin) for used, room in pairs)


@dataclass(frozen=True)
class Load:
    """What a run computes at a time."""

    batch: int
    """Samples of a step, over all ranks."""
    micro: int
    """Samples of a forward and backward."""
    ranks: int


@dataclass(frozen=True)
class Group:
    """A control group at one moment."""

    folder: Path
    limit: int | None
    """Bytes that its processes may take; None: no limit."""
    kills: int | None
    """How many of its processes the kernel has killed for lack of memory; None: not counted."""
    hits: int
    """How often its limit was met."""
    peak: int = 0
    """The most bytes that its processes have ever taken, 0 where that is not known."""


def chain(process: Path = Path("/proc/self")) -> list[Group]:
    """The control group that a process's memory counts in, and those around it as far as they can be seen.

    Args:
        process: its folder in /proc.
    """
    folder, top = _place(process)
    groups = []
    while folder is not None and top is not None:
        groups.append(_look(folder))
        if folder == top:
            break
        folder = folder.parent
    return groups


def _place(process: Path) -> tuple[Path | None, Path | None]:
    """The folder of a process's memory group, and the topmost that is mounted here."""
    try:
        memberships = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:
        return None, None
    paths = {controllers: path for _, controllers, path in memberships}
    kind = next((name for name in paths if "memory" in name.split(",")), "")  # version 1 where it has the controller
    for mount in mounts:
        end = mount.index("-")
        filesystem, options = mount[end + 1], mount[-1].split(",")
        if filesystem != ("cgroup" if kind else "cgroup2") or (kind and "memory" not in options) or kind not in paths:
            continue
        root, top = mount[3], Path(mount[4].replace("\\040", " "))
        with contextlib.suppress(ValueError):
            folder = top / Path(paths[kind]).relative_to(root)
            if folder.is_dir():
                return folder, top
        return top, top  # a mount made elsewhere: in a container, its own group
    return None, None


def _look(folder: Path) -> Group:
    events = {**_counters(folder / "memory.events"), **_counters(folder / "memory.oom_control")}
    # Version 1 limits memory, and memory with swap; where the two are equal, neither counts how often it was met.
    limits = [_number(folder / f"memory.{name}") for name in ("max", "limit_in_bytes", "memsw.limit_in_bytes")]
    limit = min((limit for limit in limits if limit and limit < _UNLIMITED), default=None)
    counts = [_number(folder / f"memory.{name}") for name in ("failcnt", "memsw.failcnt")]
    peaks = [_number(folder / f"memory.{name}") for name in ("peak", "max_usage_in_bytes", "memsw.max_usage_in_bytes")]
    hits = events.get("oom", 0) + sum(count or 0 for count in counts)
    return Group(folder, limit, events.get("oom_kill"), hits, max(peak or 0 for peak in peaks))


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


@dataclass(frozen=True)
class _Counts:
    """What the kernel has counted at one moment."""

    groups: dict[Path, list[Group]]
    """By the innermost: it and those around it."""
    everywhere: int
    """Kills on the whole machine."""


class Kills:
    """Counts the kernel's kills for lack of memory among processes: those of the last seconds before `limit`.

    A control group may have many others in it, as that of a container has, and a run may take days: what was killed on
    another day says nothing of who dies now. So its beginning moves on while all is well.

    Args:
        process: whose groups are counted in from the start, as its folder in /proc.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        groups = chain(process)
        self._looks = [_Counts({_key(groups): groups} if groups else {}, _everywhere())]
        self._looked = time.monotonic()

    def among(self, pids: Iterable[int]) -> None:
        """Count in the groups of processes that may live in others than this one."""
        for pid in pids:
            groups = chain(Path("/proc") / str(pid))
            for look in self._looks:
                if groups:
                    look.groups.setdefault(_key(groups), groups)

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self._looked >= _LOOK_EVERY

    def look(self) -> None:
        """To be called while nobody has died: what was there before the last look is no cause of what comes.

        Before the last one: a kill that this look finds may be the one that nobody has noticed yet.
        """
        groups = {key: [_look(group.folder) for group in groups] for key, groups in self._looks[-1].groups.items()}
        self._looks = [self._looks[-1], _Counts(groups, _everywhere())]
        self._looked = time.monotonic()

    def limit(self) -> str | None:
        """The limit at which there was a kill, in words, or None if there was none."""
        before = self._looks[0]
        counted = [groups for groups in before.groups.values() if groups[0].kills is not None]
        for groups in counted:
            after = [_look(group.folder) for group in groups]
            if (after[0].kills or 0) > (groups[0].kills or 0):
                met = [new for old, new in zip(groups, after, strict=True) if new.hits > old.hits and new.limit]
                full = [group for group in after if group.limit and group.peak > 0.99 * group.limit]
                return _words((met or full)[0]) if met or full else machine()
        if not counted and _everywhere() > before.everywhere:
            return machine()
        return None


def _everywhere() -> int:
    return _counters(Path("/proc/vmstat")).get("oom_kill", 0)


def _key(groups: list[Group]) -> Path:
    return groups[0].folder


def _words(group: Group) -> str:
    assert group.limit is not None
    return f"the limit of {size(group.limit)} of its container or control group ({group.folder})"


def machine() -> str:
    """The machine's memory as a limit, in words."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"the {size(total)} of this machine"


def refused_at() -> str:
    """The limit that an allocation of this process, or of one that it starts, can be refused for, in words."""
    for number, name in ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")):
        soft = resource.getrlimit(number)[0]
        if soft != resource.RLIM_INFINITY:
            return f"the limit of {size(soft)} a process ({name})"
    limited = [group for group in chain() if group.limit]
    return _words(min(limited, key=lambda group: group.limit or 0)) if limited else machine()


def room(ranks: int, process: Path = Path("/proc/self")) -> Room:
    """The memory that each of so many new ranks can have that this process starts, on this machine."""
    free = [size for name, size in _sizes(Path("/proc/meminfo")).items() if name == "MemAvailable"]
    free += [max(group.limit - _used(group.folder), 0) for group in chain(process) if group.limit]
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return Room(min(free) / ranks if free else None, None if soft == resource.RLIM_INFINITY else float(soft))


def left() -> int:
    """Bytes of memory that this process can still get, by its control groups and by the machine's own count."""
    resident = room(1).resident
    return 2**60 if resident is None else int(resident)


def _used(folder: Path) -> int:
    """What a control group holds and cannot give back at once: without files that it keeps in memory."""
    held = next((n for name in ("current", "usage_in_bytes") if (n := _number(folder / f"memory.{name}"))), 0)
    counts = _counters(folder / "memory.stat")
    return held - counts.get("total_inactive_file", counts.get("inactive_file", 0))


def peaks() -> Use:
    """The most that this process has had."""
    sizes = _sizes(Path("/proc/self/status"))
    return Use(sizes["VmHWM"], sizes["VmPeak"])


def taken() -> Use:
    """What this process has now."""
    sizes = _sizes(Path("/proc/self/status"))
    return Use(sizes["VmRSS"], sizes["VmSize"])


def _sizes(path: Path) -> dict[str, int]:
    """Bytes by name, of a file of the kernel with lines as `VmHWM:   1024 kB`."""
    lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    return {line[0]: int(line[1]) * 1024 for line in lines if len(line) == 3 and line[2] == "kB"}


def shortage(load: Load, peak: float | None = None, fixed: float | None = None, limit: float | None = None) -> str:
    """What to know and do about a run for which memory was too short, in words.

    Args:
        peak: the most bytes that a rank had, with those that it was refused.
        fixed: those of them that do not depend on the batch: weights, gradients, the optimizer's state.
        limit: what there is.
    """
    said = f"global batch {load.batch} in micro batches of {load.micro} on {load.ranks} rank{'s' * (load.ranks > 1)}"
    if peak:
        said += f", peak {size(peak)}"
    fits = fitting(load.micro, peak, fixed, limit)
    if fits:
        said += f"; a micro batch of {fits} would fit by estimate: --micro_batch_size {fits} in a new run, or auto"
    elif load.micro > 1:
        said += "; not even a micro batch of 1 would fit by estimate"
    return said + "; or --parallel.recompute auto, which a resume may change"


def fitting(micro: int, peak: float | None, fixed: float | None, limit: float | None) -> int | None:
    """The micro batch that would fit, where one of `micro` samples did not; None: none.

    By the line from what is there without samples to what was there at the end. That was not all that was needed, so
    the line can lie too low: where it says that `micro` itself fits, or where it is not known, it is half of that.
    """
    if micro == 1:
        return None
    if peak is None or fixed is None or limit is None or peak <= fixed:
        return micro // 2
    found = int((limit * (1 - MARGIN) - fixed) / ((peak - fixed) / micro))
    if found >= micro:
        return micro // 2
    return found if found >= 1 else None


def size(count: float) -> str:
    """Bytes in words: 512 MiB, 1.5 GiB."""
    unit = next((unit for unit in _UNITS if count < 1024 * 2 ** _UNITS[unit]), "TiB")
    return f"{round(count / 2 ** _UNITS[unit], 1):g} {unit}"


def is_refused(text: str) -> bool:
    """Whether a message says that memory of the host was refused."""
    return bool(_EXHAUSTED.search(text)) and "CUDA" not in text


def wanted(text: str) -> float:
    """The bytes that an allocator of torch says were asked of it; 0 where it does not say."""
    found = _WANTED.search(text)
    return float(found[1]) * 2 ** _UNITS.get(found[2], 0) if found else 0.0


def device_is_too_small(text: str) -> bool:
    """Whether torch's message of a full GPU means that it would be full again: were all other processes gone, what
    was asked for would not fit beside what this process has."""
    asked, ours = _DEVICE_FULL.search(text), _DEVICE_OURS.search(text) or _DEVICE_TORCHS.search(text)
    if not asked or not ours:
        return False
    try:
        wanted, total = _bytes(asked.groups())
        used = sum(_bytes(ours.groups()))
    except (KeyError, ValueError):
        return False
    return wanted > total - used


def _bytes(words: Sequence[str]) -> list[float]:
    """Sizes as torch writes them, a number and a unit in turn."""
    return [float(number) * 2 ** _UNITS[unit] for number, unit in zip(words[::2], words[1::2], strict=True)]


def lower_than_agent() -> None:
    """Let the kernel take this process before the one that can say why: its score is raised by a tenth of all."""
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(int(path.read_text()) + 100, 1000)))
