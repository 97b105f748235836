"""Checks a run that continues: that it is what it was, but for what a resume may change."""

from __future__ import annotations

from typing import Any

from torch import cuda

from train import config as configuration
from train.checkpoint import manifest as manifests
from train.config import Config
from train.config.resolve import check_changes
from train.data import fingerprint
from train.errors import Refused
from train.launcher import batch_norm, checks, rate_change
from train.launcher.request import ALONE
from train.launcher.resumable import fork_of
from train.launcher.task_source import of_run
from train.launcher.unused_fields import asked, of_no_use
from train.parallel import choose
from train.parallel.devices import NoGPU
from train.parallel.precision import ON_GPU_ALONE
from train.run import imports, states
from train.run.metrics import evaluations
from train.run.run_folder import Run
from train.tasks import Task
from train.trainer import build, early_stopping, trace
from train.trainer.build import config_of, data_differs, task_of


def prepare_resume(run: Run, flags: dict[str, str], local: int, nodes: range = ALONE) -> tuple[Config, list[str]]:
    """Check that a run can continue, with these changes; nothing is written. Also returns warnings.

    Args:
        local: ranks on this machine.
        nodes: numbers of machines that it may have.

    Raises:
        Refused: it cannot continue as it stands or as asked for.
    """
    record, task, ranks = run.read(), task_of(run), local * nodes[-1]
    config = kept = config_of(run, task)
    if flags:
        before = configuration.to_flat(config)
        config = configuration.with_flags(flags, task.Settings, task.file, before)
        check_changes(before, configuration.to_flat(config), f"cannot change {run.name}", fork_of(run, flags))
    step, manifest, unused = manifests.newest_valid(run)
    if manifest:
        what = f"{run.folder / 'config.toml'} does not fit its checkpoints"
        check_changes(manifest["config"], configuration.to_flat(config), what)
        if manifest.get("task_sha256") != task.sha256:
            if not task.is_built_in:
                raise Refused(f"{task.file} is not the task that {run.name} was trained with; put the original back")
            unused.append(f"the task {task.name} has changed since; {run.name} goes on with it as it is now")
    if not isinstance(config.micro_batch_size, int) or config.cpu_threads is None:
        raise Refused(f"{run.folder / 'config.toml'} lacks micro_batch_size or cpu_threads; put them back")
    if config.precision in ON_GPU_ALONE and (config.device == "cpu" or not cuda.device_count()):
        problem = f"{run.name} computes in {config.precision}, which a CPU has not, and a resume may not change that"
        raise Refused(f"{problem}; resume it where torch sees a GPU: nvidia-smi")
    checks.check_ranks(config, local, nodes)
    source = of_run(run, task)
    try:
        found = checks.check_run(task, config, local, ranks, asked(source, flags))
    except NoGPU:
        on_cpu = f"to continue on the CPU, with other bits: train resume {run.name} --device cpu"
        raise NoGPU(f"{run.name} computes on GPUs, and torch sees none here: see nvidia-smi; {on_cpu}") from None
    warnings = [*unused, *check_data(run, task, config, found.train_set, found.eval_sets), *imports.edited(run, record)]
    if found.total < step:
        raise Refused(f"{run.name} has trained {step} steps already, more than the {found.total} now asked for")
    wanted = range(step, found.total) if record["state"] == states.FINISHED else range(0)  # its user wants more
    early_stopping.check_goes_on(config.early_stopping, run, wanted)
    for field in [field for field in checks.METRICS if field in flags]:
        known = {name: None for line in evaluations(run) for name in line["eval"]}
        checks.check_metric(field, config, task, found.eval_sets, known)
    if "log.trace" in flags:
        trace.steps_of(config.log.trace, run.newest_checkpoint, found.total)
    is_first_of_several = record["world_size"] == 1 < ranks
    if is_first_of_several or choose.shards(config, ranks) or config.parallel.recompute:
        checks.check_model(task, config, ranks, found.precision)
    batch_norm.check(
        task, config, found.train_set, lambda: checks.check_model(task, config, ranks, found.precision), ranks,
        range(step, found.total), lambda other: _elsewhere(run, flags | other),
    )  # fmt: skip
    micros = build.plan_of(config, len(found.train_set)).micro_batches(0)
    if micros < ranks:
        warnings.append(f"{ranks} ranks share {micros} micro batches per step: {ranks - micros} compute nothing new")
    warnings += rate_change.warnings(
        run, task, (kept, config), len(found.train_set), step, flags,
        is_fork=False, has_rate="optim.lr" not in of_no_use(task, source),
    )  # fmt: skip
    return config, warnings


def _elsewhere(run: Run, flags: dict[str, str]) -> str:
    """What to say of fields that a resume may not change, as the end of a refusal."""
    return f"; {fork_of(run, flags)}" if run.newest_checkpoint else "; it has no checkpoint, so begin a new run"


def check_data(run: Run, task: Task, config: Config, train_set: Any, eval_sets: dict[str, Any]) -> list[str]:
    """Whether the data are those that a run began with. Returns warnings.

    Raises:
        Refused: they are not.
    """
    differs, then = data_differs(run, task, config, train_set, eval_sets), fingerprint.recorded(run.folder)
    if differs:
        way = "put them back as they were"
        if then and (hidden := fingerprint.hidden_in(then)):
            version = run.read().get("git_revision") or "that it was started with"
            way = f"hidden files ({hidden[0]}) are no data any more: go on with the version {version}"
        anew = f"begin anew with its weights: --init {run.name}"
        raise Refused(f"the data differ from those that {run.name} began with: {differs}; {way}, or {anew}")
    samples = run.read().get("samples", len(train_set))
    if len(train_set) != samples:  # of a run of an earlier version, for others differ by now
        raise Refused(
            f"the training set has {len(train_set)} samples now and had {samples} when {run.name} was started; put "
            "the data back as it was"
        )
    if then and then["format"] != fingerprint.FORMAT:
        return [f"{run.name} is of an earlier version: whether its data have changed is not compared"]
    return []
