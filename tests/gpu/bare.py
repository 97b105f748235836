"""The loop that ours is measured against: what one writes by hand for the same model, data and settings, and no more.

No metrics, no checkpoint, no schedule, nothing that counts or looks. Batches come by torch's DataLoader, indexed once
a batch, from pinned memory, without waiting.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from train.parallel.precision import allow_tf32
from train.parallel.torch_private import choose_kernels_without_timing


def loop(task_name: str, flags: dict[str, Any], is_over: Callable[[], bool]) -> None:
    """Train until it is over; the flags are those of `train run`, deterministic as it is by default.

    In bf16; of them it knows: device, batch_size, channels_last, compile, cpu_threads, optim.{name,lr}, task.*.
    """
    device = torch.device(flags["device"])
    if "cpu_threads" in flags:
        torch.set_num_threads(flags["cpu_threads"])
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    if device.type == "cuda":
        allow_tf32(False)
    torch.manual_seed(0)
    task = importlib.import_module(f"tests.gpu.tasks.{task_name}")
    own = {name.removeprefix("task."): value for name, value in flags.items() if name.startswith("task.")}
    config = types.SimpleNamespace(task=task.Settings(**own))
    dataset, model = task.datasets(config)[0], task.model(config)
    layout = torch.preserve_format
    if flags.get("channels_last") == "true":
        layout = torch.channels_last
        model.to(memory_format=layout)
    model.to(device).train()
    options: dict[str, Any] = {"fused": True} if device.type == "cuda" else {}
    kind = torch.optim.SGD if flags["optim.name"] == "sgd" else torch.optim.AdamW
    if kind is torch.optim.SGD:
        options["momentum"] = 0.9
    optimizer = kind(model.parameters(), lr=flags["optim.lr"], weight_decay=0.01, **options)
    if flags["compile"] == "true":
        choose_kernels_without_timing()  # or the one that is compiled first would decide for both
        model.compile(dynamic=False)
    batches = _batches(dataset, flags["batch_size"], device)
    while not is_over():
        batch = [_moved(tensor, device, layout) for tensor in next(batches)]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _batches(dataset: Any, size: int, device: torch.device) -> Iterator[Any]:
    sampler = BatchSampler(RandomSampler(dataset), size, drop_last=True)
    loader = DataLoader(dataset, sampler=sampler, batch_size=None, pin_memory=device.type == "cuda")
    while True:
        yield from loader


def _moved(tensor: Tensor, device: torch.device, layout: torch.memory_format) -> Tensor:
    return tensor.to(device, non_blocking=True, memory_format=layout if tensor.dim() == 4 else torch.preserve_format)
