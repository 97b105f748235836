"""The evaluations so far, for the two that follow them: early stopping and the learning rate.

Both are functions of what metrics.jsonl holds. A resume cuts that file to its step, so no state is saved.
"""

from __future__ import annotations

import json
from typing import Any

from ..build.schedule import follows_evaluations
from ..config import Config
from ..errors import TrainingFailed, nearest
from ..parallel.world import World
from ..run.best import aim_of
from ..run.metrics import Evaluation, history, metrics_text, past
from ..run.run_folder import Run
from ..tasks import Task


class History:
    """The evaluations so far as metrics.jsonl holds them, the same on every rank.

    Rank 0 reads them once per attempt and sends each new one to the others.
    """

    def __init__(self, run: Run, world: World, task: Task, config: Config) -> None:
        """A collective."""
        self._run, self._world = run, world
        follows = follows_evaluations(task, config)
        self._named = {"early_stopping.metric": config.early_stopping.metric}
        if follows and task.schedule is None:
            self._named["schedule.metric"] = config.schedule.metric
        self._is_needed = follows or bool(config.early_stopping.metric)
        self.lines: list[dict[str, Any]] = world.on_first(lambda: history(run)[0 if self._is_needed else -1 :])
        """Evaluations, the oldest first; only the newest if nothing follows them."""

    @property
    def last(self) -> int:
        """The step of the newest evaluation; -1 without one."""
        return self.lines[-1]["step"] if self.lines else -1

    def add(self, line: Evaluation) -> None:
        """Add an evaluation, with rank 0's figures. A collective.

        Raises:
            TrainingFailed: it lacks a metric that a field names.
        """
        if not self._is_needed:
            self.lines = [past(line)]
            return
        # as the file holds it, because a resume reads it from there
        sent = json.loads(self._world.broadcast(metrics_text(line)))
        for field, text in self._named.items():
            name, figures = aim_of(text).metric, sent["eval"]
            if text and name not in figures:
                command = f"train resume {self._run.name}"
                if field == "schedule.metric":
                    command = f"train fork {self._run.name} --name NEW"
                raise TrainingFailed(
                    f"no evaluation gives {name}, which {field} names{nearest(name, figures)} (there are: "
                    f"{', '.join(figures)}); choose another: {command} --{field} NAME"
                )
        self.lines.append(past(sent))
