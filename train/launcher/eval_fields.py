"""Other fields for one evaluation of a run: `train eval NAME --data.root DIR --task.fold 3`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .. import config as configuration
from ..errors import Refused
from ..run.spec import Spec
from .unused_fields import asked

if TYPE_CHECKING:
    from ..config import Config
    from ..tasks import Task

FIELDS = ("data.root", "data.name", "data.workers", "data.on_error", "eval.limit_batches", "device")
"""Config fields that an evaluation can take, besides task.NAME."""


def check(flags: Mapping[str, str]) -> None:
    """Check the fields of an evaluation, as far as that is possible without the task.

    Raises:
        Refused: an evaluation cannot use a field, or a value is wrong.
    """
    for name in flags:
        if name not in FIELDS and not name.startswith("task."):
            raise Refused(
                f"--{name}: an evaluation cannot use it, only {', '.join(FIELDS)} and task.NAME; leave it out"
            )
    configuration.check_flags(flags)


def changing(spec: Spec, flags: Mapping[str, str]) -> Callable[[Task, Config], Config]:
    """Return the function that changes the configuration of a run as these flags say.

    It raises Refused for a flag that names no field or has no effect.
    """

    def change(task: Task, config: Config) -> Config:
        from .case import Case, Kind  # late: imports torch
        from .checks import run

        flat = configuration.to_flat(config)
        changed = configuration.with_flags(flags, settings=task.Settings, task_file=task.file, flat=flat)
        run(Case(kind=Kind.EVAL, task=task, config=changed, asked=asked(flags), reads=spec.has_effect))
        return changed

    return change
