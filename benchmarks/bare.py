"""The same training as in torch's tutorials: DDP, a DistributedSampler, and torch.save at an interval of steps.

torchrun --max-restarts 100 --nproc-per-node 2 benchmarks/bare.py FOLDER STEPS SAVE_EVERY cpu|cuda
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import perceptron

BATCH = 128


def main(folder: Path, steps: int, every: int, kind: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, saved = dist.get_rank(), folder / "snapshot.pt"
    torch.manual_seed(0)
    data = perceptron.Points()
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=0)
    loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=sampler, drop_last=True)
    model = perceptron.model(None).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    done = 0
    if saved.exists():
        state = torch.load(saved, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    spread = DistributedDataParallel(model)
    with (folder / "steps.log").open("a", buffering=1) as log:
        while done < steps:
            epoch, begun = divmod(done, len(loader))
            sampler.set_epoch(epoch)
            for batch in itertools.islice(loader, begun, min(len(loader), begun + steps - done)):
                optimizer.zero_grad()
                loss = perceptron.loss(spread, (batch[0].to(device), batch[1].to(device)))
                loss.backward()
                optimizer.step()
                done += 1
                if rank == 0:
                    loss.item()  # a step counts when it is made, not when the device was asked for it
                    log.write(f"{done}\n")
                    if done % every == 0:
                        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
                        torch.save(state, folder / "snapshot.tmp")
                        (folder / "snapshot.tmp").replace(saved)
    if rank == 0:
        digest = hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values()))
        (folder / "digest").write_text(digest.hexdigest())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
