"""Checks an image while it is built: torch imports and computes, and every package has the version the lock says."""

import importlib.metadata
import re
import sys
from pathlib import Path

import torch
import torchvision
from packaging.requirements import Requirement


def differences(lock: Path) -> list[str]:
    """One line for each package that the lock names for this platform and that is missing or of another version."""
    lines = [line.rstrip(" \\") for line in lock.read_text().splitlines() if re.match(r"[A-Za-z0-9]", line)]
    wanted = [r for r in map(Requirement, lines) if not r.marker or r.marker.evaluate()]
    if not wanted:
        return [f"{lock} names no package"]
    found = [(r, installed_version(r.name)) for r in wanted]
    return [
        f"{r.name}: the lock says {r.specifier}, installed is {version or 'nothing'}"
        for r, version in found
        if version is None or not r.specifier.contains(version, prereleases=True)
    ]


def installed_version(name: str) -> str | None:
    """The version that an import of the package gets: the first on Python's path."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if wrong := differences(Path(sys.argv[1])):
    sys.exit("\n".join(wrong))
assert float((torch.ones(4, 4) @ torch.ones(4, 4)).sum()) == 64.0
print(f"as locked: torch {torch.__version__}, torchvision {torchvision.__version__}, CUDA {torch.version.cuda}")
