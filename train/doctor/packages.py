"""Checks of Python packages: do their versions fit each other. Read from metadata, without importing torch."""

from __future__ import annotations

import dataclasses
import importlib.metadata as metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, not_applicable, ok, problem
from .machine import Machine

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the checkout."""
_LIBRARIES = ("libcudnn", "libcudart", "libcublas", "libnccl", "libcufft", "libcusparse")
"""Libraries in PyTorch's own wheels, which must not be loaded from elsewhere."""


@dataclasses.dataclass(frozen=True)
class Torch:
    """The installed torch."""

    version: str
    cuda: str | None
    """Version of CUDA that torch was built for; None: built without CUDA."""


def capabilities(cuda: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the lowest and highest compute capability for which PyTorch's wheel for this CUDA has kernels.

    Source: RELEASE.md of PyTorch, "Release Compatibility Matrix", for torch 2.7 and later: the wheels up to CUDA 12.6
    go from Maxwell (5.0) to Hopper (9.0), those from 12.8 on start at Turing (7.5) and have Blackwell (12.x).
    """
    numbers = tuple(int(part) for part in cuda.split(".")[:2])
    return ((7, 5), (12, 1)) if numbers >= (12, 8) else ((5, 0), (9, 0))


def folders() -> list[str]:
    """Return the package folders of this Python; of the checkout's .venv if this Python lacks torch."""
    if _version("torch", None) is not None:
        return list(sys.path)
    return [str(path) for path in sorted((ROOT / ".venv").glob("lib/python3*/site-packages"))]


def _version(name: str, where: list[str] | None) -> str | None:
    try:
        if where is None:
            return metadata.version(name)
        found = next(iter(metadata.distributions(name=name, path=where)), None)
        return None if found is None else found.version
    except metadata.PackageNotFoundError:
        return None


def torch_of() -> Torch | None:
    """Return the installed torch, read from torch/version.py, which its build writes."""
    where = folders()
    version = _version("torch", where)
    if version is None:
        return None
    for folder in where:
        try:
            text = (Path(folder) / "torch" / "version.py").read_text()
        except OSError:
            continue
        found = re.search(r"^cuda\b.*= *'([\d.]+)'", text, re.MULTILINE)
        return Torch(version, found.group(1) if found else None)
    return Torch(version, None)


def checks(machine: Machine) -> Iterator[Finding]:
    """Yield all checks of packages."""
    torch = torch_of()
    if torch is None:
        yield not_applicable("packages", "torch is not installed yet: make setup installs it; the image has it")
        return
    yield _cuda(machine, torch)
    yield _pair(torch)
    yield _library_path(machine)


def _cuda(machine: Machine, torch: Torch) -> Finding:
    if torch.cuda is None and machine.wants_gpus():
        seen = f"torch {torch.version} was built without CUDA and cannot use the GPUs"
        return problem("torch", seen, "make clean setup" if not machine.is_station else "make rebuild")
    return ok("torch", f"{torch.version}, {'CUDA ' + torch.cuda if torch.cuda else 'built without CUDA'}")


def _pair(torch: Torch) -> Finding:
    """Check that torchvision 0.(N+15) is used with torch 2.N (README of torchvision, table of versions)."""
    vision = _version("torchvision", folders())
    if vision is None:
        return not_applicable("torchvision", "not installed; only the task images needs it")
    mine, theirs = re.match(r"2\.(\d+)", torch.version), re.match(r"0\.(\d+)", vision)
    if mine and theirs and int(theirs.group(1)) != int(mine.group(1)) + 15:
        fitting = f"0.{int(mine.group(1)) + 15}"
        seen = f"{vision} does not fit torch {torch.version}, which needs {fitting}"
        return problem("torchvision", seen, f"pip install 'torchvision=={fitting}.*'")
    return ok("torchvision", vision)


def _library_path(machine: Machine) -> Finding:
    """Check that LD_LIBRARY_PATH does not replace the CUDA libraries in PyTorch's wheels.

    It takes precedence over the paths by which the wheels' libraries find each other (RUNPATH; ld.so(8)).
    """
    traps = []
    for folder in filter(None, machine.environ.get("LD_LIBRARY_PATH", "").split(":")):
        names = {name.split(".so")[0] for name in machine.list(folder) if ".so" in name and name.startswith(_LIBRARIES)}
        if names:
            traps.append(f"{folder} ({', '.join(sorted(names))})")
    if traps:
        seen = f"replaces torch's own CUDA libraries by those in {'; '.join(traps)}"
        if "libcudnn" in seen:
            seen += ": two cuDNNs"
        return problem("LD_LIBRARY_PATH", seen, "unset LD_LIBRARY_PATH")
    return ok("LD_LIBRARY_PATH", "does not replace torch's own libraries")
