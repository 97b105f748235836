"""The record of a run: the fields of run.json, and their check.

Imports no torch.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Mapping
from types import UnionType
from typing import Any, NotRequired, TypedDict, cast, get_args, get_origin, get_type_hints, is_typeddict

from ..errors import shortened

FORMAT = 2
"""Number of the format of run folders and checkpoints. docs/contributing.md says when it is raised."""
_LARGEST = sys.float_info.max
"""Maximum of an integer: larger ones overflow when converted to float."""


class Times(TypedDict):
    """Where the time of an attempt went: seconds since it was ready, by the clock of rank 0."""

    step: int
    """The last step made by then, counted from 1."""
    seconds: float
    """Total; what none of the others counts is computing."""
    start: float
    """Work of all ranks together before the first step."""
    data: float
    communication: float | None
    """Communication that does not overlap with computing; None: cannot be separated from computing."""
    checkpoints: float
    evaluation: float


class Attempt(TypedDict):
    """One start of a run's processes. Times of day are ISO 8601 in UTC."""

    number: int
    """Counted from 1."""
    started: str
    end: str | None
    """finished, stopped, failed or died; None: it runs, or all its processes were killed."""
    world_size: int
    from_step: int | None
    """The step after which it continued; None for a script, whose steps are unknown."""
    to_step: int | None
    ready: NotRequired[str | None]
    """When its ranks started to train."""
    ended: NotRequired[str | None]
    reason: NotRequired[str]
    host: NotRequired[str]
    mark: NotRequired[str]
    """Id of the attempt on all machines, whose attempt numbers may differ."""
    edited: NotRequired[list[str]]
    """Lines about files of the task that had changed since the launch."""
    last_lines: NotRequired[list[str]]
    """Last lines of the log of the rank that died first."""
    times: NotRequired[Times | None]


class Cluster(TypedDict):
    """The place of this machine in a run on several machines."""

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
    """The cluster of that engine."""


class Record(TypedDict):
    """run.json. Fields that are not listed here are kept. Times of day are ISO 8601 in UTC."""

    format: int
    """FORMAT, when the run was created."""
    name: str
    """Name of the run folder: renaming the folder renames the run."""
    state: str
    """created, running, stopped, failed or finished; from `Run.read_effective` also interrupted, queued or copy."""
    attempts: list[Attempt]
    step: int
    """The last step made, counted from 1."""
    epoch: int
    world_size: NotRequired[int]
    forked_from: NotRequired[dict[str, Any]]
    """The forked run, its step and the digest of its task. `edited`: files of the code that differ from that run's.
    `forked_from`: the same of the forked run."""
    init: NotRequired[list[str]]
    """Lines about the initial weights and what did not fit; empty: those of model()."""
    unused_fields: NotRequired[list[str]]
    """Fields of config.toml that functions of the task replace, so that their values have no effect."""
    warnings: NotRequired[list[str]]
    """Warnings of the launch or the last resume, for the log of each attempt."""
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
    """The id of the station that has started the run (ownership.py)."""
    station_digest: NotRequired[str | None]
    """The digest with that station's key."""
    nproc: NotRequired[int]
    gpus: NotRequired[str | None]
    max_restarts: NotRequired[int | None]
    """None: not chosen, so the program decides when a rank dies."""
    kept: NotRequired[dict[str, int] | None]
    """How often the keeper has resumed the run, and at which step."""
    torchelastic: NotRequired[str | None]
    """Id of the torchrun to which the run belongs."""

    task: NotRequired[str]
    task_source: NotRequired[str]
    task_sha256: NotRequired[str]
    task_imports: NotRequired[dict[str, str]]
    """Maps files that the task needs and of which the run has copies to their digests; see imports.py."""
    task_watched: NotRequired[dict[str, str]]
    """Maps files that the task needs and that are not copied to their digests."""
    chosen: NotRequired[list[str]]
    """Fields whose values were chosen automatically at launch."""
    precision_reason: NotRequired[str]
    """Which precision was chosen automatically, and why, as a line; '' if the user has chosen one, and on a CPU."""
    total_steps: NotRequired[int | None]
    samples: NotRequired[int]
    """Number of samples of an epoch."""
    sampler: NotRequired[str]
    """The function of the task that orders the samples; '': none."""
    saved_step: NotRequired[int]
    loss: NotRequired[float | None]
    loss_parts: NotRequired[dict[str, list[str]]]
    """Maps an update ('' for a single one) to the names of the parts of its loss, which the first step has fixed."""
    samples_per_s: NotRequired[float | None]
    metrics: NotRequired[dict[str, float | None]]
    """Metrics of the last evaluation."""
    weights_sha256: NotRequired[str | None]
    data_wait: NotRequired[str]
    """Which share of the time training waited for data, and what helps."""
    nan_steps: NotRequired[int]
    """Number of steps whose updates were skipped (on_nan)."""
    skipped: NotRequired[dict[str, int]]
    """Maps a dataset to the number of its samples that could not be read."""
    wandb: NotRequired[dict[str, Any]]
    wandb_id: NotRequired[str]
    """Id of the run at W&B; see wandb_run.py."""
    not_exact: NotRequired[list[str]]
    """Why the run may end with other bits after a resume, or with other numbers of ranks and data workers."""

    script: NotRequired[str]
    """Path of the script, in a run of a script."""
    script_module: NotRequired[str]
    """The dotted name that was launched instead of a path; '': a path was."""
    script_arguments: NotRequired[list[str]]
    session: NotRequired[bool]
    """Whether the script has opened a session (sessions/place.py)."""
    expects_session: NotRequired[bool]
    """Whether the source of the script opens a session, so that a death before that restarts it, too."""
    on_restart: NotRequired[list[str] | None]
    """Arguments that a restart or resume adds or replaces. None: the user has not said how the script continues."""
    script_files: NotRequired[dict[str, str]]
    watch: NotRequired[dict[str, Any]]
    figures: NotRequired[list[str]]
    """Where the figures of a script are read from, besides its own lines: each a regex or tensorboard:PATH."""
    figures_problem: NotRequired[str]
    """Why figures of a script cannot be read, as a line; '' if they can."""
    last_figures: NotRequired[dict[str, float | None]]
    """The last value of each figure of a script."""
    step_time: NotRequired[float | None]
    """Seconds per step of a script, by the times of its lines; None: unknown."""

    cluster: NotRequired[Cluster | None]
    nodes: NotRequired[Any]
    submitted: NotRequired[Submitted]
    submission: NotRequired[str]
    """Id of the submission, by which the engine's jobs of the run are found."""
    owner: NotRequired[str]
    """The owner, if that is another user. Only in the output of `train ls` and `train show`."""
    config: NotRequired[dict[str, Any]]
    """The fields of config.toml by their dotted names. Only in the output of `train ls`."""
    best: NotRequired[dict[str, Any]]
    """Maps a metric to its best value. Only in the output of `train ls`."""
    restarts: NotRequired[int]
    """Number of attempts that were started after another one had died. Only in the output of `ls` and `show`."""
    seconds_lost: NotRequired[float | None]
    """Seconds that deaths cost; None: unknown. Only in the output of `ls` and `show`."""
    refused: NotRequired[Any]
    """Set if this machine cannot join the other machines of the run."""


