"""Checks of the folder of runs: writable, free space, locks, speed; and whether the clock has gone backwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..format import size
from .finding import Finding, not_applicable, ok, problem, warning
from .machine import Machine

MB = 2**20
_LEAST_FREE, _LITTLE_FREE = 500 * MB, 5 * 1024 * MB
_LEAST_INODES = 10_000
_SLOW = 20 * MB
"""Bytes per second. On a slower disk runs wait for checkpoints."""
_PROBE = 16 * MB
_LASTING = ("tmpfs", "ramfs")


def checks(machine: Machine, runs: Path) -> Iterator[Finding]:
    """Yield all checks of the disk under the folder of runs."""
    folder = _nearest(runs)
    yield _owner(machine, runs, folder)
    if folder.is_dir():
        yield _room(machine, runs, folder)
        yield _file_system(machine, folder)
        if os.access(str(folder), os.W_OK):
            yield _locks(folder)
            yield _speed(folder)
    yield _clock(runs)


def _nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    while not os.path.lexists(str(folder)) and folder != folder.parent:  # a dangling link counts as existing
        folder = folder.parent
    return folder


def _owner(machine: Machine, runs: Path, folder: Path) -> Finding:
    """Check that this user may write there. A container and its host identify users by number."""
    name = "folder of runs"
    if not folder.is_dir():
        return problem(name, f"{folder} is not a folder", "train launch … --runs DIR")
    if os.statvfs(str(folder)).f_flag & os.ST_RDONLY:
        point = (mount_of(machine, folder.resolve()) or (str(folder), ""))[0]
        remedy = f"sudo mount -o remount,rw {shlex.quote(point)}"
        if machine.is_container:
            remedy = "docker run -v /a/folder:/workspace/runs …  # without :ro"
        return problem(name, f"{folder} is mounted read-only", remedy)
    mine, theirs = os.geteuid(), folder.stat().st_uid
    if not os.access(str(folder), os.W_OK | os.X_OK):
        seen = f"{folder} belongs to UID {theirs}; UID {mine} may not write there"
        return problem(name, seen, f"sudo chown -R {mine}:{os.getegid()} {shlex.quote(str(folder))}")
    where = f"owned by UID {theirs}" if folder == runs.absolute() else f"will be created in {folder}"
    return ok(name, f"{runs}, {where}")


def _room(machine: Machine, runs: Path, folder: Path) -> Finding:
    name = "room on disk"
    disk = os.statvfs(str(folder))
    free, inodes = disk.f_frsize * disk.f_bavail, disk.f_favail
    usual = Path(machine.environ.get("TRAIN_RUNS") or "runs").absolute()
    there = "" if runs.absolute() == usual else f" --runs {shlex.quote(str(runs))}"
    remedy = f"train ls --sort created{there}; train rm{there} NAME"
    if free < _LEAST_FREE:
        return problem(name, f"{size(free)} free under {folder}", remedy)
    if disk.f_files and inodes < _LEAST_INODES:
        return problem(name, f"only {inodes} more files can be created under {folder} (inodes; df -i)", remedy)
    seen = f"{size(free)} free under {folder}"
    return warning(name, seen, remedy) if free < _LITTLE_FREE else ok(name, seen)


def mount_of(machine: Machine, folder: Path) -> tuple[str, str] | None:
    """Return the mount point and the type of the file system of a folder (proc_pid_mountinfo(5))."""
    best: tuple[str, str] | None = None
    for line in machine.read("/proc/self/mountinfo").splitlines():
        fields = line.split()
        if "-" not in fields:
            continue
        point = fields[4].replace("\\040", " ")
        inside = point == "/" or str(folder) == point or str(folder).startswith(point + "/")
        if inside and (best is None or len(point) >= len(best[0])):
            best = point, fields[fields.index("-") + 1]
    return best


def _file_system(machine: Machine, folder: Path) -> Finding:
    name, found = "file system", mount_of(machine, folder.resolve())
    if found is None:
        return not_applicable(name, "/proc/self/mountinfo does not list it")
    point, kind = found
    if kind in _LASTING:
        return warning(
            name, f"{kind} at {point}: runs in memory are lost at the next reboot", "train launch … --runs DIR"
        )
    if kind == "overlay" and machine.is_container:
        seen = f"{point} is the container's own layer: runs are lost with the container"
        return warning(name, seen, "docker run -v /a/folder:/workspace/runs …")
    return ok(name, f"{kind} at {point}")


def _locks(folder: Path) -> Finding:
    """Check that files can be locked, which some network disks cannot. A run is alive while its lock is held."""
    try:
        with tempfile.TemporaryFile(dir=str(folder)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                seen = f"{folder} refuses locks ({error.strerror}): two processes could write to one run"
                return problem("file locks", seen, "train launch … --runs DIR  # on another file system")
    except OSError as error:  # a full disk, which another check reports
        return not_applicable("file locks", f"no test file can be created: {error.strerror}")
    return ok("file locks", "work")


def _speed(folder: Path) -> Finding:
    """Measure how fast a file is written, including fsync."""
    block = os.urandom(MB)  # random, so that a disk cannot compress it
    try:
        with tempfile.TemporaryFile(dir=str(folder)) as file:
            began = time.monotonic()
            for _ in range(_PROBE // MB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = max(time.monotonic() - began, 1e-6)
    except OSError as error:
        return problem("write speed", f"{folder}: {error.strerror}", f"df -hi {shlex.quote(str(folder))}; dmesg | tail")
    rate = _PROBE / seconds
    seen = f"{size(rate)}/s to {folder}, including fsync"
    if rate < _SLOW:
        return warning("write speed", f"{seen}: checkpoints will be slow", "train bench checkpoint")
    return ok("write speed", seen)


def _clock(runs: Path) -> Finding:
    """Check that the clock has not gone backwards. Resumes, logs, certificates and rendezvous depend on it."""
    now, newest = time.time(), 0.0
    with contextlib.suppress(OSError):
        newest = max((path.stat().st_mtime for path in runs.glob("*/run.json")), default=0.0)
    if newest > now + 60:
        seen = f"{newest - now:.0f} s behind the last change of a run: the clock has gone backwards"
        return problem("clock", seen, "sudo timedatectl set-ntp true")
    return ok("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))
