"""Weights of the wild: read from what people have, fitted to a model, and needed no more once a run has begun."""

from __future__ import annotations

import argparse
import contextlib
import enum
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from tests.train.conftest import Station
from train.build import initial_weights
from train.build.initial_weights import fit, read
from train.checkpoint import manifest as manifests
from train.checkpoint.load import weights_in
from train.errors import Refused
from train.launcher.checks import prepare
from train.launcher.request import Request
from train.run.record import FORMAT
from train.tasks import images

pytestmark = pytest.mark.never_forgiven


class Net(nn.Module):
    """A backbone with BatchNorm, and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.fc = nn.Linear(6, classes)


def state(classes: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return Net(classes).state_dict()


def written(tmp_path: Path, made: Any) -> dict[str, Tensor]:
    torch.save(made, tmp_path / "made.pth")
    return read(tmp_path / "made.pth", "--init made.pth")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda one: one,
        OrderedDict,
        lambda one: {"model": one, "epoch": 3, "args": argparse.Namespace(lr=0.1), "best": np.float64(0.5)},
        lambda one: {"state_dict": one, "optimizer": {"state": {0: {"momentum": torch.ones(1)}}, "param_groups": []}},
        lambda one: {"model": one, "model_ema": {name: 0 * tensor for name, tensor in one.items()}},
        lambda one: {"weights_of_mine": one, "step": 5},
        lambda one: {"state_dict": {f"module.{name}": tensor for name, tensor in one.items()}},
        lambda one: {f"_orig_mod.module.{name}": tensor for name, tensor in one.items()},
        lambda one: {name: tensor.half() for name, tensor in one.items()},
        lambda one: {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in one.items()},
        lambda one: {name: tensor for name, tensor in one.items() if "num_batches" not in name},
    ],
)
def test_files_as_programs_write_them_are_read_whole(tmp_path: Path, wrap: Any) -> None:
    expected, model = state(), Net()
    found = fit(model, written(tmp_path, wrap(expected)), "", "made.pth")
    assert not found.left_out and set(found.new) <= {"backbone.1.num_batches_tracked"}
    for name, tensor in found.weights.items():
        assert tensor.dtype == expected[name].dtype and torch.allclose(tensor, expected[name], atol=1e-3)


def test_another_head_a_prefix_and_a_part_are_loaded_and_the_table_is_true(tmp_path: Path) -> None:
    there = {f"encoder.{name.removeprefix('backbone.')}": one for name, one in state(10).items() if "fc" not in name}
    there |= {"fc.weight": state(10)["fc.weight"], "fc.bias": state(10)["fc.bias"], "rotary": torch.ones(1)}
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("encoder.", "backbone."): one for name, one in state.items()}

    found = fit(model, there, "fc.*,rotary", "--init wild.pth", renamed)
    assert list(found.weights) == [name for name in before if name.startswith("backbone")]
    assert found.new == ["fc.weight", "fc.bias"]
    assert found.left_out == ["fc.weight", "fc.bias", "rotary"]
    numbers = sum(tensor.numel() for tensor in found.weights.values())
    assert found.table() == [
        f"weights of wild.pth: 7 of the model's 9 tensors loaded ({numbers} numbers)",
        "  left out     fc.weight, fc.bias, rotary",
        "  new          fc.weight, fc.bias",
    ]

    def fitting(state: dict[str, Tensor]) -> dict[str, Tensor]:  # as in docs/tasks.md
        own, state = model.state_dict(), renamed(state)
        return own | {name: one for name, one in state.items() if name in own and one.shape == own[name].shape}

    partly = fit(model, there, "", "wild.pth", fitting)
    assert partly.weights.keys() == found.weights.keys() and partly.new == found.new
    assert partly.left_out == ["fc.weight", "fc.bias", "rotary"]
    for name, tensor in model.state_dict().items():  # fitting changes nothing
        assert torch.equal(tensor, before[name])


def test_tied_weights_are_loaded_by_either_name() -> None:
    model = Net(4)
    model.out = nn.Linear(6, 4, bias=False)
    model.out.weight = model.fc.weight
    there = {name: tensor for name, tensor in model.state_dict().items() if name != "out.weight"}
    found = fit(model, there, "", "tied.safetensors")
    assert not found.new and "out.weight" not in found.weights


@pytest.mark.parametrize(
    ("change", "skip", "words"),
    [
        (
            lambda s: s | {"fc.weight": torch.ones(10, 6)},
            "",
            r"fc.weight has shape \(10, 6\), the model's \(3, 6\);.*'fc'",
        ),
        (lambda s: s | {"extra.weight": torch.ones(1)}, "", "extra.weight is not in the model;.*--init_skip 'extra'"),
        (
            lambda s: {n: t for n, t in s.items() if "fc" not in n},
            "",
            "fc.weight, fc.bias are missing in it;.*adapt_state",
        ),
        (lambda s: {f"x.{n}": t for n, t in s.items()}, "", "nothing in it fits.* x.backbone.0.weight.*rename them"),
        (lambda s: s, "*", "nothing in it fits"),
        (lambda s: s, "fcc.*", "--init_skip fcc.*: neither the file nor the model"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way(change: Any, skip: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        fit(Net(), change(state()), skip, "--init made.pth")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Net(), r"holds .*Net, which is code; save only its state"),
        ([torch.ones(1)], "is a list and no state dict"),
        ({"epoch": 3, "loss": 0.5}, "holds no state dict, but epoch, loss"),
        ({"generator": state(), "critic": state()}, "several state dicts .generator, critic."),
    ],
)
def test_what_is_no_state_of_a_model_is_refused(tmp_path: Path, made: Any, words: str) -> None:
    with pytest.raises(Refused, match=words):
        written(tmp_path, made)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "cut.pth")
    save_file(state(), tmp_path / "cut.safetensors")
    for name in ("cut.pth", "cut.safetensors"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(Refused, match="cannot be read"):
            read(tmp_path / name, name)


TASK = """
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset

