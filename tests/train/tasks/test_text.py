"""Byte-level language modelling: blocks that cover the text, a model that sees no future, a run that learns."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from train.errors import Refused
from train.launcher.request import Request, resolve
from train.tasks import text

if TYPE_CHECKING:
    from conftest import Station

SMALL = {"task.context": "16", "task.width": "16", "task.layers": "2", "task.heads": "2", "task.dropout": "0"}


def made(root: Path) -> tuple[Any, Any]:
    task, config = resolve(Request(task="text", flags={**SMALL, "data.root": str(root)}))
    return task.datasets(config)


def test_blocks_follow_each_other_without_gap_or_overlap() -> None:
    data = np.arange(103, dtype=np.uint8)
    blocks = text.Blocks(data, 10)
    assert len(blocks) == 10
    inputs, targets = zip(*(blocks[index] for index in range(len(blocks))), strict=True)
    assert torch.cat(inputs).tolist() == list(range(100))
    assert torch.cat(targets).tolist() == list(range(1, 101))


def test_a_tenth_of_each_file_is_held_out_and_nothing_of_it_is_learned(tmp_path: Path) -> None:
    for name, letter in (("a.txt", "a"), ("b.txt", "b")):
        (tmp_path / name).write_text(letter * 900 + letter.upper() * 100)
    train, held_out = made(tmp_path)
    assert set(train.text[:].tolist()) == {ord("a"), ord("b")}
    assert bytes(held_out.text[:].tolist()) == b"A" * 100 + b"B" * 100


def test_folders_train_and_val_are_used_as_such(tmp_path: Path) -> None:
    for part, content in (("train", "learn " * 20), ("val", "check " * 10)):
        (tmp_path / part / "deep").mkdir(parents=True)
        (tmp_path / part / "deep" / "x.txt").write_text(content)
    (tmp_path / "train" / ".hidden").write_text("not a text")
    train, held_out = made(tmp_path)
    assert bytes(train.text[:].tolist()).decode() == "learn " * 20
    assert bytes(held_out.text[:].tolist()).decode() == "check " * 10


def test_links_are_followed_once_and_what_is_hidden_is_left_out(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for folder, content in (
        (root / "a", "a" * 100),
        (elsewhere, "b" * 100),
        (root / ".git", "c"),
        (root / "a" / "@eaDir", "c"),
        (root / "__MACOSX", "c"),
        (root / "d", "d" * 100),
    ):
        folder.mkdir(parents=True)
        (folder / "x.txt").write_text(content)
    (root / "b").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(root)
    (root / "a" / "back").symlink_to("..")
    assert bytes(made(root)[0].text[:].tolist()) == b"a" * 90 + b"b" * 90 + b"d" * 90


@pytest.mark.parametrize("place", ["a", "deep/a"])
def test_what_cannot_be_seen_is_refused_and_not_left_out(tmp_path: Path, place: str) -> None:
    (tmp_path / "x.txt").write_text("x" * 1000)
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(Refused, match=f"{path} is a link that leads nowhere"):
        made(tmp_path)
    path.unlink()
    path.symlink_to("a")  # itself
    with pytest.raises(Refused, match=rf"{path} cannot be read \(Too many levels"):
        made(tmp_path)


def test_a_folder_that_cannot_be_looked_into_is_refused() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "x.txt").write_text("x" * 1000)
        (root / "closed").mkdir(mode=0)
        root.chmod(0o755)
        before = os.geteuid()
        try:
            if before == 0:  # who may look into everything
                os.seteuid(65534)
            with pytest.raises(Refused, match="closed cannot be read"):
                made(root)
        finally:
            os.seteuid(before)


def test_the_model_does_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = text.GPT(16, 16, 2, 2, 0.0).eval()
    one = torch.randint(256, (1, 16))
    other = one.clone()
    other[0, 10:] = (other[0, 10:] + 1) % 256
    first, second = model(one), model(other)
    assert first.shape == (1, 16, 256)
    assert torch.allclose(first[:, :10], second[:, :10], atol=1e-6) and not torch.allclose(first[:, 10], second[:, 10])


def test_bits_per_byte_of_an_untrained_model_are_eight() -> None:
    torch.manual_seed(0)
    model = text.GPT(16, 16, 2, 2, 0.0)
    batch = torch.randint(256, (8, 16)), torch.randint(256, (8, 16))
    assert abs(float(text.metrics(model, batch)["bits_per_byte"]) - 8) < 0.1
    assert abs(float(text.loss(model, batch).detach()) - 8 * math.log(2)) < 0.1


def test_a_text_is_learned_through_the_command_line(shared_station: Station) -> None:
    root = shared_station.folder / "books"
    root.mkdir()
    (root / "a.txt").write_text("abcdefgh" * 500)
    shared_station.ok(
        "run", "text", "--name", "t", "--data.root", "books", "--task.context", 16, "--task.width", 16, "--task.layers",
        1, "--task.heads", 2, "--optim.lr", 0.03, "--batch_size", 16, "--steps", 60, "--cpu_threads", 1,
        "--eval.every_epochs", 0,
    )  # fmt: skip
    figures = shared_station.record("t")["metrics"]
    assert figures.keys() == {"loss", "bits_per_byte", "accuracy"}
    assert figures["bits_per_byte"] < 2 and figures["accuracy"] > 0.6
    assert math.isclose(figures["bits_per_byte"], figures["loss"] / math.log(2), rel_tol=1e-6)
