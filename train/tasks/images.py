"""Image classification: class folders or a torchvision dataset on disk, any torchvision classification model.

    train launch images --data.root /datasets/pets --task.model resnet50      # pets/train/cat/1.jpg, pets/val/cat/…
    train launch images --data.root /datasets --data.name CIFAR10 --task.size 32

Nothing is downloaded, and hidden folders and files are left out. Batches are bytes until they are on the device, where
`on_device` normalises them: the model, and what is exported of it, takes float32 of shape (n, 3, size, size), by MEAN
and STD.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from ..config import Count
from ..data.crop import ChooseCrop, centre_crop, random_crop
from ..data.hidden import visible_folders, without_hidden
from ..data.image_files import (
    Augment,
    CropTransform,
    ImageFiles,
    Normalise,
    collate_images,
)
from ..errors import Refused, nearest, one_line
from . import data_root

DEFAULTS = {
    "epochs": 30,
    "batch_size": 128,
    "optim.name": "sgd",
    "optim.lr": 0.1,
    "optim.weight_decay": 1e-4,
    "schedule.warmup_epochs": 2,
    "schedule.scaling": "linear",
}

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Channel statistics of ImageNet, which torchvision's models expect."""

collate = collate_images


@dataclass
class Settings:
    model: str = "resnet18"
    """small, or the name of a torchvision classification model."""
    size: Count = 224
    """Height and width in pixels that the model sees."""
    augment: Literal["none", "flip", "crop", "trivial"] = "crop"
    """Training augmentation: flip; crop = random resized crop and flip; trivial = crop and TrivialAugment."""


def datasets(config: Any) -> tuple[Any, Any]:
    root = data_root(config.data.root)
    size, (varied, augment), plain = config.task.size, *_crops(config)
    if config.data.name:
        transforms = CropTransform(varied, size, augment), CropTransform(plain, size)
        return tuple(_named(config.data.name, root, part, transforms[not part]) for part in (True, False))
    found = {part: _classes_in(root / part) for part in ("train", "val")}
    if found["train"] != found["val"]:
        missing = [
            f"{', '.join(lacks[:5])}{', …' if lacks[5:] else ''} missing in {part}/"
            for part, other in (("val", "train"), ("train", "val"))
            if (lacks := sorted(set(found[other]) - set(found[part])))
        ]
        raise Refused(
            f"{root}: train/ and val/ differ in their classes: {'; '.join(missing)}; "
            "add these folders or remove their counterparts"
        )
    return _folder(root, "train", size, varied, augment), _folder(root, "val", size, plain)


def _folder(root: Path, part: str, size: int, choose: ChooseCrop, augment: Augment | None = None) -> ImageFiles:
    from torchvision.datasets import ImageFolder

    try:
        found = without_hidden(ImageFolder)(str(root / part))
    except FileNotFoundError as error:  # a class folder without an image
        raise Refused(f"--data.root {root}: {one_line(error)}") from None
    return ImageFiles(
        str(root / part), samples=found.samples, classes=found.classes, size=size, choose=choose, augment=augment
    )


