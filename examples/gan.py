"""A GAN that writes digits: train launch examples/gan.py --nproc 2

Ends at ema.fid 2.5 (computed on pixels; noise has 10). Its digits are in runs/NAME/images. Shows `updates` (two losses
per step, each with an optimizer), `inference_model`, and `ema.decay` (averaged weights draw better than the last ones).
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

DEFAULTS = {"epochs": 40, "batch_size": 64, "ema.decay": 0.99, "eval.every_epochs": 10, "schedule.decay": "linear"}


@dataclass
class Settings:
    width: int = 128
    noise: int = 32


class GAN(nn.Module):
    def __init__(self, width, noise):
        super().__init__()
        self.g = nn.Sequential(
            nn.Linear(noise, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8)),
        )  # fmt: skip
        self.d = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.LeakyReLU(0.2),
            nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1),
        )  # fmt: skip


def generate(g, batch):
    return g(torch.randn(len(batch[0]), g[0].in_features, device=batch[0].device))


def datasets(config):
    digits = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    return TensorDataset(digits[:1400]), TensorDataset(digits[1400:])


def model(config):
    return GAN(config.task.width, config.task.noise)


def d_loss(model, batch):
    return (softplus(-model.d(batch[0])) + softplus(model.d(generate(model.g, batch).detach()))).mean()


def g_loss(model, batch):
    return softplus(-model.d(generate(model.g, batch))).mean()


def updates(model, config):
    d = torch.optim.Adam(model.d.parameters(), lr=1e-3, betas=(0.5, 0.99))
    g = torch.optim.Adam(model.g.parameters(), lr=1e-3, betas=(0.5, 0.99))
    return {"d": {"loss": d_loss, "optimizer": d}, "g": {"loss": g_loss, "optimizer": g}}


def inference_model(model):
    return model.g


def predict(model, batch):
    return {"real": batch[0].flatten(1), "made": generate(model, batch).flatten(1)}


def compute_metrics(predictions):
    """Return the Fréchet distance of two normal distributions: |m1 - m2|² + tr(C1 + C2 - 2 sqrt(C1 C2))."""
    (m1, c1), (m2, c2) = ((x.double().mean(0), x.double().T.cov()) for x in predictions.values())
    return {"fid": (m1 - m2).square().sum() + (c1 + c2).trace() - 2 * torch.linalg.eigvals(c1 @ c2).sqrt().real.sum()}


def images(model, batch):
    return {"digits": generate(model, batch)}
