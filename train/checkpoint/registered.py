"""Reads the weights in checkpoints without the code that wrote them: a task's model, or what a session registered."""

from __future__ import annotations

import logging

from torch import Tensor

from ..errors import Refused
from ..run.best import AVERAGE
from ..run.run_folder import Run
from . import manifest as manifests
from .load import weights_in

log = logging.getLogger("train")

MODEL = "model"
"""The name of the module that is meant if none is named."""


def state_dict(
    run: Run, name: str = "", step: int | None = None, *, weights: str = ""
) -> tuple[int, dict[str, Tensor]]:
    """Return a step and the tensors of a task's model, or of a module that a session has registered, on the CPU.

    Args:
        name: under which it is registered (a task's is called model); '': the one called model, or the only one.
        step: of the checkpoint; None: the newest whole one.
        weights: AVERAGE (run/best.py): the average of a task's weights.

    Raises:
        Refused: there is no such checkpoint or module.
    """
    if step is not None:
        manifest = manifests.verified(run, step)
    else:
        step, manifest, unused = manifests.newest_valid(run)
        for line in unused:
            log.warning("warning: %s", line)
        if not manifest:
            raise Refused(f"{run.name} has no usable checkpoint yet; see: train show {run.name}")
    names = manifest.get("session", {"modules": [MODEL]}).get("modules", [])
    if not names:
        raise Refused(f"{run.name} has registered no model: session.register(model=…)")
    wanted = name or (MODEL if MODEL in names or len(names) > 1 else names[0])
    if wanted not in names:
        what = f"{run.name} has registered no module {wanted}" if name else f"{run.name} has registered several modules"
        raise Refused(f"{what}; choose one: {', '.join(names)}")
    try:
        found = weights_in(run.checkpoint(step), is_averaged=weights == AVERAGE)
    except ValueError as error:
        raise Refused(str(error)) from None
    if len(names) > 1:  # then names begin with that of their module
        start = f"{wanted}."
        found = {key.removeprefix(start): tensor for key, tensor in found.items() if key.startswith(start)}
    return step, found
