"""Whether this machine's clock tells the time: resumes, logs, certificates and rendezvous go by it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from train.doctor.finding import Finding, ok, problem
from train.doctor.machine import Machine

_OFF = 5.0
"""Seconds between two clocks that are told."""


def checks(machine: Machine, runs: Path) -> Iterator[Finding]:
    """All checks of the clock."""
    yield _clock(machine, runs)


def kernel_now(machine: Machine) -> float:
    """Seconds since 1970 as the kernel has them, past everything that stands between it and a program; nan if it
    does not tell. `btime` is the moment of the start, in proc_stat(5)."""
    start = re.search(r"^btime (\d+)", machine.read("/proc/stat"), re.MULTILINE)
    up = machine.read("/proc/uptime").split()
    return float(start.group(1)) + float(up[0]) if start and up else float("nan")


def _clock(machine: Machine, runs: Path) -> Finding:
    now, kernel = time.time(), kernel_now(machine)
    off = now - kernel
    if abs(off) > _OFF:
        seen = f"programs see {_words(off)} what the kernel's clock says"
        preload = machine.environ.get("LD_PRELOAD", "")
        remedy = "unset LD_PRELOAD FAKETIME" if "faketime" in preload else "sudo timedatectl set-ntp true"
        return problem("clock", seen, remedy)
    newest = max((_age(run) for run in _records(runs)), default=0.0)
    if newest > now + 60:
        seen = f"it is {_words(now - newest)} the newest run's last line: it has gone backwards"
        return problem("clock", seen, "sudo timedatectl set-ntp true")
    return ok("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))


def _records(runs: Path) -> Iterator[Path]:
    try:
        yield from runs.glob("*/run.json")
    except OSError:
        return


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _words(seconds: float) -> str:
    count = abs(seconds)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1)):
        if count >= 2 * length or length == 1:
            return f"{count / length:.0f} {unit} {'before' if seconds < 0 else 'after'}"
    raise AssertionError
