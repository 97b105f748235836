"""Proves that a program ends with the same bits however it is broken off, or says where it does not.

A calm run and one that is broken off both stop after the same number of updates. Each rank writes digests of the state
after each update. If they differ, both runs are repeated up to that update, and their states are compared element by
element. A second calm run tells whether the breaks are the cause.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import EXIT_FAILED, EXIT_FINISHED, Refused
from ..gpus import seen_here
from ..run import durable
from ..run.proving import Asked
from ..run.run_folder import Run
from . import broken, compare, moments
from .broken import Breaker, Broken, Failed, Launch
from .compare import Difference, Seen

EXACT, NOT_EXACT, FAILED = "EXACT", "NOT EXACT", "FAILED"
CODES = {EXACT: EXIT_FINISHED, NOT_EXACT: EXIT_FAILED, FAILED: EXIT_FAILED}
"""Maps a verdict to an exit code."""
FILE = "proof.json"
_SECONDS, _PACES = 4.0, (0.02, 0.3)
"""Seconds that a run that is broken off takes at least, and limits of the seconds of its updates."""
_KNOWN = 3
"""Maximum number of lines on what is known of a difference."""
_LOST = "a variable, object or file that changes in training and is in no checkpoint"
_COUNTED = "a counter of batches that begins anew after a resume; write enumerate(loader, loader.start)"
_UNSEEDED = "a clock, a generator without a seed, the id of a process, a file that an earlier run has left"
"""What to look for if nothing is known: something is lost in a break, or differs without one."""
_LATE = 5
"""Updates after the first difference at which all elements are compared: a repeated break may come a little later."""
_DRIVER = Path("/sys/module/nvidia/version")
_FACTS = ("versions", "git_revision", "script", "script_arguments", "script_files", "task", "task_sha256", "world_size")
"""Fields of run.json that a proof keeps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to prove.

    Args:
        launch: Returns a new run of this name in a folder of runs, with a number of ranks; None: as the user asked.
        updates: Number of updates after which each run stops.
        kills: Number of breaks.
        seed: Seed of the moments.
        keep: Whether runs are kept after the verdict EXACT.
        say: Prints a line about progress.
    """

    launch: Callable[[Path, str, int | None], Launch]
    updates: int
    kills: int
    seed: int
    keep: bool = False
    say: Callable[[str], None] = lambda _: None


@dataclasses.dataclass
class Proof:
    """What was found."""

    verdict: str = FAILED
    reason: str = ""
    last_lines: list[str] = dataclasses.field(default_factory=list)
    """Why it has failed, and the last lines of the rank that died first."""
    updates: int = 0
    ranks: int = 0
    breaks: list[Broken] = dataclasses.field(default_factory=list)
    difference: Difference | None = None
    cause: str = ""
    """The break after which the difference came; "": no break is the cause."""
    tensors: list[str] = dataclasses.field(default_factory=list)
    known: list[str] = dataclasses.field(default_factory=list)
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    not_compared: tuple[str, ...] = ()
    """Figures and values that differ between calm runs too."""
    has_samples: bool = False
    has_figures: bool = False
    missed: int = 0
    """Number of breaks that the run ended before."""
    seconds: float = 0.0
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    folder: Path = Path()

    @property
    def code(self) -> int:
        return CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Return the proof as it is written into proof.json."""
        fields = {name: value for name, value in vars(self).items() if name not in ("facts", "folder")}
        fields["breaks"] = [{**dataclasses.asdict(one), "text": str(one)} for one in self.breaks]
        fields["difference"] = None if self.difference is None else dataclasses.asdict(self.difference)
        return {**fields, **self.facts, "file": str(self.folder / FILE)}

    def text(self) -> str:
        """Return the verdict and what it rests on, as lines."""
        file = f"{self.folder.name}/{FILE}"
        ranks = _count(self.ranks, "rank")
        lines = []
        if self.verdict == FAILED:
            lines = [self.reason, *(f"| {line}" for line in self.last_lines), file]
        elif self.verdict == EXACT:
            times = _count(len(self.breaks), "time")
            lines.append(
                f"{self.updates} updates on {ranks}: a calm run and one that was broken off {times} end with the same "
                "bits"
            )
            lines += map(str, self.breaks)
            also = " and ".join(
                name for name, has in ((compare.FIGURES, self.has_figures), (compare.SAMPLES, self.has_samples)) if has
            )
            digests = "  ".join(f"{name} {digest[:8]}…" for name, digest in self.digests.items())
            lines.append("  ".join(filter(None, [digests, f"{also} equal" if also else ""])))
            if self.missed:
                lines.append(f"{self.missed} more would have come after its end")
            if self.not_compared:
                lines.append(f"not compared, because calm runs differ in them: {', '.join(self.not_compared)}")
            lines += [f"known: {line}" for line in self.known]
            lines.append(file)
        else:
            assert self.difference is not None
            found = self.difference
            first = f", first at update {found.logged}" if found.logged else ""
            at = (
                f"first difference at update {found.update}"
                if found.update
                else f"no state differs, only what is logged{first}"
            )
            how = f"after {self.cause}" if self.cause else "between two calm runs"
            lines.append(f"{'' if self.cause else 'without any kill: '}{at}, {how}")
            what = f" ({', '.join(found.figures[:5])})" if found.figures else ""
            names = ", ".join(f"{name}{what}" if name == compare.FIGURES else name for name in found.names)
            lines.append(f"different: {names}; equal: {', '.join(found.same) or 'nothing'}")
            lines += self.tensors
            lines += [f"known: {line}" for line in self.known] or [f"look for {self._suspect(found)}"]
            lines.append(file)
        indent = " " * (len(self.verdict) + 2)
        return f"{self.verdict}  " + f"\n{indent}".join(lines)

    def _suspect(self, found: Difference) -> str:
        if not self.cause:
            return _UNSEEDED
        is_moved = not found.update and {compare.STEP, compare.LINES} & {*found.figures}
        return _COUNTED if is_moved else _LOST


