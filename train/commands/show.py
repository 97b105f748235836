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
    "train show demo1 --json": "The same for programs: run.json with the present state.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run."""
    add_name(parser)
    add_json(parser)


def run(options: Namespace, runs: Path) -> int:
    """Print the story, or the record as JSON."""
    from ..cluster import jobs
    from ..mirror import state as mirror
    from ..run import best, folders, states
    from ..run.spec import spec_of
    from ..supervise import programs
    from ..views.listing import story
    from ..views.time_spent import note_losses

    run = folders.find(runs, options.name)
    record = jobs.status(run, screen.remark)
    is_other = record["state"] == states.OTHER_FORMAT
    spec = spec_of(record, {} if is_other else run.read_config())
    if not options.json:
        print(story(run, record, spec))
        return EXIT_FINISHED
    if is_other:
        print(json.dumps(record, indent=1))
        return EXIT_FINISHED
    has_steps = programs.of(spec).reports_steps(record["attempts"])
    facts = best.facts(run, spec.best_by) if has_steps else {}
    note_losses(run, record)
    facts |= mirror.facts(run, record, str(spec.config.get(mirror.FIELD) or ""))
    print(json.dumps({**record, **facts}, indent=1))
    return EXIT_FINISHED
