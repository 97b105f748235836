"""`train doctor`: find what is wrong with this machine, and the command that fixes it.

`python3 -m train doctor` needs only the standard library of Python 3.8, so that a host can be checked before `make up`.
"""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from ..doctor import disk, finding, gpu, host, limits, network, packages, user
from ..doctor.finding import Finding
from ..doctor.machine import Machine
from ..errors import Refused
from ..nodes import address
from .completion_values import words
from .parser import Parser, number

NAMES = (
    "Docker", "docker compose", "docker buildx", "neighbours", "container toolkit", "GPUs stay", "GPUs", "driver",
    "compute capability", "GPU memory errors", "GPU heat", "GPU memory", "persistence mode", "peer access", "IOMMU",
    "ACS", "packages", "torch", "torchvision",
    "LD_LIBRARY_PATH", "shared memory", "memory", "locked memory", "open files", "user name", "home folder",
    "cache folders",
    "folder of runs", "room on disk", "file system", "file locks", "write speed", "clock",
    "rendezvous name", "rendezvous address", "rendezvous port", "interface", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME", "InfiniBand",
)  # fmt: skip
"""The names of all checks. A machine reports those that apply to it."""


EXAMPLES = {
    "train doctor": "Check this machine. Below each problem stands the command that fixes it.",
    "train doctor --only 'shared memory,memory'": "Repeat two of the checks.",
    "train doctor --job --nproc 2": "Start two ranks; check versions, clocks and the sum of an all-reduce.",
    "train doctor --rendezvous node0:29400": "Also check the connection to node 0 of a run on several machines.",
}


def add_arguments(parser: Parser) -> None:
    """Add the choice of checks, and the form of the output."""
    add = parser.add_argument
    text = "Run only these checks: names with commas, as train doctor prints them."
    add("--only", metavar="CHECK", help=text, offer=words(*NAMES))
    text = "Check ranks together: under torchrun or srun the ranks of that job, else ranks started here."
    add("--job", action="store_true", help=text)
    add("--nproc", metavar="N", help="With --job, not under torchrun: number of ranks. Default: one per GPU, else 2.")
    add("--timeout", metavar="SECONDS", help="With --job: seconds a rank may take to start and to answer. Default: 30.")
    add("--rendezvous", metavar="HOST:PORT", help="Also check the connection to the address where machines meet.")
    add("--json", action="store_true", help="Print JSON, for programs: a list of check, verdict, seen, remedy.")


def run(options: Namespace, runs: Path) -> int:
    """Run the checks and print one line for each. Return 1 if there is a problem."""
    ranks, seconds = number("nproc", options.nproc, 1), number("timeout", options.timeout, 1)
    if not options.job and (ranks or seconds):
        raise Refused(f"--{'nproc' if ranks else 'timeout'} needs --job; give both, or neither")
    try:
        place = address.parse(options.rendezvous) if options.rendezvous is not None else None
    except ValueError as error:
        raise Refused(error) from None
    only = _named(options.only.split(",")) if options.only is not None else []
    if options.job:
        if place is not None:
            raise Refused("--job and --rendezvous are separate checks; give one of them")
        if only:
            raise Refused("--only chooses checks of this machine, and --job checks ranks; give one of them")
        if find_spec("torch") is None:
            raise Refused("--job needs torch, which this Python lacks; install it into .venv with: make setup")
        from ..doctor.job import DEADLINE, examine_job

        return examine_job(options.json, ranks, seconds or DEADLINE)
    findings = _examine(Machine(), runs, place)
    if only:
        findings = [one for name in only for one in _of_check(name, findings)]
    finding.show(findings, options.json)
    return finding.exit_code(findings)


def _named(names: list[str]) -> list[str]:
    """Return the checks of these names, in any case. Raises Refused for an unknown name."""
    known = {name.lower(): name for name in NAMES}
    for name in names:
        if name.strip().lower() not in known:
            raise Refused(f"unknown check {name.strip()!r}; the checks are: {', '.join(NAMES)}")
    return [known[name.strip().lower()] for name in names]


def _of_check(name: str, findings: list[Finding]) -> list[Finding]:
    nothing = finding.not_applicable(name, "does not apply to this machine; train doctor lists the checks that do")
    return [one for one in findings if one.check == name] or [nothing]


def _examine(machine: Machine, runs: Path, place: address.Place | None) -> list[Finding]:
    """Run every check that needs no other rank. Takes a few seconds and changes nothing.

    Args:
        runs: folder of the runs, which may not exist yet.
        place: where the machines of a run meet.
    """
    subjects = [host.checks(machine), gpu.checks(machine), packages.checks(machine), limits.checks(machine)]
    subjects += [user.checks(machine), disk.checks(machine, runs)]
    subjects += [network.checks(machine, place) if place is not None else network.names_of_interfaces(machine)]
    return [one for checks in subjects for one in checks]
