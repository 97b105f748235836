"""The cards of the stand-in machine, as NVML and CUDA show them. See cards.h."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any


class Cards:
    """A file with a line for each card. A test may change what a card tells, or take cards away.

    Args:
        folder: For the file. Equal cards that no test changes may share one.
        values: What all cards tell, by the names in cards.h.
    """

    def __init__(self, folder: Path, count: int, **values: Any) -> None:
        self._all = self.rows = [_row(number) | values for number in range(count)]
        digest = hashlib.sha256(self._text().encode()).hexdigest()
        self.file, self.hangs = folder / f"cards-{digest[:16]}", folder / "driver-hangs"
        self.environment = {"STANDIN_CARDS_FILE": str(self.file), "STANDIN_HANGS": str(self.hangs)}
        self.write()

    def write(self, number: int = 0, **changed: Any) -> None:
        """Change what a card tells."""
        if changed:
            self.rows[number] |= changed
        beside = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        beside.write_text(self._text())
        beside.replace(self.file)

    def keep(self, *numbers: int) -> None:
        """Let all cards vanish but these, by their first numbers."""
        self.rows = [self._all[number] for number in numbers]
        self.write()

    def _text(self) -> str:
        return "".join(" ".join(f"{name}={value}" for name, value in row.items()) + "\n" for row in self.rows)


def _row(number: int) -> dict[str, Any]:
    return {
        "uuid": uuid(number), "name": "Stand-in_H100", "major": 9, "minor": 0, "answers": 1, "use": 50 + number,
        "used": 400 << 20, "size": 80 << 30, "celsius": 60, "slowdown": 90, "milliwatts": 300_000, "limit": 700_000,
        "corrected": 3, "uncorrected": 0, "reasons": 4, "mode": 0, "persistence": 1, "pid": 0, "bytes": 0,
    }  # fmt: skip


def uuid(number: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{number + 1:012x}"
