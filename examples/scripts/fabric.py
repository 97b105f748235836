"""Lightning's Fabric: train launch --script examples/scripts/fabric.py --nproc 2 --name fabric --follow

The session's loader shares the batches among the ranks, so it does not go into `fabric.setup_dataloaders()`.
"""

import argparse
import os

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import trainstation as ts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    session = ts.session(seed=0, save_every=20)

    fabric = Fabric(devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    fabric.launch()
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    loader = session.loader(data, batch_size=96, device=fabric.device)

    session.register(model=model, optimizer=optimizer, schedule=schedule)
    for _ in session.epochs(args.epochs):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            session.log(loss=loss)
        schedule.step()
    session.finish()


if __name__ == "__main__":
    main()
