"""The record of a run: the fields of run.json, and their check.

Imports no torch.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping
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
    trial_of: NotRequired[str]
    """The id of the sweep of which the run is a trial."""
    rung: NotRequired[int]
    """The step after which a trial stops, so that its sweep can compare it with the others; 0: none."""
    sweep: NotRequired[str]
    """The id of a sweep, in the run that launches its trials."""
    sweep_read: NotRequired[int]
    """What differs with the content of sweep.json, of that which the loop of a sweep has read."""
    refused_trials: NotRequired[dict[str, str]]
    """Maps trials of a sweep that could not be started to the reason."""
    removed_trials: NotRequired[list[str]]
    """Trials of a sweep that its user has removed."""
    rungs: NotRequired[dict[str, list[str]]]
    """Maps the rungs of a sweep that are decided, as text, to the trials that continue."""
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
    user: NotRequired[str]
    """The user that created the run."""
    image: NotRequired[str | None]
    """Version and commit of the image in which it was created; None: none of ours."""
    command_line: NotRequired[str]
    """The command that created it, with … in place of secrets."""
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
    wants: NotRequired[dict[str, Any]]
    """What the user has asked for: `gpus` as typed (None: nothing), and whether the run takes a `lease` of them."""
    ticket: NotRequired[int]
    """Place in the queue: nanoseconds since the epoch when the run was first launched."""
    queued: NotRequired[bool]
    """Whether it waits in the queue, or was killed there."""
    gave_way: NotRequired[dict[str, Any]]
    """How often (`times`) it has stopped for a run that waited, when `last`, and the `seconds` until its turn came.
    `since`: it waits for that now."""
    after: NotRequired[list[str]]
    """Names of runs for which it waits."""
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
    """Maps files that the task needs and of which the run has copies to their digests; see code/imports.py."""
    task_watched: NotRequired[dict[str, str]]
    """Maps files that the task needs and that are not copied to their digests."""
    chosen: NotRequired[list[str]]
    """Fields whose values were chosen automatically at launch."""
    set_by_user: NotRequired[list[str]]
    """Fields that the user has set by a flag or a file, for this run or for the one that was forked."""
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
    unmet: NotRequired[str]
    """Warning that the ranks of a script have not met, as a line; '' if they have met after all."""
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

    notify: NotRequired[str | None]
    """Where the notice of the run's end is sent: a host or `a command`, never the address. None: nowhere."""
    noticed: NotRequired[str]
    """State and time of the end whose notice was sent, or given up."""
    notice_problem: NotRequired[str]
    """Why the last notice was not sent, as a line; '' if it was."""

    cluster: NotRequired[Cluster | None]
    nodes: NotRequired[Any]
    submitted: NotRequired[Submitted]
    submission: NotRequired[str]
    """Id of the submission, by which the engine's jobs of the run are found."""
    owner: NotRequired[str]
    """The owner, if that is another user. Never in the file: reading the effective state adds it."""
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
    hints = get_type_hints(Record)
    for name in _SHOWN & content.keys():
        if not _problem_of(hints[name])(content[name]):
            record[name] = content[name]
    return cast(Record, record)


def checked(content: dict[str, Any]) -> Record:
    """Check the types of the known fields in the content of a run.json, and return the content.

    Raises:
        ValueError: a field is missing or of another type; the message names it.
    """
    problem = _problem_of(Record)(content)
    if problem:
        raise ValueError(problem.removeprefix(".") if problem.startswith(".") else f"all of it{problem}")
    return cast(Record, content)


_Problem = Callable[[Any], str]
"""Returns what is wrong with a value, as in `.attempts.number is missing`; '' if nothing is."""


@functools.cache
def _problem_of(kind: Any) -> _Problem:
    """Return the check of a type. Not by pydantic, whose import would cost each command 0.1 s."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        return _of_fields(kind)
    if origin is UnionType:  # each union here is of one type and None
        inner = _problem_of(arguments[0])
        return lambda value: "" if value is None else inner(value)
    if origin in (list, dict):
        of_each, of_all = _problem_of(arguments[-1]), _of_type(origin)
        return lambda value: (
            of_all(value) or next(filter(None, map(of_each, value.values() if origin is dict else value)), "")
        )
    return _size if kind is Any else _of_type(kind)


def _of_fields(kind: Any) -> _Problem:
    """Return the check of a TypedDict. An optional field may be null."""
    required, of_all = kind.__required_keys__, _of_type(dict)
    fields = {name: _problem_of(hint) for name, hint in get_type_hints(kind).items()}

    def problem(value: Any) -> str:
        if found := of_all(value):
            return found
        if missing := required - value.keys():
            return f".{min(missing)} is missing"
        for name, inner in value.items():
            check = fields.get(name)
            if check is not None and (inner is not None or name in required) and (found := check(inner)):
                return f".{name}{found}"
        return ""

    return problem


def _of_type(kind: type) -> _Problem:
    """Return the check of a type of JSON, which does not distinguish 1 from 1.0."""
    if kind in (int, float):
        allowed = (int, float) if kind is float else (int,)
        return lambda value: _size(value) if type(value) in allowed else f" is not of type {kind.__name__}"
    return lambda value: "" if type(value) is kind else f" is not of type {kind.__name__}"


def _size(value: Any) -> str:
    return " is too large" if type(value) is int and abs(value) > _LARGEST else ""
