"""Lightning's Trainer: train launch --script examples/scripts/lightning_trainer.py --nproc 2 --name lightning --follow

Four lines make it exact: the session, its loader, its callback and `ckpt_path`.
"""

import argparse
import os

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainstation as ts


class Digits(Dataset):
    """Scans of 8x8 pixels; those for training are moved by up to one pixel."""

    def __init__(self, is_training):
        data, part = load_digits(), slice(0, 1500) if is_training else slice(1500, None)
        self.scans = torch.tensor(data.images[part], dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(data.target[part])
        self.is_training = is_training

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        scan = self.scans[index]
        if self.is_training:
            scan = torch.roll(scan, torch.randint(-1, 2, (2,)).tolist(), (1, 2))
        return scan, self.labels[index]


class Classifier(L.LightningModule):
    def __init__(self, epochs, batches):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.2), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def training_step(self, batch, number):
        scans, labels = batch
        loss = nn.functional.cross_entropy(self.net(scans), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, number):
        scans, labels = batch
        self.log("accuracy", (self.net(scans).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = self.hparams.epochs * self.hparams.batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    session = ts.session(seed=0, save_every=20)

    loader = session.loader(Digits(True), batch_size=60, num_workers=1)
    evaluation = DataLoader(Digits(False), batch_size=99)
    trainer = L.Trainer(
        max_epochs=args.epochs, devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), log_every_n_steps=5,
        callbacks=[session.lightning()], enable_checkpointing=False, logger=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Classifier(args.epochs, len(loader)), loader, evaluation, ckpt_path=session.newest())
    session.finish()


if __name__ == "__main__":
    main()
