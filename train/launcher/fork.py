"""Checks a new run that continues from a checkpoint of another run, and lists what it takes from that run.

The new run trains with the copy of the task in that run, or with another version of the task's file. Without a
checkpoint it starts at step 0.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import config as configuration
from ..build import cores, initial_weights, objects
from ..build.first_weights import mender
from ..build.hooks import Hooks
from ..build.objects import config_of, task_of
from ..build.reads import recording
from ..build.updates import read_updates, spread_updates
from ..checkpoint import manifest as manifests
from ..checkpoint.load import load
from ..config import Config, Parallel
from ..config.resolve import check_lasts
from ..data import fingerprint
from ..errors import Refused, described, one_line
from ..parallel.precision import cpu_precision
from ..parallel.world import World
from ..run import imports, owner
from ..run.record import Record
from ..run.run_folder import Run
from ..run.spec import Spec, spec_of
from ..tasks import Task
from ..tasks import load as load_task
from ..trainer import early_stopping
from . import (
    batch_norm,
    checks,
    deterministic,
    first_look,
    frozen_modes,
    kept_split,
    provenance,
    rate_change,
    task_source,
)
from .request import ALONE, Plan, scratch_run_dir
from .resume import check_data
from .unused_fields import Reader, asked, check_read, functions_of, of_functions, of_no_use

_CODE = ("task.py", imports.MODULES)
"""Files with the code of a run."""
_OF_CODE = ("task", "task_source", "task_imports", "task_watched", "task_sha256")
"""Fields of run.json about the code of a run."""
_PLAIN = (bool, int, float, str, list, tuple, type(None))
"""Types of an optimizer's arguments that can be compared."""


