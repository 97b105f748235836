"""The training of bare.py in a session: no sampler, no torch.save, no resume of its own.

train launch --script benchmarks/in_session.py --nproc 2 -- STEPS SAVE_EVERY cpu|cuda
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trainstation as ts

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import bare, perceptron


def main(steps: int, every: int, kind: str) -> None:
    session = ts.session(seed=0, save_every=every)  # type: ignore[attr-defined] # it fills itself
    torch.set_num_threads(1)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    loader = session.loader(perceptron.Points(), batch_size=bare.BATCH, device=device)
    model = perceptron.model(None).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    spread = DistributedDataParallel(model)
    session.register(model=spread, optimizer=optimizer)
    for batch in session.batches(loader, steps=steps):
        optimizer.zero_grad()
        loss = perceptron.loss(spread, batch)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    session.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
