"""A checkpoint whose parts several machines have written: each gets the files of the others.

So every machine has the whole of it, and one that is lost for good takes nothing with it. The files travel as they lie
on the disk, after the ranks have written them and before the checkpoint is published anywhere.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from train.checkpoint.road import Road
from train.parallel.world import World

Entries = dict[str, dict[str, Any]]
"""By the name of a file, its size and SHA-256 as the manifest lists them."""


def exchange(world: World, folder: Path, written: list[Entries]) -> None:
    """Bring every machine's files to all others, into a folder that each has. A collective.

    What comes is hashed on its way to the disk and fsynced there, as where it was written first.

    Args:
        written: by rank, what each has written.

    Raises:
        OSError: a machine cannot read or take a file; on every rank alike, and the files after it are not sent.
    """
    if len(world.leads) == 1:
        return
    for place, (lead, end) in enumerate(itertools.pairwise((*world.leads, world.size))):
        road = Road(world, place, [other == lead for other in world.leads])
        files = {name: entry for part in written[lead:end] for name, entry in part.items()}
        for name, entry in sorted(files.items()):  # a stop for all ranks after each: none waits longer than for one
            told = world.gather(_bring(road, folder / name, entry) if world.is_lead else None)
            problem = told[lead] or next(filter(None, told), None)  # where it cannot be read, others lack its bytes
            if problem is not None:
                raise problem


def _bring(road: Road, path: Path, entry: dict[str, Any]) -> OSError | None:
    """Send or take a file. Returns what was in the way here."""
    try:
        taken = road.send_file(entry["size"], path if road.sends else None, path if road.takes else None)
    except OSError as error:
        return error
    if road.takes and taken != entry:
        return OSError(f"{path.name} has come with other bytes than were written")
    return None
