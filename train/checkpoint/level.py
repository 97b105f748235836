"""Machines of a run, each with a run folder of its own, agree on the state to continue from, and pass it on.

Each machine writes whole checkpoints, and keeps the state in memory of its own. After a death some have newer ones than
others: the newest that anyone has is taken, and it travels, with the lines of the run (road.py). What arrives is
verified as what is read from the disk is. The checkpoint that is kept for being the best travels likewise.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train import faults
from train.checkpoint import serialize
from train.checkpoint.buffers import Buffers, begin_of_tensors
from train.checkpoint.road import Road
from train.errors import Refused
from train.parallel.world import World
from train.record import manifest as manifests
from train.record.best import Best, best_of, best_saved, wanted
from train.record.durable import sync_folder
from train.record.store import Run

Newest = Callable[[], tuple[int, dict[str, Any]]]
"""Gives the step of the newest checkpoint here that is whole, and its manifest; 0 and {} without one."""
_LINES = ("metrics.jsonl", "skipped.jsonl")
"""What a machine that was away lacks besides."""


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a machine could continue from."""

    saved: int = 0
    """The step of its newest whole checkpoint; 0: none."""
    save: str = ""
    """The mark that all machines' checkpoints of the same save have."""
    kept: int = 0
    """The step whose state it has in memory; 0: none."""
    mark: str = ""
    """Of the attempt that left it there."""
    best: Best | None = None
    """Its checkpoint that is kept for being the best."""
    best_save: str = ""
    """As `save`, of that one."""
    attempts: tuple[tuple[str, int], ...] = ()
    """Of those that came to training here: the mark, and the step that it began after."""


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all machines continue from, and have."""

    step: int = 0
    saved: int = 0
    """The newest step that all have a checkpoint of; 0: none."""
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    from_memory: bool = False
    """Whether this machine has the state in memory."""
    problem: str = ""
    """Why it is not a newer state in memory, and why not all have the best checkpoint."""
    made_here: float = math.inf
    """The last step in which this machine had a part, where others have gone on without it since."""


def agree(
    run: Run, world: World, buffers: Buffers | None, fingerprint: str, left: Callable[[], int],
    newest: Newest,
) -> Agreed:  # fmt: skip
    """Choose the newest state, and bring it to every machine. A collective.

    Args:
        left: bytes of memory that can still be had here.
        newest: on the first rank of a machine.

    Raises:
        OSError, Refused: a machine cannot read or take it; on every rank alike.
    """
    mine = world.on_leads(lambda: _offer(run, buffers, fingerprint, newest))
    everybody = world.gather(mine)
    offers = [everybody[lead] for lead in world.leads]
    saved, kept = max(each.saved for each in offers), max(each.kept for each in offers)

    def agreed(source: int, step: int, saved: int, sent: int = 0, **values: Any) -> Agreed:
        made_here = _parted(mine.attempts, offers[source].attempts)
        said = "; ".join(filter(None, [problem, _send_best(run, world, offers, step, sent)]))
        return Agreed(step, saved, problem=said, made_here=made_here, **values)

    problem = ""
    if buffers is not None and kept and kept >= saved:
        source = next(place for place, each in enumerate(offers) if each.kept == kept)
        have = [(each.kept, each.mark) == (kept, offers[source].mark) for each in offers]
        problem = "" if all(have) else _send_memory(run, world, buffers, Road(world, source, have), left)
        if not problem:
            return agreed(source, kept, min(each.saved for each in offers), from_memory=True)
        problem = f"the state after step {kept} in memory is not used: {problem}"
    if not saved:
        return Agreed(problem=problem)
    source = next(place for place, each in enumerate(offers) if each.saved == saved)
    have = [(each.saved, each.save) == (saved, offers[source].save) for each in offers]
    if not all(have):
        _send_checkpoint(run, world, saved, Road(world, source, have))
    manifest = world.on_leads(lambda: manifests.read_manifest(run.checkpoint(saved)))
    return agreed(source, saved, saved, sent=saved, manifest=manifest)


def _parted(mine: tuple[tuple[str, int], ...], theirs: tuple[tuple[str, int], ...]) -> float:
    """The step after which others went on without this machine; infinite where they did not.

    Args:
        mine: its attempts, as in `Offer`.
        theirs: those of a machine that has the newest state.
    """
    known = {mark for mark, _ in mine}
    common = max((place for place, (mark, _) in enumerate(theirs) if mark in known), default=None)
    if common is None:
        return math.inf
    return min((step for _, step in theirs[common + 1 :]), default=math.inf)


def _offer(run: Run, buffers: Buffers | None, fingerprint: str, newest: Newest) -> Offer:
    """On the first rank of a machine: clear away what a kill left, and see what is there."""
    manifests.clean(run)
    step, manifest = newest()
    attempts = tuple(
        (attempt["mark"], attempt["from_step"] or 0) for attempt in run.read()["attempts"] if attempt.get("mark")
    )
    found_best, best_mark = best_saved(run, wanted(run)), ""
    if found_best is not None:
        try:
            best_mark = _mark(manifests.read_manifest(run.checkpoint(found_best.step)))
        except (OSError, ValueError, Refused):  # a damaged one is not for others
            found_best = None
    offer = Offer(step, _mark(manifest), best=found_best, best_save=best_mark, attempts=attempts)
    while buffers is not None and (found := buffers.newest()) is not None:
        content = serialize.read(buffers, found[0], fingerprint)
        if content is not None:
            offer = dataclasses.replace(offer, kept=content.step, mark=content.mark)
            break
        buffers.wipe(found[0])
    return offer


def _mark(manifest: dict[str, Any]) -> str:
    return str(manifest.get("save") or manifest.get("digest", ""))


def _send_best(run: Run, world: World, offers: list[Offer], step: int, sent: int) -> str:
    """Bring the best checkpoint to those that lack it. Returns why not all have it then, '' if they do: training does
    not depend on it.

    Args:
        step: what is newer is made anew.
        sent: the step of a checkpoint that all have by now; 0: none.
    """
    found = best_of(each.best for each in offers if each.best is not None and each.best.step <= step)
    if found is None or found.step == sent:
        return ""
    source = next(place for place, each in enumerate(offers) if each.best == found)
    have = [(each.best, each.best_save) == (found, offers[source].best_save) for each in offers]
    if all(have):
        return ""
    try:
        _send_folder(run, world, found.step, Road(world, source, have))
    except OSError as error:
        return f"the best checkpoint is not on all machines: {error}"
    return ""


def _send_memory(run: Run, world: World, buffers: Buffers, road: Road, left: Callable[[], int]) -> str:
    """Bring the newest state in memory to those that lack it. Returns why not all have it then, '' if they do."""
    found = buffers.newest() if road.sends else None
    content = buffers.read(found[0]) if found is not None else None
    head = found[1] if found is not None else None
    described = road.tell((head, content[0]) if head is not None and content is not None else None)
    if described is None:
        return "it cannot be read"
    head, plain = described
    size = begin_of_tensors(len(plain)) + head.tensors
    problem = ""
    if road.takes:
        try:
            problem = "" if buffers.taken + left() > 2 * size else f"a machine has no room for 2 x {size} bytes"
            if not problem:
                buffers.reserve(size)
        except OSError as error:
            problem = f"a machine has no room for it: {error.strerror}"
    problem = next(filter(None, world.gather(problem)), "")
    if problem:
        return problem
    _send_lines(run, world, road)
    if world.is_lead:
        if road.takes:  # what others have made anew, perhaps of the same number
            buffers.wipe_from(head.step)
        pieces = road.pass_on(head.tensors, _Memory(content[1], head.start) if content is not None else None)
        if road.takes:
            buffers.write(head.step, plain, pieces)
            faults.here("taken")
        for _ in pieces:  # what nobody here has taken
            pass
    world.gather(None)
    return ""


class _Memory:
    """Reads tensors out of a buffer."""

    def __init__(self, memory: Any, start: int) -> None:
        self._memory, self._at = memory, start

    def readinto(self, target: memoryview) -> None:
        with memoryview(self._memory) as view:
            target[:] = view[self._at : self._at + len(target)]
        self._at += len(target)


def _send_checkpoint(run: Run, world: World, step: int, road: Road) -> None:
    """Bring the newest checkpoint to those that lack it, with the lines of the run."""
    _send_lines(run, world, road)
    _send_folder(run, world, step, road)


def _send_folder(run: Run, world: World, step: int, road: Road) -> None:
    """Bring a checkpoint to those that lack it, and verify it there."""
    folder = run.checkpoint(step)
    partial = run.checkpoints / f"{manifests.PARTIAL}{folder.name}-sent"
    if road.takes:
        shutil.rmtree(partial, ignore_errors=True)
    names = sorted(os.listdir(folder)) if road.sends else []
    problem = _send_files(world, road, [(folder / name, partial / name) for name in names], partial)

    def publish() -> None:
        try:
            if problem is not None:
                raise problem
            if not road.takes:
                return
            manifests.verify(partial)
            sync_folder(partial)
            if folder.exists():
                manifests.set_aside(run, step)
            partial.rename(folder)
            sync_folder(run.checkpoints)
            faults.here("taken")
        except (OSError, ValueError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            how = "taken from" if road.takes else "sent to"
            raise OSError(f"{folder.name} cannot be {how} another machine: {error}") from error

    world.on_leads(publish)


def _send_lines(run: Run, world: World, road: Road) -> None:
    """Bring the lines of the run to those that were away.

    Before the state: who has that is sent nothing more, so a death in between would lose the lines for good.
    """
    there = [name for name in _LINES if (run.folder / name).exists()] if road.sends else []
    files = [(run.folder / name, run.folder / f".sent-{name}") for name in there]
    problem = _send_files(world, road, files, run.folder)

    def publish() -> None:
        if problem is not None:
            raise problem
        for name in _LINES:
            if road.takes and (run.folder / f".sent-{name}").exists():
                (run.folder / f".sent-{name}").replace(run.folder / name)
        if road.takes:
            sync_folder(run.folder)

    world.on_leads(publish)


def _send_files(world: World, road: Road, files: list[tuple[Path, Path]], into: Path) -> OSError | None:
    """Bring files to a folder of those that lack them. Returns what was in the way here."""
    listed = road.tell([(target.name, source.stat().st_size) for source, target in files])
    problem: OSError | None = None
    if not world.is_lead:
        return None
    try:
        if road.takes:
            into.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = error
    for place, (name, size) in enumerate(listed):
        takes = road.takes and problem is None
        try:
            road.send_file(size, files[place][0] if road.sends else None, into / name if takes else None)
        except OSError as error:
            problem = problem or error
    return problem
