"""Q-learning with a replay buffer, on a cart-pole: train launch examples/replay.py --nproc 2

Ends at return 150 of 200. The moves lie in a buffer of the model, so every checkpoint has them. `after_step` plays
and writes them, the loss draws from them (Mnih et al., 2015; double Q-learning: van Hasselt et al., 2016).
"""

import copy

import torch
from torch import nn
from torch.nn.functional import smooth_l1_loss
from torch.utils.data import TensorDataset

DEFAULTS = {"epochs": 8, "batch_size": 128, "optim.lr": 2e-3, "schedule.decay": "linear", "eval.every_epochs": 4}
GAMES, CAPACITY, DISCOUNT = 16, 20_000, 0.98  # played side by side; moves in the buffer; of what comes later


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.slow = copy.deepcopy(self.q).requires_grad_(False)
        self.register_buffer("now", torch.zeros(GAMES, 4))
        self.register_buffer("moves", torch.zeros(CAPACITY, 10))  # state before, state after, push, whether it fell
        self.register_buffer("written", torch.zeros((), dtype=torch.long))

    def forward(self, states):
        return self.q(states)


def physics(state, push):
    """The state 0.02 s later of a cart that is pushed with 10 N (Barto, Sutton and Anderson, 1983), and who fell."""
    _, v, angle, w = state.unbind(1)
    force, sin, cos = 20.0 * push - 10.0, angle.sin(), angle.cos()
    part = (force + 0.05 * w.square() * sin) / 1.1
    turn = (9.8 * sin - cos * part) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
    after = state + 0.02 * torch.stack([v, part - 0.05 * turn * cos / 1.1, w, turn], 1)
    return after, (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 0.21)


def datasets(config):
    """Numbers that only say how many moves an epoch draws; and the first states of 64 games to evaluate with."""
    return TensorDataset(torch.arange(12800)), TensorDataset(0.1 * torch.rand(64, 4) - 0.05)


def model(config):
    return Agent()


def loss(model, batch):
    drawn = torch.rand(len(batch[0]), device=model.now.device) * model.written.clamp(1, CAPACITY)
    before, after, push, fell = model.moves[drawn.long()].split([4, 4, 1, 1], 1)
    with torch.no_grad():
        best = model.q(after).argmax(1, keepdim=True)
        goal = DISCOUNT * (1 - fell) * model.slow(after).gather(1, best) - fell
    return smooth_l1_loss(model(before).gather(1, push.long()), goal)


def after_step(model, step, stateful):
    """Play a move of each game: all ranks play the same ones, since weights and random numbers are the same."""
    chance, start = torch.rand(2, len(model.now), device=model.now.device), 0.1 * torch.rand_like(model.now) - 0.05
    push = torch.where(chance[0] < max(0.05, 1 - step / 400), (2 * chance[1]).long(), model.q(model.now).argmax(1))
    after, fell = physics(model.now, push)
    place = (model.written + torch.arange(len(push), device=push.device)) % CAPACITY
    model.moves[place] = torch.cat([model.now, after, push[:, None], fell[:, None]], 1)
    model.written += len(push)
    model.now.copy_(torch.where((fell | (chance[0] > 0.995))[:, None], start, after))
    torch._foreach_lerp_(list(model.slow.parameters()), list(model.q.parameters()), 0.02)


def inference_model(model):
    return model.q


def metrics(model, batch):
    state, stands, steps = batch[0], 1.0, 0.0
    for _ in range(200):
        steps, (state, fell) = steps + stands, physics(state, model(state).argmax(1))
        stands = stands * (~fell).float()
    return {"return": steps.mean()}
