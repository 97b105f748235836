"""Decides which rank writes which part of a state. What differs between ranks is saved by rank.

Under DDP parameters and optimizers are equal on all ranks, but other things may differ: BatchNorm's statistics (always
for `broadcast_buffers=False`, else from a forward to the next), values that a script counts on each rank, an average
that only rank 0 keeps. A checksum tells. Equal tensors are written once, divided among the ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .objects import Key

_WORDS = 1 << 20
"""Maximum number of 64-bit words that are summed at once: more would need much memory beside the state."""
Sums = dict[Key, tuple[str, int]]
"""Maps the key of a tensor to a text that is the same for equal tensors, and to its bytes."""


def section_of(rank: int) -> str:
    """Return the section of a checkpoint for what only this rank has."""
    return f"rank{rank}"


def sums_of(tensors: Mapping[Key, Tensor]) -> Sums:
    """Return what tells whether ranks hold the same tensors. Tensors that are spread over ranks are left out."""
    plain = {key: tensor for key, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    found: Sums = {}
    by_device: dict[torch.device, list[tuple[Key, Tensor]]] = {}
    for key, tensor in plain.items():
        by_device.setdefault(tensor.device, []).append((key, _checksum(tensor)))
    for sums in by_device.values():
        numbers = torch.stack([one for _, one in sums]).tolist()  # waits for the device once
        for (key, _), number in zip(sums, numbers, strict=True):
            tensor = plain[key]
            found[key] = f"{tensor.dtype} {tuple(tensor.shape)} {number}", tensor.nbytes
    return found


def _checksum(tensor: Tensor) -> Tensor:
    """Return a number on the tensor's device that depends on every byte and its place."""
    flat = (
        tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0).view(torch.uint8)
    )
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    whole = len(flat) // 8 * 8
    words = flat[:whole].clone() if flat.storage_offset() % 8 else flat[:whole]
    for number, part in enumerate(words.view(torch.int64).split(_WORDS) if whole else ()):
        places = torch.arange(1, 2 * len(part), 2, device=tensor.device)  # odd, so that no bit of a word is lost
        total = total * 1_000_003 + (part * places).sum() + number
    for byte in (flat[whole:].to(torch.int64) + 1) if len(flat) > whole else ():
        total = total * 1_000_003 + byte
    return total


def digest_of(data: bytes) -> str:
    """Return what tells whether ranks have the same plain values."""
    return hashlib.sha256(data).hexdigest()


def owners(all_sums: Sequence[Sums]) -> tuple[dict[Key, int], list[set[Key]]]:
    """Return which rank writes which equal tensor, and for each rank the tensors that it writes as its own.

    Rank 0's own tensors are written under their plain names. Each equal tensor goes to the rank that has least to write
    so far, large ones first. Every rank computes the same.
    """
    first, loads = all_sums[0], [0] * len(all_sums)
    own = [{key for key, sum in sums.items() if first.get(key) != sum} for sums in all_sums]
    for rank, keys in enumerate(own):
        loads[rank] += sum(all_sums[rank][key][1] for key in keys)
    equal = {key for key, sum in first.items() if all(sums.get(key) == sum for sums in all_sums)}
    own[0] = first.keys() - equal
    loads[0] += sum(first[key][1] for key in own[0])
    found: dict[Key, int] = {}
    for key in sorted(equal, key=lambda key: (-first[key][1], key)):
        found[key] = loads.index(min(loads))
        loads[found[key]] += first[key][1]
    return found, own


def part_of(
    tensors: Mapping[Key, Tensor], rest: Tensor, *, rank: int, gathered: Sequence[tuple[Sums, str]]
) -> dict[str, Any]:  # fmt: skip
    """Return what a rank writes, as torch.distributed.checkpoint takes it.

    Args:
        rest: the plain values as bytes.
        gathered: sums of tensors, and the digest of the plain values, of all ranks.
    """
    equal, own = owners([sums for sums, _ in gathered])
    made: dict[str, Any] = {}
    for (section, name), tensor in tensors.items():
        key = section, name
        if isinstance(tensor, DTensor) or equal.get(key) == rank or (rank == 0 and key in own[0]):
            made.setdefault(section, {})[name] = tensor
        elif key in own[rank]:
            made.setdefault(section_of(rank), {})[f"{section}.{name}"] = tensor
    if rank == 0:
        made["rest"] = rest
    elif gathered[rank][1] != gathered[0][1]:
        made.setdefault(section_of(rank), {})["rest"] = rest
    return made
