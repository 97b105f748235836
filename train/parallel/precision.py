"""The precisions fp64, fp32, tf32, bf16 and fp16: the type of weights and inputs, autocast, and loss scaling."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import torch

from train.errors import Refused
from train.parallel.torch_private import scaler_state

_NOTHING = contextlib.nullcontext()
# by torch 2.9 and 2.10, of the older of the two ways to say one thing that `allow_tf32` uses
warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32 behavior")

ON_GPU_ALONE = {"fp16": "bf16 or fp32", "tf32": "fp32"}
"""Maps a precision that a CPU does not have to its replacement. Weights are fp32 in both."""


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
    of 10 bits, in matrix products and convolutions; fp32 does so in neither (torch would in convolutions). bf16 and
    fp16 are autocast over fp32 weights; fp16 scales the loss so that small gradients do not become 0 (Micikevicius et
    al., "Mixed Precision Training", 2018).

    Raises:
        Refused: this device cannot do it.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name in ON_GPU_ALONE and device.type != "cuda":
            raise Refused(f"precision {name} needs a GPU; on a CPU use --precision {ON_GPU_ALONE[name]}")
        if device.type == "cuda":
            allow_tf32(name == "tf32")
        self.device = device
        self.weights = torch.float64 if name == "fp64" else torch.float32
        self.inputs = torch.float64 if name == "fp64" else None
        self._autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        if name == "fp16":  # it asks whether there is a GPU: without opening one, for workers are yet to be forked
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self.scaler = torch.amp.GradScaler("cuda") if name == "fp16" else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if self._autocast is None:
            return _NOTHING
        return torch.autocast(self.device.type, dtype=self._autocast)

    def scaling(self) -> dict[str, Any] | None:
        """Return `scaler.state_dict()` with tensors where it would wait for the device; None without a scaler."""
        return None if self.scaler is None else scaler_state(self.scaler)
