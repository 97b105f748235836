"""The requests for a run and for its launch, and the task and configuration they resolve to.

Imports torch and pydantic only when a request is resolved: the agent reads its request before it needs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import gpus
from ..errors import Refused
from ..run import folders
from ..tasks import Task, load

if TYPE_CHECKING:
    from ..config import Config

ALONE = range(1, 2)
"""The numbers of machines of a run on one machine."""


@dataclasses.dataclass(kw_only=True)
class Request:
    """What the user asked for, as text. `train launch` sends it to the process that imports torch."""

    task: str
    flags: dict[str, str]
    config_file: str | None = None
    ranks: int = 1
    """Number of ranks on each machine."""
    nodes: range = ALONE
    """Possible numbers of machines."""
    copy: str | None = None
    """Copy of the task's file, made at submission. Modules beside the original are still found."""
    elsewhere: Callable[[], list[list[gpus.Card]]] = list
    """Under torchrun on several machines: returns the GPUs of each other rank's machine; an empty list: unknown."""


@dataclasses.dataclass(kw_only=True)
class LaunchRequest:
    """What the agent is to do, in types that JSON has."""

    kind: str
    """new, script, resume or fork"""
    runs: str
    name: str
    request: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For new: a Request without its ranks. For fork: the forked run (`of`) and the `step` of its checkpoint."""
    flags: dict[str, str] = dataclasses.field(default_factory=dict)
    """For resume and fork: the fields that change. For script: its watch.* fields."""
    script: list[str] = dataclasses.field(default_factory=list)
    """For script: the file and its arguments."""
    nproc: str | None = None
    gpus: str | None = None
    max_restarts: int | None = None
    keep_env: list[str] = dataclasses.field(default_factory=list)
    """Names of more environment variables to keep for resumes."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES of the calling shell; None: not set, or the keeper resumes."""
    cluster: dict[str, Any] | None = None
    """For several machines: nodes.Settings. For resume: None keeps the machines, {} uses only this one."""
    queued: bool = False
    """For new: the folder exists already, made by `train submit`; see cluster/node_agent.py."""
    submission: str | None = None
    """For new: the id of the submission."""
    by_keeper: bool = False
    """For resume: the keeper asks, so check again that the run should resume once its lock is held."""


def runs_of_node(
    runs: Path, name: str, *, cluster: dict[str, Any] | None, flags: dict[str, str], config_file: str | None
) -> Path:
    """Return the folder in which a node keeps its part of a new run: --runs itself, or a subfolder if nodes share it.

    Raises:
        Refused: another node of the run has its folder in the place of node 0's.
    """
    from .. import config as configuration

    if not cluster:
        return runs
    there = folders.record_of(runs, name).get("cluster")
    other = there["node"] if there and there["rendezvous"] == cluster["rendezvous"] else None
    if cluster["node"] == 0:
        if other:
            raise Refused(
                f"{runs / name} belongs to node {other}; give each machine its own --runs, or, if they share it, "
                "launch node 0 first"
            )
        return runs
    strategy = flags.get("parallel.strategy")
    if strategy is None and config_file is not None:
        with contextlib.suppress(Refused):  # a later check reports the problem
            strategy = configuration.flatten(configuration.read_toml(Path(config_file))).get("parallel.strategy")
    is_shared = configuration.strategies.of(strategy).needs_shared_disk or other == 0
    return folders.of_node(runs, cluster["node"]) if is_shared else runs


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
