"""Settings that make two processes compute the same bits, for training and for evaluation alone.

The number of threads is one of them, so it depends on nothing that varies from launch to launch, and is recorded in the
run's configuration, as that of loader processes is.
"""

from __future__ import annotations

import os
import re

import torch
from torch import nn

from train import cores
from train.config import Config
from train.parallel.torch_private import fix_compiler

_NONE = re.compile(r"(\S[^\n.]*?) does not have a deterministic implementation")
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_SMALL = 100_000
"""Parameters of a model that computes on one thread: several would wait for each other longer than they work."""
_MOST_LOADERS = 8
"""Loader processes that a rank takes by default: each holds some batches in shared memory."""


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
        if os.environ.get(_CUBLAS) != ":16:8":  # the other one of the two with which cuBLAS is deterministic
            os.environ[_CUBLAS] = ":4096:8"
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
    fix_compiler(config.compile, config.deterministic)


def refusal(error: BaseException) -> str:
    """The message for an operation that torch refuses because it is not deterministic; '' for all other errors."""
    found = _NONE.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return ""
    return (
        f"{found[1]} has no deterministic implementation on this device; use another operation, or start the run with "
        "--deterministic false: resumed, it is then not equal bit for bit"
    )


def share(ranks: int) -> int:
    """The cores that this process may use, over the ranks; at least 1."""
    return max(1, int(cores.usable() // ranks))


def loaders(ranks: int, device: torch.device, is_indexed_at_once: bool) -> int:
    """Loader processes of a rank, where the user set none.

    Args:
        is_indexed_at_once: whether a batch is one indexing of tensors, which costs less than another process.
    """
    if device.type == "cpu" or is_indexed_at_once:
        return 0
    return min(max(share(ranks) - 1, 1), _MOST_LOADERS)


def threads(ranks: int, device: torch.device, model: nn.Module) -> tuple[int, str]:
    """Threads of a rank, and why: by OMP_NUM_THREADS, else 1 for a small model, else its share of the cores."""
    wish = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wish.isdecimal() and 1 <= int(wish) <= 4096:
        return int(wish), "by OMP_NUM_THREADS"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if device.type == "cpu" and parameters < _SMALL:
        return 1, f"the model has {parameters:,} parameters; from {_SMALL:,} on it would be a share of the cores"
    return share(ranks), "a fair share of the cores"
