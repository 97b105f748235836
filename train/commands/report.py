"""`train report`: where the time of a run went, and its figures as a page."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from train import screen
from train.commands.options import add_json, add_name, add_target
from train.commands.parser import Parser
from train.errors import EXIT_FINISHED, Refused


def add_arguments(parser: Parser) -> None:
    """Of which run, and in which form."""
    add_name(parser)
    add_target(parser, ".html", ".htm", required=False)
    add_json(parser)


def run(options: Namespace, runs: Path) -> int:
    """Print where the time went, or write the page."""
    from train.run import folders
    from train.views import report

    if options.json and options.to is not None:
        raise Refused("--json prints, and --to writes a page; give one of them")
    run = folders.find(runs, options.name)
    if options.to is not None:
        report.write(run, Path(options.to))
        screen.say(f"wrote {options.to}")
    else:
        print(report.as_json(run) if options.json else report.text(run))
    return EXIT_FINISHED
