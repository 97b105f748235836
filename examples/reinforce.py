"""REINFORCE on a cart-pole: train launch examples/reinforce.py --nproc 2

Ends at return 180 of 200. A sample is the first state of an episode, drawn when it is fetched. The loss plays a batch
of episodes at once. Both draw from generators that the engine seeds, so a resumed run plays the same episodes.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import Dataset

DEFAULTS = {"epochs": 30, "batch_size": 64, "optim.lr": 1e-2, "schedule.decay": "linear", "eval.every_epochs": 5}


@dataclass
class Settings:
    width: int = 32
    steps: int = 200
    discount: float = 0.98


class Starts(Dataset):
    """First states of episodes: position, speed, angle and angular speed, near 0."""

    def __init__(self, episodes):
        self.episodes = episodes

    def __len__(self):
        return self.episodes

    def __getitem__(self, i):
        return 0.1 * torch.rand(4) - 0.05


def physics(state, push):
    """Return the state 0.02 s after a push of 10 N (Barto, Sutton and Anderson, 1983)."""
    x, v, angle, w = state.unbind(1)
    force, sin, cos = 20.0 * push - 10.0, angle.sin(), angle.cos()
    part = (force + 0.05 * w.square() * sin) / 1.1
    turn = (9.8 * sin - cos * part) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
    speed = part - 0.05 * turn * cos / 1.1
    return torch.stack([x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * w, w + 0.02 * turn], 1)


@torch.no_grad()
def play(model, state):
    """Play episodes. Returns states, actions, and 1 while the pole stood, 0 afterwards: (T, N, …)."""
    stands, played = torch.ones_like(state[:, 0]), []
    for _ in range(model.steps):
        push = torch.bernoulli(model(state)[:, 0].sigmoid())
        played.append((state, push, stands))
        state = physics(state, push)
        stands = stands * ((state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21))
    return [torch.stack(part) for part in zip(*played, strict=True)]


def datasets(config):
    return Starts(256), Starts(128)


def model(config):
    made = nn.Sequential(nn.Linear(4, config.task.width), nn.Tanh(), nn.Linear(config.task.width, 1))
    made.steps, made.discount = config.task.steps, config.task.discount
    return made


def loss(model, batch):
    """Return the mean of -log probability x (return from there on - its mean over the poles that still stand)."""
    states, pushes, rewards = play(model, batch)
    times = torch.arange(len(rewards), device=rewards.device)
    discounts = (model.discount ** (times - times[:, None]).clamp(min=0)).triu()
    returns = discounts @ rewards
    usual = returns.sum(1, keepdim=True) / rewards.sum(1, keepdim=True).clamp(min=1)
    return binary_cross_entropy_with_logits(model(states)[..., 0], pushes, (returns - usual) * rewards)


def metrics(model, batch):
    return {"return": play(model, batch)[2].sum(0).mean()}
