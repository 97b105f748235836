"""nn.DataParallel on several GPUs: what its threads compute in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gpu.harness import FAILED, OK, Row
from train.config import Config
from train.parallel.precision import Precision
from train.parallel.single import DataParallel
from train.parallel.world import World


def what(gpus: int) -> str:
    return f"dp on {gpus} GPUs: the type of each replica"


def types(gpus: int) -> Row:
    """In each precision every replica, which is a thread of its own, computes in the type of the run."""
    found = {precision: _seen(precision, gpus) for precision in ("fp32", "bf16", "fp16")}
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    is_right = all(found[name] == {(gpu, kind) for gpu in range(gpus)} for name, kind in expected.items())
    said = "; ".join(f"{name}: {_words(found[name])}" for name in found if not is_right)
    return Row(what(gpus), said or "the run's", OK if is_right else FAILED)


def _seen(precision: str, gpus: int) -> set[tuple[int, torch.dtype]]:
    """The GPUs that made a part of a forward's output, each with the type that it made."""
    device, seen = torch.device("cuda", 0), set[tuple[int, torch.dtype]]()
    arithmetic = Precision(precision, device)
    strategy = DataParallel(World(0, 1, 0, device), Config(), arithmetic)
    model = nn.Sequential(nn.Linear(8, 8))
    strategy.place(model)

    def look(_: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        seen.add((output.get_device(), output.dtype))

    model[0].register_forward_hook(look)  # replicas share it
    with arithmetic.autocast():
        value = strategy.compute(lambda replicas: replicas(torch.ones(4 * gpus, 8, device=device)).float().mean())
    strategy.backward(value, 1.0, None)
    return seen


def _words(seen: set[tuple[int, torch.dtype]]) -> str:
    return ", ".join(f"GPU {gpu} {kind}" for gpu, kind in sorted(seen, key=str))
