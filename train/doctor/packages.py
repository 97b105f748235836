"""Python packages and libraries: do versions fit each other. Read from metadata; torch is not imported."""

from __future__ import annotations

import dataclasses
import importlib.metadata as metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from train.doctor.finding import Finding, not_applicable, ok, problem
from train.doctor.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""
_LIBRARIES = ("libcudnn", "libcudart", "libcublas", "libnccl", "libcufft", "libcusparse")
"""What comes in PyTorch's own wheels, and must not come from elsewhere."""


@dataclasses.dataclass(frozen=True)
class Torch:
    """The installed torch."""

    version: str
    cuda: str | None
    """The CUDA that it was built for; None: a build without."""


def capabilities(cuda: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The lowest and the highest compute capability that PyTorch's wheel for this CUDA has kernels for.

    From RELEASE.md of PyTorch, "Release Compatibility Matrix", for torch 2.7 and later: the wheels up to CUDA 12.6 go
    from Maxwell (5.0) to Hopper (9.0), those from 12.8 on start at Turing (7.5) and have Blackwell (12.x).
    """
    numbers = tuple(int(part) for part in cuda.split(".")[:2])
    return ((7, 5), (12, 1)) if numbers >= (12, 8) else ((5, 0), (9, 0))


def folders() -> list[str]:
    """Where packages are: of this Python; on a host that has not got torch itself, of the checkout's .venv."""
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
    """The installed torch, from the file that its build writes (torch/version.py)."""
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
    """All checks of packages."""
    torch = torch_of()
    if torch is None:
        yield not_applicable("packages", "torch is not installed yet: make setup does it, or the image has it")
        return
    yield _cuda(machine, torch)
    yield _pair(torch)
    yield _library_path(machine)


def _cuda(machine: Machine, torch: Torch) -> Finding:
    if torch.cuda is None and machine.wants_gpus():
        seen = f"torch {torch.version} was built without CUDA, and would leave the GPUs idle"
        return problem("torch", seen, "make clean setup" if not machine.is_station else "make rebuild")
    return ok("torch", f"{torch.version}, {'CUDA ' + torch.cuda if torch.cuda else 'a build without CUDA'}")


def _pair(torch: Torch) -> Finding:
    """torchvision 0.(N+15) is built for torch 2.N (README of torchvision, table of versions)."""
    vision = _version("torchvision", folders())
    if vision is None:
        return not_applicable("torchvision", "not installed; the task images needs it")
    mine, theirs = re.match(r"2\.(\d+)", torch.version), re.match(r"0\.(\d+)", vision)
    if mine and theirs and int(theirs.group(1)) != int(mine.group(1)) + 15:
        fitting = f"0.{int(mine.group(1)) + 15}"
        seen = f"{vision} is built for another torch than {torch.version}: {fitting} is the one that fits"
        return problem("torchvision", seen, f"pip install 'torchvision=={fitting}.*'")
    return ok("torchvision", vision)


def _library_path(machine: Machine) -> Finding:
    """Libraries of CUDA that would be loaded instead of those in PyTorch's wheels.

    LD_LIBRARY_PATH beats the paths that the wheels' libraries find each other by (RUNPATH; ld.so(8)).
    """
    traps = []
    for folder in filter(None, machine.environ.get("LD_LIBRARY_PATH", "").split(":")):
        names = {name.split(".so")[0] for name in machine.list(folder) if ".so" in name and name.startswith(_LIBRARIES)}
        if names:
            traps.append(f"{folder} ({', '.join(sorted(names))})")
    if traps:
        seen = f"takes CUDA's libraries from {'; '.join(traps)}, instead of those that torch was built with"
        if "libcudnn" in seen:
            seen += ": two cuDNNs"
        return problem("LD_LIBRARY_PATH", seen, "unset LD_LIBRARY_PATH")
    return ok("LD_LIBRARY_PATH", "takes nothing from beside torch's own libraries")
