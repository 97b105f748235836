"""Accelerate: train launch --script examples/scripts/accelerate_loop.py --nproc 2 --name accelerate --follow

The session's loader shares the batches among the ranks, so it does not go into `accelerator.prepare()`.
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import trainstation as ts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16"])
    args = parser.parse_args()
    session = ts.session(seed=0, save_every=20)

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=args.mixed_precision)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = session.loader(data, batch_size=96, device=accelerator.device)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.epochs * len(loader))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    session.register(model=model, optimizer=optimizer, schedule=schedule)
    for epoch in session.epochs(args.epochs):
        for inputs, labels in loader:
            with accelerator.autocast():
                loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            session.log(loss=loss, lr=schedule.get_last_lr()[0])
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    session.finish()
    accelerator.end_training()


if __name__ == "__main__":
    main()
