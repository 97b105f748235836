"""The loops that ours is measured against: what one writes by hand for the same model, data and settings, and no more.

No metrics, no checkpoint, no schedule, nothing that counts or looks. Batches come by torch's DataLoader, indexed once
a batch, from pinned memory, without waiting.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from train.parallel.precision import allow_tf32
from train.parallel.torch_private import choose_kernels_without_timing

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def loop(task_name: str, flags: dict[str, Any], is_over: Callable[[], bool]) -> None:
    """Train until it is over; the flags are those of `train run`.

    Of them it knows: device, batch_size, precision, channels_last, compile, deterministic, cpu_threads,
    optim.{name,lr}, task.*.
    """
    task = importlib.import_module(f"tests.gpu.tasks.{task_name}")
    own = {name.removeprefix("task."): value for name, value in flags.items() if name.startswith("task.")}
    config = types.SimpleNamespace(task=task.Settings(**own))
    device, precision = torch.device(flags["device"]), flags.get("precision", "fp32")
    set_arithmetic(flags, precision, device)
    torch.manual_seed(0)
    dataset = task.datasets(config)[0]
    model: nn.Module = task.model(config)
    layout = torch.preserve_format
    if flags.get("channels_last") == "true":
        layout = torch.channels_last
        model.to(memory_format=layout)  # type: ignore[call-overload]
    model.to(device).train()
    options: dict[str, Any] = {"fused": True} if device.type == "cuda" else {}
    kind = torch.optim.SGD if flags["optim.name"] == "sgd" else torch.optim.AdamW
    if kind is torch.optim.SGD:
        options["momentum"] = 0.9
    optimizer = kind(model.parameters(), lr=flags["optim.lr"], weight_decay=0.01, **options)
    scaler = torch.amp.GradScaler("cuda") if precision == "fp16" else None
    if flags.get("compile") == "true":
        if flags.get("deterministic", "true") == "true":  # or the one that is compiled first would decide for both
            choose_kernels_without_timing()
        model.compile(dynamic=False)
    batches = _batches(dataset, flags["batch_size"], device)
    while not is_over():
        batch = [_moved(tensor, device, layout) for tensor in next(batches)]
        with autocast(precision, device):
            loss = task.loss(model, batch)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize()


def set_arithmetic(flags: dict[str, Any], precision: str, device: torch.device) -> None:
    if "cpu_threads" in flags:
        torch.set_num_threads(flags["cpu_threads"])
    is_exact = flags.get("deterministic", "true") == "true"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(is_exact)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not is_exact
    if device.type == "cuda":
        allow_tf32(precision == "tf32")


def _batches(dataset: Any, size: int, device: torch.device) -> Iterator[Any]:
    sampler = BatchSampler(RandomSampler(dataset), size, drop_last=True)
    loader = DataLoader(dataset, sampler=sampler, batch_size=None, pin_memory=device.type == "cuda")
    while True:
        yield from loader


def _moved(tensor: Tensor, device: torch.device, layout: torch.memory_format) -> Tensor:
    return tensor.to(device, non_blocking=True, memory_format=layout if tensor.dim() == 4 else torch.preserve_format)


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if precision not in _TYPES:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_TYPES[precision])
