"""Checks a new run that goes on from a checkpoint of another one, and says what it has of that one."""

from __future__ import annotations

from typing import Any

from train import config as configuration
from train.checkpoint import manifest as manifests
from train.config import Init
from train.data import fingerprint
from train.errors import Refused
from train.launcher import checks, provenance
from train.launcher.checks import Prepared
from train.launcher.request import ALONE
from train.launcher.resume import check_data, edited
from train.run import imports
from train.run.run_folder import Run
from train.trainer import cores
from train.trainer.build import config_of, task_of
from train.trainer.load import changed_groups

_OF_FORK = ("task.py", imports.MODULES, fingerprint.FACTS, "metrics.jsonl")
"""What a fork has of the run that it is of, beside a checkpoint."""
_RECORD_OF_FORK = ("task", "task_source", "task_imports", "task_sha256", "cwd", "samples", "chosen")
"""The same, of run.json."""


def prepare_fork(run: Run, step: int, flags: dict[str, str], ranks: int) -> tuple[Prepared, list[str]]:
    """Check a new run that goes on from a checkpoint of this one, with these changes. Also returns warnings.

    Raises:
        Refused: it cannot go on so.
    """
    record, task = run.read(), task_of(run)
    before = config_of(run, task)
    config = configuration.with_flags(flags, task.Settings, task.file, configuration.to_flat(before))
    config.init = Init()  # its weights are those of the checkpoint
    manifest, folder = manifests.verified(run, step), run.checkpoint(step)
    is_other = "batch_size" in flags or ranks != record["world_size"]
    if is_other and "micro_batch_size" not in flags and "micro_batch_size" in record.get("chosen", ()):
        config.micro_batch_size = None
    if config.micro_batch_size == "auto":
        raise Refused("--micro_batch_size auto: a fork does not try sizes; give a number")
    checks.cut_batch(config, ranks, ALONE)
    found = checks.check_run(task, config, ranks, ranks, flags)
    model = checks.check_model(task, config, ranks, found.precision)
    if config.cpu_threads is None:
        config.cpu_threads, _ = cores.default_threads(ranks, found.precision.device, model)
    warnings = [*check_data(run, task, config, found.train_set, found.eval_sets), *edited(run, record)]
    if found.total <= step:
        raise Refused(
            f"the checkpoint is of step {step}, and the new run would end after {found.total}; give more --epochs or "
            "--steps"
        )
    groups = changed_groups(run, step, task, before, config)
    fork = record.get("forked_from")
    if fork is not None and fork["step"] == step:  # the checkpoint has not got yet what that fork has changed
        groups = [{**old, **new} for old, new in zip(fork["groups"], groups, strict=True)]
    text = manifests.manifest_text(manifest | {"config": configuration.to_flat(config)})
    there = f"checkpoints/{folder.name}"
    copies = {name: run.folder / name for name in _OF_FORK if (run.folder / name).exists()} | {there: folder}
    files: dict[str, str | bytes] = {
        "config.toml": configuration.to_toml(config), f"{there}/{manifests.MANIFEST}": text
    }  # fmt: skip
    made: dict[str, Any] = {key: value for key, value in record.items() if key in _RECORD_OF_FORK} | {
        "step": step, "epoch": manifest["epoch"], "total_steps": found.total, "git_revision": provenance.git_revision(),
        "versions": provenance.versions(found.cards), "forked_from": {"run": run.name, "step": step, "groups": groups},
    }  # fmt: skip
    return Prepared(task, config, files, made, copies), warnings
