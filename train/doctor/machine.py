"""How checks see a machine: its files, its programs, its environment.

The tests of what is not there where they run, a GPU for one, hand in a machine of files and of outputs that were
recorded elsewhere.
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
"""Seconds that a program may take: one that asks a driver which hangs must not hang us."""
_TIMED_OUT = 124
"""The exit code of one that took longer, as timeout(1) has it."""


@dataclasses.dataclass(frozen=True)
class Output:
    """What a program printed, and its exit code."""

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
        root: the folder that its files are under.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> None:
        self.environ = os.environ if environ is None else environ
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """The text of a file; '' if there is none."""
        try:
            return self.path(name).read_text(errors="replace")
        except OSError:
            return ""

    def list(self, name: str) -> builtins.list[str]:
        """The names in a folder, in order; [] if there is none."""
        try:
            return sorted(os.listdir(str(self.path(name))))
        except OSError:
            return []

    def run(self, *command: str) -> Output | None:
        """What a program says, or None if it is not installed. One that takes too long has failed."""
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
            # not waited for, as subprocess.run would: what a driver holds in the kernel does not even die
            process.returncode = _TIMED_OUT
            return Output(_TIMED_OUT, "", f"{command[0]} has not answered for {_PATIENCE:.0f} s")
        return Output(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))

    @property
    def is_station(self) -> bool:
        """Whether this is inside the station's image."""
        return self.environ.get("TRAINSTATION_IMAGE") == "1"

    @property
    def is_container(self) -> bool:
        """Whether this is inside some container."""
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
        """Whether GPUs are meant to be here."""
        wanted = self.environ.get("STATION_GPUS", "none" if self.is_station else "")
        if wanted:
            return wanted != "none"
        return self.has_nvidia_card() or bool(self.read("proc/driver/nvidia/version"))
