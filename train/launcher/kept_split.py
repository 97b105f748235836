"""Warns if a run starts with weights that may have been trained on its evaluation samples.

A random split follows `data.seed`. With another one than in the run that trained the weights, samples that this run
evaluates on were in the other's training set, and its metrics look better than they are.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..build import objects
from ..config import Config
from ..data import fingerprint
from ..data.aside import aside
from ..errors import Refused
from ..run import folders
from ..run.best import AVERAGE
from ..run.run_folder import Run
from ..tasks import Task

_PATIENCE = 60.0
"""Seconds that `datasets()` may take with the other seed."""
_SAMPLES = ": samples"
"""End of the facts about the number of samples."""
Sets = Mapping[str, Any]
"""The training set and the evaluation sets, as keyword arguments of a fingerprint."""


def run_of(source: str, runs: Path) -> Run | None:
    """Return the run whose weights a path holds: a checkpoint, or a file that `train export` wrote. None: unknown.

    Args:
        runs: The folder in which an exported file's run is looked for.
    """
    path = Path(source.removesuffix(f"@{AVERAGE}"))
    found = path.parent.parent if path.is_dir() else runs / (_exported_from(path).partition("/")[0] or ".")
    return Run(found) if (found / "run.json").is_file() else None


def _exported_from(path: Path) -> str:
    """Return the checkpoint, RUN/STEP, that `train export` wrote into a file; '' if it did not write the file."""
    try:
        if zipfile.is_zipfile(path):  # as torch.save writes it
            with zipfile.ZipFile(path) as file:
                return file.comment.decode()
        with path.open("rb") as file:  # .safetensors: the length of a table, and the table
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return str(head["__metadata__"]["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return ""


def _ancestors(first: Run, runs: Path) -> Iterator[Run]:
    """Yield a run, and those whose weights it started with, directly or not."""
    ahead, seen = [first], set[str]()
    while ahead:
        run = ahead.pop()
        if run.name in seen:
            continue
        seen.add(run.name)
        yield run
        try:
            fork, init = run.read().get("forked_from") or {}, run.read_config().get("init")
        except Refused:  # it is damaged: nothing is known about it
            continue
        if fork:
            ahead += [Run(runs / fork["run"])] if (runs / fork["run"] / "run.json").is_file() else []
        elif isinstance(init, str) and init and (one := run_of(init, runs)) is not None:
            ahead.append(one)


def warnings(task: Task, config: Config, source: str, runs: Path, *, sets: Sets) -> list[str]:
    """Return a warning if weights from `source` may have been trained on evaluation samples of this configuration.

    Args:
        source: Path of a checkpoint or an exported file, or the name of a run.
        runs: The folder of the runs.
    """
    first = folders.find(runs, source) if (runs / source / "run.json").is_file() else run_of(source, runs)
    if first is None or not sets["eval_sets"]:
        return []
    for run in _ancestors(first, runs):
        if said := _said_of(run, task, config, sets):
            return [said]
    return []


def _said_of(run: Run, task: Task, config: Config, sets: Sets) -> str:
    """Return the warning about one of the runs that trained the weights; '' if there is nothing to say."""
    try:
        then, before = fingerprint.recorded(run.folder), run.read_config()
    except Refused:
        return ""
    seeds: tuple[Any, Any] = before.get("seed"), before.get("data.seed")
    if then is None or None in seeds or seeds == (config.seed, config.data.seed):
        return ""
    if not fingerprint.differences(then, objects.fingerprint(task, config, **sets)) and _shows_split(then):
        return ""
    whole = dataclasses.replace(config, seed=seeds[0], data=dataclasses.replace(config.data, seed=seeds[1]))
    only_data = dataclasses.replace(whole, seed=config.seed)

    def compared() -> list[bool]:
        """Return whether the split depends on the seeds, whether the run's give its data, and data.seed alone."""
        own, theirs = _facts(config, sets), _facts(whole, _made(task, whole))
        alone = theirs if whole.seed == only_data.seed else _facts(only_data, _made(task, only_data))
        depends = own != theirs or not _shows_split(own)
        is_same = not fingerprint.differences(then, theirs) or _counts(then) == _counts(theirs)
        return [depends, is_same, alone == theirs]

    found, _ = aside(compared, _PATIENCE)
    depends, is_same, alone = found or (True, _counts(then) == _counts(_facts(config, sets)), True)
    if not (depends and is_same):
        return ""
    reads = "" if alone else f"let datasets() in {task.file.name} read config.data.seed, not config.seed, and "
    return f"evaluation samples may have been trained on by {run.name}; {reads}keep its split: --data.seed {seeds[1]}"


def _made(task: Task, config: Config) -> Sets:
    train_set, eval_sets = objects.make_datasets(task, config)
    return {"train_set": train_set, "eval_sets": eval_sets}


def _facts(config: Config, sets: Sets) -> dict[str, Any]:
    """Return what the sets themselves show: a task's own fingerprint() may leave out how they are split."""
    return fingerprint.of_sets(config.data.root, None, **sets)


def _counts(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: count for name, count in facts["facts"].items() if name.endswith(_SAMPLES)}


def _shows_split(facts: dict[str, Any]) -> bool:
    """Whether a fingerprint shows which samples each evaluation set has."""
    shown = {name.partition(":")[0].partition(".")[0] for name in facts["facts"] if not name.endswith(_SAMPLES)}
    return {name.removesuffix(_SAMPLES) for name in _counts(facts) if name.startswith("evaluation set")} <= shown