def datasets(config):
    points = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points[:, :3].argmax(1)), None

def model(config):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def pretrained(config):
    return "body.pt"

def adapt_state_dict(state, model):
    with open("adapted", "a") as file:
        file.write("x")
    return {name.removeprefix("body."): tensor for name, tensor in state.items() if "head" not in name}

DEFAULTS = {"init_skip": "2", "optim.lr": 0.01}
"""


class Code:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_the_metadata_of_a_strangers_checkpoint_execute_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Code()))
    listed = {".metadata": manifests.file_digest(folder / ".metadata")}
    text = manifests.manifest_text({"format": FORMAT, "step": 1, "files": listed})
    (folder / "manifest.json").write_text(text)
    with pytest.raises(Refused, match=r"posix\.mkdir, which is code"):
        read(folder, "--init step-00000001")
    assert not (tmp_path / "executed").exists()


class ByName(pickle.Pickler):
    """Writes members of an enum as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


class ByValue(pickle.Pickler):
    """Writes members of an enum as other versions of Python do."""

    def reducer_override(self, value: Any) -> Any:
        return (type(value), (value.value,)) if isinstance(value, enum.Enum) else NotImplemented


@pytest.mark.parametrize("writer", [ByName, ByValue])
def test_a_checkpoint_is_read_whichever_python_has_written_it(tmp_path: Path, writer: type[pickle.Pickler]) -> None:
    expected = state()
    dcp.save({"model": expected}, checkpoint_id=tmp_path, no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    with (tmp_path / ".metadata").open("wb") as file:
        writer(file).dump(metadata)
    assert (b"builtins" in (tmp_path / ".metadata").read_bytes()) == (writer is ByName)
    found = weights_in(tmp_path)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


class Attribute:
    def __init__(self, *of: Any) -> None:
        self.of = of

    def __reduce__(self) -> Any:
        return getattr, self.of


@pytest.mark.parametrize(
    "of",
    [
        (torch.Size, "__class__"),
        (Metadata, "__init__"),
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING, "_missing_"),
        (_MEM_FORMAT_ENCODING, ["TORCH_CONTIGUOUS_FORMAT"]),
        (_MEM_FORMAT_ENCODING, "NONE", 0),
        (_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, "__reduce_ex__"),
        (Attribute(torch.Size, "__subclasses__"), "__call__"),
    ],
)
def test_metadata_get_no_attribute_but_members_of_one_enum(tmp_path: Path, of: Any) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute(*of)))
    with pytest.raises(ValueError, match=r"getattr, which is code|is damaged"):
        weights_in(tmp_path)


def test_what_a_task_leaves_out_may_be_missing_whatever_its_name_began_with() -> None:
    there = {f"vit.{name}": tensor for name, tensor in state(10).items()}

    def adapt(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix("vit."): tensor for name, tensor in state.items() if "fc" not in name}

    found = fit(Net(), there, "", "vit.pth", adapt)
    assert found.left_out == ["vit.fc.weight", "vit.fc.bias"] and found.new == ["fc.weight", "fc.bias"]
    with pytest.raises(Refused, match=r"backbone\.0\.weight, .* are missing in it"):
        fit(Net(), {"fc.weight": there["vit.fc.weight"][:3], "x": torch.ones(1)}, "x", "x.pth")


def test_a_classifier_of_ddp_is_left_out_by_images_too() -> None:
    there = {f"module.{name}": tensor for name, tensor in images.network("resnet18", 10).state_dict().items()}
    model = images.network("resnet18", 3)
    found = fit(model, there, "", "ddp.pth", lambda state: images.adapt_state_dict(state, model))
    assert found.new == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("body.pt", "nowhere.pt"), "nowhere.pt: there is no such file"),
        (('"body.pt"', "3"), "is a int and no state dict"),
        (('"body.pt"', "1 / 0"), r"pretrained.. failed: .*line 18: ZeroDivisionError"),
        (("return {name.rem", "return state and 5\n    return {name.rem"), "adapt_state_dict in .* is a int"),
    ],
)
def test_what_a_task_returns_instead_of_weights_is_refused(own: Path, change: Any, words: str) -> None:
    own.write_text(own.read_text().replace(*change))
    with contextlib.chdir(own.parent), pytest.raises(Refused, match=words):
        prepare(Request(task=str(own), flags={}))


