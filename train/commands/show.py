"""`train show`: tell the story of a run."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED
from .options import add_json, add_name
from .parser import Parser

EXAMPLES = {
    "train show demo1": "State, reason and next command; results, attempts, checkpoints.",
    "train show demo1 --json": "The same for programs: run.json with the current state.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run."""
    add_name(parser)
    add_json(parser)


def run(options: Namespace, runs: Path) -> int:
    """Print the story, or the record as JSON."""
    from ..mirror import state as mirror
    from ..monitor.status import look
    from ..run import best, folders, states
    from ..views.listing import story

    one = look(folders.find(runs, options.name), screen.remark)
    if not options.json:
        print(story(one))
        return EXIT_FINISHED
    facts = one.to_json()
    if one.state != states.OTHER_FORMAT:
        has_steps = one.program.reports_steps(one.record["attempts"])
        facts |= best.facts(one.run, one.spec.best_by) if has_steps else {}
        facts |= mirror.facts(one.run, one.record, str(one.spec.config.get(mirror.FIELD) or ""))
    print(json.dumps(facts, indent=1))
    return EXIT_FINISHED
