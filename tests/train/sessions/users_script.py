"""A training script as a user writes one, with a session: what can differ after a kill is all in it.

    users_script.py FOLDER EPOCHS PAUSE

Dropout and BatchNorm, augmentation in data workers, bf16, GradScaler, OneCycle, an average of the weights, accumulation
with a short last update, clipping, an early-stop counter, and work at the end of an epoch. Runs under `train launch
--script` on any number of ranks that divides 12. FOLDER gets `epochs.txt`: a line each time an epoch's end is worked.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import trainstation as ts

BATCHES, BATCH_SIZE, ACCUMULATED, PATIENCE = 11, 12, 2, 2


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of 4 kinds; those to train with are changed at random, by each of the generators that people use."""

    def __init__(self, count: int, is_augmented: bool) -> None:
        self.labels = torch.arange(count) % 4
        self.pictures = torch.randn(count, 1, 8, 8) + self.labels[:, None, None, None]
        self.is_augmented = is_augmented

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = self.pictures[index]
        if self.is_augmented:
            picture = picture + 0.3 * torch.randn(8, 8) + float(np.random.normal(0, 0.1))
            picture = picture.flip(-1) if random.random() < 0.5 else picture
        return picture, int(self.labels[index])


def main(folder: Path, epochs: int, pause: float) -> None:
    session = ts.session(seed=3, save_every=5)  # 11 batches are 6 updates: always in the middle of an epoch
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" not in os.environ:  # for plain `python`, as many scripts have it
        os.environ["MASTER_PORT"] = "29500"
    if ranks > 1:
        dist.init_process_group("gloo")
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(),
        nn.Linear(216, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4),
    )  # fmt: skip
    model = DistributedDataParallel(net) if ranks > 1 else net
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    updates_per_epoch = (BATCHES + ACCUMULATED - 1) // ACCUMULATED
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=epochs * updates_per_epoch)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    loader = session.loader(Pictures(BATCHES * BATCH_SIZE, True), batch_size=BATCH_SIZE, num_workers=2)
    evaluation = DataLoader(Pictures(48, False), batch_size=16)
    session.register(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, average=average)
    session.values.setdefault("best", float("inf"))
    session.values.setdefault("worse", 0)

    for epoch in session.epochs(epochs):
        model.train()
        for number, (pictures, labels) in enumerate(loader, loader.start):
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(pictures), labels)
            scaler.scale(loss / ACCUMULATED).backward()
            if (number + 1) % ACCUMULATED == 0 or number + 1 == len(loader):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                average.update_parameters(net)
                scheduler.step()
            session.log(loss=loss, lr=scheduler.get_last_lr()[0], scale=scaler.get_scale())
            time.sleep(pause)
        average.eval()
        with torch.no_grad():
            figure = sum(float(functional.cross_entropy(average(x), y)) for x, y in evaluation) + float(torch.rand(()))
        if rank == 0:
            with (folder / "epochs.txt").open("a") as file:
                file.write(f"{epoch} {figure!r} {session.values['best']!r} {session.values['worse']}\n")
        session.log(figure=figure)
        time.sleep(4 * pause)
        session.values["worse"] = 0 if figure < session.values["best"] else session.values["worse"] + 1
        session.values["best"] = min(figure, session.values["best"])
        if session.values["worse"] > PATIENCE:
            break
    session.finish()


if __name__ == "__main__":  # what data workers import
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
