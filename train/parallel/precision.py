"""fp64, fp32, tf32, bf16, fp16: the type of weights and inputs, autocast, and loss scaling."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from train.errors import Refused

_NOTHING = contextlib.nullcontext()


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
        if name == "fp16" and device.type != "cuda":
            raise Refused("precision fp16 needs a GPU; on a CPU use --precision bf16 or fp32")
        if name == "tf32" and device.type != "cuda":
            raise Refused("precision tf32 needs a GPU; on a CPU use --precision fp32")
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
        self.device = device
        self.weights = torch.float64 if name == "fp64" else torch.float32
        self.inputs = torch.float64 if name == "fp64" else None
        self._autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        if name == "fp16":  # it asks whether there is a GPU: without opening one, for workers are yet to be forked
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self.scaler = torch.amp.GradScaler("cuda") if name == "fp16" else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward pass."""
        if self._autocast is None:
            return _NOTHING
        return torch.autocast(self.device.type, dtype=self._autocast)
