"""Adapters (LoRA): train run digits --name upright && train launch examples/lora.py --nproc 2 --init upright

`upright` knows upright digits. This task learns digits on their side and trains a sixth of the parameters (Hu et al.,
2021). Ends at accuracy 0.8 on held-out scans. Shows frozen parts, `adapt_state_dict`, and `inference_model` (merges).
"""

import copy
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

DEFAULTS = {"init_skip": "*.down,*.up", "epochs": 10, "optim.lr": 1e-2, "optim.weight_decay": 0.0}


@dataclass
class Settings:
    rank: int = 4


class Adapted(nn.Module):
    """A layer that stays as it is, plus up(down(x)), which is learnt. `up` starts at 0: so does the difference."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        if isinstance(layer, nn.Linear):
            self.down = nn.Linear(layer.in_features, rank, bias=False)
            self.up = nn.Linear(rank, layer.out_features, bias=False)
        else:
            self.down = nn.Conv2d(layer.in_channels, rank, layer.kernel_size, layer.stride, layer.padding, bias=False)
            self.up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))

    def merged(self):
        """The layer alone, with weights that do the same."""
        layer = copy.deepcopy(self.layer)
        layer.weight.data += (self.up.weight.flatten(1) @ self.down.weight.flatten(1)).view_as(layer.weight)
        return layer


def datasets(config):
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    scans = (pixels.float() / 16).reshape(-1, 1, 8, 8).rot90(1, (2, 3))
    return TensorDataset(scans[:1400], labels[:1400]), TensorDataset(scans[1400:], labels[1400:])


def model(config):
    layers = [
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1024, 10),
    ]  # fmt: skip
    rank = config.task.rank
    return nn.Sequential(*(Adapted(one, rank) if isinstance(one, (nn.Conv2d, nn.Linear)) else one for one in layers))


def adapt_state_dict(state, model):
    """The names of `upright` (0.weight) become those of the frozen layers (0.layer.weight); adapters are new."""
    return {name.replace(".", ".layer."): tensor for name, tensor in state.items()}


def inference_model(model):
    """What is evaluated and exported: the model of `upright`, with other weights."""
    return nn.Sequential(*(one.merged() if isinstance(one, Adapted) else one for one in model))


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def metrics(model, batch):
    scans, labels = batch
    logits = model(scans)
    return {"loss": cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).double().mean()}
