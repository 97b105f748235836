"""What a cluster's engine (Slurm, Kubernetes) does with a run, and how its tools are called. Imports no torch."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from train.errors import Refused, one_line, whole
from train.run import folders, states
from train.run.run_folder import Run
from train.supervise.timeouts import WAIT_MINUTES

ENGINES = {"slurm": "train.cluster.slurm", "kubernetes": "train.cluster.kubernetes"}
"""By the name that --on takes."""
FILE, TASK, CONFIG = "submission.json", "task.py", "submitted.toml"
"""What each node reads: the request, and copies of the user's files as they were when the run was submitted."""
_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")
_LONGEST = 10 * 365 * 86400
"""Seconds of a time limit: engines count in numbers of 32 bits."""


@dataclasses.dataclass
class Submission:
    """What was asked for."""

    engine: str
    runs: Path
    name: str
    task: str
    flags: dict[str, str]
    config_file: str | None = None
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
    max_restarts: int = 3
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The engine's own options, by their names in the Namespace."""
    is_dry: bool = False
    """Only shown: nothing is created, and the engine need not be there."""
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))
    """By this the engine's jobs of the run are found, whatever became of its answers."""

    @property
    def folder(self) -> Path:
        return self.runs / self.name


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """How a run stands at its engine."""

    state: str
    """queued or running; of an engine that remembers jobs which have ended: finished or failed."""
    text: str

    @property
    def is_over(self) -> bool:
        return self.state not in (states.QUEUED, states.RUNNING)


class Engine(Protocol):
    """A module of this folder with these functions."""

    SCRIPT: str
    """The name in the run folder of what the engine is given."""

    def options(self, parser: Any) -> None:
        """Add the options of this engine alone: `parser.add_argument`, as every command does."""

    def check(self, asked: Submission) -> None:
        """Raises Refused: it cannot be submitted, or (unless `is_dry`) a tool or the cluster is missing."""

    def place(self, asked: Submission) -> str | None:
        """Where its jobs are asked for; None: the engine has one place."""

    def render(self, asked: Submission) -> str:
        """The text of SCRIPT."""

    def submit(self, run: Run) -> str:
        """Hand SCRIPT over. Returns what the engine made of it, as a short text.

        Raises:
            Refused: the engine did not take it, or its answer was lost.
        """

    def jobs(self, place: str | None) -> dict[str, JobStatus]:
        """The jobs there, by the id of their submission.

        Raises:
            Refused: the engine does not answer.
        """

    def stop(self, run: Run, job: JobStatus, now: bool) -> None:
        """Begin to end a job that is not over: one that runs saves, unless `now`. Called again until it is over."""

    def logs(self, run: Run, rank: int, since: str | None = None) -> list[str] | None:
        """The command that prints the output of a rank; None: the output lies in the run folders of its nodes.

        Args:
            since: print what comes, too, from this time on; '': from the start.
        """

    def remove(self, run: Run) -> str:
        """Remove all that the engine has of a run. Returns a line about what stays; '' for nothing."""


def engine(name: str) -> Engine:
    """The engine of that name."""
    return cast(Engine, importlib.import_module(ENGINES[name]))


def call(*command: str, given: str | None = None, seconds: float = 60.0) -> str:
    """What a tool of the engine's prints.

    Raises:
        Refused: it is missing, fails, or does not end.
    """
    name = command[0]
    if shutil.which(name) is None:
        raise Refused(f"there is no {name} here")
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{name} does not answer within {seconds:.0f} s") from None
    except OSError as error:
        raise Refused(f"{name} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise Refused(f"{name}: {one_line(lines[-1]) if lines else f'exit code {done.returncode}'}")
    return done.stdout


def template(file: str, /, **values: Any) -> str:
    """A template of this folder, filled in."""
    import jinja2

    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    made = jinja2.Template(text, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return made.render(values) + "\n"


def read(folder: Path) -> dict[str, Any]:
    """The request of a submission.

    Raises:
        Refused: it is damaged, or an earlier version's.
    """
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if isinstance(found["changes"], dict):
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise Refused(f"{folder / FILE} is damaged, or of an earlier version; submit the run anew under another name")


def other_node_folders(runs: Path, name: str) -> Sequence[Path]:
    """The folders of a run's nodes but node 0, or what is left of them."""
    return [folder / name for folder in folders.of_nodes(runs) if (folder / name).exists()]


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
