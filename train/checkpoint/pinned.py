"""Host memory of ours that a GPU copies to by itself: page-locked, as a whole, for as long as it is needed."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor


def lay_open(memory: mmap.mmap) -> Tensor:
    """Memory as bytes (uint8, of its size), and out of reach of processes that are forked from now on: a fork would
    make pages that a GPU writes to somebody else's."""
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def pin(flat: Tensor, device: torch.device) -> int:
    """Lock it for this GPU, which becomes the thread's. Returns CUDA's error, 0 for none: without, copies wait for the
    device and come to the same."""
    torch.cuda.set_device(device)
    code = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0))
    if code:
        # CUDA keeps the error until this thread asks for its last one, as torch does after a kernel: after this one
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=device).fill_(0)
    return code


def unpin(address: int, device: torch.device) -> None:
    """Let go what lies there, locked for this GPU, which becomes the thread's: a new one would open the first."""
    torch.cuda.set_device(device)
    torch.cuda.cudart().cudaHostUnregister(address)