def _classes_in(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise Refused(f"{folder.parent} has no folder {folder.name}/; put class folders into train/ and val/")
    classes = visible_folders(str(folder))
    if not classes:
        raise Refused(f"{folder} has no class folders; put the images of each class into its own folder")
    return classes


def _crops(config: Any) -> tuple[tuple[ChooseCrop, Augment | None], ChooseCrop]:
    """Return the crop and augmentation of training images, and the crop of evaluation images."""
    size, name = config.task.size, config.task.augment
    centre = functools.partial(centre_crop, size=size, to=round(size * 256 / 224) if size >= 64 else size)
    if name == "none":
        return (centre, None), centre
    if name == "flip":
        return (functools.partial(centre, flips=True), None), centre
    augment = None
    if name == "trivial":
        from torchvision.transforms import v2

        augment = v2.TrivialAugmentWide()
    return (functools.partial(random_crop, size=size), augment), centre


def _named(name: str, root: Path, train: bool, transform: Any) -> Any:
    """Return the training or the evaluation part of a torchvision dataset in root."""
    import torchvision.datasets as known

    kind: Any = getattr(known, name, None) if name in known.__all__ else None
    if kind is None or not issubclass(kind, known.VisionDataset):
        raise Refused(f"--data.name {name}: torchvision has no such dataset{nearest(name, known.__all__)}")
    takes = inspect.signature(kind.__init__).parameters
    if issubclass(kind, known.DatasetFolder):
        kind = without_hidden(kind)
    if "root" not in takes:
        raise Refused(
            f"--data.name {name}: torchvision's {name} reads no folder; use the task fake, which makes images up"
        )
    options: list[dict[str, Any]] = [{}]
    if "train" in takes:
        options = [{"train": train}]
    elif "split" in takes:
        options = [{"split": "train"}] if train else [{"split": "val"}, {"split": "test"}]
    if "download" in takes:
        options = [option | {"download": False} for option in options]
    problem: Exception | None = None
    for option in options:
        try:
            return kind(str(root), transform=transform, **option)
        except (RuntimeError, ValueError, OSError, TypeError) as error:
            problem = problem or error
    said = one_line(problem).replace("You can use download=True to download it", "").strip()[:300]
    advice = "nothing is downloaded: put its files there"
    raise Refused(f"--data.name {name}: not usable from {root}: {said}; {advice}") from problem


@functools.lru_cache(maxsize=2)
def _number_of_classes(root: str, name: str) -> int:
    if not name:
        return len(_classes_in(Path(root) / "train"))
    dataset = _named(name, Path(root), True, None)
    classes = getattr(dataset, "classes", None)
    if classes is not None:
        return len(classes)
    labels = next(
        (getattr(dataset, field) for field in ("targets", "labels", "_labels") if hasattr(dataset, field)), None
    )
    if labels is None:
        raise Refused(f"--data.name {name}: its number of classes is not known; write a task file for it")
    return int(max(labels)) + 1


def network(name: str, classes: int, size: int = 224) -> nn.Module:
    """Make a classification network by name.

    Raises:
        Refused: torchvision has no such classification model.
    """
    if name == "small":
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, classes),
        )
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise Refused(
            f"--task.model {name}: torchvision has no such classification model{nearest(name, ['small', *known])}"
        )
    options: dict[str, Any] = {"image_size": size} if name.startswith("vit_") else {}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = True
    try:
        return models.get_model(name, weights=None, num_classes=classes, **options)
    except (ValueError, AssertionError) as error:  # torchvision uses either for a size that does not fit
        raise Refused(f"--task.model {name} --task.size {size}: {one_line(error)}") from None


def model(config: Any) -> nn.Module:
    classes = _number_of_classes(str(data_root(config.data.root)), config.data.name)
    return network(config.task.model, classes, config.task.size)


def adapt_state_dict(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the weights without the last layer, if that is for another number of classes."""
    own = model.state_dict()
    last = next(reversed(own)).rpartition(".")[0]
    has_other = any(name in own and own[name].shape != state[name].shape for name in state if name.startswith(last))
    return {name: one for name, one in state.items() if not (has_other and name.startswith(f"{last}."))}


_normalise = Normalise(MEAN, STD)


def on_device(batch: Any) -> Any:
    images, labels = batch
    return [_normalise(images), labels]


def loss(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    output = model(images)
    if isinstance(output, tuple):  # GoogLeNet and Inception return auxiliary logits while training
        logits, *auxiliary = output
        extra = sum(0.3 * nn.functional.cross_entropy(other, labels) for other in auxiliary if other is not None)
        return nn.functional.cross_entropy(logits, labels) + extra
    return nn.functional.cross_entropy(output, labels)


def images(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    shown = batch[0][:16].float()
    mean, std = (shown.new_tensor(values)[:, None, None] for values in (MEAN, STD))
    return {"samples": shown * std + mean}


def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    images, labels = batch
    logits = model(images)
    hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    return {
        "loss": nn.functional.cross_entropy(logits, labels),
        "accuracy": hits[:, 0].double().mean(),
        "top5": hits.any(1).double().mean(),
    }
