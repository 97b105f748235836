"""Makes a damaged file of frozen weights again, from the weights that a run started with."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from ..checkpoint import manifest as manifests
from ..config import Config
from ..errors import Refused, one_line
from ..parallel.precision import cpu_precision
from ..run.run_folder import Run
from ..tasks import Task
from . import initial_weights, objects
from .freeze import frozen_names

log = logging.getLogger("train")


def _warn(line: str) -> None:
    log.warning("warning: %s", line)


def mender(run: Run, task: Task, config: Config, *, tell: Callable[[str], object] = _warn) -> manifests.Mend:
    """Return a function that writes a damaged file of frozen weights again, from the first weights of a run. It builds
    a model.

    Args:
        tell: called with a warning about what was done.
    """

    @functools.cache
    def again(sha256: str, size: int) -> bool:
        from ..checkpoint import frozen  # slow to import, and hardly ever used

        try:
            model = objects.make_model(task, config, cpu_precision(config).weights)
            if (run.folder / initial_weights.FILE).exists():
                initial_weights.load(run.folder, model)
            entry = {"sha256": sha256, "size": size}
            names = frozen_names(model, config.freeze)
            is_made = frozen.make_again(run, model.state_dict(), frozen=names, entry=entry)
        except (OSError, Refused) as error:
            tell(f"the frozen weights cannot be computed again: {one_line(error)}")
            return False
        if is_made:
            tell(f"{manifests.frozen_name(entry)} was damaged, and was computed again")
        return is_made

    return lambda entry: again(entry["sha256"], entry["size"])
