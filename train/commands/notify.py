"""`train notify`: where the notice of a run's end goes, and a test."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FAILED, EXIT_FINISHED
from .parser import Parser

EXAMPLES = {
    "train notify --test": "Send a test notice to the address in TRAIN_NOTIFY, and print what was answered.",
    "train notify": "Print where notices go: the host, never the whole address.",
}


def add_arguments(parser: Parser) -> None:
    """Add --test."""
    parser.add_argument("--test", action="store_true", help="Send a test notice now. Exit code 3: it was refused.")


def run(options: Namespace, runs: Path) -> int:
    """Print where notices go, or send one."""
    from ..launcher import notices

    to = notices.of_shell()
    if options.test:
        answer = notices.test(to)
        screen.say(f"{to.source}: {answer.text}", sys.stdout)
        return EXIT_FINISHED if answer.is_sent else EXIT_FAILED
    screen.say(f"notices go to {to.place} ({to.source}); to send one: train notify --test", sys.stdout)
    return EXIT_FINISHED
