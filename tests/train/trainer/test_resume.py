"""A run that was stopped, killed, copied or renamed ends as the one that nobody disturbed, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiers import later
from train.checkpoint import manifest as manifests
from train.config import forbidden_changes
from train.errors import Refused
from train.launcher.resume import prepare_resume

pytestmark = pytest.mark.never_forgiven

ADAMW = {"optim__name": "adamw", "optim__lr": 0.01, "data__workers": 2, "task__batchnorm": "true"}

BY_FOUR = {"checkpoint__every_steps": 4, "checkpoint__asynchronous": "false"}


@pytest.fixture(scope="session")
def undisturbed(engine: Any) -> Any:
    """With the runs `sgd3` and `adamw3`: ten steps on three ranks, undisturbed."""
    assert engine.run("sgd3", 3)["state"] == "finished"
    assert engine.run("adamw3", 3, **ADAMW)["state"] == "finished"
    return engine


@pytest.mark.parametrize(("flags", "reference"), [(ADAMW, "adamw3"), *later(({}, "sgd3"))], ids=["adamw", "sgd"])
def test_stopped_after_each_single_step_it_ends_bit_for_bit_as_undisturbed(
    undisturbed: Any, flags: dict[str, Any], reference: str
) -> None:
    name = f"{reference}-stopped-always"
    record = undisturbed.run(name, 3, ["1 2 SIGTERM"], **flags)
    for step in range(1, 11):
        assert (record["state"], record["step"]) == ("stopped", step)
        assert undisturbed.code == 75
        record = undisturbed.resume(name, 3, ["1 0 SIGTERM"])
    assert len(record["attempts"]) == 11
    assert undisturbed.outcome(name) == undisturbed.outcome(reference)


@pytest.mark.parametrize(("ranks", "stops"), [(3, (2, 1)), (1, (6,)), *later((4, (5, 2)), (2, (4, 4)))])
def test_stopped_in_the_middle_it_goes_on_for_many_steps_bit_for_bit(
    undisturbed: Any, ranks: int, stops: tuple[int, ...]
) -> None:
    reference, name = f"sgd{ranks}", f"sgd{ranks}-stopped"
    if ranks != 3:
        undisturbed.run(reference, ranks)
    undisturbed.run(name, ranks, [f"{stops[0]} 0 SIGTERM"])
    for stop in stops[1:]:
        undisturbed.resume(name, ranks, [f"{stop} 0 SIGTERM"])
    record = undisturbed.resume(name, ranks)
    assert [attempt["end"] for attempt in record["attempts"]] == ["stopped"] * len(stops) + ["finished"]
    assert undisturbed.outcome(name) == undisturbed.outcome(reference)


def test_an_optimizer_without_state_resumes(engine: Any) -> None:
    engine.run("plain", 2, optim__momentum=0, steps=5)
    engine.run("plain-stopped", 2, ["2 1 SIGTERM"], optim__momentum=0, steps=5)
    engine.resume("plain-stopped", 2)
    assert engine.outcome("plain-stopped") == engine.outcome("plain")


@pytest.mark.parametrize(("rank", "reference", "flags"), [(0, "adamw3", ADAMW), *later((2, "sgd3", {}))])
def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_changes_nothing(
    undisturbed: Any, rank: int, reference: str, flags: dict[str, Any]
) -> None:
    name = f"{reference}-killed"
    record = undisturbed.run(name, 3, [f"6 {rank} SIGKILL"], **BY_FOUR, **flags)
    assert (record["state"], undisturbed.code) == ("interrupted", 3)
    assert "SIGKILL" in record["reason"]
    assert undisturbed.station.run(name).steps_saved() == [4]
    undisturbed.resume(name, 3)
    assert undisturbed.outcome(name) == undisturbed.outcome(reference)


def test_killed_before_its_first_checkpoint_it_starts_from_the_beginning(undisturbed: Any) -> None:
    undisturbed.run("early", 3, ["3 1 SIGKILL"])
    assert undisturbed.station.run("early").steps_saved() == []
    undisturbed.resume("early", 3)
    assert undisturbed.outcome("early") == undisturbed.outcome("sgd3")


def test_metrics_and_sample_logs_are_cut_to_the_checkpoint_also_those_of_ranks_that_are_no_more(engine: Any) -> None:
    engine.run("cut-reference", 1, steps=8)
    engine.run("cut", 4, steps=6, checkpoint__every_steps=3, checkpoint__keep=2)
    folder = engine.station.runs / "cut"
    shutil.rmtree(folder / "checkpoints/step-00000006")
    with (folder / "samples.rank3.log").open("a") as file:
        file.write("7 1 2")  # what a kill in the middle of a line leaves
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "ep')
    engine.resume("cut", 2, steps=8)
    assert [line["step"] for line in engine.station.metrics("cut") if "loss" in line] == list(range(1, 9))
    assert [line["step"] for line in engine.station.metrics("cut") if "eval" in line] == [4, 8]
    assert engine.station.samples("cut") == engine.station.samples("cut-reference")
    assert [line.split()[0] for line in (folder / "samples.rank3.log").read_text().splitlines()] == ["1", "2", "3"]


def test_a_finished_run_goes_on_when_asked_for_more_epochs(engine: Any) -> None:
    constant = {"schedule__decay": "constant", "schedule__warmup_epochs": 0}
    engine.run("more-long", 2, epochs=3, **constant)
    engine.run("more-short", 2, epochs=2, **constant)
    record = engine.resume("more-short", 2, epochs=3)
    assert (record["state"], record["step"]) == ("finished", 12)
    assert engine.outcome("more-short") == engine.outcome("more-long")


def test_workers_and_logging_may_change_on_a_resume_and_the_result_does_not(undisturbed: Any) -> None:
    undisturbed.run("changed", 3, ["4 0 SIGTERM"], checkpoint__every_steps=4)
    undisturbed.resume("changed", 3, data__workers=2, log__every_steps=5, checkpoint__keep=1, checkpoint__every_steps=3)
    assert (
        undisturbed.station.record("changed")["weights_sha256"]
        == (undisturbed.station.record("sgd3")["weights_sha256"])
    )
    assert [line["step"] for line in undisturbed.station.metrics("changed") if "loss" in line] == [1, 2, 3, 4, 5, 10]
    assert undisturbed.station.run("changed").steps_saved() == [10]


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", "3"), ("batch_size", "8"), ("micro_batch_size", "2"), ("optim.lr", "0.5"), ("precision", "bf16"),
     ("schedule.decay", "constant"), ("clip_grad_norm", "1"), ("task.dropout", "0.1"), ("cpu_threads", "2")],
)  # fmt: skip
def test_a_change_that_would_make_another_run_is_refused_naming_the_field(
    undisturbed: Any, field: str, value: str
) -> None:
    run = undisturbed.station.run("sgd3")
    before = (run.folder / "config.toml").read_bytes()
    with pytest.raises(Refused, match=rf"\b{field} was .* and is {value}"):
        prepare_resume(run, {field: value}, 3)
    assert (run.folder / "config.toml").read_bytes() == before


def test_a_config_file_edited_in_the_run_folder_is_refused_naming_the_field(undisturbed: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(undisturbed.station.runs / "sgd3", tmp_path / "edited")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1\n", "lr = 0.2\n"))
    with pytest.raises(Refused, match=r"optim\.lr was 0\.1 and is 0\.2"):
        prepare_resume(type(undisturbed.station.run("sgd3"))(folder), {}, 3)


def test_fewer_steps_than_were_made_are_refused(undisturbed: Any) -> None:
    with pytest.raises(Refused, match="already trained 10 steps"):
        prepare_resume(undisturbed.station.run("sgd3"), {"steps": "9"}, 3)


def test_a_changed_copy_of_the_task_is_refused_and_a_changed_original_only_warns(
    undisturbed: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(undisturbed.station.runs / "sgd3", tmp_path / "sgd3")
    run = type(undisturbed.station.run("sgd3"))(folder)
    original = tmp_path / "original.py"
    original.write_text((folder / "task.py").read_text() + "# changed\n")
    run.update(task_source=str(original))
    assert any("original.py has changed" in line for line in prepare_resume(run, {}, 3)[1])
    (folder / "task.py").write_text((folder / "task.py").read_text() + "# changed\n")
    with pytest.raises(Refused, match=r"task\.py has changed since"):
        prepare_resume(run, {}, 3)


def test_a_run_of_a_built_in_task_goes_on_with_another_version_of_it_and_says_so(engine: Any) -> None:
    steady = {"schedule__decay": "constant", "schedule__warmup_epochs": 0}
    engine.run("builtin", 1, task=Path("digits"), steps=2, **steady)
    run = engine.station.run("builtin")
    assert not prepare_resume(run, {"steps": "4"}, 1)[1]
    manifest = manifests.read_manifest(run.checkpoint(2))
    text = manifests.manifest_text(manifest | {"task_sha256": "of another version"})
    (run.checkpoint(2) / manifests.MANIFEST).write_text(text)
    (warning,) = prepare_resume(run, {"steps": "4"}, 1)[1]
    assert "the task digits has changed since" in warning


def test_every_field_that_shapes_the_result_is_protected() -> None:
    from train.config import fields

    free = [name for name in fields() if not forbidden_changes({name: 1}, {name: 2})]
    shaping = {"seed", "batch_size", "micro_batch_size", "precision", "compile", "clip_grad_norm", "sync_batchnorm"}
    shaping |= {"deterministic", "cpu_threads", "data.name", "data.drop_last", "channels_last", "parallel.reduce"}
    shaping |= {name for name in fields() if name.startswith(("optim.", "schedule."))}
    shaping -= {"schedule.total_epochs"}  # as epochs: a longer run may keep its curve
    assert shaping.isdisjoint(free)
    assert {
        "epochs",
        "steps",
        "data.workers",
        "data.on_error",
        "log.samples",
        "checkpoint.keep",
        "parallel.strategy",
    } <= set(free)
    # a new field does not change the format of run folders
    assert not forbidden_changes({"seed": 0}, {"seed": 0, "data.drop_last": False})
    assert forbidden_changes({"seed": 0}, {"seed": 0, "data.drop_last": True}) == ["data.drop_last"]


def test_a_resume_with_fewer_micro_batches_than_ranks_warns(undisturbed: Any) -> None:
    warnings = prepare_resume(undisturbed.station.run("sgd3"), {}, 6)[1]
    assert warnings == ["a step has 4 micro batches for 6 ranks, so 2 ranks have no work"]


@pytest.mark.minutes
def test_killed_agent_copied_folder_and_new_name_still_give_the_same_bits(undisturbed: Any) -> None:
    """The whole way, as a user goes it: tmux, torchrun, kills, a renamed and a copied folder, another shell."""
    station = undisturbed.station
    flags = [part for key, value in undisturbed.flags.items() for part in (f"--{key}", str(value))]
    task = station.folder / "task.py"
    text = undisturbed.task.read_text()
    slow = text.replace(
        "    if model.training:\n", "    if model.training:\n        __import__('time').sleep(0.3)\n", 1
    )
    assert slow != text
    task.write_text(slow)  # slow enough to be met while it runs
    station.ok("launch", task, "--name", "victim", "--nproc", 3, "--checkpoint.every_steps", 2, *flags)

    station.wait("victim", lambda record: 2 in station.run("victim").steps_saved(), "its first checkpoint")
    while_running = station("resume", "victim")
    assert while_running.returncode == 2
    assert "running" in while_running.stderr and "Traceback" not in while_running.stderr
    os.kill(station.record("victim")["pids"]["agent"], signal.SIGKILL)
    assert station.wait_for_end("victim")["state"] == "interrupted"

    shutil.copytree(station.runs / "victim", station.runs / "copy")
    (station.runs / "victim").rename(station.runs / "renamed")
    for name in ("copy", "renamed"):
        station.ok("resume", name)
        if name == "renamed":  # a rank dies: the agent starts all of them again by itself
            station.wait(name, lambda record: len(record["pids"].get("ranks", [])) == 3, "three ranks")
            station.wait(name, lambda record: bool(record["attempts"][-1].get("ready")), "its start")
            station.wait_for_step(name, station.run(name).steps_saved()[0] + 1)
            os.kill(station.record(name)["pids"]["ranks"][1], signal.SIGKILL)
    for name in ("copy", "renamed"):
        record = station.wait_for_end(name)
        assert record["state"] == "finished", station.logs(name)
        assert undisturbed.outcome(name) == undisturbed.outcome("sgd3")
        assert record["name"] == name
        assert str(station.runs) not in json.dumps(record)

    again = station("resume", "copy")
    assert again.returncode == 0
    assert len((again.stdout + again.stderr).splitlines()) == 1
    refused = station("resume", "copy", "--epochs", 3, "--optim.lr", 0.3)
    assert refused.returncode == 2
    assert "optim.lr" in refused.stderr and "Traceback" not in refused.stderr
    more = station("resume", "copy", "--epochs", 3, "--nproc", 2, "--follow")
    assert more.returncode == 0, more.stderr
    assert station.record("copy")["step"] == 12
    assert station.record("copy")["world_size"] == 2
