"""FSDP2, a loop of its own: train launch --script examples/scripts/fsdp2.py --nproc 2 --name fsdp2 --follow

A small transformer learns to read scans of digits, row by row. Lines with `session` are what makes it exact.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import trainstation as ts


class Digits(Dataset):
    """Scans of 8x8 pixels, each moved by up to one pixel."""

    def __init__(self):
        data = load_digits()
        self.scans = torch.tensor(data.images, dtype=torch.float32) / 16
        self.labels = torch.tensor(data.target)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        shift = torch.randint(-1, 2, (2,)).tolist()
        return torch.roll(self.scans[index], shift, (0, 1)), self.labels[index]


class Reader(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, scans):
        hidden = self.embed(scans) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    session = ts.session(seed=0, save_every=20)

    use_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")

    model = Reader().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = session.loader(Digits(), batch_size=96, num_workers=1, device=device)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=args.epochs * len(loader))

    session.register(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in session.epochs(args.epochs):
        for scans, labels in loader:
            loss = nn.functional.cross_entropy(model(scans), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            session.log(loss=loss, lr=scheduler.get_last_lr()[0])
    session.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
