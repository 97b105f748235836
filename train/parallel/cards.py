"""Which GPUs this torch has kernels for.

A wheel carries machine code for some compute capabilities. On another card the first kernel fails, minutes after the
launch; here it is said before. nvidia-smi is asked, for torch would open the device to answer.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Sequence

import torch

from train.errors import Refused, whole
from train.parallel import numbered

_QUERY = ["nvidia-smi", "--query-gpu=compute_cap,uuid,name", "--format=csv,noheader"]
_LONGEST = 10.0
"""Seconds: without persistence mode nvidia-smi starts the driver anew."""


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU: its name, its compute capability as (major, minor), and its UUID, where it is known."""

    name: str
    capability: tuple[int, int]
    uuid: str = ""


def here() -> list[Card]:
    """The GPUs that a run may see here, in its order; [] where nvidia-smi does not tell.

    Where it cannot be said which of the machine's they are, all of them.
    """
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_LONGEST, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = read(done.stdout) if done.returncode == 0 else []
    return seen(found, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get(numbered.ORDER))


def read(text: str) -> list[Card]:
    """The cards in nvidia-smi's answer, a line `9.0, GPU-8932f937-…, NVIDIA H100` for each."""
    found = [re.fullmatch(r"\s*(\d+)\.(\d+)\s*,\s*([^\s,]+)\s*,\s*(.+?)\s*", line) for line in text.splitlines()]
    return [Card(match[4], (int(match[1]), int(match[2])), match[3]) for match in found if match]


def seen(cards: list[Card], visible: str | None, order: str | None = None) -> list[Card]:
    """Those of a machine's cards that a process may see; all of them where that cannot be said.

    A slice's UUID (MIG-…) does not name its card, and what CUDA counts in another order than nvidia-smi no number does.

    Args:
        cards: in nvidia-smi's order.
        visible, order: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; None: not set.
    """
    if not visible:
        return cards
    found: list[Card] = []
    for name in map(str.strip, visible.split(",")):
        if name.isdecimal() and order in (None, numbered.AS_NVIDIA_SMI):
            fits = cards[whole(name) :][:1]
        elif name.startswith("GPU-"):  # its first characters are enough
            fits = [card for card in cards if card.uuid.startswith(name)]
        else:
            return cards
        if len(fits) != 1:  # here CUDA stops reading
            break
        found += fits
    return found or cards


def is_known(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether code for these architectures runs on a card of this capability.

    Machine code (sm_XY) runs on cards of the same major version and at least its minor one; PTX (compute_XY) is
    compiled for any newer card; code with a letter (sm_90a) runs on that very card alone (CUDA C++ Programming Guide,
    "Application Compatibility").
    """
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if match is None:
            continue
        own = (int(match[2]), int(match[3]))
        if own == capability:
            return True
        if match[1] == "sm" and not match[4] and own[0] == capability[0] and own[1] <= capability[1]:
            return True
        if match[1] == "compute" and not match[4] and own <= capability:
            return True
    return False


def check(cards: Sequence[Card], architectures: Sequence[str] | None = None) -> None:
    """Whether a run can compute on these cards.

    Args:
        architectures: what there is code for; None: what this torch has.

    Raises:
        Refused: not one of them is known to torch. With some that are and some that are not, ranks look at theirs.
    """
    known = _architectures() if architectures is None else architectures
    if not known or not cards or any(is_known(card.capability, known) for card in cards):
        return
    card = cards[0]
    version = ".".join(map(str, card.capability))
    raise Refused(
        f"torch {torch.__version__} has no kernels for {card.name} (compute capability {version}; it has "
        f"{', '.join(known)}); install a torch built for it (pytorch.org lists builds by CUDA version), "
        "or use --device cpu"
    )


def _architectures() -> list[str]:
    """What this torch has code for. torch.cuda.get_arch_list asks the driver first, after which no fork is safe."""
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return str(flags).split() if flags else []
