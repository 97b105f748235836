"""A checkpoint is committed or it does not exist."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.specs import with_spec
from train.checkpoint import manifest as manifests
from train.errors import Refused, may_pass
from train.run.record import FORMAT
from train.run.run_folder import Run
from train.trainer.export import export
from train.trainer.load import load_trained

pytestmark = pytest.mark.never_forgiven


@pytest.fixture(scope="session")
def saved(engine: Any) -> Any:
    """With the run `saved`: three ranks, ten steps, a checkpoint every two steps, of which three are kept."""
    engine.run("saved", 3, checkpoint__every_steps=2)
    return engine


def test_a_resumed_run_goes_on_from_the_older_checkpoint_when_the_newest_is_damaged(finished: Any) -> None:
    """By the command line: what was found travels between processes."""
    run = Run(shutil.copytree(finished.runs / "done", finished.runs / "spoilt"))
    newest, older = run.steps_saved()[:2]
    shard = next(run.checkpoint(newest).glob("__0_*"))
    shard.write_bytes(shard.read_bytes()[:-7])
    finished.ok("resume", "spoilt", "--epochs", 3, "--nproc", 2, "--follow")
    record = run.read()
    assert record["state"] == "finished" and record["attempts"][-1]["from_step"] == older
    assert shard.name in finished.logs("spoilt") and manifests.newest_valid(run)[0] == record["step"]


@pytest.fixture
def copied(saved: Any, tmp_path: Path) -> Run:
    """A copy of that run to damage."""
    return Run(shutil.copytree(saved.station.runs / "saved", tmp_path / "copied"))


def test_the_newest_are_kept_and_nothing_unfinished_is_left(saved: Any) -> None:
    assert sorted(os.listdir(saved.station.runs / "saved/checkpoints")) == [
        "step-00000006", "step-00000008", "step-00000010",
    ]  # fmt: skip


def test_a_checkpoint_has_shards_of_every_rank_that_wrote_and_lists_all_its_files(saved: Any) -> None:
    run = saved.station.run("saved")
    manifest = manifests.verify(run.checkpoint(10))
    names = set(os.listdir(run.checkpoint(10)))
    assert names == {"manifest.json", *manifest["files"]}
    assert (manifest["step"], manifest["world_size"]) == (10, 3)
    assert {name.split("_")[2] for name in names if name.startswith("__")} >= {"0", "1"}


def damages(folder: Path) -> Iterator[tuple[str, str]]:
    """Damage a checkpoint in one way after the other: yields what was done to which file, then undoes it."""
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        stride = max(len(content) // 50, 1)
        for place in {*range(0, len(content), stride), len(content) - 1}:
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            yield f"byte {place}", path.name
        path.write_bytes(content[:-1])
        yield "truncated", path.name
        path.write_bytes(b"")
        yield "empty", path.name
        path.write_bytes(content + b"\n")
        yield "longer", path.name
        path.unlink()
        yield "missing", path.name
        path.write_bytes(content)
    extra = folder / "__7_0.distcp"
    extra.write_bytes(b"of another run")
    yield "extra", extra.name
    extra.unlink()


def test_any_damage_to_any_file_is_named_and_the_older_checkpoint_is_used(copied: Run) -> None:
    kinds = 0
    for kind, name in damages(copied.checkpoint(10)):
        step, _, lines = manifests.newest_valid(copied)
        assert step == 8, (kind, name)
        assert len(lines) == 1 and name in lines[0] and "step-00000010" in lines[0], (kind, name, lines)
        kinds += 1
    assert kinds > 200
    assert manifests.newest_valid(copied)[0] == 10


def test_files_in_subfolders_belong_to_a_checkpoint_too(copied: Run) -> None:
    folder = copied.checkpoint(10)
    manifest = manifests.read_manifest(folder)
    inside = folder / "adapter" / "manifest.json"
    inside.parent.mkdir()
    inside.write_text("weights")
    with pytest.raises(ValueError, match=r"adapter/manifest\.json does not belong to it"):
        manifests.verify(folder)
    manifest["files"]["adapter/manifest.json"] = manifests.file_digest(inside)
    (folder / "manifest.json").write_text(manifests.manifest_text(manifest))
    manifests.verify(folder)
    inside.unlink()
    with pytest.raises(ValueError, match=r"adapter/manifest\.json is missing"):
        manifests.verify(folder)


def test_a_flipped_bit_of_the_manifest_is_found(copied: Run) -> None:
    path = copied.checkpoint(10) / "manifest.json"
    content = path.read_bytes()
    for place in range(0, len(content), 13):
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"manifest\.json"):
            manifests.read_manifest(copied.checkpoint(10))


def test_export_and_resume_use_the_older_checkpoint_when_the_newest_is_damaged(saved: Any) -> None:
    folder = shutil.copytree(saved.station.runs / "saved", saved.station.runs / "damaged")
    run = Run(folder)
    shard = next(run.checkpoint(10).glob("__1_*"))
    shard.write_bytes(shard.read_bytes()[:-7])
    assert load_trained(*with_spec(run))[3] == 8
    with pytest.raises(Refused, match=shard.name):
        load_trained(*with_spec(run), 10)
    saved.resume("damaged", 3)
    assert shard.name in saved.said("damaged")
    assert saved.outcome("damaged") == saved.outcome("saved")
    assert sorted(os.listdir(run.checkpoints)) == ["step-00000006", "step-00000008", "step-00000010"]
    assert manifests.newest_valid(run)[0] == 10


def test_what_the_disk_does_not_give_out_is_not_used_and_not_thrown_away(saved: Any) -> None:
    run = Run(shutil.copytree(saved.station.runs / "saved", saved.station.runs / "unreadable"))
    shard = next(run.checkpoint(10).glob("__1_*"))
    content = shard.read_bytes()
    shard.unlink()
    shard.symlink_to(shard.name)  # too many levels of symbolic links: an error of the system, also for root
    saved.resume("unreadable", 3)
    assert saved.outcome("unreadable") == saved.outcome("saved")
    kept = run.checkpoints / ".unreadable-step-00000010"
    assert (kept / shard.name).is_symlink()
    (kept / shard.name).unlink()
    (kept / shard.name).write_bytes(content)
    assert manifests.verify(kept)["step"] == 10


@pytest.mark.parametrize(
    ("manifest", "words", "passes"), [("manifest.json", "symbolic links", False), ("/proc/self/mem", "Input/", True)]
)
def test_when_no_checkpoint_can_be_read_nothing_starts_over(
    copied: Run, manifest: str, words: str, passes: bool
) -> None:
    for step in copied.steps_saved():
        (copied.checkpoint(step) / "manifest.json").unlink()
        (copied.checkpoint(step) / "manifest.json").symlink_to(manifest)
    with pytest.raises(Refused, match=words) as refused:
        manifests.newest_valid(copied)
    assert may_pass(refused.value) == may_pass(pickle.loads(pickle.dumps(refused.value))) == passes
    assert copied.steps_saved() == [10, 8, 6]


def test_a_checkpoint_of_a_newer_version_is_refused_and_kept(copied: Run) -> None:
    manifest = manifests.read_manifest(copied.checkpoint(10))
    text = manifests.manifest_text(manifest | {"format": FORMAT + 1})
    (copied.checkpoint(10) / "manifest.json").write_text(text)
    with pytest.raises(Refused, match=f"the format {FORMAT + 1}"):
        manifests.newest_valid(copied)


@pytest.mark.minutes
def test_a_peer_killed_during_the_last_save_leaves_no_outcome_without_its_checkpoint(engine: Any) -> None:
    station = engine.station
    engine.run("last", 2)
    flags = [part for key, value in engine.flags.items() for part in (f"--{key}", str(value))]
    done = station(
        "run", engine.task, "--name", "last-killed", "--spawn", 2, *flags, env={"TRAIN_FAULT": "save.begin@1:1"}
    )
    record = station.run("last-killed").read_effective()
    assert (done.returncode, record["state"]) == (3, "interrupted"), done.stderr
    assert station.run("last-killed").steps_saved() == []
    engine.resume("last-killed", 2)
    assert engine.outcome("last-killed") == engine.outcome("last")


def test_when_all_are_damaged_a_resume_starts_over_and_says_so(saved: Any) -> None:
    run = Run(shutil.copytree(saved.station.runs / "saved", saved.station.runs / "hopeless"))
    for step in run.steps_saved():
        (run.checkpoint(step) / "manifest.json").unlink()
    with pytest.raises(Refused, match="no usable checkpoint"):
        load_trained(*with_spec(run))
    saved.resume("hopeless", 3)
    assert saved.said("hopeless").count("is damaged and not used: manifest.json") == 3
    assert saved.outcome("hopeless") == saved.outcome("saved")


def test_an_unfinished_folder_is_never_loaded_and_is_cleaned_away(saved: Any) -> None:
    run = Run(shutil.copytree(saved.station.runs / "saved", saved.station.runs / "unfinished"))
    # complete but for the rename: a kill at the last moment before the commit
    run.checkpoint(10).rename(run.checkpoints / ".partial-step-00000010-1")
    (run.checkpoints / ".partial-removing-step-00000004").mkdir()
    assert run.steps_saved() == [8, 6]
    assert load_trained(*with_spec(run))[3] == 8
    saved.resume("unfinished", 3)
    assert not [name for name in os.listdir(run.checkpoints) if name.startswith(".")]
    assert saved.outcome("unfinished") == saved.outcome("saved")


def digest_by_the_formula(path: Path) -> str:
    """weights_sha256 as documented, from the bytes of a .safetensors file, without torch."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = {key: value for key, value in json.loads(content[8:start]).items() if key != "__metadata__"}
    dtypes = {"F32": "float32", "F64": "float64", "I64": "int64"}
    digest = hashlib.sha256()
    for name in sorted(header):
        entry = header[name]
        shape = ",".join(str(size) for size in entry["shape"])
        digest.update(f"{name}\n{dtypes[entry['dtype']]}\n{shape}\n".encode())
        first, last = entry["data_offsets"]
        digest.update(content[start + first : start + last])
    return digest.hexdigest()


