"""A script of Lightning in which much happens around a batch: lightning_script.py FILE

Weights are averaged in the module's hook and by a callback that is listed after the session's. Before the training a
batch is read, and a rate is searched. The training stops early, in the middle of a schedule, after validations in the
middle of epochs. Where FILE is missing, rank 0 makes it and kills itself after the training.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import trainstation as ts

SAMPLES, BATCH_SIZE = 246, 12


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        time.sleep(0.01)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(self.net)

    def on_train_end(self) -> None:
        with torch.no_grad():  # once: a resume after the end must not repeat it
            self.net[0].weight.mul_(2)

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("left", float(max(0, 60 - self.global_step)), sync_dist=True)  # stops after about 65 updates
        self.log("error", nn.functional.cross_entropy(self.average(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    session = ts.session(seed=0, save_every=4, log_samples=True)
    inputs = torch.randn(SAMPLES, 8)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    loader = session.loader(data, batch_size=BATCH_SIZE, drop_last=False)
    trainer = L.Trainer(
        max_epochs=20, devices=int(os.environ["LOCAL_WORLD_SIZE"]), accelerator="cpu", strategy="ddp",
        log_every_n_steps=2, accumulate_grad_batches=2, val_check_interval=7, default_root_dir=Path(sys.argv[1]).parent,
        callbacks=[
            session.lightning(), EMAWeightAveraging(decay=0.9), EarlyStopping("left", patience=1),
        ],
        enable_checkpointing=False, logger=False, enable_progress_bar=False,
    )  # fmt: skip
    next(iter(loader))
    model = Classifier()
    Tuner(trainer).lr_find(model, loader, max_lr=0.1, num_training=5)
    trainer.fit(model, loader, DataLoader(data, 50), ckpt_path=session.newest())
    if session.rank == 0 and not Path(sys.argv[1]).exists():
        Path(sys.argv[1]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    session.finish()


if __name__ == "__main__":
    main()
