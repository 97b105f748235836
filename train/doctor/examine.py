"""All checks of one machine, in the order in which people meet what they are about."""

from __future__ import annotations

from pathlib import Path

from train.doctor import disk, gpu, host, limits, network, packages
from train.doctor.finding import Finding, not_applicable
from train.doctor.machine import Machine
from train.supervise.address import Place

NAMES = (
    "Docker", "docker compose", "docker buildx", "container toolkit", "GPUs stay", "GPUs", "driver",
    "compute capability", "GPU memory errors", "GPU heat", "GPU memory", "packages", "torch", "torchvision",
    "LD_LIBRARY_PATH", "shared memory", "memory", "locked memory", "open files",
    "folder of runs", "room on disk", "file system", "file locks", "write speed", "clock",
    "rendezvous name", "rendezvous address", "rendezvous port", "interface", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME", "InfiniBand",
)  # fmt: skip
"""Every check there is; which of them say something depends on the machine."""


def chosen(findings: list[Finding], only: list[str]) -> list[Finding]:
    """Those of these names, in the order of the names.

    Raises:
        ValueError: there is no check of a name.
    """
    found = []
    for name in only:
        known = next((known for known in NAMES if known.lower() == name.lower()), None)
        if known is None:
            raise ValueError(f"there is no check {name!r}; there are: {', '.join(NAMES)}")
        there = [finding for finding in findings if finding.check == known]
        found += there or [not_applicable(known, "nothing to check here: train doctor says what there is")]
    return found


def examine(machine: Machine, runs: Path, place: Place | None = None) -> list[Finding]:
    """Every check that needs no other rank. Takes a few seconds; changes nothing.

    Args:
        runs: the folder where runs are stored, or will be.
        place: where ranks of several machines are to meet.
    """
    subjects = [host.checks(machine), gpu.checks(machine), packages.checks(machine), limits.checks(machine)]
    subjects += [disk.checks(machine, runs), network.checks(machine, place) if place is not None else iter(())]
    return [finding for checks in subjects for finding in checks]
