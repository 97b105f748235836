"""The one run at Weights & Biases of a run and its restarts: its id is in run.json, and ranks get it as WANDB_RUN_ID.

Imports no torch.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

FIELD = "wandb_id"
"""Field of run.json with the id. A fork gets another one, and so does a copy when it is resumed."""
ID, RESUME = "WANDB_RUN_ID", "WANDB_RESUME"
"""Variables that W&B reads. What a user sets wins."""
_OURS = "TRAIN_WANDB_RUN"
"""Variable with the WANDB_RUN_ID that we set, so that a run that starts another one does not pass it on."""
_ALLOW = "allow"


def new_id() -> str:
    return uuid.uuid4().hex[:12]


def users(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that `variables` has set for a run around this process."""
    found = dict(environ)
    if (ours := found.pop(_OURS, None)) is not None and found.get(ID) == ours:
        del found[ID]
        if found.get(RESUME) == _ALLOW:
            del found[RESUME]
    return found


def variables(environ: Mapping[str, str], run_id: str, *, has_feed: bool, rank: int) -> dict[str, str]:
    """Return the variables with which a rank continues its run at W&B after a restart.

    Each rank has its own run there: processes that write into one overwrite each other.

    Args:
        environ: The environment of the agent.
        has_feed: Whether --log.wandb sends the curves as `run_id`, so that the code of rank 0 needs another run.
    """
    own = run_id if rank == 0 and not has_feed else f"{run_id}-{rank}"
    given = users(environ)
    if ID in given or not run_id:
        return {RESUME: given.get(RESUME, _ALLOW)}
    return {ID: own, RESUME: given.get(RESUME, _ALLOW), _OURS: own}


def of_feed(environ: Mapping[str, str], run_id: str) -> tuple[str, Any]:
    """Return the id and the `resume` with which --log.wandb sends the curves."""
    given = users(environ)
    return given.get(ID) or run_id, given.get(RESUME) or _ALLOW
