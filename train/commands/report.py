"""`train report`: figures of a run for people; above all, where its time went."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from train import screen
from train.commands import shared
from train.commands.parser import Parser
from train.errors import EXIT_FINISHED, Refused
from train.format import duration

if TYPE_CHECKING:
    from train.record.store import Run

_BAR = 24
"""Letters of the longest bar."""


def add_arguments(parser: Parser) -> None:
    """Of which run, and in which form."""
    shared.add_name(parser)
    shared.add_target(parser, ".html", ".htm", required=False)
    shared.add_json(parser)


def run(options: Namespace, runs: Path) -> int:
    """Print where the time went, or write the page."""
    from train.record import folders, page

    if options.json and options.to is not None:
        raise Refused("--json prints, and --to writes a page; give one of them")
    run = folders.find(runs, options.name)
    if options.to is not None:
        page.write(run, Path(options.to))
        screen.say(f"wrote {options.to}")
        return EXIT_FINISHED
    print(_as_json(run) if options.json else _summary(run))
    return EXIT_FINISHED


def _as_json(run: Run) -> str:
    from train.record import times

    record = run.shown()
    account = times.of(run, record)
    facts = {"name": run.name, "state": record["state"], **account.plain(), "verdict": times.verdict(account, record)}
    return json.dumps(facts, indent=1)


def _summary(run: Run) -> str:
    from train.record import page, times
    from train.record.table import with_reason

    record = run.shown()
    account = times.of(run, record)
    columns = screen.width(sys.stdout)
    lines = [f"{screen.name(run.name)}: {with_reason(record['state'], record.get('reason'))}"]
    parts = page.parts(account)
    lines.append(
        f"  {duration(account.whole)} from its creation to its end, of which" if parts else "  no time is known of"
    )
    width = max((len(part["name"]) for part in parts), default=0)
    largest = max((part["share"] for part in parts), default=1.0)
    for part in parts:
        bar = "#" * round(_BAR * part["share"] / largest)
        time = duration(part["seconds"])
        lines.append(f"  {part['name']:<{width}}  {time:>12}  {100 * part['share']:5.1f} %  {bar}".rstrip())
    if account.redone:
        lines.append(f"  made again: {account.redone} steps, {duration(account.again)}")
    lines += [f"  {line}" for line in (*times.verdict(account, record), *account.notes)]
    lines.append(f"  what each part is, and figures: train report {run.name} --to {run.name}.html")
    return "\n".join(screen.wrapped(screen.printable(line), columns, indent=4) for line in lines)
