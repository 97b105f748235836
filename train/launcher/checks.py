"""Checks a launch completely before anything is created or changed.

`CHECKS` lists what is checked, of which launches and in which order. `run` is the only function that runs it. A new
check is a line of the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from .. import config as configuration
from .. import doing, gpus
from ..build import cores, schedule
from ..build.reads import recording
from ..code import changes
from ..code.imports import kept
from ..code.source import of_task, unused_warning
from ..config import Config, decays, strategies
from ..data import fingerprint, probe
from ..data.fetch import EVALUATION, TRAINING, is_indexed_at_once
from ..errors import Refused
from ..parallel.devices import check_fork, check_kernels, pick_device
from ..parallel.precision import Precision, auto, lacks_tf32
from ..run.ownership import MODULES
from ..tasks import Task
from ..trainer import trace
from ..trainer.loggers import wandb
from . import (
    batch_norm,
    batches,
    deterministic,
    first_look,
    frozen_modes,
    kept_split,
    metric_names,
    past_run,
    rate_change,
    rungs,
    unused_fields,
)
from .batches import check_ranks, cut_batch
from .case import Case, Kind
from .request import ALONE, Plan, Request, resolve, scratch_run_dir, set_by_user
from .unused_fields import asked

_CODE = ("task.py", MODULES)
"""Files with the code of a run."""
_OF_CODE = ("task", "task_source", "task_imports", "task_watched", "task_sha256")
"""Fields of run.json about the code of a run."""
_MADE = Kind.NEW | Kind.FORK
_AGAIN = Kind.RESUME | Kind.FORK
_TRAINS = _MADE | Kind.RESUME
_ALL = _TRAINS | Kind.EVAL


@scratch_run_dir()
def prepare(
    request: Request, *, ranks: int = 1, nodes: range = ALONE, runs: Path = Path(),
    elsewhere: Callable[[], list[list[gpus.Card]]] = list,
) -> Plan:  # fmt: skip
    """Check a new run from its flags to its data, and choose the values that its user left open.

    Args:
        ranks: Number of ranks on each machine.
        nodes: Possible numbers of machines.
        runs: The folder of the runs.
        elsewhere: Under torchrun: returns the GPUs of each other rank's machine; an empty list: unknown.

    Raises:
        Refused: the run is not possible as requested.
    """
    task, config = resolve(request)
    source = of_task(task.file, Path(request.task).absolute().parent)
    case = Case(
        kind=Kind.NEW, task=task, config=config, asked=asked(request.flags, request.config_file, task), local=ranks,
        nodes=nodes, source=source, reads=source.reads, given=Path(request.task), request=request, runs=runs,
        elsewhere=elsewhere, is_searched=config.micro_batch_size == "auto",
    )  # fmt: skip
    chosen = [name for name in ("micro_batch_size", "cpu_threads") if getattr(config, name) in (None, "auto")]
    reasons = dict.fromkeys(("micro_batch_size_reason", "cpu_threads_reason", "precision_reason"), "")
    case.record = {
        "cwd": os.getcwd(), "world_size": case.ranks, "chosen": chosen, "init": [], **reasons,
        "set_by_user": set_by_user(request.flags, config_file=request.config_file),
    }  # fmt: skip
    run(case)
    return case.to_plan()


class Needs(enum.IntEnum):
    """What a check looks at. Checks that need less come first."""

    CONFIG = enum.auto()
    DATA = enum.auto()
    """The datasets, and how an epoch is cut."""
    OBJECTS = enum.auto()
    """All that the task builds. A resume builds the model later, and only for a check that asks for it."""
    READS = enum.auto()
    """Which fields the task's functions have read, so everything has been built."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A row of the table. The function returns warnings, or raises Refused; some also choose what is left open."""

    of: Kind
    needs: Needs
    function: Callable[[Case], list[str] | None]


def run(case: Case) -> None:
    """Make the checks of a launch in the order of the table. Fills in the case.

    Raises:
        Refused: the launch is not possible.
    """
    known = case.reads
    with contextlib.ExitStack() as recorded:
        seen = recorded.enter_context(recording(case.config))
        case.reads = lambda field: seen.has(field) or known(field)
        for check in sorted(CHECKS, key=lambda check: check.needs):
            if check.needs is Needs.READS:
                recorded.close()
            if case.kind in check.of:
                case.warnings += check.function(case) or []


