"""Which sample is seen at which position: a keyed permutation, computed where it is needed.

`order(seed, epoch, positions, length)` is a pure function with O(1) memory and O(1) random access. So the order does
not depend on ranks, data workers or restarts, and resuming is arithmetic.

The permutation is an alternating Feistel network over the smallest 2^k >= length with cycle walking (Black and
Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): a value that falls outside the range is sent through
again until it falls inside, which takes fewer than two passes on average. The permutation shuffles; it does not
encrypt.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]

ROUNDS = 8
ROUNDS_FEW = 24
"""Number of rounds for up to 4096 samples. A round mixes little if a half has few bits: with 8 rounds, orders of five
samples were 0.7 to 1.6 times as frequent as they should be."""


_TABLE_BITS = 12
"""Maximum bits of an index for which hashes are looked up in tables: a half of these bits has 64 values."""


def seed_of(*parts: object) -> int:
    """Return a 64-bit seed from values with a stable text (numbers, names). It is the same on every machine."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def order(seed: int, epoch: int, positions: npt.ArrayLike, length: int) -> npt.NDArray[np.int64]:
    """Return the dataset indices at these positions of an epoch.

    Args:
        positions: integers in [0, length), any shape.
        length: number of samples in the dataset, at least 1.

    Returns:
        int64 array of the shape of `positions`; over all positions each index occurs exactly once.

    Raises:
        ValueError: a position is out of range.
    """
    where = np.asarray(positions, dtype=np.int64)
    if length < 1 or (where.size and (where.min() < 0 or where.max() >= length)):
        raise ValueError(f"positions must be in [0, {length})")
    bits = max(2, (length - 1).bit_length())
    kind: Any = np.uint32 if bits <= 32 else np.uint64
    rounds = ROUNDS_FEW if bits <= 12 else ROUNDS
    digest = hashlib.shake_128(f"order\0{seed}\0{epoch}\0{length}".encode()).digest(8 * rounds)
    keys = np.frombuffer(digest, dtype="<u8").astype(kind)
    if bits <= _TABLE_BITS:
        permute: Callable[[Values], Values] = functools.partial(_feistel_of_few, keys=keys, bits=bits)
        if 2 * where.size >= 1 << bits:  # all of them once, then walking is looking up
            permute = permute(np.arange(1 << bits)).take
    else:
        permute = functools.partial(_feistel, keys=keys, bits=bits)
    values = _walk(where.ravel().astype(kind), permute, length)
    return values.astype(np.int64).reshape(where.shape)


def uniform(seed: int, epoch: int, count: int) -> npt.NDArray[np.float64]:
    """Return numbers from [0, 1) for the first `count` positions of an epoch: those of the generator SplitMix64."""
    key = np.uint64(seed_of(seed, "uniform", epoch))
    mixed = _hash(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15), key)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _walk(values: Values, permute: Callable[[Values], Values], length: int) -> Values:
    """Permute, and send values outside the range through again."""
    values = permute(values)
    outside = np.flatnonzero(values >= length)
    while outside.size:
        again = permute(values[outside])
        values[outside] = again
        outside = outside[again >= length]
    return values


def _feistel(values: Values, keys: Values, bits: int) -> Values:
    """Permute [0, 2^bits): each round mixes one half of the bits with a hash of the other half."""
    kind = values.dtype.type
    low_bits = kind(bits // 2)
    low_mask, high_mask = kind((1 << (bits // 2)) - 1), kind((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for turn, key in enumerate(keys):
        if turn % 2:
            low ^= _hash(high, key) & low_mask
        else:
            high ^= _hash(low, key) & high_mask
    return (high << low_bits) | low


def _feistel_of_few(values: Values, keys: Values, bits: int) -> Values:
    """Do the same in a tenth of the time: a half of so few bits has few values, whose hashes are looked up.

    Halves are bytes, because bytes.translate looks up faster than NumPy.
    """
    low_bits, high_bits = bits // 2, bits - bits // 2
    hashes = _hash(np.arange(1 << high_bits, dtype=keys.dtype), keys[:, None])
    hashes[0::2] &= (1 << high_bits) - 1
    hashes[1::2] &= (1 << low_bits) - 1
    tables = np.zeros((len(keys), 256), dtype=np.uint8)
    tables[:, : 1 << high_bits] = hashes
    low, high = (values & ((1 << low_bits) - 1)).astype(np.uint8), (values >> low_bits).astype(np.uint8)
    for turn, table in enumerate(tables):
        source, target = (high, low) if turn % 2 else (low, high)
        target ^= np.frombuffer(source.tobytes().translate(table.tobytes()), np.uint8)
    return (high.astype(np.intp) << low_bits) | low


def _hash(values: Values, key: Any) -> Values:
    """Hash value + key with the finalizer of MurmurHash3 (32 bits) or SplitMix64 (64 bits): every bit depends on
    all."""
    kind = values.dtype.type
    mixed = values + key
    if kind is np.uint32:
        steps = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
    else:
        steps = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
    for shift, factor in steps:
        mixed ^= mixed >> kind(shift)
        if factor != 1:
            mixed *= kind(factor)
    return mixed
