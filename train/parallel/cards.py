"""Which GPUs this torch has kernels for.

A wheel carries machine code for some compute capabilities. On another card the first kernel fails, minutes after the
launch; here it is said before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from train.errors import Refused
from train.gpus import Card


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
