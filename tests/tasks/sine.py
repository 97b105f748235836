"""A small network whose steps take their time while a file is there. What it learns does not depend on that."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset


def datasets(config):
    numbers = torch.arange(600.0).reshape(600, 1) / 600
    return TensorDataset(numbers, torch.sin(6 * numbers)), None


def model(config):
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def loss(model, batch):
    if Path(os.environ.get("SLOW", "/nowhere")).exists():
        time.sleep(0.3)
    numbers, wanted = batch
    return (model(numbers) - wanted).pow(2).mean()
