"""Cards that torch has no kernels for are refused before anything is launched."""

from __future__ import annotations

import pytest

from train.errors import Refused
from train.gpus import Card
from train.parallel import cards

WHEEL = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
"""What the wheel of torch 2.7.1 with CUDA 12.6 has."""


@pytest.mark.parametrize(
    ("capability", "architectures", "known"),
    [
        ((9, 0), WHEEL, True),
        ((8, 9), WHEEL, True),  # code of the same major version, and an older minor one
        ((8, 7), ("sm_89",), False),
        ((10, 0), WHEEL, False),
        ((12, 0), WHEEL, False),
        ((12, 0), (*WHEEL, "compute_90"), True),  # PTX is compiled there
        ((9, 0), ("compute_100",), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 0), ("sm_90a", "compute_90a"), False),
        ((10, 3), ("sm_100", "sm_120"), True),
        ((12, 1), ("sm_75", "sm_100", "sm_120"), True),
    ],
)
def test_what_code_runs_where(capability: tuple[int, int], architectures: tuple[str, ...], known: bool) -> None:
    assert cards.is_known(capability, architectures) is known


def test_a_refusal_names_the_card_and_what_to_do() -> None:
    old, new = Card("NVIDIA H100", (9, 0)), Card("NVIDIA B200", (10, 0))
    with pytest.raises(Refused) as refused:
        cards.check([new], WHEEL)
    for words in ("NVIDIA B200", "10.0", "sm_90", "--device cpu", "built for it"):
        assert words in str(refused.value)
    cards.check([new, old], WHEEL)  # ranks look at their own
    cards.check([], WHEEL)
    cards.check([new], ())  # a torch without CUDA says nothing of cards
