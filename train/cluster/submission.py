"""A run that is handed to an engine of a cluster, and what such an engine can do. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Protocol

from train.cluster import WAIT_MINUTES
from train.errors import Refused, whole
from train.record.store import Run

FILE = "submission.json"
"""What each node reads: in the run folder, or where an engine lays it down. The files that it names lie beside it."""
TASK, CONFIG = "task.py", "submitted.toml"
"""Copies of the user's files, as they were when the run was handed over; what the user changes later is not trained."""
NODES = ".nodes"
"""The folder beside run folders in which the nodes but node 0 have theirs, where all see the same disk."""
_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")
_LONGEST = 10 * 365 * 86400
"""Seconds of a time limit: engines count in numbers of 32 bits."""


@dataclasses.dataclass
class Submission:
    """What was asked for, checked as far as it can be without torch."""

    engine: str
    runs: Path
    name: str
    task: str
    flags: dict[str, str]
    config_file: str | None = None
    init: str | None = None
    nodes: int = 1
    gpus_per_node: int = 0
    """0: it computes on CPUs."""
    nproc: int = 1
    """Ranks on each node."""
    seconds: int | None = None
    """The time limit; None: the engine's own."""
    warn: int = 120
    """Seconds before the time limit at which all ranks save."""
    cpus: int | None = None
    """For each node."""
    memory: str | None = None
    """For each node, as 64G."""
    image: str | None = None
    wait_minutes: float = WAIT_MINUTES
    """How long a node waits for the others."""
    max_restarts: int | None = None
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the engine's own options were given, by their names in the Namespace."""
    is_dry: bool = False
    """Only shown: nothing is created, and the engine need not be there."""
    files: dict[str, str | bytes] = dataclasses.field(default_factory=dict)
    """What has to lie where every node reads it: FILE and what it names. Filled by runs/submit.py."""
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What run.json is to have, for an engine that creates the run folder at once. Filled by runs/submit.py."""

    @property
    def folder(self) -> Path:
        return self.runs / self.name


@dataclasses.dataclass(frozen=True)
class Standing:
    """How a job stands that its engine knows."""

    is_running: bool
    """Else it waits, or has ended."""
    words: str
    ended: str | None = None
    """The state in which its run rests, where the engine alone sees that; None: the engine has not done with it."""
    parts: tuple[str, ...] = ()
    """What it consists of, a line each."""


class Silent(Refused):
    """The engine does not answer; the message says why."""


class Unanswered(Silent):
    """Whether the engine has taken a run is not known, and may show later; the message says what to do."""


class Log(Protocol):
    """What rank 0's node prints, shown as it comes."""

    def update(self, record: dict[str, Any]) -> None:
        """Show what is new."""

    def close(self) -> None:
        """Show what is left, and end."""


class Engine(Protocol):
    """What takes runs: a module of this folder with these functions."""

    FAR: bool
    """Whether the run is kept where only the engine's nodes see it. The folder here is then a record of what was handed
    over, and of what the engine says; else it is the run's own."""

    def options(self, parser: Any) -> None:
        """Add the options of this engine alone: `parser.add_argument`, as every command does."""

    def check(self, submission: Submission) -> None:
        """Raises Refused: what is asked for cannot be handed over, or (unless `is_dry`) a tool or the cluster is
        missing. Nothing is created, and nothing slow is imported."""

    def render(self, submission: Submission) -> str:
        """What --dry-run prints: the file that the engine would be given."""

    def submit(self, submission: Submission) -> str:
        """Hand it over. Returns a line that says what it was given, for people.

        Raises:
            Refused: the engine does not take it; nothing is left behind.
            Unanswered: it may have taken it; the run folder stays.
        """

    # Of a run whose run.json has `submitted`: {"engine": NAME, "job": ID, "at": where the job is known, if it matters}.

    def standings(self, at: str | None) -> dict[str, Standing]:
        """The user's jobs there, by id; of those that it has done with, it may know none.

        Raises:
            Silent: it does not answer here.
        """

    def halt(self, run: Run, standing: Standing, now: bool) -> None:
        """Begin to end a job that has not ended: one that runs saves, unless `now`. Called again until it has."""

    def again(self, run: Run) -> None:
        """Hand a run over once more; writes `submitted`.

        Raises:
            Refused: the engine does not take it.
            Unanswered: it may have taken it.
        """

    def adopt(self, run: Run) -> None:
        """Write the job of a hand-over whose answer was lost into `submitted`, if there is one.

        Raises:
            Silent: the engine does not answer.
        """

    def forget(self, run: Run) -> str:
        """Remove what the engine keeps of a run that has ended. Returns a line about what stays; '' for nothing."""

    # Of an engine that is FAR.

    def print_log(self, run: Run, rank: int) -> None:
        """Print what the node of that rank has said.

        Raises:
            Refused: there is nothing of it.
        """

    def log(self, run: Run, rank: int) -> Log:
        """The same, to be followed."""


def runs_of(runs: Path, node: int) -> Path:
    """Where a node keeps its run folders, on a disk that all nodes see."""
    return runs / NODES / str(node) if node else runs


def of_others(runs: Path, name: str) -> list[Path]:
    """The folders of a run's nodes but node 0, or what is left of them."""
    return sorted(runs.glob(f"{NODES}/*/{name}"))


def seconds_of(text: str) -> int:
    """A time limit as Slurm writes it: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS[:MINUTES[:SECONDS]].

    Raises:
        Refused: it is none.
    """
    found = _TIME.fullmatch(text)
    if found:
        days, parts = whole(found[1] or "0"), [whole(part) for part in found.groups()[1:] if part is not None]
        units = [3600, 60, 1] if found[1] is not None or len(parts) == 3 else [60, 1]
        seconds = 86400 * days + sum(part * unit for part, unit in zip(parts, units, strict=False))
        if 0 < seconds <= _LONGEST:
            return seconds
    raise Refused(f"--time {text}: give minutes, or a time such as 8:00:00 (hours) or 2-12:00:00 (days and hours)")


def time_of(seconds: int) -> str:
    """A time limit as Slurm reads it."""
    days, rest = divmod(seconds, 86400)
    return f"{f'{days}-' if days else ''}{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"


def to_json(content: dict[str, Any]) -> str:
    """FILE's text."""
    return json.dumps(content, indent=1) + "\n"
