"""Settings of torch that make two processes compute the same bits, for training and for evaluation alone."""

from __future__ import annotations

import os
import re
import sys

import torch
from torch import nn

from train.config import Config

_NONE = re.compile(r"(\S[^\n.]*?) does not have a deterministic implementation")
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def fix(config: Config) -> None:
    """Set this process's arithmetic as the configuration says. Before a device is touched: cuBLAS reads it then.

    Deterministic is strict. With warnings alone torch would not change the backward of attention, in all three of its
    fast kernels; strict, it fixes the order in two of them and avoids the third, cuDNN's (2.7.1:
    ATen/native/transformers/cuda). An operation without a deterministic way raises; `refusal` says what to do then.
    """
    assert config.cpu_threads is not None
    torch.set_num_threads(config.cpu_threads)
    torch.use_deterministic_algorithms(config.deterministic)
    # the fastest algorithm by trial may be another one in the next process
    torch.backends.cudnn.benchmark = not config.deterministic
    if config.deterministic:
        os.environ.setdefault(_CUBLAS, ":4096:8")
        # filling every empty tensor with NaN, to find reads of it, takes a tenth of the time and changes no result
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def lay_out(model: nn.Module, config: Config) -> nn.Module:
    """The same model, its weights laid out in memory as the configuration says."""
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def compile_as_asked(model: nn.Module, config: Config) -> None:
    """Compile a model in place, if that is wanted. Call it once the model is on its device, with its first weights."""
    if config.compile:
        model.compile(dynamic=False)
    if "torch._dynamo" in sys.modules:  # a task may compile functions, and parts in place
        # one graph a shape: torch would make one for any shape once it has seen two, and a resume may see others first
        torch._dynamo.config.automatic_dynamic_shapes = False
        # beyond torch's limit (8) shapes are not compiled, and which ones would depend on where an attempt began
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1 << 16
    if config.deterministic and (config.compile or "torch._inductor.config" in sys.modules):
        decide_without_timing()


def decide_without_timing() -> None:
    """Stop torch's compiler from choosing kernels by their time: the next process would choose others.

    The compiler follows torch's deterministic mode only in part. `dynamic_scale_rblock` tries sums in blocks of half
    the size, which adds in another order; `shape_padding` tries matrices with zeros added (2.7.1: _inductor/runtime/
    triton_heuristics.py, fx_passes/pad_mm.py). From 2.9 on one switch covers all of that.
    """
    from torch._inductor import config as inductor  # not loaded where nothing is compiled

    for name, value in {"dynamic_scale_rblock": False, "shape_padding": False, "deterministic": True}.items():
        if hasattr(inductor, name):
            setattr(inductor, name, value)


def refusal(error: BaseException) -> str:
    """The message for an operation that torch refuses because it is not deterministic; '' for all other errors."""
    text = str(error)
    if not isinstance(error, RuntimeError):
        return ""
    found = _NONE.search(text)
    if found:
        what = f"{found[1]} has no deterministic implementation on this device; use another operation"
    elif _CUBLAS in text and "not deterministic" in text:
        what = f"cuBLAS is not deterministic with {_CUBLAS}={os.environ.get(_CUBLAS, '')}; unset it"
    else:
        return ""
    return f"{what}, or start the run with --deterministic false: resumed, it is then not equal bit for bit"
