"""The launches of a run: `NewRun`, `NewScript`, `NewSweep`, `Fork` and `Resume`, each with its own fields.

    NewRun("digits", flags={"epochs": "2"}, runs="runs", name="demo1", nproc="2").start()

A launch is made by a command or by a program, and travels to the agent as JSON. A fork of the zygote checks it, which
gives a `Plan`. The agent carries the plan out. Until then nothing is created or changed. Imports no torch before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import breakpoints, caches, doing, hash_seed, programs, variables
from ..errors import Refused
from ..gpus import VISIBLE, seen_here
from ..run import environment, folders, provenance, states
from ..run.record import Record
from ..run.run_folder import Lock, Run
from ..signals import KEEPER, SWEEP, USER
from . import mirrored
from .request import ALONE, Launch, OpenedRun, Plan, Request, numbers_of, set_by_user


class _Launch(Launch):
    def start(self, cancelled: Callable[[], bool] = lambda: False) -> list[str]:
        """Start the run in its tmux session and wait until the agent has recorded it. Returns warnings.

        Args:
            cancelled: Returns whether the caller withdraws the launch.

        Raises:
            Refused: tmux is missing, a check fails, or the launch was withdrawn. Nothing is left behind.
        """
        from . import tmux

        return tmux.start(self, cancelled)


class _New(_Launch):
    def undo(self, run: Run, lock: Lock) -> None:
        lock.release()
        folders.remove(run)

    def stop(self) -> None:
        from .stopping import stop_and_wait  # late: it imports much and is rarely needed

        stop_and_wait(self.run, states.NOW)
        folders.remove(self.run)


@dataclasses.dataclass
class NewRun(Request, _New):
    """A new run of a task.

    Args:
        cluster: For several machines: the fields of nodes.Settings.
        queued: Whether the folder exists already, made by `train submit`; see cluster/node_agent.py.
        submission: The id of the submission.
    """

    _: dataclasses.KW_ONLY
    cluster: dict[str, Any] | None = None
    queued: bool = False
    submission: str | None = None

    def check(self) -> Plan:
        from ..code import imports
        from .checks import prepare
        from .leasing import device_of
        from .ranks_and_gpus import choose

        is_on_cpu = device_of(self, {}) == "cpu"
        ranks, visible = choose(self.nproc, self.gpus, cpu_only=is_on_cpu, leased=self.leased)
        nodes = numbers_of(self.machines())
        of_gloo = keep_gloo_at_home(ranks, nodes)
        imports.watch()
        plan = prepare(self, ranks=ranks, nodes=nodes, runs=Path(self.runs))
        plan.visible, plan.warnings = visible, of_gloo + plan.warnings
        return plan

    def open(self, environ: Mapping[str, str]) -> OpenedRun:
        from .create_run import create

        fields = {"submission": self.submission}
        return create(self, programs.TASK, environ, existing=self.run if self.queued else None, fields=fields)

    def machines(self, record: Record | None = None) -> Mapping[str, Any] | None:
        return self.cluster or None


@dataclasses.dataclass
class NewScript(_New):
    """A new run of a torchrun program.

    Args:
        script: Path of the script; '': `module` says what to start.
        module: Dotted name of a module to start like `python -m`.
        arguments: Arguments of the script.
        on_restart: Arguments that a restart adds or replaces, as one text; '': none, the script continues by itself;
            None: the user has not said how it continues.
        flags: Maps `watch.*` fields to values, as text.
        figures: Where its figures are read from: each a regular expression or tensorboard:PATH.
    """

    script: str = ""
    _: dataclasses.KW_ONLY
    module: str = ""
    arguments: list[str] = dataclasses.field(default_factory=list)
    on_restart: str | None = None
    flags: dict[str, str] = dataclasses.field(default_factory=dict)
    figures: list[str] = dataclasses.field(default_factory=list)

    def check(self) -> Plan:
        from ..scripts import check, reader
        from .ranks_and_gpus import choose

        ranks, visible = choose(self.nproc, self.gpus, leased=self.leased)
        record, warnings = check.check(
            self.script, module=self.module, arguments=self.arguments, on_restart=self.on_restart, flags=self.flags
        )
        reader.check(self.figures)
        record |= {"figures": self.figures, **provenance.facts(seen_here())}
        return Plan(files={}, record=record, warnings=warnings, ranks=ranks, visible=visible)

    def open(self, environ: Mapping[str, str]) -> OpenedRun:
        from .create_run import create

        return create(self, programs.SCRIPT, environ)


@dataclasses.dataclass
class NewSweep(_New):
    """A new sweep: a run whose rank launches other runs, its trials.

    Args:
        sweep: The content of sweep.json, as far as the caller knows it; see sweeps/kept.py.
    """

    sweep: dict[str, Any] = dataclasses.field(default_factory=dict)

    def check(self) -> Plan:
        from ..sweeps.kept import Sweep
        from .sweep import prepare

        return prepare(Sweep.from_json(self.sweep), Path(self.runs), made=from_json)

    def open(self, environ: Mapping[str, str]) -> OpenedRun:
        from .create_run import create

        return create(self, programs.SWEEP, environ)


@dataclasses.dataclass
class Fork(_New):
    """A new run that continues from a checkpoint of another run of a task, or of a script with a session.

    Args:
        of: Name of the forked run.
        step: Step of the checkpoint; 0: the new run starts at the beginning.
        flags: Maps config fields that change to their values, as text.
        task: Path of an edited version of the task, or a built-in task; None: the forked run's own copy.
        arguments: For a script: arguments that change or are added; see scripts/command.py.
        on_restart: For a script: as in `Resume`.
    """

    of: str
    step: int
    _: dataclasses.KW_ONLY
    flags: dict[str, str] = dataclasses.field(default_factory=dict)
    task: str | None = None
    arguments: list[str] = dataclasses.field(default_factory=list)
    on_restart: str | None = None

    def check(self) -> Plan:
        from ..code import imports
        from ..scripts import check
        from .ranks_and_gpus import choose

        ranks, visible = choose(self.nproc, self.gpus, leased=self.leased)
        source = folders.find_trusted(Path(self.runs), self.of)
        if not programs.of_record(source.read()).has_fields:
            made, copies, warnings = check.check_fork(
                source, self.step, arguments=self.arguments, on_restart=self.on_restart, flags=self.flags
            )
            made |= provenance.facts(seen_here())
            return Plan(files={}, record=made, copies=copies, warnings=warnings, ranks=ranks, visible=visible)
        from .fork import prepare_fork

        of_gloo = keep_gloo_at_home(ranks, ALONE)
        if self.task is not None:
            imports.watch()
        plan = prepare_fork(source, self.step, self.flags, ranks, self.task)
        plan.visible, plan.warnings = visible, of_gloo + plan.warnings
        return plan

    def open(self, environ: Mapping[str, str]) -> OpenedRun:
        from .create_run import create

        source = folders.find_trusted(Path(self.runs), self.of)
        record = source.read()
        folders.enter(record.get("cwd") or "")
        return create(self, programs.of_record(record), environ, source=source)


@dataclasses.dataclass(kw_only=True)
class Resume(_Launch):
    """A run that continues from its newest checkpoint, or a script that is started again.

    Args:
        flags: Maps config fields that change to their values, as text. For a script: its `watch.*` fields.
        on_restart: For a script: its new arguments for restarts, as in `NewScript`; None: they stay.
        figures: For a script: where its figures are read from, as in `NewScript`; None: as before.
        cluster: The fields of nodes.Settings. None keeps the machines, {} uses only this one.
        by_sweep: Whether the run is a trial that its sweep resumes.
        by_keeper: Whether the keeper resumes the run. Then whether it should is checked again with the lock held.
    """

    flags: dict[str, str] = dataclasses.field(default_factory=dict)
    on_restart: str | None = None
    figures: list[str] | None = None
    cluster: dict[str, Any] | None = None
    by_sweep: bool = False
    by_keeper: bool = False

    def check(self) -> Plan:
        from ..scripts import check, reader
        from .ranks_and_gpus import choose_again

        run = folders.find_trusted(Path(self.runs), self.name)
        record = run.read()
        program = programs.of_record(record)
        program.check_options(
            {"on_restart": self.on_restart, "figures": self.figures, "nproc": self.nproc, "gpus": self.gpus}
        )
        if program.launches_trials:
            from .sweep import prepare_again

            return prepare_again(run, record, self.flags)
        ranks, visible = choose_again(
            run, record, nproc=self.nproc, gpus=self.gpus, now=self.visible, leased=self.leased
        )
        if not program.has_fields:
            fields, warnings = check.check_again(run, self.flags, self.on_restart)
            if self.figures is not None:
                reader.check(self.figures)
                fields["figures"] = self.figures
            return Plan(files={}, record=fields, warnings=warnings, ranks=ranks, visible=visible)
        from .. import config as configuration
        from .resume import prepare_resume

        nodes = numbers_of(self.machines(record))
        of_gloo = keep_gloo_at_home(ranks, nodes)
        config, warnings = prepare_resume(run, self.flags, ranks, nodes)
        files: dict[str, str | bytes] = {"config.toml": configuration.to_toml(config)} if self.flags else {}
        warnings = of_gloo + warnings
        changes = {"warnings": warnings, "set_by_user": set_by_user(self.flags, before=record.get("set_by_user") or ())}
        return Plan(files=files, record=changes, warnings=warnings, ranks=ranks, visible=visible)

    def open(self, environ: Mapping[str, str]) -> OpenedRun:
        from .create_run import reopen

        return reopen(self, environ, by_keeper=self.by_keeper)

    def machines(self, record: Record | None = None) -> Mapping[str, Any] | None:
        if self.cluster is None and record is not None:
            return record.get("cluster")
        return self.cluster or None

    def environ(self) -> tuple[dict[str, str], list[str]]:
        """Return the caller's environment merged into the recorded one, and warnings."""
        self.visible = None if self.by_keeper else os.environ.get(VISIBLE)
        run = folders.find_trusted(Path(self.runs), self.name)
        saved = environment.read(run.folder)
        seed = environment.hash_seed_of(saved)
        mine = dict(os.environ) if seed is None else {**os.environ, hash_seed.SEED: seed}
        merged, warnings = environment.resumed(saved, mine, as_recorded=self.by_keeper)
        return hash_seed.with_seed(merged), warnings

    def has_ended(self) -> bool:
        return not self.run.alive()  # a run releases its lock first, and its session ends a moment later

    def undo(self, run: Run, lock: Lock) -> None:
        from ..supervise import attempts

        by = KEEPER if self.by_keeper else SWEEP if self.by_sweep else USER
        attempts.record_end(run, states.STOPPED, reason="stopped (its resume was interrupted)", by=by)
        lock.release()

    def stop(self) -> None:
        from .stopping import stop_and_wait  # late: it imports much and is rarely needed

        later = states.FOR_KEEPER if self.by_keeper else states.OF_SWEEP if self.by_sweep else ""
        stop_and_wait(self.run, later or states.NOW)


_LAUNCHES: Mapping[str, type[_Launch]] = {
    launch.__name__: launch for launch in (NewRun, NewScript, NewSweep, Fork, Resume)
}


def from_json(content: dict[str, Any]) -> _Launch:
    """Return the launch from what `to_json` gave."""
    fields = dict(content)
    return _LAUNCHES[fields.pop("launch")](**fields)


def check(content: dict[str, Any]) -> Plan:
    """Check a launch, given as JSON. Called in a fork of the zygote.

    Raises:
        Refused: the launch is not possible.
    """
    caches.provide()
    breakpoints.skip()
    launch = from_json(content)
    plan = launch.check()
    with doing.now("the look at the mirror"):
        plan.warnings += mirrored.check(launch, plan)
    return plan


def keep_gloo_at_home(ranks: int, nodes: range) -> list[str]:
    """Make ranks of one machine connect through its loopback interface. Returns a warning if a variable is ignored."""
    warning = variables.keep_gloo_at_home(dict(os.environ)) if nodes == ALONE and ranks > 1 else ""
    return [warning] if warning else []


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
