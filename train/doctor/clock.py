"""Whether this machine's clock goes forward: resumes, logs, certificates and rendezvous go by it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from train.doctor.finding import Finding, ok, problem


def checks(runs: Path) -> Iterator[Finding]:
    """All checks of the clock; that of hosts beside each other is in job.py."""
    now, newest = time.time(), 0.0
    with contextlib.suppress(OSError):
        newest = max((path.stat().st_mtime for path in runs.glob("*/run.json")), default=0.0)
    if newest > now + 60:
        seen = f"it is {newest - now:.0f} s behind the newest run's last line: it has gone backwards"
        yield problem("clock", seen, "sudo timedatectl set-ntp true")
    else:
        yield ok("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))
