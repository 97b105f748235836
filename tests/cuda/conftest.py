"""A station whose machine has the GPUs of the stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cuda import standin
from tests.cuda.cards import Cards
from tests.train.conftest import Station


class GpuStation(Station):
    """A folder to work in, on a machine with GPUs; what processes do with these is in a log."""

    def __init__(self, folder: Path, gpus: int, **options: Any) -> None:
        """
        Args:
            options: of standin.environment.
        """
        super().__init__(folder)
        self.cards, self.log = Cards(folder, gpus, **options.pop("cards", {})), folder / "calls"
        self.more = standin.environment(self.cards, log=self.log, **options) | {"STANDIN_PATIENCE": "90"}

    def calls(self, *first: str) -> dict[int, list[str]]:
        """The calls in the log, by process, in order: those that begin with these words."""
        found: dict[int, list[str]] = {}
        for line in self.log.read_text().splitlines():
            pid, _, call = line.partition(" ")
            if call.startswith(first or ("",)):
                found.setdefault(int(pid), []).append(call)
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[GpuStation]:
    """Four GPUs."""
    if lacks := standin.lacks():
        pytest.skip(lacks)
    made = GpuStation(tmp_path, 4)
    yield made
    made.close()
