"""`train fetch`: bring a run back from its mirror."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .. import format, screen
from ..errors import EXIT_FINISHED
from .parser import Parser

EXAMPLES = {
    "train fetch s3://bucket/demo1": "Copy the run to this machine. Then: train resume demo1.",
    "train fetch /mnt/backup/demo1 --name demo2": "Copy it under another name.",
}


def add_arguments(parser: Parser) -> None:
    """Add the URL and the name."""
    parser.add_argument("url", metavar="URL", help="The checkpoint.mirror of the run.")
    parser.add_argument("--name", help="Name of the run here. Default: its old name.")


def run(options: Namespace, runs: Path) -> int:
    """Fetch the run, and print the command that continues it."""
    from ..mirror.fetching import fetch

    fetched, left_out, size = fetch(options.url, runs, options.name)
    for line in left_out:
        screen.remark(line)
    step = fetched.newest_checkpoint
    what = f"step {step}, {format.size(size)}" if step else f"no checkpoint, {format.size(size)}"
    screen.say(
        f"fetched {screen.name(fetched.name)}: {what}; to continue it with its data: train resume {fetched.name}"
    )
    return EXIT_FINISHED