@dataclasses.dataclass
class _Code:
    """The code with which a fork trains, and the fields of the forked run as this code reads them."""

    task: Task
    reads: Reader
    """Returns whether it reads a field, as far as that is known without running it."""
    before: Config
    warnings: list[str]
    files: dict[str, str | bytes] = dataclasses.field(default_factory=dict)
    """Files of the code that are not those of the forked run."""
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of run.json about the code."""
    edited: list[str] = dataclasses.field(default_factory=list)
    """Names of files that the forked run does not have so; []: the code is the same."""

    def keep(self, record: Record, given: Path | None, data: str) -> None:
        """Note what the run folder keeps of the code. Call it when the task has built everything."""
        old: dict[str, Any] = {key: value for key, value in record.items() if key in _OF_CODE}
        if given is None:
            self.record = old
            return
        self.files, self.record = task_source.kept(self.task, given, data)
        known = {old.get("task_sha256"), *_digests(old).values()}
        now = {str(given): self.task.sha256, **_digests(self.record)}
        self.edited = [Path(path).name for path, digest in now.items() if digest not in known]

    @property
    def sets_optimizer(self) -> bool:
        """Whether edited code makes the optimizer, so that its arguments may have been edited."""
        task = self.task
        return bool(self.edited) and any((task.optimizer, task.updates, task.param_groups))


def _digests(record: dict[str, Any]) -> dict[str, str]:
    """Map the files that a task needs to their digests."""
    return {**(record.get("task_imports") or {}), **(record.get("task_watched") or {})}


@scratch_run_dir()
def prepare_fork(run: Run, step: int, flags: dict[str, str], ranks: int, file: str | None = None) -> Plan:
    """Check a new run that continues from a checkpoint of this one, with these changes.

    Args:
        step: Step of the checkpoint; 0: the new run starts at the beginning.
        file: Another version of the task; None: the run's own copy.

    Raises:
        Refused: it cannot continue so.
    """
    mine = owner.opened(run)
    record = mine.read()
    spec = spec_of(record, mine.read_config())
    given = Path(file) if file is not None else None
    code = _own(run, spec) if given is None else _of_file(run, given, flags)
    config = _config(run, step, code, flags)
    task, of_overfit = checks.overfitted(code.task, config, flags if "overfit" in flags else configuration.fields())
    is_other = "batch_size" in flags or ranks != record["world_size"]
    if is_other and "micro_batch_size" not in flags and "micro_batch_size" in spec.chosen:
        config.micro_batch_size = None
    checks.cut_batch(config, ranks, ALONE)
    with recording(config) as seen:
        found = checks.check_run(task, config, ranks, ranks, asked(flags))
        model = checks.check_model(task, config, ranks, found.precision)
        if config.cpu_threads is None:
            config.cpu_threads, _ = cores.default_threads(ranks, found.precision.device, model)
        code.keep(record, given, config.data.root)
        files, warnings = dict[str, str | bytes](code.files), [*code.warnings, *of_overfit, *found.warnings]
        if code.edited:
            sets = {"train_set": found.train_set, "eval_sets": found.eval_sets}
            differs, facts = _data_of(run, task, config, **sets)
            warnings, files[fingerprint.FACTS] = warnings + differs, facts
            warnings += kept_split.warnings(task, config, run.name, run.folder.parent, sets=sets)
        else:
            check_data(run, spec, task, config, found.train_set, found.eval_sets)

    def reads(field: str) -> bool:
        return seen.has(field) or code.reads(field)

    warnings += _dropped(run, code, config, reads, flags) if given is not None else []
    check_read(task, config, reads, asked(flags))
    files["config.toml"] = configuration.to_toml(config)
    warnings += imports.edited(run, spec) if given is None else []
    if found.total <= step:
        end = f"the new run would end after step {found.total}; give more --epochs or --steps"
        raise Refused(f"the checkpoint is of step {step}, but {end}")
    steps, no_use = range(step, found.total), of_no_use(task, config, reads)
    batch_norm.check(
        task, config, found.train_set, lambda: model, samples=found.samples, ranks=ranks, steps=steps
    )  # fmt: skip
    if step:
        early_stopping.check_goes_on(config.early_stopping, run, steps)
        warnings += rate_change.warnings(
            run, spec, task, (code.before, config), samples=found.samples, step=step, flags=flags, is_fork=True,
        )  # fmt: skip
    begin = _at_checkpoint(run, step, code, model, config) if step else _at_beginning(run, record, code, model, config)
    warnings, files = warnings + begin.warnings, files | begin.files
    warnings += frozen_modes.warnings(task, model, config.freeze)
    warnings += first_look.warnings(
        task, config, model=model, eval_sets=found.eval_sets, ranks=ranks, device=found.precision.device,
        named=checks.followed_metrics(config),
    )  # fmt: skip
    deterministic.check(task, config, found.precision.device, found.train_set, model)  # it takes the model's values
    names = (fingerprint.FACTS, *(_CODE if given is None else ()))
    copies = {name: run.folder / name for name in names if name not in files and (run.folder / name).exists()}
    made: dict[str, Any] = code.record | begin.record | {
        "cwd": record.get("cwd"), "samples": objects.plan_of(config, found.samples).length,
        "sampler": task.sampler, "chosen": list(spec.chosen),
        "step": step, "total_steps": found.total, "git_revision": provenance.git_revision(),
        "versions": provenance.versions(found.cards), "forked_from": _ancestry(run, step, spec, code),
        "warnings": warnings, "unused_fields": no_use, "not_exact": checks.not_exact(task, config, found),
    }  # fmt: skip
    warnings += [f"not exact: {line}" for line in made["not_exact"]]
    return Plan(files=files, record=made, copies=copies | begin.copies, warnings=warnings, ranks=ranks)


def _ancestry(run: Run, step: int, spec: Spec, code: _Code) -> dict[str, Any]:
    """Return what run.json says of the forked run, and of the run from which that one was forked."""
    fork = {"run": run.name, "step": step, "task_sha256": spec.task_sha256, "edited": code.edited}
    return fork | ({"forked_from": spec.forked_from} if spec.forked_from else {})


def _own(run: Run, spec: Spec) -> _Code:
    """Return a run's own code."""
    task = task_of(run, spec)
    return _Code(task, lambda name: name not in spec.unused_fields, config_of(run, task), [])


