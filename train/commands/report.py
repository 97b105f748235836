"""`train report`: show where the time of a run went, or write a page about the run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED, Refused
from .options import add_json, add_name, add_target
from .parser import Parser

EXAMPLES = {
    "train report demo1": "Show in the terminal where the time went, and what would help.",
    "train report demo1 --to demo1.html": "Write one HTML page with curves, attempts and the configuration.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run and the form of the output."""
    add_name(parser)
    add_target(parser, ".html", ".htm", required=False)
    add_json(parser)


def run(options: Namespace, runs: Path) -> int:
    """Print where the time went, or write the page."""
    from ..monitor.status import here
    from ..run import folders
    from ..views import report

    if options.json and options.to is not None:
        raise Refused("--json prints, but --to writes a page; give one of them")
    one = here(folders.find(runs, options.name))
    if options.to is not None:
        report.write(one, Path(options.to))
        screen.say(f"wrote {options.to}")
    else:
        print(report.as_json(one) if options.json else report.text(one))
    return EXIT_FINISHED
