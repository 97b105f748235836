"""A U-Net that finds shapes in noise: train launch examples/unet.py --nproc 2

Ends at miou 0.85 over discs, squares, triangles and background. runs/NAME/images has pictures, labels and predictions.
Shows `predict` with `compute_metrics`: a figure of the whole evaluation set, not a mean over batches.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, max_pool2d, one_hot
from torch.utils.data import TensorDataset

DEFAULTS = {"epochs": 1.5, "batch_size": 16, "optim.lr": 4e-3, "schedule.warmup_epochs": 0.1, "eval.every_epochs": 0.5}
KINDS = ("nothing", "disc", "square", "triangle")


def shapes(count, seed, noise=0.2):
    """Return pictures (count, 1, 32, 32) with two shapes each, and the class of each pixel (count, 32, 32)."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    pictures, kinds = noise * torch.randn(count, 32, 32, generator=draw), torch.zeros(count, 32, 32, dtype=torch.long)
    for _ in range(2):
        y, x, size, light = torch.rand(4, count, 1, 1, generator=draw)
        down, across, size = rows - 32 * y, (columns - 32 * x).abs(), 5 + 4 * size
        disc, square = down.square() + across.square() < size.square(), torch.maximum(down.abs(), across) < size
        triangle = (down.abs() < size) & (across < (down + size) / 2)
        kind = torch.randint(1, 4, (count, 1, 1), generator=draw)
        inside = (disc & (kind == 1)) | (square & (kind == 2)) | (triangle & (kind == 3))
        pictures, kinds = torch.where(inside, pictures + 0.5 + light, pictures), torch.where(inside, kind, kinds)
    return TensorDataset(pictures[:, None], kinds)


def double(before, width):
    layers = [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.one, self.two, self.four = double(1, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up_two, self.up_one = double(6 * width, 2 * width), double(3 * width, width)
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, pictures):
        one = self.one(pictures)
        two = self.two(max_pool2d(one, 2))
        two = self.up_two(torch.cat([two, interpolate(self.four(max_pool2d(two, 2)), scale_factor=2.0)], 1))
        return self.head(self.up_one(torch.cat([one, interpolate(two, scale_factor=2.0)], 1)))


def datasets(config):
    return shapes(2000, seed=0), shapes(300, seed=1)


def model(config):
    return UNet()


def loss(model, batch):
    logits = model(batch[0]).movedim(1, -1)  # pixels as samples: on a GPU the loss of planes is not deterministic
    return cross_entropy(logits.flatten(0, 2), batch[1].flatten())


def predict(model, batch):
    """Return a confusion matrix of pixels for each picture: true class in rows, predicted class in columns."""
    there, found = (one_hot(kinds.flatten(1), 4).double() for kinds in (batch[1], model(batch[0]).argmax(1)))
    return {"pixels": there.transpose(1, 2) @ found}


def compute_metrics(predictions):
    pixels = predictions["pixels"].sum(0)
    iou = pixels.diagonal() / (pixels.sum(0) + pixels.sum(1) - pixels.diagonal())
    return {"miou": iou.mean(), **{f"iou.{kind}": value for kind, value in zip(KINDS, iou, strict=True)}}


def images(model, batch):
    pictures, kinds = batch[0][:4], batch[1][:4, None]
    found = model(pictures).argmax(1, keepdim=True)
    return {"seen-there-found": torch.cat([pictures, kinds / 3, found / 3])}
