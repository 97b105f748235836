"""What NCCL is told by environment variables, before the first communicator. What the user has set stays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableMapping
from pathlib import Path

_SYS_NICE = 23
"""CAP_SYS_NICE, in linux/capability.h."""


def prepare(deterministic: bool) -> None:
    """Set what is not set."""
    status = ""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii")
    fill(os.environ, deterministic, is_walled(status))


def fill(environ: MutableMapping[str, str], deterministic: bool, walled: bool) -> None:
    """Set what is not set.

    NVLS adds inside the NVLink switch, in an order that nothing promises to be the same in the next call; rings and
    trees have one. Memory of the host by cuMem (on by default since NCCL 2.24) needs system calls for NUMA that
    Docker's seccomp profile refuses without SYS_NICE (NCCL's documentation, NCCL_CUMEM_HOST_ENABLE).
    """
    if deterministic:
        environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if walled:
        environ.setdefault("NCCL_CUMEM_HOST_ENABLE", "0")


def is_walled(status: str) -> bool:
    """Whether /proc/self/status tells of a seccomp filter, and of no SYS_NICE (see proc(5))."""
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    has_filter = fields.get("Seccomp", "0").strip() == "2"
    return has_filter and not int(fields.get("CapEff", "0").strip(), 16) >> _SYS_NICE & 1