def _overfit(case: Case) -> list[str]:
    typed: Collection[str] = configuration.fields()  # a fork keeps what its run was launched with
    if case.past is None or "overfit" in case.of.flags:
        typed = case.request.flags if case.request is not None else case.of.flags
    case.task, warnings = overfitted(case.task, case.config, typed)
    return warnings


def _name_unused(case: Case) -> list[str]:
    if case.source is None or case.given is None or case.task.is_built_in:
        return []
    return unused_warning(case.source, case.given)


def _cut(case: Case) -> None:
    if case.is_searched and case.config.data.on_device:
        raise Refused("--micro_batch_size auto leaves no GPU memory for --data.on_device true; give a number")
    cut_batch(case.config, case.local, case.nodes)


def _sizes(case: Case) -> None:
    if not isinstance(case.config.micro_batch_size, int) or case.config.cpu_threads is None:
        file = case.of.run.folder / "config.toml"
        raise Refused(f"micro_batch_size or cpu_threads is missing in {file}; put it back")


def _fp16(case: Case) -> None:
    if case.config.precision == "fp16" and (case.config.device == "cpu" or not torch.cuda.device_count()):
        problem = f"{case.of.run.name} computes in fp16, which needs a GPU, but torch sees none here"
        raise Refused(f"{problem}; check with nvidia-smi, or resume it on a machine with a GPU")


def _choose_precision(case: Case) -> None:
    if case.config.precision != "auto":
        return
    device = pick_device(case.config, case.local, 0)
    known = [gpus.of_ranks(case.local), *case.elsewhere()] if device.type == "cuda" else []
    cards = [card for found in known for card in found] if all(known) else []
    case.config.precision, case.record["precision_reason"] = auto(device, cards)  # type: ignore[assignment]


def _device(case: Case) -> list[str]:
    config = case.config
    device = pick_device(config, case.local, 0)
    config.device = "cuda" if device.type == "cuda" else "cpu"  # a resume must not change the device silently
    if device.type == "cuda":
        check_fork()
        case.cards = gpus.seen_here()
    check_kernels(case.cards)
    warnings = []
    if config.precision == "tf32":
        lacks = lacks_tf32(device, gpus.of_ranks(case.local) if device.type == "cuda" else [])
        if lacks and "precision" in case.asked:
            raise Refused(f"precision tf32 needs {lacks}; use --precision fp32")
        warnings = [f"precision tf32 needs {lacks}, so this run computes in fp32 here"] if lacks else []
    case.precision = Precision(config.precision, device)
    return warnings


def _device_asked(case: Case) -> None:
    if "device" in case.asked:
        pick_device(case.config, 1, 0)


def _on_nan(case: Case) -> None:
    if case.config.on_nan == "skip" and case.config.precision == "fp16":
        raise Refused("--on_nan skip is not needed: the loss scaling of fp16 skips such steps; leave out --on_nan")


def _workers(case: Case) -> None:
    problem = case.threads  # before model(): ranks fork data workers then
    if case.config.data.workers and problem:
        raise Refused(problem)


def _evaluation(case: Case) -> None:
    task = case.task
    unused_fields.check_evaluation(task, case.config, case.eval_sets, case.asked)
    if case.eval_sets and not task.can_evaluate:
        raise Refused(
            f"{task.file} has updates() and an evaluation set, but nothing to evaluate; define metrics(model, batch), "
            "or return None for the evaluation set in datasets()"
        )


def _schedule(case: Case) -> None:
    schedule.check(case.task, schedule.Planned(case.config, case.cut.steps_per_epoch, case.total))


def _rungs(case: Case) -> None:
    if case.request is not None and case.request.rungs:
        rungs.check(case.request.rungs, case.task, case.config, cut=case.cut, has_evaluation=bool(case.eval_sets))


def _trace(case: Case) -> None:
    trace.steps_of(case.config.trace, total=case.total)
    if case.kind is Kind.RESUME and "trace" in case.asked:
        trace.steps_of(case.config.trace, case.of.run.newest_checkpoint, case.total)


def _model(case: Case) -> None:
    assert case.model is not None  # built and checked


