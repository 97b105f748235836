"""The device of each rank, whether this torch has kernels for it, and how NCCL is set up on it."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, MutableMapping, Sequence

import torch

from .. import gpus
from ..config import Config
from ..errors import Refused
from ..gpus import Card
from .torch_private import cuda_architectures, grow_segments, is_in_bad_fork

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables of torch's allocator: the name since torch 2.9, and older names."""


class NoGPU(Refused):
    """A GPU is needed and there is none now. There may be one later."""


def pick_device(config: Config, ranks_here: int, local_rank: int) -> torch.device:
    """Return the device of a rank. Counts GPUs without opening one, so the process may still fork.

    Raises:
        NoGPU: a GPU is needed and there is none.
        Refused: there are more ranks than GPUs.
    """
    count = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and count == 0:
        raise NoGPU(
            f"device cuda needs a GPU, but torch sees none here{_by_choice()}; leave out --device, or see nvidia-smi"
        )
    if count == 0:
        return torch.device("cpu")
    if ranks_here > count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = f", or others than {visible}: --gpus" if visible else ""
        raise Refused(
            f"{ranks_here} ranks need {ranks_here} GPUs, but {count} are usable here; use --nproc {count}{chosen}"
        )
    return torch.device("cuda", local_rank)


def _by_choice() -> str:
    """Return a hint that a variable may hide the GPUs: torch ignores all ids after the first one that it cannot
    read."""
    visible = os.environ.get(gpus.VISIBLE)
    return "" if visible is None else f", and {gpus.VISIBLE} is {visible!r}: unset it, or name GPUs of this machine"


def take_device(device: torch.device) -> None:
    """Make a GPU this process's current device.

    Raises:
        Refused: this torch has no kernels for it.
    """
    if device.type == "cuda":
        gpus.number_by_bus()
        if grows_segments(os.environ, platform.release()):
            grow_segments()
        torch.cuda.set_device(device)
        card = torch.cuda.get_device_properties(device)
        check_kernels([Card(card.name, (card.major, card.minor))])


def grows_segments(environ: Mapping[str, str], kernel: str) -> bool:
    """Whether torch's allocator of GPU memory is to grow its segments (expandable_segments).

    Sizes that change from step to step then leave no gaps. The user's own settings of the allocator stay. The driver's
    calls for it fail under WSL and on Tegra boards, and for MIG slices torch asks NVML what it may not answer.

    Args:
        kernel: The release of the kernel.
    """
    is_set = any(name in environ for name in _ALLOCATOR)
    is_slice = "MIG-" in environ.get(gpus.VISIBLE, "")
    return not (is_set or is_slice or any(name in kernel.lower() for name in ("microsoft", "tegra")))


def check_fork() -> None:
    """Check that this process, and so its siblings that become ranks, can use a GPU.

    Raises:
        Refused: the process that forks them has used CUDA, though it holds no GPU.
    """
    if is_in_bad_fork():
        raise Refused(
            "the process that forks the ranks has asked CUDA for GPUs, and its forks cannot use them; find what Python "
            "imports at its start, or set PYTORCH_NVML_BASED_CUDA_CHECK=1"
        )


def check_kernels(cards: Sequence[Card], architectures: Sequence[str] | None = None) -> None:
    """Check that a run can compute on these cards. Without kernels the first operation would fail, minutes later.

    Args:
        architectures: for which there is code; None: those of this torch.

    Raises:
        Refused: torch has kernels for none of them. If it has kernels for some, each rank checks its own card.
    """
    known = cuda_architectures() if architectures is None else architectures
    if not known or not cards or any(has_kernels(card.capability, known) for card in cards):
        return
    card = cards[0]
    version = ".".join(map(str, card.capability))
    raise Refused(
        f"torch {torch.__version__} has no kernels for {card.name} (compute capability {version}; it has "
        f"{', '.join(known)}); install a torch built for it (pytorch.org lists builds by CUDA version), "
        "or use --device cpu"
    )


def has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether code for these architectures runs on a card of this capability.

    Machine code (sm_XY) runs on cards of the same major version and at least its minor one; PTX (compute_XY) is
    compiled for any newer card; code with a letter (sm_90a) runs on that very card alone (CUDA C++ Programming Guide,
    "Application Compatibility").
    """
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if match is not None:
            built_for = (int(match[2]), int(match[3]))
            is_taken_by_newer = not match[4] and (match[1] == "compute" or built_for[0] == capability[0])
            if built_for == capability or (is_taken_by_newer and built_for < capability):
                return True
    return False


def prepare_nccl(deterministic: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set NCCL's environment variables before the first communicator. Those that the user has set stay.

    NVLS adds inside the NVLink switch, in an order that may differ from call to call; rings and trees have a fixed one.
    Host memory by cuMem (on by default since NCCL 2.24) needs NUMA system calls that Docker's seccomp profile refuses;
    without it NCCL takes /dev/shm, as all versions before did (NCCL's documentation, NCCL_CUMEM_HOST_ENABLE).
    """
    if deterministic:
        environ.setdefault("NCCL_NVLS_ENABLE", "0")
    environ.setdefault("NCCL_CUMEM_HOST_ENABLE", "0")
