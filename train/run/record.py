"""The record of a run: what run.json holds, and the one check that it is so.

Imports no torch.
"""

import functools
import sys
from types import UnionType
from typing import Any, NotRequired, TypedDict, cast, get_args, get_origin, get_type_hints, is_typeddict

_LARGEST = sys.float_info.max
"""Whole numbers beyond it overflow wherever one counts with them."""


class Times(TypedDict, total=False):
    """What an attempt notes of itself: seconds since it was ready, by the clock of rank 0."""

    step: int
    """The last one made then, counted from 1."""
    seconds: float
    """In all; what is in none of the others is computing."""
    start: float
    """What the ranks do together before the first step."""
    data: float
    communication: float | None
    """Not hidden behind computing; None: it cannot be told apart from computing."""
    checkpoints: float
    evaluation: float


class Attempt(TypedDict):
    """One start of a run's processes. Times of day are ISO 8601 in UTC."""

    number: int
    """Counted from 1."""
    started: str
    end: str | None
    """finished, stopped, failed or died; None: it runs, or was killed as a whole."""
    world_size: int
    from_step: int | None
    """It continued after this step; None: a script's steps are its own."""
    to_step: int | None
    ready: NotRequired[str | None]
    """When its ranks began to train."""
    ended: NotRequired[str | None]
    reason: NotRequired[str]
    host: NotRequired[str]
    mark: NotRequired[str]
    """The same on all machines, whose records number their attempts each for itself."""
    edited: NotRequired[list[str]]
    """What it said of files of the task that had changed since the launch."""
    last_lines: NotRequired[list[str]]
    """Of the log of the rank that died first."""
    times: NotRequired[Times | None]


class Cluster(TypedDict):
    """The place of this machine in a run on several."""

    least: int
    most: int
    node: int
    rendezvous: str
    """HOST:PORT of node 0."""
    wait_minutes: NotRequired[float]


class Submitted(TypedDict):
    """The engine of a cluster that starts the run."""

    engine: str
    at: NotRequired[str | None]
    """Which of the engine's clusters."""


class Record(TypedDict):
    """run.json. Fields that are not named here, of a newer version, stay in it. Times of day are ISO 8601 in UTC."""

    name: str
    """The folder's: a run may be renamed by renaming its folder."""
    state: str
    """created, running, stopped, failed or finished; from `Run.read_effective` also interrupted, queued or copy."""
    attempts: list[Attempt]
    step: int
    """The last one made, counted from 1."""
    epoch: int
    world_size: NotRequired[int]
    forked_from: NotRequired[dict[str, Any]]
    """The run and step that it goes on from."""
    init: NotRequired[list[str]]
    """What weights it began with, and what did not fit, as lines; empty: those of model()."""
    unused_fields: NotRequired[list[str]]
    """Fields of config.toml that functions of the task take the place of: their values say nothing of the run."""
    warnings: NotRequired[list[str]]
    """What its launch, or the last resume, warned of: for the log of each attempt."""
    stopped_by: str | None
    reason: NotRequired[str]
    pids: NotRequired[dict[str, Any]]
    host: NotRequired[str]
    device: NotRequired[str]
    created: NotRequired[str | None]
    started: NotRequired[str | None]
    ended: NotRequired[str | None]
    tmux_session: NotRequired[str | None]
    cwd: NotRequired[str]
    versions: NotRequired[dict[str, Any]]
    git_revision: NotRequired[str | None]
    station: NotRequired[str | None]
    """The id of the station that has started the run, and the digest by its key (ownership.py)."""
    station_digest: NotRequired[str | None]
    nproc: NotRequired[int]
    gpus: NotRequired[str | None]
    max_restarts: NotRequired[int]
    kept: NotRequired[dict[str, int] | None]
    """How often the keeper has resumed it, and at which step."""
    torchelastic: NotRequired[str | None]
    """The torchrun that it belongs to."""

    task: NotRequired[str]
    task_source: NotRequired[str]
    task_sha256: NotRequired[str]
    sets_epoch: NotRequired[bool]
    """Whether `set_epoch` of data sets is called; not for runs that began before it was."""
    task_imports: NotRequired[dict[str, str]]
    """Digests of the files that the task needs and that the run has copies of; see imports.py."""
    task_watched: NotRequired[dict[str, str]]
    """The same, of those without a copy."""
    chosen: NotRequired[list[str]]
    """Fields that the launch has chosen a value for."""
    total_steps: NotRequired[int | None]
    samples: NotRequired[int]
    saved_step: NotRequired[int]
    loss: NotRequired[float | None]
    samples_per_s: NotRequired[float | None]
    metrics: NotRequired[dict[str, float | None]]
    """Of the last evaluation."""
    weights_sha256: NotRequired[str | None]
    data_wait: NotRequired[str]
    """How much of the time training waited for data, and what helps."""
    nan_steps: NotRequired[int]
    """Steps whose updates were left out (on_nan)."""
    skipped: NotRequired[dict[str, int]]
    """Samples that could not be read, by data set."""
    wandb: NotRequired[dict[str, Any]]
    not_exact: NotRequired[list[str]]
    """Why it may end with other bits after a resume, or on other numbers of ranks and workers."""

    script: NotRequired[str]
    """Where it lay; of a run that executes a script."""
    script_arguments: NotRequired[list[str]]
    script_files: NotRequired[dict[str, str]]
    watch: NotRequired[dict[str, Any]]

    cluster: NotRequired[Cluster | None]
    nodes: NotRequired[Any]
    submitted: NotRequired[Submitted]
    submission: NotRequired[str]
    """Its id, by which the engine's jobs of the run are found."""
    owner: NotRequired[str]
    """The user whose it is, where that is another one: in the output of `train ls` and `show`, not in the file."""
    config: NotRequired[dict[str, Any]]
    """The fields of config.toml by their dotted names: in the output of `train ls`, not in the file."""
    refused: NotRequired[Any]
    """This machine cannot be one of the run's several."""


def checked(content: dict[str, Any]) -> Record:
    """The content of a run.json, where every field that is known is of its type.

    Raises:
        ValueError: it is not so; the message says which field.
    """
    _check("", content, Record)
    return cast(Record, content)


_ALLOWED = {float: (int, float)}
"""JSON does not tell 1 from 1.0."""
_hints = functools.cache(get_type_hints)


def _check(where: str, value: Any, kind: Any) -> None:
    """Raises ValueError where a value is not of a kind that this file uses. By hand: pydantic takes 0.1 s to import,
    and each command reads records."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        _check(where, value, dict)
        for name in sorted(kind.__required_keys__ - value.keys()):
            raise ValueError(f"{where}{name} is missing")
        for name in _hints(kind).keys() & value.keys():
            if value[name] is not None or name in kind.__required_keys__:  # what may be missing may be null
                _check(f"{where}{name}.", value[name], _hints(kind)[name])
    elif origin is UnionType:
        if value is not None:  # each union here is of one kind and None
            _check(where, value, arguments[0])
    elif origin is list:
        _check(where, value, list)
        for inner in value:
            _check(where, inner, arguments[0])
    elif origin is dict:
        _check(where, value, dict)
        for inner in value.values():
            _check(where, inner, arguments[1])
    elif kind is not Any and (
        isinstance(value, bool) != (kind is bool) or not isinstance(value, _ALLOWED.get(kind, kind))
    ):
        raise ValueError(f"{where.rstrip('.') or 'all of it'} is not of type {kind.__name__}")
    elif isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(f"{where.rstrip('.')} is too large")