def _keep_code(case: Case) -> None:
    """Add the code to the plan. Looks at the modules that this process has loaded, so all must have been built."""
    old = dict[str, Any](case.of.record) if case.past is not None else {}
    if case.given is None:
        case.record |= {key: value for key, value in old.items() if key in _OF_CODE}
        case.copies |= {name: case.of.run.folder / name for name in _CODE if (case.of.run.folder / name).exists()}
        return
    files, record = kept(case.task, case.given, case.config.data.root)
    case.files, case.record = case.files | files, case.record | record
    if case.past is not None:
        known = {old.get("task_sha256"), *_digests(old).values()}
        now = {str(case.given): case.task.sha256, **_digests(record)}
        case.edited = [Path(path).name for path, digest in now.items() if digest not in known]


def _digests(record: dict[str, Any]) -> dict[str, str]:
    """Map the files that a task needs to their digests."""
    return {**(record.get("task_imports") or {}), **(record.get("task_watched") or {})}


def _data(case: Case) -> list[str]:
    if not (names := fingerprint.hidden_in(case.keep_facts())):
        return []
    which = f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}"
    return [f"the data contain hidden files ({which}), which may shift labels; delete them or skip them in datasets()"]


def _read(case: Case) -> None:
    unused_fields.check_read(case.task, case.config, case.reads, case.asked)


def _edited(case: Case) -> list[str]:
    return changes.edited(case.of.run, case.of.spec) if case.given is None else []


def _choose_workers(case: Case) -> None:
    if case.config.data.workers is None:
        is_indexed = is_indexed_at_once(case.train_set, case.task.collate)
        case.config.data.workers = cores.default_loaders(case.local, case.device, is_indexed)
    _workers(case)


def _search_size(case: Case) -> None:
    if not case.is_searched:
        return
    from . import batch_size

    assert case.request is not None
    with doing.now("the search for a micro batch size"):
        found = batch_size.find(case.request, case.config, case.local)
    case.config.micro_batch_size, case.record["micro_batch_size_reason"] = found
    batches.check_sync_batchnorm(case)


def _choose_threads(case: Case) -> None:
    if case.config.cpu_threads is None:
        case.config.cpu_threads, reason = cores.default_threads(case.local, case.device, case.model)
        if case.kind is Kind.NEW:  # a fork tells what was chosen for its run
            case.record["cpu_threads_reason"] = reason


def _start(case: Case) -> list[str]:
    from . import fork_start  # late: it imports torch's checkpoints, which is slow

    return fork_start.check(case)


def _exact(case: Case) -> list[str]:
    """Warn of reasons why the run would not be exact, as far as its first samples show."""
    config, task = case.config, case.task
    assert isinstance(config.micro_batch_size, int)
    sets = {TRAINING: case.train_set} | {name or EVALUATION: one for name, one in case.eval_sets.items()}
    case.record["not_exact"] = probe.why_not_exact(
        sets, collate=task.collate, made_by=task.datasets, batch=config.micro_batch_size, seed=config.seed
    )
    return [f"not exact: {line}" for line in case.record["not_exact"]]


def _ordered(case: Case) -> list[str]:
    """Warn if the bits of an `ordered` run depend on its number of ranks, by values that are not set."""
    config, chosen = case.config, case.record["chosen"]
    if config.parallel.reduce != "ordered" or not chosen:
        return []
    flat = configuration.to_flat(config)
    values, flags = (
        form.join(f"{prefix}{name} {flat[name]}" for name in chosen) for form, prefix in ((", ", ""), (" ", "--"))
    )
    return [
        f"--parallel.reduce ordered gives the same bits on other numbers of ranks only with the same {values}, whose "
        f"default depends on the ranks; to launch it there: {flags}"
    ]


def _frozen(case: Case) -> list[str]:
    return frozen_modes.warnings(case.task, case.model, case.config.freeze)


def _first_look(case: Case) -> list[str]:
    config, ranks, named, way = case.config, case.ranks, metric_names.followed_metrics(case.config), {}
    if case.kind is Kind.RESUME:  # only what a single rank, or its machine, did not show
        is_first_of_several = case.of.record["world_size"] == 1 < ranks
        splits = strategies.of(config.parallel.strategy, ranks).splits_parameters
        if is_first_of_several or splits or config.parallel.recompute:
            _model(case)
        if not is_first_of_several:
            return []
        named, way = {}, {"way": f"continue on one rank: train resume {case.of.run.name} --nproc 1"}
    return first_look.warnings(
        case.task, config, model=case.model, eval_sets=case.eval_sets, ranks=ranks, device=case.device, named=named,
        **way,
    )  # fmt: skip


