"""`train doctor`: is this machine well, and what mends it.

`python3 -m train doctor` does it with the standard library of Python 3.8 alone, for a host before `make up`.
"""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from train.commands.parser import Parser, number
from train.errors import Refused


def add_arguments(parser: Parser) -> None:
    """Which checks, and how they are shown."""
    add = parser.add_argument
    add("--json", action="store_true", help="for machines: a list of check, verdict, seen, remedy")
    text = "these alone, by their names with commas: 'shared memory,memory'; train doctor lists them"
    add("--only", metavar="CHECK", help=text, offer=_checks)
    text = "check the way to where ranks of several machines are to meet, too"
    add("--rendezvous", metavar="HOST:PORT", help=text)
    text = "under torchrun or srun, on every rank: what several ranks need; alone: here"
    add("--job", action="store_true", help=text)
    add("--nproc", metavar="N", help="with --job, alone: ranks to try it with (one per GPU, else 2)")
    add("--timeout", metavar="SECONDS", help="with --job: how long a rank may take to come and to answer (30)")


def _checks(**_: object) -> list[str]:
    from train.doctor.examine import NAMES

    return list(NAMES)


def run(options: Namespace, runs: Path) -> int:
    """Check, print a line a check. 1 if there is a problem."""
    from train.doctor import finding
    from train.doctor.examine import chosen, examine
    from train.doctor.machine import Machine
    from train.supervise import address

    ranks, seconds = number("nproc", options.nproc, 1), number("timeout", options.timeout, 1)
    if not options.job and (ranks or seconds):
        raise Refused(f"--{'nproc' if ranks else 'timeout'} is for --job; give both, or neither")
    try:
        place = address.parse(options.rendezvous) if options.rendezvous is not None else None
        only = [name.strip() for name in options.only.split(",")] if options.only is not None else []
        chosen([], only)  # a name that is none is refused at once
    except ValueError as error:
        raise Refused(error) from None
    if options.job:
        if place is not None:
            raise Refused("--job and --rendezvous are two questions; ask one of them")
        if only:
            raise Refused("--only is for the checks of one machine, and --job for those of ranks; ask one of them")
        if find_spec("torch") is None:
            raise Refused("--job takes torch, which this Python has not; make setup installs it into .venv")
        from train.doctor.job import DEADLINE, examine_job

        return examine_job(options.json, ranks, seconds or DEADLINE)
    findings = examine(Machine(), runs, place)
    findings = chosen(findings, only) if only else findings
    finding.show(findings, options.json)
    return finding.exit_code(findings)
