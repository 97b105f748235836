"""Detection with a model of torchvision (FCOS, Tian et al., 2019): train launch examples/detection.py --nproc 2

Finds red and green rectangles in pictures made here. Ends at f1 0.8: boxes of the right kind that overlap by half.
Shows a `collate` that keeps lists, a loss that is a sum of several, and figures of a whole set.
"""

import torch
from torch import nn
from torch.utils.data import Dataset
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_iou

DEFAULTS = {"epochs": 5, "batch_size": 16, "optim.lr": 2e-3, "schedule.warmup_epochs": 1, "eval.every_epochs": 1}


class Boxes(Dataset):
    """Pictures (3, 64, 64) with one to three rectangles: where they are, and their kinds (1: red, 2: green)."""

    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(self.seed + i)
        picture, boxes, kinds = 0.4 * torch.rand(3, 64, 64, generator=draw), [], []
        for _ in range(int(torch.randint(1, 4, (), generator=draw))):
            x, y, width, height = torch.randint(12, 24, (4,), generator=draw) * torch.tensor([2, 2, 1, 1]) - 12
            kind = int(torch.randint(1, 3, (), generator=draw))
            picture[kind - 1, y : y + height + 12, x : x + width + 12] += 0.5
            boxes.append([x, y, x + width + 12, y + height + 12])
            kinds.append(kind)
        return picture, {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(kinds)}


def datasets(config):
    return Boxes(320, 0), Boxes(80, 10**6)


def collate(items):
    """A list of pictures and a list of dicts, as torchvision's detectors take them."""
    return tuple(map(list, zip(*items, strict=True)))


def model(config):
    sizes = (3, 16), (16, 32), (32, 64)
    backbone = nn.Sequential(*(part for a, b in sizes for part in (nn.Conv2d(a, b, 3, 2, 1), nn.ReLU())))
    backbone.out_channels = 64
    return FCOS(backbone, 3, min_size=64, max_size=64, anchor_generator=AnchorGenerator(((8,),), ((1.0,),)))


def loss(model, batch):
    return sum(model(*batch).values())


def metrics(model, batch):
    """The loss: torchvision's detectors return losses in training mode, and boxes in eval mode."""
    model.train()
    found = loss(model, batch)
    model.eval()
    return {"loss": found}


def predict(model, batch):
    """Count for each picture: true boxes, named boxes, true boxes that were found, named boxes that are right."""
    counts = []
    for found, true in zip(model(batch[0]), batch[1], strict=True):
        sure = found["scores"] > 0.4
        right = box_iou(found["boxes"][sure], true["boxes"]) > 0.5
        right &= found["labels"][sure, None] == true["labels"]
        counts.append([right.shape[1], right.shape[0], right.any(0).sum(), right.any(1).sum()])
    return {"counts": torch.tensor(counts)}


def compute_metrics(predictions):
    objects, named, found, right = predictions["counts"].sum(0).tolist()
    return {"recall": found / objects, "precision": right / max(named, 1), "f1": (found + right) / (objects + named)}
