"""What the torture holds runs against: how an undisturbed run ends, and what was reported as saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import changes
from train.checkpoint import manifest
from train.launcher.checks import prepare
from train.launcher.request import Request
from train.launcher.resume import prepare_resume
from train.run import folders, states
from train.run.run_folder import Run

FLAGS = {
    "batch_size": "60", "micro_batch_size": "8", "checkpoint.every_steps": "5", "checkpoint.keep": "2",
    "eval.every_epochs": "0.5", "log.every_steps": "1", "log.samples": "true", "log.tensorboard": "false",
    "task.width": "8", "precision": "fp64", "cpu_threads": "1",
}  # fmt: skip
"""Epochs of 24 steps with a short last batch, dropout and augmentation."""
PATIENCE = 180.0
"""Seconds after which an attempt that has not ended hangs."""


class Failure(Exception):
    """A promise that was not kept."""


def make(
    runs: Path, name: str, ranks: int, workers: int, asynchronous: bool, steps: int,
    more: dict[str, str] | None = None, task: str = "digits",
) -> Run:  # fmt: skip
    """A fresh run; `more` are flags."""
    flags = FLAGS | {"steps": str(steps), "data.workers": str(workers)} | (more or {})
    flags["checkpoint.asynchronous"] = str(asynchronous).lower()
    prepared = prepare(Request(task, flags=flags), ranks=ranks)
    return folders.create(runs, name, files=prepared.files, record=prepared.record)


def change(run: Run, ranks: int, flags: dict[str, str]) -> None:
    """What `train resume` with these flags would write before it starts the ranks."""
    config, _ = prepare_resume(run, flags, ranks)
    changes.apply(run, config)


def logs(run: Run) -> str:
    """The ends of the logs of its last attempt."""
    folder = run.logs(len(run.read()["attempts"]))
    return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))


def outcome(run: Run) -> dict[str, Any]:
    """What must not depend on how often a run was interrupted."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    keys = ("step", "epoch", "loss", "lr", "eval", "samples")
    samples: dict[int, list[int]] = {}
    for path in sorted(run.folder.glob("samples.rank*.log")):
        for line in path.read_text().splitlines():
            step, *ids = map(int, line.split())
            samples.setdefault(step, []).extend(ids)
    record = run.read()
    return {
        "state": record["state"], "sha": record["weights_sha256"], "metrics": record["metrics"],
        "lines": [{key: line[key] for key in keys if key in line} for line in lines],
        "samples": {step: sorted(ids) for step, ids in samples.items()},
    }  # fmt: skip


def compare(run: Run, wanted: dict[str, Any], exactly: bool = True) -> None:
    """Raise Failure where a finished run differs from the undisturbed one."""
    found = outcome(run)
    newest = manifest.newest_valid(run)[0]
    if found["state"] == states.FINISHED and newest != run.read()["step"]:
        raise Failure(f"{run.name} is finished, and its newest checkpoint is {newest}")
    for key in ("state", "samples"):
        if found[key] != wanted[key]:
            raise Failure(f"{run.name}: {key} differ\n{logs(run)}")
    if exactly:
        for key in ("sha", "metrics", "lines"):
            if found[key] != wanted[key]:
                raise Failure(f"{run.name}: {key} differ: {found[key]!s:.300} instead of {wanted[key]!s:.300}")
        return
    for ours, theirs in zip(found["lines"], wanted["lines"], strict=True):
        for key in ours.keys() & {"loss", "lr"}:
            if abs(ours[key] - theirs[key]) > 1e-9 * max(1, abs(theirs[key])):
                raise Failure(f"{run.name}: {key} of step {ours['step']} is {ours[key]} instead of {theirs[key]}")


def saved(run: Run) -> int:
    """The newest step reported as saved."""
    return int(run.read().get("saved_step", 0))


def check_nothing_lost(run: Run, before: int) -> None:
    """A checkpoint once reported as saved must still be there, or a newer one, and whole."""
    step = manifest.newest_valid(run)[0]
    if step < before:
        raise Failure(f"{run.name}: the checkpoint of step {before} was reported as saved; the newest is {step}")
