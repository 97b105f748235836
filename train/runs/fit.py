"""`micro_batch_size auto`: the largest micro batch that the devices of a run have room for.

Found by trying, before the run is created, in processes that are thrown away (runs/trial.py): nothing of a try is left
in memory, on a device, in random states or weights. What is found is written into the run's configuration, so it is
chosen once in the life of a run, whatever becomes of its devices and world size.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from train import own
from train.errors import Refused, one_line
from train.runs.memory import Use


def largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of `sizes` (ascending) that fits, where all smaller ones then fit too; None: not even the first.

    Doubles, then bisects: so nothing is tried that is more than twice what fits, for a machine whose memory is overrun
    may take other processes with it. It begins with the second, because a single sample may be too few for a model
    (BatchNorm) that two are enough for.
    """
    low, high, at = -1, len(sizes), min(1, len(sizes) - 1)
    while low < at < high:
        if fits(sizes[at]):
            low, at = at, min(2 * at + 1, len(sizes) - 1)
        else:
            high = at
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low] if low >= 0 else None


def expected(size: int, known: Mapping[int, Use]) -> Use | None:
    """What a micro batch of this size will need, by the line through the two largest smaller ones; None: unknown."""
    smaller = sorted(other for other in known if other < size)[-2:]
    if len(smaller) < 2:
        return None
    (low, one), (high, two) = ((other, known[other]) for other in smaller)
    by = (size - high) / (high - low)
    return Use(
        int(two.resident + by * max(two.resident - one.resident, 0)),
        int(two.address_space + by * max(two.address_space - one.address_space, 0)),
    )


def find(task: str, copy: str | None, flat: dict[str, Any], ranks: int, sizes: Sequence[int]) -> tuple[int, str]:
    """The largest of these micro batches that fits, and a word on how that was found.

    Args:
        task: as the user named it.
        copy: the file that it is to be read from, if another.
        flat: the configuration, by dotted names.
        ranks: how many there will be on this machine; each is tried, and all have to fit.

    Raises:
        Refused: none fits, or a step cannot be tried.
    """
    order = {"task": task, "copy": copy, "config": flat, "ranks": ranks, "sizes": list(sizes), "parent": os.getpid()}
    # into files, not pipes: what a task has forked there would hold those open
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        done = subprocess.run(
            own.command("train.runs.trial"),
            input=json.dumps(order).encode(),
            # asked otherwise, CUDA could not be used in a fork of the process that asked
            env=os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            stdout=out,
            stderr=err,
            check=False,
        )
        answered, complained = _text(out), _text(err)
    try:
        answer = json.loads(answered)
    except ValueError:
        said = one_line((complained.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        raise Refused(f"--micro_batch_size auto: trying steps failed: {said[:300]}; give a number") from None
    if "refused" in answer:
        raise Refused(answer["refused"])
    return int(answer["size"]), str(answer["reason"])


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
