"""A machine with InfiniBand cards, as files, and a library that knows them (verbs.c)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from train import infiniband


def plug_in(root: Path, states: dict[str, str], devices: bool = True) -> None:
    """Write the files of cards with one port each.

    Args:
        states: Maps a card to the state of its port.
        devices: Whether the files to open are there.
    """
    for number, (card, state) in enumerate(states.items()):
        folder = root / "sys/class/infiniband" / card
        (folder / "ports/1").mkdir(parents=True, exist_ok=True)
        (folder / f"device/infiniband_verbs/uverbs{number}").mkdir(parents=True, exist_ok=True)
        (folder / "ports/1/state").write_text(f"{state}\n")
        (folder / "ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
        if devices:
            (root / "dev/infiniband").mkdir(parents=True, exist_ok=True)
            (root / f"dev/infiniband/uverbs{number}").touch()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *cards: str) -> None:
    """Make this process find a library that knows these cards."""
    library = folder / "libibverbs-stand-in.so"
    if not library.exists():
        compiler = shutil.which("cc") or shutil.which("gcc")
        assert compiler, "a C compiler"
        source = Path(__file__).with_name("verbs.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(infiniband, "LIBRARIES", ("libibverbs-of-nobody.so", str(library)))
    monkeypatch.setenv("VERBS_STAND_IN", " ".join(cards))
