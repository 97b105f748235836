"""The precisions fp64, fp32, tf32, bf16 and fp16: the type of weights and inputs, autocast, and loss scaling."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ..config import Config
from ..errors import Refused
from ..gpus import Card
from .torch_private import scaler_state

_NOTHING = contextlib.nullcontext()
# by torch 2.9 and 2.10, of the older of the two ways to say one thing that `allow_tf32` uses
warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32 behavior")

ON_GPU_ALONE = ("fp16", "tf32")
"""Precisions that a CPU does not have. Weights are fp32 in both."""
_HAS_TF32 = (8, 0)
"""Lowest compute capability of GPUs that have TF32 and bf16."""


def auto(device: torch.device, cards: Sequence[Card]) -> tuple[str, str]:
    """Return the precision of a run whose user has chosen none, and a line about it; '' on a CPU.

    Args:
        cards: The GPUs of all ranks; empty: unknown.
    """
    if device.type != "cuda":
        return "fp32", ""
    if not cards:
        return "fp32", (
            "precision fp32, because NVML does not know the GPUs; on compute capability 8.0 and newer --precision tf32 "
            "and bf16 are faster"
        )
    lowest = min(cards, key=lambda card: card.capability)
    has = f"{lowest.name} has compute capability {_version(lowest.capability)}"
    if lowest.capability < _HAS_TF32:
        return "fp32", f"precision fp32, because {has}, and tf32 needs {_version(_HAS_TF32)}"
    return "tf32", f"precision tf32, because {has}; --precision bf16 is faster still, --precision fp32 is more exact"


def lacks_tf32(device: torch.device, cards: Sequence[Card]) -> str:
    """Return what TF32 needs and these devices lack; '' if they have TF32, or if the cards are unknown."""
    if device.type != "cuda":
        return "a GPU"
    lowest = min(cards, key=lambda card: card.capability, default=None)
    if lowest is None or lowest.capability >= _HAS_TF32:
        return ""
    needed, has = _version(_HAS_TF32), _version(lowest.capability)
    return f"a GPU of compute capability {needed} or newer, and {lowest.name} has {has}"


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def allow_tf32(is_allowed: bool) -> None:
    """Set whether a GPU computes fp32 products with a mantissa of 10 bits, in matrix products and convolutions.

    From 2.9 on torch has two settings for this, and we use both, the older one first. The older one alone does not
    cover convolutions, which then follow what a task may have set for everything. With the newer one alone, torch's own
    readers of the older one (its compiler, for example) raise an error for the contradiction.
    """
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    cuda.matmul.allow_tf32 = cudnn.allow_tf32 = is_allowed
    if hasattr(torch.backends, "fp32_precision"):
        places: tuple[Any, ...] = (cudnn, cuda.matmul, cudnn.conv, cudnn.rnn)  # type: ignore[attr-defined]
        for place in places:
            place.fp32_precision = "tf32" if is_allowed else "ieee"


class Precision:
    """The arithmetic of a run on one device.

    fp64 and fp32 are the type of weights and inputs alike. tf32 is fp32 whose products a GPU computes with a mantissa
    of 10 bits, in matrix products and convolutions; fp32 does so in neither (torch would in convolutions). A device
    without TF32 computes such a run in fp32. bf16 and fp16 are autocast over fp32 weights, which fsdp gathers in the
    type of the products (fsdp.py); fp16 scales the loss so that small gradients do not become 0 (Micikevicius et al.,
    "Mixed Precision Training", 2018).

    Args:
        name: One of the field's values except auto, which the launch has replaced.

    Raises:
        Refused: this device cannot do it.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        assert name != "auto"
        if name == "fp16" and device.type != "cuda":
            raise Refused("precision fp16 needs a GPU; on a CPU use --precision bf16 or fp32")
        if device.type == "cuda":
            allow_tf32(name == "tf32")
        self.device = device
        self.weights = torch.float64 if name == "fp64" else torch.float32
        self.inputs = torch.float64 if name == "fp64" else None
        self.products = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        """The type of matrix products and convolutions if it differs from that of the weights."""
        if name == "fp16":  # it asks whether there is a GPU: without opening one, for workers are yet to be forked
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self.scaler = torch.amp.GradScaler("cuda") if name == "fp16" else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if self.products is None:
            return _NOTHING
        return torch.autocast(self.device.type, dtype=self.products)

    def scaling(self) -> dict[str, Any] | None:
        """Return `scaler.state_dict()` with tensors where it would wait for the device; None without a scaler."""
        return None if self.scaler is None else scaler_state(self.scaler)


def precision_on(device: torch.device, config: Config) -> str:
    """Return the precision to compute with on a device: fp32 on a CPU for precisions that only GPUs have."""
    return "fp32" if device.type == "cpu" and config.precision in ON_GPU_ALONE else config.precision


def cpu_precision(config: Config) -> Precision:
    """Return the precision with which a CPU computes this run."""
    cpu = torch.device("cpu")
    return Precision(precision_on(cpu, config), cpu)
