"""Chooses how many ranks run on this machine, and which GPUs they may see."""

from __future__ import annotations

import os

from ..errors import Refused, is_whole, whole
from ..gpus import VISIBLE, number_by_bus
from ..run import environment
from ..run.record import Record
from ..run.run_folder import Run

MOST_RANKS = 4096
"""Maximum number of ranks on one machine."""
_BY_UUID = "; a UUID, also of a MIG slice, goes into CUDA_VISIBLE_DEVICES"
"""End of a message: where UUIDs go, which --gpus does not take."""


def count_ranks(nproc: str | None, gpus: str | None, cpu_only: bool = False) -> tuple[int, str | None]:
    """Return the number of ranks on this machine and the GPU ids they may see (None: unchanged).

    A number without a comma is a count of GPUs; ids contain a comma (`2,` is id 2).

    Raises:
        Refused: not a number, too few GPUs here, or no such GPU.
    """
    import torch

    here = 0 if cpu_only else torch.cuda.device_count()
    visible: str | None = None
    if gpus is not None:
        chosen = ids_in(gpus, here)
        outer = os.environ.get(VISIBLE)  # ids are relative to the GPUs that this process may see
        visible = ",".join(outer.split(",")[int(i)].strip() if outer else i for i in chosen)
        here = len(chosen)
    if nproc is None:
        return (here if gpus is not None else 1), visible
    if nproc == "auto":
        return max(here, 1), visible
    if not is_whole(nproc) or not 1 <= whole(nproc) <= MOST_RANKS:
        raise Refused(f"--nproc {nproc}: give a number of ranks from 1 to {MOST_RANKS}, or auto (one rank per GPU)")
    return whole(nproc), visible


def choose(
    nproc: str | None, gpus: str | None, *, cpu_only: bool = False, leased: str | None = None
) -> tuple[int, str | None]:
    """Return the number of ranks on this machine and the GPUs they see (None: all). This process then sees them too.

    Args:
        leased: The GPUs that `gpus` has found, as in CUDA_VISIBLE_DEVICES; None: none is leased.

    Raises:
        Refused: as in count_ranks.
    """
    if leased is not None:
        see(leased)
        gpus = None if gpus is None else str(len(leased.split(",")))
    ranks, visible = count_ranks(nproc, gpus, cpu_only)
    if visible is not None:
        see(visible)
    return ranks, os.environ.get(VISIBLE)


def choose_again(
    run: Run, record: Record, *, nproc: str | None, gpus: str | None, now: str | None, leased: str | None = None
) -> tuple[int, str | None]:
    """Return what `choose` returns, for a resume: the ranks and GPUs of before, unless the user changes them.

    The user changes GPUs by --gpus, whose ids are relative to the GPUs that the caller sees, or by
    CUDA_VISIBLE_DEVICES, if it differs from the value at the start of the run.

    Args:
        now: CUDA_VISIBLE_DEVICES of the calling shell; None: not set, or the keeper resumes.
        leased: As in `choose`.

    Raises:
        Refused: as in count_ranks.
    """
    if nproc is None and gpus is None:
        nproc = str(record.get("nproc") or record["world_size"])
    if leased is not None:
        return choose(nproc, gpus, leased=leased)
    before = environment.read(run.folder)
    saved = before.values.get(VISIBLE) if before is not None else None
    if gpus is not None or (now is not None and now != saved):
        see(now)
    else:
        see(record.get("gpus") or os.environ.get(VISIBLE))
    return choose(nproc, gpus)


def see(visible: str | None) -> None:
    """Make these GPUs visible to this process and to those it starts; None: all."""
    if visible is None:
        os.environ.pop(VISIBLE, None)
    else:
        os.environ[VISIBLE] = visible
        number_by_bus()


def ids_in(gpus: str, here: int) -> list[str]:
    """Return the ids in `0,2`; for a count N the first N of `here` GPUs.

    Raises:
        Refused: it is neither, or there are no such GPUs.
    """
    text = gpus.strip()
    is_count = "," not in text
    ids = [text] if is_count else [part.strip() for part in text.rstrip(",").split(",")]
    if not all(map(is_whole, ids)) or len(set(ids)) < len(ids) or (is_count and whole(text) < 1):
        raise Refused(f"--gpus {gpus}: give a count of at least 1, or distinct ids with a comma (0,1 or 2,){_BY_UUID}")
    if is_count:
        ids = [str(index) for index in range(min(whole(text), here + 1))]
    if any(whole(part) >= here for part in ids):
        if not here:
            raise Refused(f"--gpus {gpus}: no GPU is usable here; leave out --gpus to run on the CPU")
        raise Refused(f"--gpus {gpus}: the usable GPUs here have ids 0 to {here - 1}; choose among them")
    return [str(int(part)) for part in ids]
