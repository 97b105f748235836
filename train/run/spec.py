"""What runs in a run: its program, configuration, placement and restarts. Read once per process and handed down.

A launch or a resume fixes these facts until the run's processes have ended. How the run stands (state, step, attempts)
changes meanwhile and stays in run.json: see record.py. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .record import Cluster, Record, Submitted
from .run_folder import Run

TASK, SCRIPT, SESSION, SWEEP = "task", "script", "session", "sweep"
"""The programs. programs.py has a class for each."""
RUN = "{run}"
"""Stands for the path of the run folder in what a user gives a script."""
MAX_RESTARTS = 3
"""Maximum number of restarts in a row without a new checkpoint, where the user has not said another."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What runs. Read-only: a resume that changes it writes run.json and config.toml, and reads another."""

    program: str
    """TASK, SCRIPT, SESSION: a script that has opened a session, or SWEEP: our loop that launches other runs."""
    config: Mapping[str, Any]
    """The fields of config.toml by their dotted names; {} for a script."""

    # the code
    task: str
    """A built-in task, or task.py: the copy in the run folder."""
    task_source: str
    """Path of the file that was launched; '' for a built-in task."""
    task_sha256: str
    task_imports: Mapping[str, str]
    """Maps files that the task needs and of which the run has copies to their digests."""
    task_watched: Mapping[str, str]
    """Maps files that the task needs and that are not copied to their digests."""
    script: str
    """Path of the script; '' for a task."""
    script_module: str
    """The dotted name with which a script is started (`python -m`); '': by its path."""
    script_arguments: tuple[str, ...]
    expects_session: bool
    """Whether the source of a script opens a session."""
    on_restart: tuple[str, ...] | None
    """Arguments that a restart of a script adds or replaces; (): none, the script continues by itself; None: the user
    has not said how it continues."""
    script_files: Mapping[str, str]
    """Maps the script and the files that it imports to their digests."""
    watch: Mapping[str, Any]
    """Limits of a script (`--watch.NAME`); a task has them in `config`."""
    figures: tuple[str, ...]
    """Where the figures of a script are read from, besides its own lines: each a regex or tensorboard:PATH."""
    cwd: str
    """The folder in which the run was launched."""

    # placement and restarts
    nproc: int | None
    """Number of ranks on this machine."""
    gpus: str | None
    """The GPUs that the ranks see, as in CUDA_VISIBLE_DEVICES; None: all."""
    cluster: Cluster | None
    """The place of this machine among several; None: it is the only one."""
    submitted: Submitted | None
    """The engine that starts the run; None: its user does."""
    submission: str
    wandb_id: str
    """Id of the run at W&B, from which wandb_run.py makes that of each rank."""
    rung: int
    """The step after which a trial stops, so that its sweep can compare it with the others; 0: none."""
    max_restarts: int | None
    """Maximum number of restarts in a row without progress. None: not chosen; ask the program (`restarts`)."""

    # where it starts, and by which rules
    forked_from: Mapping[str, Any] | None
    """The forked run and its step."""
    init: tuple[str, ...]
    """Lines about the initial weights and what did not fit; (): those of model()."""
    chosen: tuple[str, ...]
    """Fields whose values were chosen automatically at launch."""
    set_by_user: tuple[str, ...]
    """Fields that the user has set by a flag or a file, at the launch or a resume, for this run or the forked one."""
    reasons: Mapping[str, str]
    """Maps fields that were chosen automatically to why they have their value, as a line."""
    samples: int | None
    """Number of samples of an epoch; None: no attempt has counted them."""
    sampler: str
    """The function of the task that orders the samples: order, weights or lengths; '': none, every sample once."""
    unused_fields: tuple[str, ...]
    """Fields whose values have no effect: functions of the task replace them, or the task does not read them."""
    warnings: tuple[str, ...]
    """Warnings of the launch or the last resume, for the log of each attempt."""

    @property
    def is_submitted(self) -> bool:
        return self.submitted is not None and bool(self.submission)

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON has it, for `from_json` in a process that is started for the run."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Spec:
        """Return the spec that another process has read."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
        return cls(**values)

    @property
    def fork_step(self) -> int:
        """The step of the checkpoint with which the run started; 0: it started at the beginning."""
        return int(self.forked_from["step"]) if self.forked_from else 0

    def forked_at(self, run: str, step: int, **more: Any) -> dict[str, Any]:
        """Return `forked_from` of a run that continues this one, named `run`, at this step, with more fields."""
        before = {"forked_from": self.forked_from} if self.forked_from else {}
        return {"run": run, "step": step, **more, **before}

    @property
    def best_by(self) -> str:
        """checkpoint.best: the metric that says which checkpoint is the best; '' if none is set."""
        wanted = self.config.get("checkpoint.best")
        return wanted if isinstance(wanted, str) else ""

    @property
    def keep_best(self) -> int:
        """checkpoint.keep_best: the number of best checkpoints that are kept; 0 if checkpoint.best is not set."""
        count = self.config.get("checkpoint.keep_best", 1)
        return count if self.best_by and isinstance(count, int) else 0

    @property
    def used_config(self) -> dict[str, Any]:
        """The configuration without the fields whose values have no effect."""
        return {name: value for name, value in self.config.items() if self.has_effect(name)}

    def has_effect(self, field: str) -> bool:
        """Whether the value of a field has an effect, as far as the launch has found out."""
        return field not in self.unused_fields


_REASON = "_reason"


def program_of(record: Record) -> str:
    """Return the program of a run. A sweep and a script have a field of their name. A script that has opened a session
    says so."""
    if record.get(SWEEP):
        return SWEEP
    if not record.get(SCRIPT):
        return TASK
    return SESSION if record.get(SESSION) else SCRIPT


def spec_of(record: Record, config: Mapping[str, Any]) -> Spec:
    """Return what a record and the fields of config.toml say about what runs."""
    return Spec(
        program=program_of(record),
        config=config,
        task=record.get("task") or "",
        task_source=record.get("task_source") or "",
        task_sha256=record.get("task_sha256") or "",
        task_imports=record.get("task_imports") or {},
        task_watched=record.get("task_watched") or {},
        script=record.get("script") or "",
        script_module=record.get("script_module") or "",
        script_arguments=tuple(record.get("script_arguments") or ()),
        expects_session=bool(record.get("expects_session")),
        on_restart=None if (words := record.get("on_restart")) is None else tuple(words),
        script_files=record.get("script_files") or {},
        watch=record.get("watch") or {},
        figures=tuple(record.get("figures") or ()),
        cwd=record.get("cwd") or "",
        nproc=record.get("nproc"),
        gpus=record.get("gpus"),
        cluster=record.get("cluster") or None,
        submitted=record.get("submitted"),
        submission=record.get("submission") or "",
        wandb_id=record.get("wandb_id") or "",
        rung=record.get("rung") or 0,
        max_restarts=record.get("max_restarts"),
        forked_from=record.get("forked_from") or None,
        init=tuple(record.get("init") or ()),
        chosen=tuple(record.get("chosen") or ()),
        set_by_user=tuple(record.get("set_by_user") or ()),
        reasons={
            name.removesuffix(_REASON): str(text) for name, text in record.items() if name.endswith(_REASON) and text
        },
        samples=record.get("samples"),
        sampler=record.get("sampler") or "",
        unused_fields=tuple(record.get("unused_fields") or ()),
        warnings=tuple(record.get("warnings") or ()),
    )


def read_spec(run: Run) -> Spec:
    """Read what runs from a run folder. Once per process: hand it down.

    Raises:
        Refused: run.json is missing or damaged.
    """
    return spec_of(run.read(), run.read_config())
