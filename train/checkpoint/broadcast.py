"""Broadcasts the training state of rank 0 to all others, which may have no folder or memory to read it from."""

from __future__ import annotations

import pickle

import torch
import torch.distributed as dist
from torch import nn

from train.checkpoint import serialize
from train.checkpoint.buffers import begin_of_tensors
from train.checkpoint.serialize import Content
from train.parallel.precision import Precision
from train.parallel.world import World

_PIECE = 64 << 20
"""Bytes that one broadcast sends."""


def broadcast_state(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """Give every rank the model, the optimizer and the loss scaling of rank 0, bit for bit. A collective.

    Needs host memory for one more copy of the state on each rank.
    """
    state = serialize.serialize(model, optimizer, precision, "", 0, "") if world.is_first else None
    plain, end = world.share((state.plain, state.end) if state is not None else None)
    start = begin_of_tensors(len(plain))
    memory = torch.empty(start + end, dtype=torch.uint8)
    if state is not None:
        state.copy_to(memory)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
    for piece in memory[start:].split(_PIECE) if end else ():
        dist.broadcast(piece, src=0, group=world.group)
    if state is None:
        content = Content(0, "", pickle.loads(plain)["state"], memory.numpy(), start)
        serialize.apply(content, model, optimizer, precision)