def _of_file(run: Run, file: Path, flags: dict[str, str]) -> _Code:
    """Return another version of a run's code, and the run's fields for it. The code in the run is not executed: its
    modules would hide those of the new version.

    Raises:
        Refused: the file is no task, or a new setting has no value.
    """
    task = load_task(str(file))
    source = task_source.of_task(task.file, file.parent)
    flat = configuration.read_flat(run.folder / "config.toml")
    settings = {f"task.{one.name}" for one in dataclasses.fields(task.Settings)} if task.Settings is not None else set()
    warnings = [] if task.is_built_in else task_source.unused_warning(source, file)
    gone = sorted(name for name in flat if name.startswith("task.") and name not in settings)
    for name in gone:
        warnings.append(f"{name} = {flat[name]} of {run.name} is dropped: Settings in {file.name} has no such field")
    new = sorted(settings - flat.keys())
    flat = {name: value for name, value in flat.items() if name not in gone}
    given = {name: text for name, text in flags.items() if name in new}
    before = configuration.with_flags(given, settings=task.Settings, task_file=task.file, flat=flat)
    now = configuration.to_flat(before)
    for name in new:
        if name not in flags:
            warnings.append(f"{name} = {now[name]} is new: the default in {file.name}")
    return _Code(task, source.reads, before, warnings + _hidden(run, file, task, source, now, flags))


def _dropped(run: Run, code: _Code, config: Config, reads: Reader, flags: dict[str, str]) -> list[str]:
    """Give the fields of the forked run that functions of edited code replace their defaults. Returns warnings."""
    known, flat = configuration.fields(), configuration.to_flat(code.before)
    set_there = [name for name, info in known.items() if name in flat and flat[name] != info.default]
    warnings = []
    for name, function in of_functions(functions_of(code.task), reads, set_there).items():
        file, (group, _, last) = code.task.file.name, name.partition(".")
        warnings.append(f"{name} = {flat[name]} of {run.name} is dropped: {function}() in {file} replaces it")
        for one in (code.before, config) if name not in flags else (code.before,):
            setattr(getattr(one, group), last, known[name].default)
    return warnings


def _hidden(
    run: Run, file: Path, task: Task, source: task_source.Source, now: dict[str, Any], flags: dict[str, str]
) -> list[str]:
    """Return warnings about edited defaults in the file that do not count, because the forked run sets the fields."""
    kept = run.folder / "task.py"
    old = task_source.Source(kept.read_bytes(), list, "task").defaults() if kept.exists() else {}
    new = source.defaults() | task.DEFAULTS
    return [
        f"{name} stays {now[name]} as in {run.name}, though {file.name} says {value} now; to change: --{name} {value}"
        for name, value in new.items()
        if name in now and value not in (now[name], old.get(name, value), ...) and name not in flags
    ]


def _config(run: Run, step: int, code: _Code, flags: dict[str, str]) -> Config:
    """Return the configuration of a fork with these changes.

    Raises:
        Refused: a fork cannot have them.
    """
    before, settings = code.before, code.task.Settings
    config = configuration.with_flags(
        flags, settings=settings, task_file=code.task.file, flat=configuration.to_flat(before)
    )
    check_lasts(config, settings)
    if step and config.optim.name != before.optim.name:
        way = f"start a new run with its weights: --init {run.name}@{step}"
        raise Refused(f"--optim.name {config.optim.name} cannot load the state of {before.optim.name}; {way}")
    if step and config.overfit != before.overfit:
        raise Refused(f"a fork cannot change --overfit; start a new run with its weights: --init {run.name}@{step}")
    if config.data.seed is None:  # --data.seed none
        config.data.seed = config.seed
    if step:
        config.init = config.init_skip = ""  # the weights come from the checkpoint
    if config.micro_batch_size == "auto":
        raise Refused("--micro_batch_size auto does not work for a fork; give a number")
    if config.precision == "auto":
        raise Refused(f"--precision auto does not work for a fork; give {before.precision}, or another one")
    return config


def _data_of(run: Run, task: Task, config: Config, **sets: Any) -> tuple[list[str], str]:
    """Return a warning if edited code makes other data than the forked run had, and the new facts about the data."""
    differs = objects.data_differs(run, task, config=config, **sets)
    facts = json.dumps(objects.fingerprint(task, config, **sets), indent=1) + "\n"
    return [f"the data are not those of {run.name}: {differs}"] if differs else [], facts


@dataclasses.dataclass
class _Begin:
    """Where a fork begins: what its run folder gets for that."""

    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: dict[str, str | bytes] = dataclasses.field(default_factory=dict)
    copies: dict[str, Path] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)