def _split(case: Case) -> list[str]:
    if case.initial is None or not case.initial.path:
        return []
    return kept_split.warnings(case.task, case.config, case.initial.path, case.runs, sets=case.sets)


CHECKS = (
    Check(_MADE, Needs.CONFIG, _overfit),
    Check(_MADE, Needs.CONFIG, _name_unused),
    Check(_MADE, Needs.CONFIG, _cut),
    Check(Kind.RESUME, Needs.CONFIG, _sizes),
    Check(Kind.RESUME, Needs.CONFIG, _fp16),
    Check(Kind.RESUME, Needs.CONFIG, lambda case: check_ranks(case.config, case.local, case.nodes)),
    Check(Kind.NEW, Needs.CONFIG, _choose_precision),
    Check(_TRAINS, Needs.CONFIG, _device),
    Check(_ALL, Needs.CONFIG, lambda case: unused_fields.check(case.task, case.config, case.asked)),
    Check(Kind.EVAL, Needs.CONFIG, _device_asked),
    Check(_TRAINS, Needs.CONFIG, lambda case: wandb.check(case.config.log.wandb)),
    Check(_TRAINS, Needs.CONFIG, metric_names.check_evaluates),
    Check(_TRAINS, Needs.CONFIG, _on_nan),
    Check(_TRAINS, Needs.DATA, _workers),
    Check(_TRAINS, Needs.DATA, _evaluation),
    Check(_TRAINS, Needs.DATA, metric_names.check),
    Check(_TRAINS, Needs.DATA, batches.check_sync_batchnorm),
    Check(_TRAINS, Needs.DATA, _schedule),
    Check(_TRAINS, Needs.DATA, _trace),
    Check(Kind.NEW, Needs.DATA, _rungs),
    Check(_MADE, Needs.OBJECTS, _model),
    Check(Kind.NEW, Needs.OBJECTS, Case.keep_initial_weights),
    Check(Kind.NEW, Needs.OBJECTS, _data),
    Check(_MADE, Needs.OBJECTS, _keep_code),
    Check(_AGAIN, Needs.OBJECTS, past_run.check_data),
    Check(Kind.FORK, Needs.READS, past_run.drop_replaced),
    Check(_ALL, Needs.READS, _read),
    Check(_AGAIN, Needs.READS, _edited),
    Check(_AGAIN, Needs.READS, past_run.check_steps),
    Check(_AGAIN, Needs.READS, rate_change.warnings),
    Check(Kind.NEW, Needs.READS, _choose_workers),
    Check(Kind.NEW, Needs.READS, _search_size),
    Check(_MADE, Needs.READS, _choose_threads),
    Check(Kind.FORK, Needs.READS, _start),
    Check(_MADE, Needs.READS, _exact),
    Check(Kind.NEW, Needs.READS, _ordered),
    Check(_MADE, Needs.READS, _frozen),
    Check(_TRAINS, Needs.READS, _first_look),
    Check(Kind.NEW, Needs.READS, _split),
    Check(_TRAINS, Needs.READS, batch_norm.check),
    Check(Kind.RESUME, Needs.READS, batches.warn_of_idle_ranks),
    Check(_MADE, Needs.READS, deterministic.check),  # last: it takes the model's values
)
"""All checks of a launch. Those with the same need are made in this order."""


def overfitted(task: Task, config: Config, typed: Collection[str]) -> tuple[Task, list[str]]:
    """Return the task as `overfit` trains it, and warnings: overfit chooses the samples and keeps the learning rate.

    Args:
        typed: The fields that the user has typed. They win over overfit.
    """
    if config.overfit is None:
        return task, []
    warnings, schedule = [], config.schedule
    if task.sampler:
        warnings.append(
            f"--overfit {config.overfit} chooses the samples, so {task.sampler}() in {task.file} is not called"
        )
    keeps = f"--overfit {config.overfit} keeps the learning rate constant"
    if task.schedule is not None:
        warnings.append(f"{keeps}, so schedule() in {task.file} is not called")
    for name, value in {"decay": decays.CONSTANT, "warmup_epochs": 0.0}.items():
        field, set_to = f"schedule.{name}", getattr(schedule, name)
        if field in typed or set_to == value:
            continue
        if set_to != configuration.fields()[field].default and task.schedule is None:
            warnings.append(f"{keeps}, so {field} is {value}; to change: --{field} {set_to}")
        setattr(schedule, name, value)
    return task.to_overfit(), warnings
