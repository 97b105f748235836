"""Checks a resume: the run must be unchanged, except for what a resume may change."""

from __future__ import annotations

import functools
from typing import Any

from torch import cuda

from .. import config as configuration
from ..build import objects, sampling
from ..build.first_weights import mender
from ..build.objects import config_of, data_differs, task_of
from ..checkpoint import manifest as manifests
from ..config import Config, strategies
from ..config.resolve import check_changes
from ..errors import Refused
from ..parallel.devices import NoGPU
from ..run import imports, owner, states
from ..run.metrics import evaluations
from ..run.run_folder import Run
from ..run.spec import Spec, spec_of
from ..tasks import Task
from ..trainer import early_stopping, trace
from . import batch_norm, checks, first_look, rate_change
from .request import ALONE
from .resumable import fork_of
from .unused_fields import asked, check_read

_TRAINED_ON = "evaluation samples may have been trained on"


def prepare_resume(run: Run, flags: dict[str, str], local: int, nodes: range = ALONE) -> tuple[Config, list[str]]:
    """Check that a run can continue with these changes. Writes nothing but a damaged file of frozen weights. Also
    returns warnings.

    Args:
        local: Number of ranks on this machine.
        nodes: Possible numbers of machines.

    Raises:
        Refused: the run cannot continue as it is, or not with these changes.
    """
    mine = owner.opened(run)
    record = mine.read()
    spec, ranks = spec_of(record, mine.read_config()), local * nodes[-1]
    task = task_of(run, spec)
    config = kept = config_of(run, task)
    if flags:
        before = configuration.to_flat(config)
        config = configuration.with_flags(flags, settings=task.Settings, task_file=task.file, flat=before)
        check_changes(before, configuration.to_flat(config), what=f"cannot change {run.name}", way=fork_of(run, flags))
    told: list[str] = []
    step, manifest, unused = manifests.newest_valid(run, mend=mender(run, task, kept, tell=told.append))
    if manifest:
        what = f"{run.folder / 'config.toml'} does not fit the checkpoints of {run.name}"
        check_changes(manifest["config"], configuration.to_flat(config), what=what)
        if manifest.get("task_sha256") != task.sha256:
            if not task.is_built_in:
                raise Refused(f"{task.file} has changed since {run.name} started; put the original back")
            unused.append(f"the task {task.name} has changed since; {run.name} continues with the new version")
    if not isinstance(config.micro_batch_size, int) or config.cpu_threads is None:
        raise Refused(f"micro_batch_size or cpu_threads is missing in {run.folder / 'config.toml'}; put it back")
    if config.precision == "fp16" and (config.device == "cpu" or not cuda.device_count()):
        problem = f"{run.name} computes in fp16, which needs a GPU, but torch sees none here"
        raise Refused(f"{problem}; check with nvidia-smi, or resume it on a machine with a GPU")
    checks.check_ranks(config, local, nodes)
    try:
        found = checks.check_run(
            task, config, local, ranks, asked(flags), count=functools.partial(sampling.samples_of, spec)
        )
    except NoGPU:
        on_cpu = f"check with nvidia-smi, or continue on the CPU with other bits: train resume {run.name} --device cpu"
        raise NoGPU(f"{run.name} computes on GPUs, but torch sees none here; {on_cpu}") from None
    check_read(task, config, lambda name: name not in spec.unused_fields, asked(flags))
    warnings = [*told, *unused, *found.warnings]
    check_data(run, spec, task, config, found.train_set, found.eval_sets)
    warnings += imports.edited(run, spec)
    if found.total < step:
        more = f"more than the requested {found.total}; give more --epochs or --steps"
        raise Refused(f"{run.name} has already trained {step} steps, {more}")
    wanted = range(step, found.total) if record["state"] == states.FINISHED else range(0)  # its user wants more
    early_stopping.check_goes_on(config.early_stopping, run, wanted)
    for field in [field for field in checks.metrics_of(config) if field in flags]:
        known = {name: None for line in evaluations(run) for name in line["eval"]}
        checks.check_metric(field, config, task, found.eval_sets, known)
    if "trace" in flags:
        trace.steps_of(config.trace, run.newest_checkpoint, found.total)
    is_first_of_several = record["world_size"] == 1 < ranks
    warnings += _check_model(run, task, config, found, ranks=ranks, is_first_of_several=is_first_of_several)
    batch_norm.check(
        task, config, found.train_set, lambda: checks.check_model(task, config, ranks, found.precision),
        samples=found.samples, ranks=ranks, steps=range(step, found.total),
        way=lambda other: _elsewhere(run, flags | other),
    )  # fmt: skip
    micros = objects.plan_of(config, found.samples).micro_batches(0)
    if micros < ranks:
        warnings.append(f"a step has {micros} micro batches for {ranks} ranks, so {ranks - micros} ranks have no work")
    warnings += rate_change.warnings(
        run, spec, task, (kept, config), samples=found.samples, step=step, flags=flags, is_fork=False,
    )  # fmt: skip
    return config, warnings


def _check_model(
    run: Run, task: Task, config: Config, found: checks.Checked, *, ranks: int, is_first_of_several: bool
) -> list[str]:
    """Check that these ranks can train and evaluate the model, where a single rank or its machine did not show it."""
    splits = strategies.of(config.parallel.strategy, ranks).splits_parameters
    if not (is_first_of_several or splits or config.parallel.recompute):
        return []
    model = checks.check_model(task, config, ranks, found.precision)
    if not is_first_of_several:
        return []
    way = f"continue on one rank: train resume {run.name} --nproc 1"
    return first_look.warnings(
        task, config, model=model, eval_sets=found.eval_sets, ranks=ranks, device=found.precision.device, named={},
        way=way,
    )  # fmt: skip


def _elsewhere(run: Run, flags: dict[str, str]) -> str:
    """Return the end of a refusal about fields that a resume may not change."""
    return f"; {fork_of(run, flags)}" if run.newest_checkpoint else "; it has no checkpoint, so start a new run"


def check_data(run: Run, spec: Spec, task: Task, config: Config, train_set: Any, eval_sets: dict[str, Any]) -> None:
    """Check that the data are those with which the run started.

    Raises:
        Refused: they are not.
    """
    differs = data_differs(run, task, config=config, train_set=train_set, eval_sets=eval_sets)
    if differs:
        init = f"start a new run with its weights: --init {run.name}"
        before = run.read_config()
        if config.data.seed != before.get("data.seed"):
            end = f"keep its split: --data.seed {before.get('data.seed')}"
            raise Refused(f"other data than those of {run.name} ({differs}), so {_TRAINED_ON}; {end}")
        if config.seed != before.get("seed"):
            end = f"let it read config.data.seed, and give that version: --task {spec.task_source}"
            raise Refused(
                f"other data than those of {run.name} ({differs}), because datasets() in {task.file.name} reads "
                f"config.seed, so {_TRAINED_ON}; {end}"
            )
        raise Refused(
            f"the data have changed since {run.name} started ({differs}); put them back as they were, or {init}"
        )
    length = objects.plan_of(config, sampling.samples_of(spec, train_set)).length
    samples = length if spec.samples is None else spec.samples
    if length != samples:  # only for a run whose data.json was removed: the check above covers the others
        raise Refused(
            f"the training set had {samples} samples when {run.name} started and has {length} now; put "
            "the data back as they were"
        )
