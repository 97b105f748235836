"""`train bench input`: from JPEG files to a batch that the model can take, in images per second of one core.

Compares the task `images` with torchvision's reference pipeline (references/classification of its repository): class
folders read by Pillow, RandomResizedCrop, flip, conversion to floating point, normalisation, a DataLoader and its
collation. Both run in this process on one thread, in turn, and their CPU time counts. Both augment alike
(tests/train/data/test_crop.py).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ..data.loader import Loader
from ..data.plan import Plan, Sharing, micro_batches_of
from ..launcher.request import Request, resolve
from .compare import quartiles

WIDTH, HEIGHT, QUALITY = 500, 375, 90
"""Size and JPEG quality of the pictures: usual values of ImageNet, whose files of this size have some 110 kB."""
BATCH = 32


def bench(folder: Path, pictures: int, times: int) -> str:
    """Measure with this many pictures, each pipeline this many times over all of them. Returns a table in Markdown."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as name:
            size = paint(Path(name), pictures)
            ways = {"torchvision's reference": reference(Path(name)), "train: images": ours(Path(name))}
            seconds = measure(ways, pictures, times)
    finally:
        torch.set_num_threads(threads)
    return _table(seconds, size / pictures)


def measure(ways: dict[str, Callable[[], Iterator[Any]]], pictures: int, times: int) -> dict[str, list[float]]:
    """Return the CPU seconds per picture of each pass of each way, in turn.

    Args:
        ways: maps a name to the function that starts a pass over the pictures.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(times + 1):
        for name, batches in ways.items():
            began, seen = time.process_time(), 0
            for inputs, _ in batches():
                assert inputs.dtype == torch.float32 and inputs.shape[1:] == (3, 224, 224)
                seen += len(inputs)
            assert seen == pictures
            if turn:  # the first one brings files and libraries into memory
                taken[name].append((time.process_time() - began) / pictures)
    return taken


def _table(seconds: dict[str, list[float]], size: float) -> str:
    (plain, *_), turns = seconds.values(), len(next(iter(seconds.values())))
    lines = [
        f"{WIDTH} x {HEIGHT} JPEG, {size / 1000:.0f} kB, to {BATCH} x 3 x 224 x 224, one core, {turns} turns",
        "",
        "| pipeline | ms an image | images/s per core | x reference | quartiles |",
        "|---|---|---|---|---|",
    ]
    for name, taken in seconds.items():
        low, middle, high = quartiles(plain, taken)
        least = min(taken)
        lines.append(f"| {name} | {1000 * least:.3f} | {1 / least:.0f} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    return "\n".join(lines)


def paint(folder: Path, pictures: int, width: int = WIDTH, height: int = HEIGHT) -> int:
    """Write class folders train/ and val/ with JPEG files of natural content, two classes. Returns their bytes.

    They are natural in what makes decoding slow or fast: power falls with the square of spatial frequency (Field,
    Relations between the statistics of natural images, 1987), and colour varies less than brightness.
    """
    from PIL import Image

    size = 0
    for part, count in (("train", pictures), ("val", 2)):
        for number in range(count):
            path = folder / part / str(number % 2) / f"{number:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(scene(number, width, height)).save(path, quality=QUALITY)
            size += path.stat().st_size if part == "train" else 0
    return size


def scene(seed: int, width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Make a picture of natural content, (height, width, 3)."""
    draw = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    power = 1 / np.maximum(frequency, 1 / max(width, height))

    def field() -> Any:
        made = np.fft.irfft2(power * np.exp(2j * np.pi * draw.random(power.shape)), s=(height, width))
        return made / made.std()

    bright, blue, red = field(), field(), field()
    colours = np.stack([bright + 0.3 * red, bright - 0.15 * (blue + red), bright + 0.3 * blue], -1)
    return (128 + 50 * colours).clip(0, 255).astype(np.uint8)


def reference(folder: Path) -> Callable[[], Iterator[Any]]:
    """Return torchvision's reference pipeline on the class folders in train/."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    from ..tasks.images import MEAN, STD

    augment = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float),
            transforms.Normalize(MEAN, STD),
        ]
    )
    loader = DataLoader(ImageFolder(str(folder / "train"), augment), BATCH, shuffle=True)
    return lambda: iter(loader)


def ours(folder: Path) -> Callable[[], Iterator[Any]]:
    """Yield the batches of the task `images` as training gets them."""
    task, config = resolve(Request(task="images", flags={"data.root": str(folder)}))
    train_set, _ = task.datasets(config)
    plan = Plan(length=len(train_set), batch_size=BATCH, micro_batch_size=BATCH)
    cpu = torch.device("cpu")
    loader = Loader(train_set, {}, collate=task.collate, workers=0, device=cpu, dtype=None, on_device=task.on_device)
    epochs = iter(range(1_000_000))

    def batches() -> Iterator[Any]:
        first = next(epochs) * plan.steps_per_epoch
        for _, batch in loader.batches(
            micro_batches_of(plan, Sharing(), first=first, last=first + plan.steps_per_epoch)
        ):
            yield batch

    return batches
