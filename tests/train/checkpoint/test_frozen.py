"""Frozen weights are written once; file and shards together are the state, whatever happens to either."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks import TASKS
from tests.train.specs import with_spec
from train.checkpoint import frozen
from train.checkpoint import manifest as manifests
from train.checkpoint.load import weights_in
from train.checkpoint.state_dict import weights_sha256
from train.errors import Refused
from train.launcher.resume import prepare_resume
from train.run.run_folder import Run
from train.trainer.export import export

pytestmark = pytest.mark.never_forgiven

TASK = TASKS / "adapter.py"
FLAGS: dict[str, Any] = {
    "checkpoint__every_steps": 2, "checkpoint__keep": 9, "optim__name": "adamw", "schedule__warmup_epochs": 0,
}  # fmt: skip
BASE = ("base.0.weight", "base.0.bias", "base.1.weight", "base.1.bias", "base.2.weight", "base.2.bias")


@pytest.fixture(scope="session")
def adapted(engine: Any) -> Any:
    """With two runs of ten steps: in `adapted` the frozen weights stay, in `strayed` it moves from step 5 on."""
    for name, more in (("adapted", {}), ("strayed", {"task__moves_from": 5})):
        assert engine.run(name, task=TASK, **FLAGS, **more)["state"] == "finished", engine.said(name)
    return engine


@pytest.fixture
def copied(adapted: Any, tmp_path: Path) -> Run:
    """A copy of `adapted` to damage."""
    return Run(shutil.copytree(adapted.station.runs / "adapted", tmp_path / "copied"))


def stored(run: Run, step: int) -> set[str]:
    """The weights in the shards of a checkpoint."""
    folder = run.checkpoint(step)
    reader = torch.distributed.checkpoint.FileSystemReader(folder)
    paths = (reader.read_metadata().planner_data or {}).values()
    return {path[1] for path in paths if path[0] == "model"}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_checkpoint_has_only_what_moves_and_export_has_all(adapted: Any, tmp_path: Path) -> None:
    run = adapted.station.run("adapted")
    (file,) = manifests.frozen_files(run)
    held = load_file(run.folder / file)
    assert held.keys() == {*BASE, "teacher.weight"}
    assert all(not stored(run, step) & held.keys() for step in run.steps_saved())
    assert size_of(run.checkpoint(10)) < 60_000 < 260_000 < (run.folder / file).stat().st_size
    export(*with_spec(run), tmp_path / "all.safetensors")
    whole = load_file(tmp_path / "all.safetensors")
    assert weights_sha256(whole) == run.read()["weights_sha256"] == weights_sha256(weights_in(run.checkpoint(10)))
    assert all(torch.equal(whole[name], value) for name, value in held.items())


def test_what_moves_all_the_same_is_written_from_then_on(adapted: Any) -> None:
    run = adapted.station.run("strayed")
    weights = {step: weights_in(run.checkpoint(step))["teacher.weight"] for step in run.steps_saved()}
    assert [step for step in sorted(weights) if "teacher.weight" in stored(run, step)] == [6, 8, 10]
    assert torch.equal(weights[2], weights[4]) and not torch.equal(weights[6], weights[8])
    assert not any(stored(run, step) & {*BASE} for step in weights)
    assert weights_sha256(weights_in(run.checkpoint(10))) == run.read()["weights_sha256"]


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [
        (3, "save.frozen"),
        *(pytest.param(1, point, marks=pytest.mark.minutes) for point in ("save.frozen", "save.shards:2")),
        *(pytest.param(3, point, marks=pytest.mark.minutes) for point in ("save.renamed:3", "prune.removed:4")),
    ],
)
def test_killed_anywhere_and_resumed_it_ends_as_undisturbed(adapted: Any, ranks: int, fault: str) -> None:
    whole, name = f"strayed-{ranks}", f"strayed-{ranks}-{fault.replace(':', '-')}"
    flags = FLAGS | {"task__moves_from": 5, "checkpoint__keep": 2}
    if not (adapted.station.runs / whole).exists():
        adapted.run(whole, ranks, task=TASK, **flags)
    assert adapted.run(name, ranks, task=TASK, fault=f"{fault.replace(':', '@0:')}", **flags)["state"] == "interrupted"
    adapted.resume(name, ranks)
    assert adapted.outcome(name) == adapted.outcome(whole)
    assert len(manifests.frozen_files(adapted.station.run(name))) == 1
    assert not list(adapted.station.run(name).folder.glob(".frozen*"))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param((3, "ddp"), (1, "single"), marks=pytest.mark.minutes),
        ((1, "single"), (2, "fsdp")),
        pytest.param((2, "fsdp"), (2, "ddp"), marks=pytest.mark.minutes),
    ],
)
def test_it_goes_on_with_other_ranks_and_strategies(adapted: Any, first: Any, then: Any) -> None:
    name = f"from-{first[1]}-to-{then[1]}"
    flags = FLAGS | {"precision": "fp64", "epochs": 1.5, "parallel__strategy": first[1]}
    adapted.run(name, first[0], task=TASK, **flags)
    run = adapted.station.run(name)
    before = weights_in(run.checkpoint(6))
    record = adapted.resume(name, then[0], epochs=2.5, parallel__strategy=then[1])
    assert record["state"] == "finished" and record["attempts"][-1]["from_step"] == 6, adapted.said(name)
    after = weights_in(run.checkpoint(10))
    assert all(torch.equal(before[key], after[key]) for key in BASE) and before.keys() == after.keys()
    assert not torch.equal(before["up.weight"], after["up.weight"])
    assert bool({*BASE} & stored(run, 10)) == (then[1] == "fsdp")


def test_a_damaged_file_is_made_again_from_the_seed(copied: Run) -> None:
    (name,) = manifests.frozen_files(copied)
    path, content = copied.folder / name, (copied.folder / name).read_bytes()
    for damaged in (content[:-1], content[:100] + bytes([content[100] ^ 1]) + content[101:],
                    content[:-50] + bytes([content[-50] ^ 1]) + content[-49:], None):  # fmt: skip
        path.unlink() if damaged is None else path.write_bytes(damaged)
        _, warnings = prepare_resume(copied, {}, 1)
        assert any(f"{name} was damaged, and was computed again" in line for line in warnings)
        assert path.read_bytes() == content and manifests.newest_valid(copied)[0] == 10


def test_a_damaged_file_that_the_first_weights_do_not_make_is_named_and_costs_nothing(
    adapted: Any, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(adapted.station.runs / "adapted", tmp_path / "tuned"))
    text = (run.folder / "config.toml").read_text()
    (run.folder / "config.toml").write_text(text.replace("seed = 0", "seed = 1", 1))
    for step in run.steps_saved():
        path = run.checkpoint(step) / manifests.MANIFEST
        path.write_text(manifests.manifest_text(json.loads(path.read_text().replace('"seed": 0', '"seed": 1'))))
    (name,) = manifests.frozen_files(run)
    content = (run.folder / name).read_bytes()
    (run.folder / name).write_bytes(content[:-1])
    with pytest.raises(Refused, match="put a copy of that file back") as told:
        prepare_resume(run, {}, 1)
    assert name in str(told.value) and len(run.steps_saved()) == 5
    (run.folder / name).write_bytes(content)
    prepare_resume(run, {}, 1)


def test_a_damaged_shard_still_costs_one_checkpoint(copied: Run) -> None:
    shard = next(copied.checkpoint(10).glob("__0_*"))
    shard.write_bytes(shard.read_bytes()[:-7])
    assert manifests.newest_valid(copied)[0] == 8


def test_a_fork_carries_the_file_and_unfrozen_it_writes_all_and_removes_the_file(adapted: Any) -> None:
    (name,) = manifests.frozen_files(adapted.station.run("adapted"))
    assert adapted.fork("adapted", "frozen-same", 8, steps=12)["state"] == "finished", adapted.said("frozen-same")
    same = adapted.station.run("frozen-same")
    assert manifests.frozen_files(same) == [name] and not stored(same, 12) & {*BASE}
    record = adapted.fork("frozen-same", "frozen-more", 12, steps=16, freeze="down", checkpoint__keep=1)
    assert record["state"] == "finished"
    more = adapted.station.run("frozen-more")
    (other,) = manifests.frozen_files(more)
    assert other != name and not stored(more, 16) & {*BASE, "down.weight"}
    assert weights_sha256(weights_in(more.checkpoint(16))) == more.read()["weights_sha256"]


def test_a_run_starts_with_the_weights_of_a_checkpoint_that_refers_to_the_file(adapted: Any) -> None:
    station = adapted.station
    station.ok("run", TASK, "--name", "second", "--init", "adapted@8", "--steps", 2, "--seed", 3)
    adapted.resume("second", steps=4)  # another seed: only the file has these weights
    found, wanted = (weights_in(station.run(name).checkpoint(step)) for name, step in (("second", 4), ("adapted", 8)))
    assert all(torch.equal(found[name], wanted[name]) for name in BASE)
    assert not stored(station.run("second"), 4) & {*BASE}


def test_the_average_of_frozen_weights_is_left_out_too(adapted: Any) -> None:
    flags = FLAGS | {"ema__decay": 0.9}
    adapted.run("frozen-averaged", task=TASK, **flags)
    adapted.run("frozen-averaged-killed", task=TASK, fault="save.published@0:3", **flags)
    adapted.resume("frozen-averaged-killed")
    assert adapted.outcome("frozen-averaged-killed") == adapted.outcome("frozen-averaged")
    assert size_of(adapted.station.run("frozen-averaged").checkpoint(10)) < 70_000


def test_equal_tensors_make_equal_files_and_any_change_shows(tmp_path: Path) -> None:
    run = Run(tmp_path)
    tensors = {
        "b": torch.randn(3, 5), "a": torch.arange(7, dtype=torch.int8), "c": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 4), "half": torch.randn(3).bfloat16(), "t": torch.randn(4, 6).T,
        "yes": torch.ones(3) > 0,
    }  # fmt: skip
    entry = frozen.write(run, tensors)
    assert frozen.write(run, dict(reversed(tensors.items()))) == entry
    assert os.listdir(tmp_path) == [manifests.frozen_name(entry)]
    found = load_file(tmp_path / manifests.frozen_name(entry))
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    same, digests = frozen.inspect(tmp_path / manifests.frozen_name(entry))
    assert same == entry and digests == {name: frozen.digest_of(one) for name, one in tensors.items()}
    other = tensors["b"].clone()
    other[2, 4] = torch.nextafter(other[2, 4], torch.tensor(9.0))
    assert frozen.digest_of(other) != digests["b"] != frozen.digest_of(tensors["b"].reshape(5, 3))