def prove(wanted: Wanted, runs: Path, name: str, *, ranks: int | None = None) -> Proof:
    """Prove one number of ranks. Writes proof.json.

    Args:
        runs: Folder of the runs, in which this makes a folder `prove-NAME-N` with runs of its own.
        ranks: Number of ranks; None: as the user asked.

    Raises:
        Refused: the launch is not possible, or the run is too short for so many breaks. Nothing is left behind.
    """
    folder, began = _fresh(runs, name), time.monotonic()
    proof = Proof(folder=folder)
    attempt = _Attempt(wanted, folder, ranks, proof)
    try:
        attempt.compare()
    except Failed as failed:
        proof.verdict, proof.reason, proof.last_lines = FAILED, str(failed), failed.last_lines
    except BaseException:
        broken.end_all(folder, attempt.names)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    broken.end_all(folder, attempt.names)
    proof.seconds = round(time.monotonic() - began, 1)
    durable.write_atomically(folder / FILE, json.dumps(proof.to_json(), indent=1, default=str) + "\n")
    if proof.verdict == EXACT and not wanted.keep:
        for one in attempt.names:
            shutil.rmtree(folder / one, ignore_errors=True)
    return proof


def _fresh(runs: Path, name: str) -> Path:
    """Make the folder of a proof. Its runs are no runs of `runs`: ls, keepers and notices do not see them."""
    number = 1
    while True:
        folder = runs / f"prove-{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return folder


