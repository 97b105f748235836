"""What a launch is made of: the request for a task, the plan that the checks give, and what every launch answers.

Imports torch and pydantic only when a request is resolved: the agent reads its launch before it needs them. The
launches themselves are in launches.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import hash_seed
from ..gpus import VISIBLE
from ..leases.devices import Reservation
from ..run.record import Record
from ..run.run_folder import Lock, Run
from ..run.spec import Spec
from ..tasks import Task, load
from ..zygote.client import Zygote

if TYPE_CHECKING:
    from ..config import Config

ALONE = range(1, 2)
"""The numbers of machines of a run on one machine."""


@dataclasses.dataclass
class Request:
    """What to train.

    Args:
        task: Name of a built-in task, or path of a task's file.
        flags: Maps config fields to values, as text. They win over `config_file`.
        config_file: A TOML file with config fields.
        copy: A copy of the task's file, made at submission. Modules beside the original are still found.
        rungs: Steps at which a sweep compares the run with its other trials.
    """

    task: str
    _: dataclasses.KW_ONLY
    flags: dict[str, str] = dataclasses.field(default_factory=dict)
    config_file: str | None = None
    copy: str | None = None
    rungs: list[int] = dataclasses.field(default_factory=list)


def set_by_user(flags: Mapping[str, str], *, config_file: str | None = None, before: Iterable[str] = ()) -> list[str]:
    """Return the names of the config fields that a user has set: by flags, by a file, or `before` for the same run."""
    from .. import config as configuration

    in_file = configuration.flatten(configuration.read_toml(Path(config_file))) if config_file is not None else {}
    return sorted({*before, *in_file, *flags})


@dataclasses.dataclass(kw_only=True)
class Plan:
    """What a launch that has passed every check is going to do.

    Args:
        files: Files to write into the run folder.
        record: Fields of run.json.
        copies: Maps a path in the run folder to the file or folder that is copied there.
        warnings: What the user should know, one line each.
        ranks: Number of ranks on this machine.
        visible: The GPUs that the ranks see, as in CUDA_VISIBLE_DEVICES; None: all.
        has_evaluation: Whether the task has an evaluation set.
        task, config: What was checked. Known only in the process that has checked it, because their classes may be
            the task's own.
    """

    files: dict[str, str | bytes]
    record: dict[str, Any]
    copies: dict[str, Path] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    ranks: int = 1
    visible: str | None = None
    has_evaluation: bool = False
    task: Any = None
    config: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"task": None, "config": None}


@dataclasses.dataclass(kw_only=True)
class OpenedRun:
    """A run that is ready to start: checked, created or found, its lock held.

    Args:
        zygote: The process from which the ranks are forked.
        held: What it holds, or waits for.
        listening: On node 0 of several machines: the socket to which the other nodes connect.
    """

    run: Run
    spec: Spec
    lock: Lock
    plan: Plan
    zygote: Zygote
    held: Reservation
    listening: socket.socket | None = None


@dataclasses.dataclass(kw_only=True)
class Launch(ABC):
    """What every launch has, in types that JSON has.

    Args:
        runs: Folder of the runs.
        name: Name of the run.
        nproc: Number of ranks on this machine, or `auto` (one per GPU), as text. None: one per GPU of `gpus`, else 1.
        gpus: A number of GPUs, or their ids with a comma (`0,1` or `2,`). None: all that are visible.
        max_restarts: Maximum number of restarts in a row without progress. None: the program's default.
        keep_env: Names of more environment variables to keep for resumes.
        command_line: The command as typed, without secrets; '' from a program, and of a resume.
        visible: CUDA_VISIBLE_DEVICES of the calling shell; None: not set, or the keeper resumes.
        lease: Whether the run holds its GPUs or cores; see leasing.py.
        queue: Whether the run waits for them. None: if they are GPUs, or if it has waited in the queue before.
        after: Names of runs that must finish before.
        gives_way: `mine` or `all`: the runs for which it stops and waits behind them; see giving_way.py. '': none.
        leased: The GPUs that the run holds, as in CUDA_VISIBLE_DEVICES; None: none.
        ticket: Its place in the queue; 0: not known yet.
        notify: Where the notice of the run's end goes, a URL or a command; '': nowhere; None: not given.
        trial_of: The id of the sweep of which the run is a trial; '': none.
        rung: The step after which a trial stops, so that its sweep can compare it with the others; 0: none; None: as
            before.
    """

    runs: str = ""
    name: str = ""
    nproc: str | None = None
    gpus: str | None = None
    max_restarts: int | None = None
    keep_env: list[str] = dataclasses.field(default_factory=list)
    command_line: str = ""
    visible: str | None = None
    lease: bool = True
    queue: bool | None = False
    after: list[str] = dataclasses.field(default_factory=list)
    gives_way: str = ""
    leased: str | None = None
    ticket: int = 0
    notify: str | None = dataclasses.field(default=None, repr=False)
    trial_of: str = ""
    rung: int | None = None

    @abstractmethod
    def check(self) -> Plan:
        """Check everything and choose what was left open. Creates and changes nothing; imports torch for a task.

        Raises:
            Refused: the launch is not possible.
        """

    @abstractmethod
    def open(self, environ: Mapping[str, str]) -> OpenedRun:
        """Check the launch, create or find its run and take the lock. Called in the agent.

        Args:
            environ: The environment of the launch, of which a part is kept with the run.

        Raises:
            Refused: the launch is not possible; nothing has been created or changed.
        """

    @property
    def run(self) -> Run:
        """The run folder, which may not exist yet."""
        return Run(Path(self.runs) / self.name)

    def machines(self, record: Record | None = None) -> Mapping[str, Any] | None:
        """Return the machines of the run as nodes.Settings; None: this machine alone."""
        return None

    def environ(self) -> tuple[dict[str, str], list[str]]:
        """Return the environment of the run, made from that of the caller, and warnings."""
        self.visible = os.environ.get(VISIBLE)
        return hash_seed.with_seed(os.environ), []

    def has_ended(self) -> bool:
        """Whether a session of this name belongs to a run that has ended, so that the session is about to end too."""
        return False

    @abstractmethod
    def undo(self, run: Run, lock: Lock) -> None:
        """Undo in the agent what `open` has done, because the caller has withdrawn the launch."""

    @abstractmethod
    def stop(self) -> None:
        """Undo in the caller what the agent has done and answered already."""

    def to_json(self) -> dict[str, Any]:
        """Return the launch as an object of JSON."""
        return {"launch": type(self).__name__, **dataclasses.asdict(self)}


def numbers_of(machines: Mapping[str, Any] | None) -> range:
    """Return the possible numbers of machines."""
    return range(machines["least"], machines["most"] + 1) if machines else ALONE


@contextlib.contextmanager
def scratch_run_dir() -> Iterator[None]:
    """Context manager in which TRAIN_RUN_DIR is an empty folder that is then removed: no run exists during a check."""
    with tempfile.TemporaryDirectory(prefix="train-check-", ignore_cleanup_errors=True) as folder:
        before = os.environ.get("TRAIN_RUN_DIR")
        os.environ["TRAIN_RUN_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TRAIN_RUN_DIR"]
            else:
                os.environ["TRAIN_RUN_DIR"] = before


def resolve(request: Request) -> tuple[Task, Config]:
    """Return the task, and the configuration from its defaults, the file and the flags; see config/resolve.py.

    Raises:
        Refused: something in them is unknown or wrong.
    """
    from .. import config as configuration

    task = load_task(request.task, request.copy)
    return task, configuration.resolve(
        request.flags,
        config_file=request.config_file,
        settings=task.Settings,
        defaults=task.DEFAULTS,
        task_file=task.file,
    )


def load_task(name: str, copy: str | None) -> Task:
    """Load the task that a request names. A copy is loaded with the modules beside the original.

    Raises:
        Refused: as in `load`.
    """
    if copy is None:
        return load(name)
    source = Path(name).absolute()
    return load(name, file=Path(copy), beside=[source.parent], seen_as=source if source.parent.is_dir() else None)