def _at_checkpoint(run: Run, step: int, code: _Code, model: nn.Module, config: Config) -> _Begin:
    """Begin with a checkpoint.

    Raises:
        Refused: it does not fit.
    """
    told: list[str] = []
    mend = mender(run, code.task, code.before, tell=told.append)
    manifest, folder = manifests.verified(run, step, mend), run.checkpoint(step)
    changed = _changed(run, step, code, model, config)
    names = ", ".join(sorted(changed))
    said = [f"the optimizer takes {names} from {code.task.file.name}, not from the checkpoint"]
    text = manifests.manifest_text(manifest | {
        "config": configuration.to_flat(config), "changed": sorted(changed.union(manifest.get("changed", ()))),
        "task_sha256": code.task.sha256,
    })  # fmt: skip
    there = f"checkpoints/{folder.name}"
    beside = [run.metrics] if run.metrics.exists() else []
    if frozen := manifest.get("frozen"):
        beside.append(run.folder / manifests.frozen_name(frozen))
    return _Begin(
        record={"epoch": manifest["epoch"]},
        files={f"{there}/{manifests.MANIFEST}": text},
        copies={there: folder} | {path.name: path for path in beside},
        warnings=told + (said if changed and code.sets_optimizer else []),
    )


def _at_beginning(run: Run, record: Record, code: _Code, model: nn.Module, config: Config) -> _Begin:
    """Begin at step 0, with the initial weights of the forked run.

    Raises:
        Refused: these weights do not fit edited code.
    """
    kept = run.folder / initial_weights.FILE
    if not kept.exists():
        initial = initial_weights.fitted(code.task, config, model) if code.edited else None
        if initial is None:
            return _Begin()
        return _Begin(record={"init": initial.table()}, files={initial_weights.FILE: initial.file()})
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    for name, value in initial_weights.read(kept, str(kept)).items():
        if shapes.get(name) != value.shape:
            here = f"{[*shapes[name]]} in" if name in shapes else "not in"
            way = f"start a new run: train launch {code.task.file}"
            raise Refused(f"the initial weights of {run.name} do not fit: {name} is {here} the model now; {way}")
    is_new = code.edited and (code.task.pretrained is not None or code.task.adapt_state_dict is not None)
    said = [f"the initial weights are those of {run.name}: pretrained() is not called again"] if is_new else []
    return _Begin({"init": record.get("init") or []}, copies={initial_weights.FILE: kept}, warnings=said)


def _changed(run: Run, step: int, code: _Code, model: nn.Module, after: Config) -> set[str]:
    """Check that a checkpoint fits the changed configuration. Returns the optimizer arguments that change with it.

    Args:
        model: The checked model; the state of the checkpoint is loaded into it.

    Raises:
        Refused: the checkpoint does not fit the model, the optimizer or another part of the new configuration.
    """
    after = dataclasses.replace(after, device="cpu", parallel=Parallel())
    world, precision = World(0, size=1, local_rank=0, device=torch.device("cpu")), cpu_precision(after)
    (update, *_), optimizer = spread_updates(code.task, model, config=after, world=world, precision=precision)
    new = [dict(group) for group in optimizer.param_groups]
    try:
        load(
            run.checkpoint(step),
            model,
            optimizer=optimizer,
            by_itself=True,
            extra=Hooks(code.task, update.strategy, after).extra,
        )
    except ValueError as error:
        raise Refused(f"{error}; start a new run with its weights: --init {run.name}@{step}") from None
    except Exception as error:
        if not code.edited:
            raise
        why = one_line(described(error))[:300]
        raise Refused(f"the checkpoint of step {step} cannot be loaded by {code.task.file}: {why}") from error
    if code.sets_optimizer:
        old = optimizer.param_groups  # what the edited function set before is only known from the checkpoint
    else:
        old = [
            group for update in read_updates(code.task, model, code.before) for group in update.optimizer.param_groups
        ]
    past = {id(parameter): group for group in old for parameter in group["params"]}
    return {
        key
        for group in new
        for key, value in group.items()
        if key not in ("params", "lr")
        and isinstance(value, _PLAIN)
        and value != past.get(id(group["params"][0]), group).get(key)
    }
