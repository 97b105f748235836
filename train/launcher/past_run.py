"""Checks a resume or a fork against the run that it continues: its data, its steps and its fields."""

from __future__ import annotations

from .. import config as configuration
from ..build import objects, sampling
from ..data import fingerprint
from ..errors import Refused
from ..run import states
from ..trainer import early_stopping
from . import kept_split
from .case import Case, Kind
from .unused_fields import functions_of, of_functions

_TRAINED_ON = "evaluation samples may have been trained on"


def check_data(case: Case) -> list[str]:
    """Check that the data are those with which the run started. Edited code may make other data: that is a warning.

    Raises:
        Refused: they are not.
    """
    run, spec, config = case.of.run, case.of.spec, case.config
    differs = objects.data_differs(run, case.task, config=config, **case.sets)
    if case.edited:
        case.keep_facts()
        warnings = [f"the data are not those of {run.name}: {differs}"] if differs else []
        return warnings + kept_split.warnings(case.task, config, run.name, run.folder.parent, sets=case.sets)
    if case.kind is Kind.FORK and (run.folder / fingerprint.FACTS).exists():
        case.copies[fingerprint.FACTS] = run.folder / fingerprint.FACTS
    if differs:
        init = f"start a new run with its weights: --init {run.name}"
        before = spec.config
        if config.data.seed != before.get("data.seed"):
            end = f"keep its split: --data.seed {before.get('data.seed')}"
            raise Refused(f"other data than those of {run.name} ({differs}), so {_TRAINED_ON}; {end}")
        if config.seed != before.get("seed"):
            end = f"let it read config.data.seed, and give that version: --task {spec.task_source}"
            raise Refused(
                f"other data than those of {run.name} ({differs}), because datasets() in {case.task.file.name} reads "
                f"config.seed, so {_TRAINED_ON}; {end}"
            )
        raise Refused(
            f"the data have changed since {run.name} started ({differs}); put them back as they were, or {init}"
        )
    length = objects.plan_of(config, sampling.samples_of(spec, case.train_set)).length
    samples = length if spec.samples is None else spec.samples
    if length != samples:  # only for a run whose data.json was removed: the check above covers the others
        raise Refused(
            f"the training set had {samples} samples when {run.name} started and has {length} now; put "
            "the data back as they were"
        )
    return []


def check_steps(case: Case) -> None:
    """Check that steps are left, and that early stopping lets the run make them."""
    run, step, total = case.of.run, case.of.step, case.total
    if case.kind is Kind.FORK and total <= step:
        end = f"the new run would end after step {total}; give more --epochs or --steps"
        raise Refused(f"the checkpoint is of step {step}, but {end}")
    if total < step:
        more = f"more than the requested {total}; give more --epochs or --steps"
        raise Refused(f"{run.name} has already trained {step} steps, {more}")
    if case.kind is Kind.FORK or case.of.record["state"] == states.FINISHED:  # its user wants more
        early_stopping.check_goes_on(case.config.early_stopping, run, range(step, total) if step else range(0))


def drop_replaced(case: Case) -> list[str]:
    """Give the fields of the forked run that functions of edited code replace their defaults. Returns warnings."""
    known, before, warnings = configuration.fields(), case.of.before, list[str]()
    flat = configuration.to_flat(before)
    set_there = [name for name, info in known.items() if name in flat and flat[name] != info.default]
    if case.given is None:
        return []
    for name, function in of_functions(functions_of(case.task), case.reads, set_there).items():
        file, (group, _, last) = case.task.file.name, name.partition(".")
        warnings.append(f"{name} = {flat[name]} of {case.of.run.name} is dropped: {function}() in {file} replaces it")
        for one in (before, case.config) if name not in case.of.flags else (before,):
            setattr(getattr(one, group), last, known[name].default)
    return warnings