_SHOWN = {"step", "epoch", "total_steps", "world_size", "created", "started", "ended", "host"}
"""Fields of a run of another format that are shown if they have the types of this format."""


def other_format(content: Mapping[str, Any], what: object) -> str:
    """Return why this version cannot use a run or a checkpoint, given its run.json or manifest; '' if it can.

    Args:
        what: Its name, for the text.
    """
    found = content.get("format")
    if type(found) is int and found == FORMAT:
        return ""
    has = "has no format" if found is None else f"has the format {shortened(json.dumps(found), 20)}"
    return f"{what} {has}, and this version of train uses format {FORMAT}; use the version that wrote it"


def shown(content: Mapping[str, Any], state: str, reason: str) -> Record:
    """Return the fields of a run.json of another format that can be shown: all of them are plain values."""
    record: dict[str, Any] = {"name": content["name"], "format": content.get("format"), "state": state}
    record |= {"reason": reason, "stopped_by": None, "attempts": [], "step": 0, "epoch": 0, "world_size": None}
    for name in _SHOWN & content.keys():
        with contextlib.suppress(ValueError):
            _check(name, content[name], _hints(Record)[name])
            record[name] = content[name]
    return cast(Record, record)


def checked(content: dict[str, Any]) -> Record:
    """Check the types of the known fields in the content of a run.json, and return the content.

    Raises:
        ValueError: a field is missing or of another type; the message names it.
    """
    _check("", content, Record)
    return cast(Record, content)


_ALLOWED = {float: (int, float)}
"""Types allowed for a declared type: JSON does not distinguish 1 from 1.0."""
_hints = functools.cache(get_type_hints)


def _check(where: str, value: Any, kind: Any) -> None:
    """Raise ValueError if a value has another type. Not by pydantic, whose import would cost each command 0.1 s."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        _check(where, value, dict)
        for name in sorted(kind.__required_keys__ - value.keys()):
            raise ValueError(f"{where}{name} is missing")
        for name in _hints(kind).keys() & value.keys():
            if value[name] is not None or name in kind.__required_keys__:  # an optional field may be null
                _check(f"{where}{name}.", value[name], _hints(kind)[name])
    elif origin is UnionType:
        if value is not None:  # each union here is of one type and None
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