class _Attempt:
    """The runs of a proof."""

    def __init__(self, wanted: Wanted, folder: Path, ranks: int | None, proof: Proof) -> None:
        self._wanted, self._folder, self._ranks, self._proof = wanted, folder, ranks, proof
        self.names: list[str] = []
        self._breaks: list[moments.Break] = []

    def compare(self) -> None:
        """Run what is needed, and fill the proof."""
        wanted, proof = self._wanted, self._proof
        began = time.monotonic()
        calm = self._calm("calm", wanted.updates)
        record = calm.read()
        proof.ranks = record["world_size"]
        one = compare.read(calm, proof.ranks)
        proof.updates, proof.digests = one.updates, one.last
        proof.has_samples, proof.has_figures = any(one.samples), bool(one.figures)
        proof.facts = _facts(record)
        if not one.last:
            raise Failed("the calm run made no update of a registered object")
        if wanted.kills > proof.updates - 2:
            raise Refused(
                f"the run ended by itself after update {proof.updates}, too early for {_count(wanted.kills, 'break')}; "
                "let it train longer, or give fewer --kills"
            )
        seconds = time.monotonic() - began
        self._breaks = moments.choose(proof.updates, wanted.kills, proof.ranks, wanted.seed)
        wanted.say(f"the calm run took {seconds:.0f} s; now the same, broken off {_count(wanted.kills, 'time')}")
        other = self._broken("broken", wanted.updates)
        proof.missed = wanted.kills - len(proof.breaks)
        if not proof.breaks:
            raise Failed("the run ended before it could be broken off; give more --updates")
        two = compare.read(other, proof.ranks)
        proof.known = _known(calm, other)
        found = compare.difference(one, two)
        if found is None:
            proof.verdict = EXACT
        else:
            self._explain(one, two, found)
        if proof.verdict == EXACT and one.is_in_first_epoch:
            wanted.say(
                f"no epoch ended within {_count(proof.updates, 'update')}, so what the script does there is not "
                "proved; give more --updates"
            )

    def _explain(self, one: Seen, two: Seen, found: Difference) -> None:
        """Find out whether the breaks are the cause, and what differs."""
        wanted, proof = self._wanted, self._proof
        at, late = found.update, self._late(found.update)
        wanted.say(f"they differ{f' at update {at}' if at else ''}; a second calm run tells whether the breaks are why")
        second = self._calm("calm-2", wanted.updates, dump=late)
        three = compare.read(second, proof.ranks)
        natural = compare.difference(one, three)
        proof.verdict, proof.difference = NOT_EXACT, found
        while natural is not None and (names := compare.changes_by_itself(natural)) is not None:
            proof.not_compared += names
            natural = compare.difference(one, three, but=proof.not_compared)
        if natural is not None:
            proof.difference = natural
            if at:
                self._list(second, self._calm("calm-3", late, dump=late), late)
            return
        if proof.not_compared:
            rest = compare.difference(one, two, but=proof.not_compared)
            if rest is None:
                proof.verdict, proof.difference = EXACT, None
                return
            proof.difference = rest
            if rest.update not in (0, at):  # what differed before does not count
                late = self._late(rest.update)
                second = self._calm("calm-3", late, dump=late)
            at = rest.update
        by_then = at or proof.difference.logged or proof.updates
        before = [one for one in proof.breaks if one.update - one.repeated <= by_then]
        proof.cause = str((before or proof.breaks)[-1]).partition(" (")[0]
        if at:
            wanted.say("the broken run is repeated up to there, to compare all elements")
            self._list(second, self._broken("broken-2", late, dump=late), late)

    def _list(self, calm: Run, other: Run, update: int) -> None:
        """Put the tensors into the proof that differ between two runs after this update."""
        lines = compare.listed(compare.tensors(calm, other, self._proof.ranks))
        if lines:
            self._proof.tensors = [f"after update {update}:", *lines]
        else:
            self._proof.tensors = [f"it did not differ after update {update} when it was repeated"]

    def _late(self, update: int) -> int:
        """Return an update at which a repeated run still differs if its break meets it some updates later; 0: none."""
        return min(update + _LATE, self._proof.updates) if update else 0

    def _launch(self, name: str) -> Launch:
        self.names.append(name)
        return self._wanted.launch(self._folder, name, self._ranks)

    def _calm(self, name: str, updates: int, dump: int = 0) -> Run:
        def say(warnings: list[str]) -> None:
            if name == "calm":
                for line in warnings:
                    self._wanted.say(f"warning: {line}")

        return broken.calm(self._launch(name), Asked(stop=updates, dump=dump), say)

    def _broken(self, name: str, updates: int, dump: int = 0) -> Run:
        saves = tuple(one for one in moments.saves(self._breaks) if one < updates)
        pace = min(max(_SECONDS / self._proof.updates, _PACES[0]), _PACES[1])
        breaker = Breaker(self._launch(name), Asked(stop=updates, saves=saves, pace=pace, dump=dump))
        try:
            breaker.live_through([one for one in self._breaks if one.update < updates])
        finally:
            if name == "broken":
                self._proof.breaks = breaker.breaks
        return breaker.run


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a proof says of the machine and the program."""
    machine: dict[str, Any] = {
        "system": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count(),
        "cards": [card.name for card in seen_here()],
    }  # fmt: skip
    if machine["cards"]:
        import torch

        with contextlib.suppress(OSError):
            machine["driver"] = _DRIVER.read_text().strip()
        machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"machine": machine} | {name: record[name] for name in _FACTS if record.get(name)}


def _known(*runs: Run) -> list[str]:
    """Return what the runs themselves have said about what is not exact."""
    found: dict[str, None] = {}
    for run in runs:
        found |= dict.fromkeys(run.read().get("not_exact", ()))
        for path in sorted(run.folder.glob("logs/attempt-*/rank0.log")):
            for line in path.read_text(errors="replace").splitlines():
                if line.startswith("warning: "):
                    found[line.removeprefix("warning: ")] = None
    return [*found][:_KNOWN]
