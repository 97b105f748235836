"""What a user asks for: the request of a run and of its launch, and the task and the configuration that it makes.

Imports neither torch nor pydantic until a request is resolved: the agent reads its request before it needs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.errors import Refused
from train.run import folders
from train.tasks import Task, load

if TYPE_CHECKING:
    from train.config import Config

ALONE = range(1, 2)
"""One machine."""


@dataclasses.dataclass
class Request:
    """What the user asked for, as text: it travels from `train launch` to the process that imports torch."""

    task: str
    flags: dict[str, str]
    config_file: str | None = None
    ranks: int = 1
    """On this machine."""
    nodes: range = ALONE
    """Numbers of machines that it may have, each with so many ranks."""
    copy: str | None = None
    """The file of the task as it was when the run was handed over; modules beside the original are still found."""


@dataclasses.dataclass
class LaunchRequest:
    """What the process inside tmux is to do, in types that JSON has."""

    kind: str
    """new, script, resume or fork"""
    runs: str
    name: str
    request: dict[str, Any] = dataclasses.field(default_factory=dict)
    """With new: a Request without its ranks. With fork: the run that it is `of`, and the `step` of its checkpoint."""
    flags: dict[str, str] = dataclasses.field(default_factory=dict)
    """With resume and fork: the fields that change. With script: its watch.*."""
    script: list[str] = dataclasses.field(default_factory=list)
    """With script: the file and its arguments."""
    nproc: str | None = None
    gpus: str | None = None
    max_restarts: int | None = None
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES where it was typed; None: not set, or the keeper resumes."""
    cluster: dict[str, Any] | None = None
    """On several machines: nodes.Settings. With resume: None leaves them as they are, {}: this one alone."""
    queued: bool = False
    """With new: the folder is there already, for an engine was to start the run; see cluster/node_agent.py."""
    submission: str | None = None
    """With new: which submission the run is of."""
    by_keeper: bool = False
    """With resume: the keeper asks, so it must still be wanted when the run's lock is held."""


def runs_of_node(
    runs: Path, name: str, cluster: dict[str, Any] | None, flags: dict[str, str], config_file: str | None
) -> Path:
    """Where a node keeps its part of a new run, given --runs: node 0 there; another one too, unless all share it.

    Raises:
        Refused: another node of the run has its folder where node 0's is to be.
    """
    from train import config as configuration

    if not cluster:
        return runs
    there = folders.record_of(runs, name).get("cluster")
    other = there["node"] if there and there["rendezvous"] == cluster["rendezvous"] else None
    if cluster["node"] == 0:
        if other:
            raise Refused(
                f"{runs / name} is that of node {other}; where machines share --runs, launch node 0 first, or "
                "give each a --runs of its own"
            )
        return runs
    strategy = flags.get("parallel.strategy")
    if strategy is None and config_file is not None:
        with contextlib.suppress(Refused):  # a check will say what is wrong with it
            strategy = configuration.flatten(configuration.read_toml(Path(config_file))).get("parallel.strategy")
    is_shared = strategy in configuration.SPREAD or other == 0
    return folders.of_node(runs, cluster["node"]) if is_shared else runs


def resolve(request: Request) -> tuple[Task, Config]:
    """The task and the configuration that its defaults, file and flags make; see config/resolve.py.

    Raises:
        Refused: something in them is unknown or wrong.
    """
    from train import config as configuration

    task = load_task(request.task, request.copy)
    return task, configuration.resolve(request.flags, request.config_file, task.Settings, task.DEFAULTS, task.file)


def load_task(name: str, copy: str | None) -> Task:
    """The task that a request names; of a copy, with the modules beside the original.

    Raises:
        Refused: as `load`.
    """
    if copy is None:
        return load(name)
    source = Path(name).absolute()
    return load(name, Path(copy), [source.parent], seen_as=source if source.parent.is_dir() else None)