@pytest.mark.parametrize("flags", [{"task__tied": "true"}, {"task__batchnorm": "true", "precision": "fp64"}])
def test_weights_sha256_is_that_of_the_exported_file(engine: Any, tmp_path: Path, flags: dict[str, Any]) -> None:
    name = "digest-" + "-".join(flags).replace("__", "-")
    record = engine.run(name, 3, steps=2, **flags)
    export(*with_spec(engine.station.run(name)), tmp_path / "weights.safetensors")
    assert record["weights_sha256"] == digest_by_the_formula(tmp_path / "weights.safetensors")


def test_tied_weights_stay_tied_and_resume_bit_for_bit(engine: Any) -> None:
    engine.run("tied", 3, steps=6, task__tied="true")
    engine.run("tied-stopped", 3, ["3 0 SIGTERM"], steps=6, task__tied="true")
    engine.resume("tied-stopped", 3)
    assert engine.outcome("tied-stopped") == engine.outcome("tied")
    model = load_trained(*with_spec(engine.station.run("tied")))[2]
    assert model.again.weight is model.middle.weight


def test_what_three_ranks_wrote_one_process_loads(saved: Any, tmp_path: Path) -> None:
    run = saved.station.run("saved")
    export(*with_spec(run), tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    loaded = load_trained(*with_spec(run))[2].state_dict()
    assert state.keys() == loaded.keys()
    assert all(torch.equal(state[key], loaded[key]) for key in state)


def test_training_goes_on_when_a_rank_cannot_write_its_shard(engine: Any) -> None:
    # from step 5 on rank 1 can write no file beyond 16 kB, as with a quota: its shard is larger
    flags = {"task__width": 96, "checkpoint__every_steps": 2, "checkpoint__asynchronous": "false"}
    record = engine.run("quota", 3, ["5 1 limit"], **flags)
    assert engine.code == 3
    assert record["state"] == "failed"
    assert "step 10 could not be saved" in record["reason"]
    run = engine.station.run("quota")
    assert sorted(os.listdir(run.checkpoints)) == ["step-00000002", "step-00000004"]
    assert manifests.newest_valid(run)[0] == 4
    assert engine.said("quota").count("could not be saved") == 2  # after steps 6 and 8; 10 is in the reason
    assert engine.losses("quota")[-1] > 0 and len(engine.losses("quota")) == 10
    engine.resume("quota", 3)
    engine.run("no-quota", 3, **flags)
    assert engine.outcome("quota") == engine.outcome("no-quota")
