"""How checks see a machine: its files, its programs, its environment.

Tests of hardware that they lack, such as a GPU, pass a machine made of recorded files and outputs.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_PATIENCE = 8.0
"""Seconds that a program may take. A program that asks a hanging driver must not hang the doctor."""
_TIMED_OUT = 124
"""The exit code of a program that took longer, as with timeout(1)."""


@dataclasses.dataclass(frozen=True)
class Output:
    """The output and the exit code of a program."""

    code: int
    out: str
    error: str = ""

    @property
    def first_line(self) -> str:
        return next((line.strip() for line in (self.error + "\n" + self.out).splitlines() if line.strip()), "")


class Machine:
    """This machine.

    Args:
        environ: its environment.
        root: folder below which its files are.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> None:
        self.environ = os.environ if environ is None else environ
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """Return the text of a file; '' if it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace")
        except OSError:
            return ""

    def list(self, name: str) -> builtins.list[str]:
        """Return the sorted names in a folder; [] if it cannot be read."""
        try:
            return sorted(os.listdir(str(self.path(name))))
        except OSError:
            return []

    def run(self, *command: str) -> Output | None:
        """Run a program. Return its output; None if it is not installed. One that takes too long has failed."""
        program = shutil.which(command[0], path=self.environ.get("PATH"))
        if program is None:
            return None
        try:
            process = subprocess.Popen(
                [program, *command[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=dict(self.environ),
            )  # fmt: skip
        except OSError as error:
            return Output(126, "", f"{command[0]}: {error.strerror}")
        try:
            out, err = process.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                process.kill()
            # do not wait, as subprocess.run would: a process stuck in a driver does not even die
            process.returncode = _TIMED_OUT
            return Output(_TIMED_OUT, "", f"{command[0]} did not answer within {_PATIENCE:.0f} s")
        return Output(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))

    @property
    def is_station(self) -> bool:
        """Whether this runs inside the station's image."""
        return self.environ.get("TRAINSTATION_IMAGE") == "1"

    @property
    def is_container(self) -> bool:
        """Whether this runs inside a container."""
        return self.is_station or self.path(".dockerenv").exists() or self.path("run/.containerenv").exists()

    def has_nvidia_card(self) -> bool:
        """Whether a display or compute card of NVIDIA (PCI vendor 10de, class 03) is plugged in."""
        folder = "sys/bus/pci/devices"
        return any(
            self.read(f"{folder}/{card}/vendor").strip() == "0x10de"
            and self.read(f"{folder}/{card}/class").startswith("0x03")
            for card in self.list(folder)
        )

    def wants_gpus(self) -> bool:
        """Whether this machine is expected to have GPUs."""
        wanted = self.environ.get("STATION_GPUS", "none" if self.is_station else "")
        if wanted:
            return wanted != "none"
        return self.has_nvidia_card() or bool(self.read("proc/driver/nvidia/version"))
