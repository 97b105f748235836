"""Model FLOP utilisation: the share of a GPU's peak that forward and backward use.

As in Chowdhery et al., "PaLM", 2022, appendix B; of matrix products, convolutions and attention, as torch counts them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from .. import gpus
from ..config import Config
from ..data.plan import Plan, Sharing
from ..parallel.world import World

_PEAKS = {
    "H200": (989, 495, 67), "H100": (989, 495, 67), "H100 NVL": (835, 417, 60), "H100 PCIe": (756, 378, 51),
    "H800": (989, 495, 67), "H800 PCIe": (756, 378, 51), "H20": (148, 74, 44), "A100": (312, 156, 19.5),
    "A800": (312, 156, 19.5), "A40": (149.7, 74.8, 37.4), "A10": (125, 62.5, 31.2), "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5), "L20": (119.5, 59.8, 59.8), "L4": (121, 60, 30.3), "RTX 4090": (165, 82.6, 82.6),
    "RTX 4090 D": (147, 73.5, 73.5), "RTX 3090": (71, 35.6, 35.6),
}  # fmt: skip
"""TFLOP/s without sparsity, of bf16 and fp16 (sums in fp32), tf32 and fp32, by words of the name that NVML gives a GPU.

From NVIDIA's data sheets of these cards, and its white papers of GA102 and Ada. The H800 and A800 compute as the H100
and A100 do, except in fp64. RTX 4090 D: 114 SMs at 2.52 GHz, by the white paper's operations per SM and cycle.
"""
_VARIANTS = {"3e", "D", "Laptop", "Max", "NVL", "Ti"}
"""Words that make another card of a known one. Its peak is unknown unless a key of _PEAKS has the word."""
_COLUMNS = {"bf16": 0, "fp16": 0, "tf32": 1, "fp32": 2}


def peak(name: str, precision: str) -> float:
    """Return the peak FLOP/s of a GPU; 0 if unknown."""
    words = set(re.findall(r"\w+", name))
    found = max((key.split() for key in _PEAKS if words.issuperset(key.split())), key=len, default=[])
    if precision not in _COLUMNS or not found or words & _VARIANTS - set(found):
        return 0.0
    return _PEAKS[" ".join(found)][_COLUMNS[precision]] * 1e12


def flops_of(config: Config, world: World) -> Flops | None:
    """Return the FLOP counter of rank 0; None if a count would mean nothing: compiled, with recompute, on unknown
    GPUs."""
    counts_all = world.device.type == "cuda" and not config.compile and not config.parallel.recompute
    if not (config.log.mfu and world.is_first and counts_all):
        return None
    found = peak(next((card.name for card in gpus.seen_here()), ""), config.precision)
    return Flops(found * world.size) if found else None


class Flops:
    """Compares the FLOPs that a sample costs on this rank with what all ranks could compute."""

    def __init__(self, peak: float) -> None:
        self._peak, self._of_sample = peak, 0.0

    @contextlib.contextmanager
    def counting(self, plan: Plan, sharing: Sharing, step: int) -> Iterator[None]:
        """Context manager around a step (counted from 0) that counts its FLOPs."""
        from torch.utils.flop_counter import FlopCounterMode

        spans = (plan.span(number, plan.samples(step)) for number, _ in sharing.computed(plan.micro_batches(step)))
        own = sum(high - low for low, high in spans)
        with FlopCounterMode(display=False) as counter:
            yield
        self._of_sample = counter.get_total_flops() / own

    def utilisation(self, samples_per_s: float) -> float:
        """Return the share of the GPUs' peak that is used, from 0 to 1."""
        return self._of_sample * samples_per_s / self._peak
