"""`train archive`: pack a run into one file, to resume it on another machine."""

from __future__ import annotations

import os
import shlex
import tarfile
from argparse import Namespace
from pathlib import Path, PurePosixPath

from .. import format, screen
from ..errors import EXIT_FINISHED, Refused
from .options import add_name
from .parser import Parser

EXAMPLES = {
    "train archive demo1": "Write demo1.tar: the whole run with its checkpoints, task and logs.",
    "train archive demo1 --to /media/usb/demo1.tar": "Write it elsewhere. The last line printed resumes the run there.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run and the file."""
    add_name(parser)
    parser.add_argument("--to", metavar="FILE", help="File to write, a .tar. Default: NAME.tar.")


def run(options: Namespace, runs: Path) -> int:
    """Write the file, and print the command that resumes the run on another machine."""
    from .. import programs
    from ..cluster import jobs
    from ..run import durable, folders, ownership

    found = folders.find(runs, options.name)
    record, target = found.read(), Path(f"{found.name}.tar" if options.to is None else options.to)
    durable.check_target(target, (".tar",))
    if os.path.lexists(target):
        raise Refused(f"{target} exists already; remove it, or give another file with --to FILE")
    programs.of_record(record).check_can("archive", found.name)
    if jobs.is_submitted(record) or record.get("cluster"):
        raise Refused(f"{found.name} runs on a cluster or several machines; archive a fork of it: train fork --help")
    lock = found.acquire()
    if lock is None:
        raise Refused(f"{found.name} is {found.stands()}; stop it first: train stop {found.name}")
    try:
        with durable.published(target) as partial:
            partial.chmod(0o600)  # it contains files that only their owner may read
            with tarfile.open(partial, "w") as tar:
                try:
                    tar.add(found.path.resolve(), found.name, filter=_checked)
                except OSError as error:
                    if error.filename is None:  # the file that is being written
                        raise
                    raise Refused(f"{error.filename} cannot be read: {error.strerror}") from None
    finally:
        lock.release()
    has_copies = (found.folder / ownership.MODULES).exists()
    other = list(record.get("task_watched") or {}) + ([] if has_copies else list(record.get("task_imports") or {}))
    other += record.get("script_files") or {}
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        screen.remark(
            f"the archive lacks {', '.join(other[:3])}{more}, which it needs; copy them to the same paths, too"
        )
    file = shlex.quote(str(target))
    screen.say(f"wrote {target}, {format.size(target.stat().st_size)}; to resume on another machine that has the data:")
    screen.say(f"  mkdir -p runs && tar -xkof {file} --no-same-permissions -C runs && train resume {found.name}")
    return EXIT_FINISHED


def _checked(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return the archive's entry for a file of the run; None for an unfinished save or a request to stop.

    Raises:
        Refused: the file is a link, or neither a file nor a folder.
    """
    inside = PurePosixPath(member.name).parts[1:]
    if len(inside) in (1, 2) and (inside[-1].startswith(".") or inside == ("stop",)):
        return None
    if inside == ("wandb",):  # links, and data that W&B has already; wandb.json keeps the id of its run
        return None
    if not (member.isreg() or member.isdir() or member.islnk()):
        raise Refused(f"{member.name} is a link or a special file; replace it by a plain file")
    member.mode &= 0o777  # no program of another user that would run with the rights of who unpacks it
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
