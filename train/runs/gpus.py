"""How many ranks run here, and which GPUs they may see."""

from __future__ import annotations

import os

from train.errors import Refused


def count_ranks(nproc: str | None, gpus: str | None, cpu_only: bool = False) -> tuple[int, str | None]:
    """Ranks on this machine and the GPU ids they may see (None: as they are).

    A bare number of GPUs is a count; ids contain a comma (`2,` is id 2).

    Raises:
        Refused: not a number, not so many GPUs here, or no such GPU.
    """
    import torch

    here = 0 if cpu_only else torch.cuda.device_count()
    visible: str | None = None
    if gpus is not None:
        chosen = _listed(gpus, here) if "," in gpus else _counted(gpus, here)
        # ids count among the GPUs that this process may see
        outer = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = ",".join(outer.split(",")[int(i)] if outer else i for i in chosen)
        here = len(chosen)
    if nproc is None:
        return (here if gpus is not None else 1), visible
    if nproc == "auto":
        return max(here, 1), visible
    if not nproc.isdecimal() or int(nproc) < 1:
        raise Refused(f"--nproc {nproc}: give a number of ranks of at least 1, or auto for one per GPU")
    if int(nproc) > 4096:
        raise Refused(f"--nproc {nproc}: more ranks than any machine runs; give at most 4096")
    return int(nproc), visible


def _listed(gpus: str, here: int) -> list[str]:
    """The ids in `0,2`, of `here` GPUs."""
    ids = [part.strip() for part in gpus.strip().rstrip(",").split(",")]
    if not ids or not all(part.isdecimal() for part in ids) or len(set(ids)) < len(ids):
        raise Refused(f"--gpus {gpus}: give a count (2) or different ids with a comma (0,1 or 2,)")
    missing = [part for part in ids if int(part) >= here]
    if missing:
        raise Refused(f"--gpus {gpus}: there is no GPU {missing[0]} here; {_gpus_here(here)}")
    return [str(int(part)) for part in ids]


def _counted(gpus: str, here: int) -> list[str]:
    """The ids of the first so many of `here` GPUs."""
    if not gpus.strip().isdecimal() or int(gpus) < 1:
        raise Refused(f"--gpus {gpus}: give a count of at least 1, or ids with a comma (0,1 or 2,)")
    if int(gpus) > here:
        raise Refused(
            f"--gpus {gpus}: {_gpus_here(here)}; leave out --gpus" + (" to run on the CPU" if not here else "")
        )
    return [str(index) for index in range(int(gpus))]


def _gpus_here(here: int) -> str:
    return f"{here} are usable here" if here != 1 else "1 is usable here"
