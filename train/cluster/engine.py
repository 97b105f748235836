"""The interface of a cluster's engine (Slurm, Kubernetes), and how to call its tools. Imports no torch."""

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

from ..errors import Refused, one_line, whole
from ..run import folders, states
from ..run.record import Record
from ..run.run_folder import Run
from ..supervise.timeouts import WAIT_MINUTES

ENGINES = {"slurm": ".slurm", "kubernetes": ".kubernetes"}
"""Maps a value of --on to the module of its engine."""
FILE, TASK, CONFIG = "submission.json", "task.py", "submitted.toml"
"""Files that each node reads: the request, and copies of the user's files from when the run was submitted."""
_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")
_LONGEST = 10 * 365 * 86400
"""Seconds that a time limit may have at most. Engines store it in 32 bits."""


@dataclasses.dataclass(kw_only=True)
class Submission:
    """A request to run a task on a cluster."""

    engine: str
    runs: Path
    name: str
    task: str
    flags: dict[str, str]
    config_file: str | None = None
    nodes: int = 1
    gpus_per_node: int = 0
    """0: the run computes on CPUs."""
    nproc: int = 1
    """Ranks per node."""
    seconds: int | None = None
    """Time limit in seconds; None: the default of the engine."""
    warn: int = 120
    """Seconds before the time limit at which all ranks save."""
    cpus: int | None = None
    """CPUs per node."""
    memory: str | None = None
    """Memory per node, such as 64G."""
    image: str | None = None
    wait_minutes: float = WAIT_MINUTES
    """Minutes that a node waits for the other nodes."""
    max_restarts: int = 3
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of this engine alone, by their names in the Namespace."""
    is_dry: bool = False
    """Whether the script is only shown. Then nothing is created, and the engine need not exist."""
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))
    """Identifies the jobs of this run at the engine, even if the engine's answer was lost."""

    @property
    def folder(self) -> Path:
        return self.runs / self.name


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """State of a run at its engine."""

    state: str
    """queued or running. An engine that remembers ended jobs also says finished or failed."""
    text: str

    @property
    def is_over(self) -> bool:
        return self.state not in (states.QUEUED, states.RUNNING)


class Engine(Protocol):
    """Functions that a module of an engine has."""

    SCRIPT: str
    """Name of the file in the run folder that is handed to the engine."""

    def options(self, parser: Any) -> None:
        """Add the options of this engine with `parser.add_argument`."""

    def check(self, asked: Submission) -> None:
        """Check whether a request can be submitted.

        Raises:
            Refused: it cannot; or, unless `is_dry`, a tool or the cluster is missing.
        """

    def place(self, asked: Submission) -> str | None:
        """Return where to ask for the jobs of a request; None: the engine has only one place."""

    def render(self, asked: Submission) -> str:
        """Return the text of SCRIPT."""

    def submit(self, run: Run, record: Record) -> str:
        """Hand SCRIPT in the folder of a run to the engine. Returns a short text about the new job.

        Raises:
            Refused: the engine refused it, or its answer was lost.
        """

    def jobs(self, place: str | None) -> dict[str, JobStatus]:
        """Return the jobs at a place, by the id of their submission.

        Raises:
            Refused: the engine does not answer.
        """

    def stop(self, run: Run, record: Record, job: JobStatus, now: bool) -> None:
        """Ask a job to end. A running job saves first, unless `now`. Called repeatedly until the job is over."""

    def logs(self, record: Record, rank: int, since: str | None = None) -> list[str] | None:
        """Return the command that prints the output of a rank; None: the output is in the run folders of the nodes.

        Args:
            since: follow the output, starting at this time; '': from the start.
        """

    def remove(self, record: Record) -> str:
        """Remove everything that the engine has of a run. Returns a line about what stays, or ''."""


def engine(name: str) -> Engine:
    """Return the engine of that name."""
    return cast(Engine, importlib.import_module(ENGINES[name], __package__))


def call(*command: str, given: str | None = None, seconds: float = 60.0) -> str:
    """Run a tool of the engine and return what it prints.

    Args:
        given: text for its stdin.
        seconds: how long it may take.

    Raises:
        Refused: the tool is missing, fails, or does not end in time.
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
    """Fill in a template of this folder and return the text."""
    import jinja2

    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    made = jinja2.Template(text, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return made.render(values) + "\n"


def read(folder: Path) -> dict[str, Any]:
    """Read the request of a submission from its folder.

    Raises:
        Refused: it is damaged.
    """
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if isinstance(found["changes"], dict):
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise Refused(f"{folder / FILE} is damaged; submit the run again under another --name")


def other_node_folders(runs: Path, name: str) -> Sequence[Path]:
    """Return the existing folders of a run's nodes, except node 0's."""
    return [folder / name for folder in folders.of_nodes(runs) if (folder / name).exists()]


def seconds_of(text: str) -> int:
    """Return the seconds of a time limit in Slurm's form.

    The forms are MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS and DAYS-HOURS[:MINUTES[:SECONDS]].

    Raises:
        Refused: the text is not a time limit.
    """
    found = _TIME.fullmatch(text)
    if found:
        days, parts = whole(found[1] or "0"), [whole(part) for part in found.groups()[1:] if part is not None]
        units = [3600, 60, 1] if found[1] is not None or len(parts) == 3 else [60, 1]
        seconds = 86400 * days + sum(part * unit for part, unit in zip(parts, units, strict=False))
        if 0 < seconds <= _LONGEST:
            return seconds
    raise Refused(f"--time {text}: give minutes, or a time such as 8:00:00 (hours) or 2-12:00:00 (days and hours)")