@pytest.fixture
def own(station: Station) -> Path:
    """A task whose weights lie in a file, of which one part fits."""
    body = {"body.0.weight": torch.full((6, 4), 0.25), "body.0.bias": torch.zeros(6), "head.weight": torch.ones(9, 6)}
    torch.save({"model": body}, station.folder / "body.pt")
    task = station.folder / "task.py"
    task.write_text(TASK)
    return task


def test_a_task_names_its_weights_and_no_later_command_asks_for_them_before_a_checkpoint_neither(
    station: Station, own: Path
) -> None:
    flags = ("--steps", 4, "--batch_size", 6)
    station.ok("run", own, "--name", "undisturbed", *flags)
    done = station("run", own, "--name", "begun", *flags, env={"TRAIN_FAULT": "update:2"})
    assert done.returncode == 3 and "died of SIGKILL" in done.stderr
    assert "weights of pretrained in" in done.stderr and "2 of the model's 4 tensors loaded" in done.stderr
    assert "left out     head.weight\n" in done.stderr and "new          2.weight, 2.bias" in done.stderr
    assert (station.folder / "adapted").read_text() == "xx"
    (station.folder / "body.pt").unlink()
    station.ok("resume", "begun", "--follow")
    station.ok("export", "begun", "--to", "begun.safetensors")
    assert (station.folder / "adapted").read_text() == "xx", "asked again"
    assert station.record("begun")["weights_sha256"] == station.record("undisturbed")["weights_sha256"]
    assert "tensors loaded" in station.ok("show", "begun").stdout
    first = load_file(station.runs / "begun" / initial_weights.FILE)
    assert set(first) == {"0.weight", "0.bias"} and torch.equal(first["0.weight"], torch.full((6, 4), 0.25))


def test_a_run_begins_with_the_weights_of_another_by_name(finished: Station, tmp_path: Path) -> None:
    # a learning rate that no bit of a float32 notices
    flags = ("--steps", 1, "--optim.lr", 1e-30, "--seed", 5, "--schedule.warmup_epochs", 0)
    done = finished.ok("run", "digits", "--name", "by-name", "--init", "done", *flags)
    assert "tensors loaded" in done.stderr
    assert finished.record("by-name")["weights_sha256"] == finished.record("done")["weights_sha256"]
    for init, words in (
        ("dona@best", "no file and no run has this name"),
        ("done@", "no file and no run has this name"),
        ("done@45", "no checkpoint of step 45"),
    ):
        done = finished.here("launch", "digits", "--name", "never", "--init", init)
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    (finished.folder / "done").touch()
    done = finished.here("run", "digits", "--name", "never", "--init", "done")
    (finished.folder / "done").unlink()
    assert done.returncode == 2 and "both a file and a run have this name; give ./done" in done.stderr
    done = finished.here("run", "digits", "--name", "never", "--init_skip", "7")
    assert done.returncode == 2 and "--init_skip 7 has no effect without --init;" in done.stderr
    assert not (finished.runs / "never").exists()
    (tmp_path / "init.toml").write_text('init = "done@best"\n')
    finished.ok("run", "digits", "--name", "by-toml", "--config", tmp_path / "init.toml", *flags)
    assert finished.record("by-toml")["weights_sha256"] == finished.record("done")["weights_sha256"]


def test_a_pretrained_classifier_of_images_gets_another_number_of_classes(station: Station) -> None:
    from PIL import Image

    for part in ("train", "val"):
        for label in "abc":
            folder = station.folder / "pets" / part / label
            folder.mkdir(parents=True)
            Image.new("RGB", (32, 32), (80, 90, 100)).save(folder / "1.png")
    torch.manual_seed(3)
    there = images.network("resnet18", 10)
    torch.save(there.state_dict(), station.folder / "resnet18.pth")
    flags = ("images", "--data.root", "pets", "--task.size", 32, "--steps", 1, "--batch_size", 3, "--data.workers", 0)
    done = station.ok("run", *flags, "--name", "pets", "--init", "resnet18.pth")
    assert "120 of the model's 122 tensors loaded" in done.stderr
    assert "left out     fc.weight, fc.bias" in done.stderr and "new          fc.weight, fc.bias" in done.stderr


def test_eval_and_export_find_beside_them_what_the_run_found(station: Station, own: Path) -> None:
    text = own.read_text().replace("    return nn.Seq", '    torch.load("body.pt")\n    return nn.Seq')
    own.write_text(text.replace("argmax(1)), None", "argmax(1)), TensorDataset(points[:5], points[:5, :3].argmax(1))"))
    station.ok("run", own, "--name", "a", "--steps", 1)
    elsewhere = Station(station.folder / "elsewhere")
    elsewhere.folder.mkdir()
    assert "step 1, 5 samples" in elsewhere.ok("eval", "a", "--runs", station.runs).stdout
    elsewhere.ok("export", "a", "--runs", station.runs, "--to", "a.pt")
    assert (elsewhere.folder / "a.pt").exists()
