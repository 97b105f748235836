"""A task of a few numbers."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def datasets(config):
    return TensorDataset(torch.arange(64.0).reshape(64, 1) / 64), None


def model(config):
    return nn.Linear(1, 1)


def loss(model, batch):
    (numbers,) = batch
    return (model(numbers) - 2 * numbers).pow(2).mean()
