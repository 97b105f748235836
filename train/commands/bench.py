"""`train bench`: what this machine can do."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from train.commands.parser import Parser, number
from train.errors import EXIT_FINISHED

SUBJECTS = ("checkpoint", "ordered", "resume", "stop")


def add_arguments(parser: Parser) -> None:
    """What to measure, how large and how often."""
    add = parser.add_argument
    add("subject", metavar="|".join(SUBJECTS), choices=SUBJECTS, help="what to measure")
    add("--mb", metavar="N", action="append", help="checkpoint: MB of state; may be repeated (100, 1000)")
    text = "resume: size of the virtual data set (1000000000)"
    add("--samples", metavar="N", default="1000000000", help=text)
    add("--times", metavar="N", help="repetitions; medians are shown (checkpoint 5, ordered 30, resume 25, stop 200)")


def run(options: Namespace, runs: Path) -> int:
    """Measure and print a table."""
    sizes = [number("mb", text, 1) or 1 for text in options.mb or ["100", "1000"]]
    times = number("times", options.times, 1)
    samples = number("samples", options.samples, 100_000) or 0
    runs.mkdir(parents=True, exist_ok=True)
    if options.subject == "checkpoint":
        from train.bench import checkpoint

        print(checkpoint.bench(runs, sizes, times or 5))
    elif options.subject == "ordered":
        from train.bench import ordered

        print(ordered.bench(runs, times or 30))
    elif options.subject == "resume":
        from train.bench import resume

        print(resume.bench(runs, samples, times or 25))
    else:
        from train.bench import stop

        print(stop.bench(runs, times or 200))
    return EXIT_FINISHED
