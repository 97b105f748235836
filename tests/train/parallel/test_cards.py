"""Cards that torch has no kernels for are refused before anything is launched."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.errors import Refused
from train.parallel import cards
from train.parallel.cards import Card

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


OLD = Card("NVIDIA Quadro K620", (5, 0), "GPU-1f0e2d3c-aaaa")
NEW = Card("NVIDIA B200", (10, 0), "GPU-8932f937-bbbb")
OTHER = Card("NVIDIA H100", (9, 0), "GPU-89aaf937-cccc")
ALL = [OLD, NEW, OTHER]


@pytest.mark.parametrize(
    ("visible", "order", "found"),
    [
        (None, None, ALL),
        ("", None, ALL),
        ("1", None, [NEW]),
        (" 2, 0", "PCI_BUS_ID", [OTHER, OLD]),
        ("1", "FASTEST_FIRST", ALL),  # whose number that is, nvidia-smi does not say
        ("1,7,2", None, [NEW]),  # CUDA reads up to the first that there is not
        ("7", None, ALL),
        ("9" * 5000, None, ALL),
        ("GPU-8932f937-bbbb", "FASTEST_FIRST", [NEW]),
        ("GPU-89aa,GPU-1f0e2d3c-aaaa", None, [OTHER, OLD]),
        ("GPU-89", None, ALL),  # of two cards
        ("MIG-5c89852c-d268-c3f3", None, ALL),
        ("MIG-GPU-8932f937-bbbb/1/0", None, ALL),
        ("-1", None, ALL),
        ("1gpu", None, ALL),
        ("²", None, ALL),
    ],
)
def test_only_the_cards_that_a_run_may_see_are_looked_at(
    visible: str | None, order: str | None, found: list[Card]
) -> None:
    assert cards.seen(ALL, visible, order) == found


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert cards.here() == []
    smi.write_text(
        '#!/bin/sh\n[ "$1" = --query-gpu=compute_cap,uuid,name ] || exit 2\n'
        "echo '9.0, GPU-89aaf937-cccc, NVIDIA H100'\necho '10.0, GPU-8932f937-bbbb, NVIDIA B200'\n"
    )
    smi.chmod(0o755)
    assert cards.here() == [OTHER, NEW]
    cards.check(cards.here(), WHEEL)  # one of them will do
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(Refused, match="no kernels for NVIDIA B200"):
        cards.check(cards.here(), WHEEL)
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert cards.here() == []
