"""`train archive`: a run as one file, from which another machine goes on."""

from __future__ import annotations

import os
import shlex
import tarfile
from argparse import Namespace
from pathlib import Path, PurePosixPath

from train import format, screen
from train.commands.options import add_name
from train.commands.parser import Parser
from train.errors import EXIT_FINISHED, Refused


def add_arguments(parser: Parser) -> None:
    """Which run, and where to."""
    add_name(parser)
    parser.add_argument("--to", metavar="FILE", help="the file to write, a .tar; default: NAME.tar")


def run(options: Namespace, runs: Path) -> int:
    """Write the file; say how another machine goes on."""
    from train.cluster import jobs
    from train.run import durable, folders, imports

    found = folders.find(runs, options.name)
    record, target = found.read(), Path(f"{found.name}.tar" if options.to is None else options.to)
    durable.check_target(target, (".tar",))
    if os.path.lexists(target):
        raise Refused(f"{target} exists; remove it, or choose another file with --to")
    if record.get("script"):
        raise Refused(f"{found.name} runs a script, and what that needs and saves lies elsewhere; copy it by hand")
    if jobs.is_submitted(record) or record.get("cluster"):
        raise Refused(f"{found.name} is of a cluster or of several machines; archive a fork of it: train fork --help")
    lock = found.acquire()
    if lock is None:
        raise Refused(f"{found.name} is running; first: train stop {found.name}")
    try:
        with durable.published(target) as partial:
            partial.chmod(0o600)  # as the file in it that only its owner may read
            with tarfile.open(partial, "w") as tar:
                try:
                    tar.add(found.path.resolve(), found.name, filter=_checked)
                except OSError as error:
                    if error.filename is None:  # of the file that is written
                        raise
                    raise Refused(f"{error.filename} cannot be read: {error.strerror}") from None
    finally:
        lock.release()
    has_copies = (found.folder / imports.MODULES).exists()
    other = list(record.get("task_watched") or {}) + ([] if has_copies else list(record.get("task_imports") or {}))
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        screen.remark(
            f"{found.name} has no copy of {', '.join(other[:3])}{more}, which its task needs; take them along"
        )
    file = shlex.quote(str(target))
    screen.say(f"wrote {target}, {format.size(target.stat().st_size)}; elsewhere, beside the data that it needs:")
    screen.say(f"  mkdir -p runs && tar -xkf {file} -C runs && train resume {found.name}")
    return EXIT_FINISHED


def _checked(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """What becomes of a file of the run; None: it is left out, as an unfinished save or a request to stop it.

    Raises:
        Refused: it is a link or no file.
    """
    inside = PurePosixPath(member.name).parts[1:]
    if len(inside) in (1, 2) and (inside[-1].startswith(".") or inside == ("stop",)):
        return None
    if inside == ("wandb",):  # links, and what the service has: wandb.json says which run it is
        return None
    if not (member.isreg() or member.isdir() or member.islnk()):
        raise Refused(f"{member.name} is a link or no file, which another machine has not; put a file in its place")
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
