"""`train top`: a live page of the runs, their ranks and the GPUs."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import tty
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import EXIT_FINISHED
from .options import add_names, matching
from .parser import Parser, decimal

if TYPE_CHECKING:
    from rich.text import Text

    from ..monitor.top import Page

_PATIENCE = 5.0
"""Seconds a cluster has to report the state of its runs when the page is printed once."""


EXAMPLES = {
    "train top": "Watch all runs, ranks and GPUs. q leaves.",
    "train top demo1 'exp-*' --every 5": "Watch some runs, redrawn every 5 seconds.",
    "train top --once": "Print the page once, for scripts.",
}


def add_arguments(parser: Parser) -> None:
    """Add the runs and the interval."""
    parser.epilog = (
        "columns:\n"
        "  WAIT      share of a step in which rank 0 waits for data\n"
        "  LEFT      time until the last step\n"
        "  cpu, mem  use by a rank\n"
        "  gpu       use of the rank's GPU, and its memory (in all: of all processes)"
    )
    add_names(parser, "*")
    parser.add_argument("--every", metavar="SECONDS", default="2", help="Seconds between two updates. Default: 2.")
    parser.add_argument("--once", action="store_true", help="Print the page once and exit, as without a terminal.")


def run(options: Namespace, runs: Path) -> int:
    """Show the page until q or Ctrl-C. Without a terminal that can redraw it, print it once."""
    from ..monitor.top import Page

    every = decimal("every", options.every, 0.1, 3600)
    names = [found.name for found in matching(runs, options.names)] if options.names else []
    page = Page(runs, names)
    if options.once or not _is_redrawn():
        page.ask(_PATIENCE)
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 120
        print("\n".join(row.text.rstrip() for row in page.rows(columns, 10_000)))
        return EXIT_FINISHED
    _live(page, every)
    return EXIT_FINISHED


def _is_redrawn() -> bool:
    """Whether a terminal can clear what it has shown. On any other terminal rich draws nothing."""
    is_able = os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")
    return is_able and sys.stdout.isatty() and sys.stdin.isatty()


def _live(page: Page, every: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys(),
        Live(_drawn(page), console=console, screen=True, auto_refresh=False) as live,
    ):
        while not _quits(every):
            live.update(_drawn(page), refresh=True)


def _drawn(page: Page) -> Text:
    from rich.text import Text

    from ..monitor.top import STYLE

    size = shutil.get_terminal_size()
    text = Text(no_wrap=True, overflow="crop")
    for row in page.rows(size.columns, size.lines - 1):
        text.append(row.text + "\n", style=STYLE.get(row.kind, ""))
    return text.append("q leaves", style="dim")


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Context manager in which keys arrive one by one and are not echoed."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quits(seconds: float) -> bool:
    """Wait for a key, at most so many seconds. Return whether the key was q or the terminal has gone."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and sys.stdin.read(1) in ("q", "Q", "")
