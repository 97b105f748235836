"""A variational autoencoder of digits: train launch examples/vae.py --nproc 2

Ends at loss 130, in nats per scan. runs/NAME/images has scans above their reconstructions, and digits drawn from noise.
Shows `images`, and a loss that draws random numbers: they are seeded by the step, so a resumed run draws the same ones.
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributions import Binomial
from torch.utils.data import TensorDataset

DEFAULTS = {"epochs": 30, "batch_size": 64, "optim.lr": 2e-3, "schedule.warmup_epochs": 2, "eval.every_epochs": 10}


@dataclass
class Settings:
    width: int = 256
    latent: int = 12
    beta: float = 1.0


class VAE(nn.Module):
    def __init__(self, width, latent, beta):
        super().__init__()
        self.latent, self.beta = latent, beta
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 2 * latent),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 64), nn.Unflatten(1, (1, 8, 8)),
        )  # fmt: skip

    def forward(self, scans):
        mean, log_variance = self.encoder(scans).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def datasets(config):
    scans = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    return TensorDataset(scans[:1400]), TensorDataset(scans[1400:])


def model(config):
    return VAE(config.task.width, config.task.latent, config.task.beta)


def parts(model, batch):
    """Return reconstruction loss and divergence from the prior, in nats per scan. Their sum is the negative ELBO."""
    (scans,) = batch
    logits, mean, log_variance = model(scans)
    # a check of the arguments would wait for the GPU in each step
    scan = Binomial(16, logits=logits, validate_args=False)
    reconstruction = -scan.log_prob(16 * scans).sum() / len(scans)
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
    return reconstruction, divergence


def loss(model, batch):
    reconstruction, divergence = parts(model, batch)
    return reconstruction + model.beta * divergence


def metrics(model, batch):
    reconstruction, divergence = parts(model, batch)
    return {"loss": reconstruction + model.beta * divergence, "reconstruction": reconstruction, "kl": divergence}


def images(model, batch):
    scans = batch[0][:8]
    noise = torch.randn(64, model.latent, device=scans.device)
    return {"made": model.decoder(noise).sigmoid(), "seen": torch.cat([scans, model(scans)[0].sigmoid()])}
