"""`train doctor`: is this machine well, and what mends it.

`python3 -m train doctor` does it with the standard library of Python 3.8 alone, for a host before `make up`.
"""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from train.commands.completion_values import words
from train.commands.parser import Parser, number
from train.doctor import disk, finding, gpu, host, limits, network, packages, user
from train.doctor.finding import Finding
from train.doctor.machine import Machine
from train.errors import Refused
from train.supervise import address

NAMES = (
    "Docker", "docker compose", "docker buildx", "neighbours", "container toolkit", "GPUs stay", "GPUs", "driver",
    "compute capability", "GPU memory errors", "GPU heat", "GPU memory", "packages", "torch", "torchvision",
    "LD_LIBRARY_PATH", "shared memory", "memory", "locked memory", "open files", "user name", "home folder",
    "cache folders",
    "folder of runs", "room on disk", "file system", "file locks", "write speed", "clock",
    "rendezvous name", "rendezvous address", "rendezvous port", "interface", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME", "InfiniBand",
)  # fmt: skip
"""Every check there is; which of them say something depends on the machine."""


def add_arguments(parser: Parser) -> None:
    """Which checks, and how they are shown."""
    add = parser.add_argument
    add("--json", action="store_true", help="for machines: a list of check, verdict, seen, remedy")
    text = "these alone, by their names with commas: 'shared memory,memory'; train doctor lists them"
    add("--only", metavar="CHECK", help=text, offer=words(*NAMES))
    text = "check the way to where ranks of several machines are to meet, too"
    add("--rendezvous", metavar="HOST:PORT", help=text)
    text = "under torchrun or srun, on every rank: what several ranks need; alone: here"
    add("--job", action="store_true", help=text)
    add("--nproc", metavar="N", help="with --job, alone: ranks to try it with (one per GPU, else 2)")
    add("--timeout", metavar="SECONDS", help="with --job: how long a rank may take to come and to answer (30)")


def run(options: Namespace, runs: Path) -> int:
    """Check, print a line a check. 1 if there is a problem."""
    ranks, seconds = number("nproc", options.nproc, 1), number("timeout", options.timeout, 1)
    if not options.job and (ranks or seconds):
        raise Refused(f"--{'nproc' if ranks else 'timeout'} is for --job; give both, or neither")
    try:
        place = address.parse(options.rendezvous) if options.rendezvous is not None else None
    except ValueError as error:
        raise Refused(error) from None
    only = _named(options.only.split(",")) if options.only is not None else []
    if options.job:
        if place is not None:
            raise Refused("--job and --rendezvous are two questions; ask one of them")
        if only:
            raise Refused("--only is for the checks of one machine, and --job for those of ranks; ask one of them")
        if find_spec("torch") is None:
            raise Refused("--job takes torch, which this Python has not; make setup installs it into .venv")
        from train.doctor.job import DEADLINE, examine_job

        return examine_job(options.json, ranks, seconds or DEADLINE)
    findings = _examine(Machine(), runs, place)
    if only:
        findings = [one for name in only for one in _of_check(name, findings)]
    finding.show(findings, options.json)
    return finding.exit_code(findings)


def _named(names: list[str]) -> list[str]:
    """The checks of these names, however they are written. Raises Refused if there is none of a name."""
    known = {name.lower(): name for name in NAMES}
    for name in names:
        if name.strip().lower() not in known:
            raise Refused(f"there is no check {name.strip()!r}; there are: {', '.join(NAMES)}")
    return [known[name.strip().lower()] for name in names]


def _of_check(name: str, findings: list[Finding]) -> list[Finding]:
    nothing = finding.not_applicable(name, "nothing to check here: train doctor says what there is")
    return [one for one in findings if one.check == name] or [nothing]


def _examine(machine: Machine, runs: Path, place: address.Place | None) -> list[Finding]:
    """Every check that needs no other rank. Takes a few seconds; changes nothing.

    Args:
        runs: the folder where runs are stored, or will be.
        place: where ranks of several machines are to meet.
    """
    subjects = [host.checks(machine), gpu.checks(machine), packages.checks(machine), limits.checks(machine)]
    subjects += [user.checks(machine), disk.checks(machine, runs)]
    subjects += [network.checks(machine, place) if place is not None else network.names_of_interfaces(machine)]
    return [one for checks in subjects for one in checks]
