"""`train prune`: ended runs only, the named checkpoints stay, and all names are checked before anything is deleted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.train.conftest import Station
from tests.train.terminal import Terminal
from train.checkpoint import manifest
from train.run import folders
from train.run.record import FORMAT
from train.run.run_folder import Run

pytestmark = pytest.mark.never_forgiven

SCORES = {10: 0.5, 20: 0.1, 30: 0.4}
"""The evaluated loss of each checkpoint."""


def saved(run: Run, step: int, frozen: str = "") -> None:
    """A whole checkpoint, perhaps with a file of frozen weights beside it."""
    folder = run.checkpoint(step)
    folder.mkdir()
    (folder / "model").write_bytes(bytes(1000))
    content: dict[str, Any] = {"format": FORMAT, "files": {"model": manifest.file_digest(folder / "model")}}
    if frozen:
        (run.folder / "frozen").write_text(frozen)
        content["frozen"] = manifest.file_digest(run.folder / "frozen")
        (run.folder / "frozen").rename(run.folder / manifest.frozen_name(content["frozen"]))
    (folder / "manifest.json").write_text(manifest.manifest_text(content))


def made(station: Station, name: str, state: str = "finished", scores: Any = SCORES, **values: Any) -> Run:
    """A run that has ended, of this station."""
    record = {"total_steps": 30, "step": 30, "state": state, "stopped_by": "user" if state == "stopped" else None}
    run = folders.create(station.runs, name, files={"config.toml": ""}, record=record | values)
    for step in scores:
        saved(run, step)
    lines = [json.dumps({"step": step, "epoch": 1, "eval": {"loss": loss}}) for step, loss in scores.items()]
    run.metrics.write_text("".join(f"{line}\n" for line in lines if "null" not in line))
    return run


def refused(station: Station, *words: str) -> str:
    """The line of a refused prune."""
    done = station("prune", *words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done
    return done.stderr


def test_a_trained_run_keeps_its_last_and_best_and_is_loaded_and_continued(station: Station) -> None:
    station.ok(
        "run", "digits", "--name", "pruned", "--steps", 24, "--checkpoint.every_steps", 4, "--checkpoint.keep", 9,
        "--eval.every_steps", 4, "--cpu_threads", 1,
    )  # fmt: skip
    before, run = station.record("pruned"), station.run("pruned")
    top = before["best"]["step"]
    assert len(run.steps_saved()) == 6
    listed = refused(station, "pruned")
    assert "nothing was deleted" in listed and "--yes" in listed and len(run.steps_saved()) == 6
    done = station.ok("prune", "pruned", "--yes")
    assert (
        f"step {top} (" in done.stdout and "last" in done.stdout and done.stdout.startswith("pruned: deletes step 4,")
    )
    assert set(run.steps_saved()) == {24, top} == set(station.record("pruned")["checkpoints"])
    assert sorted(os.listdir(run.checkpoints)) == sorted({run.checkpoint(top).name, run.checkpoint(24).name})
    assert station.ok("prune", "pruned").stderr == "nothing to delete\n"
    station.ok("resume", "pruned", "--steps", 26, "--follow")
    assert station.record("pruned")["state"] == "finished" and run.newest_checkpoint == 26


@pytest.mark.parametrize(
    ("keep", "state", "stay"),
    [
        ("last", "finished", {30}),
        ("best", "finished", {20}),
        ("best,last", "stopped", {20, 30}),
        ("best", "stopped", {20, 30}),
    ],
)
def test_what_is_named_stays_and_the_last_of_a_run_that_may_be_resumed(
    station: Station, keep: str, state: str, stay: set[int]
) -> None:
    run = made(station, "a", state)
    station.ok("prune", "a", "--keep", keep, "--yes")
    assert set(run.steps_saved()) == stay


def test_without_an_evaluation_there_is_a_last_one_and_no_best(station: Station) -> None:
    run = made(station, "a", scores={10: None, 20: None})
    assert "no best one" in refused(station, "a", "--keep", "best", "--yes")
    assert "give last, best" in refused(station, "a", "--keep", "newest", "--yes") and len(run.steps_saved()) == 2
    station.ok("prune", "a", "--yes")
    assert run.steps_saved() == [20]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"state": "failed"}, "is failed; only finished and stopped runs"),
        ({"state": "created"}, "is created; only"),
        ({"state": "running"}, "is interrupted; only"),
        ({"state": "stopped", "stopped_by": "keeper"}, "continues by itself; only"),
        ({"cluster": {"least": 2, "most": 2, "node": 0, "rendezvous": "x:1"}}, "several machines"),
    ],
)
def test_other_states_refuse_the_whole_command(station: Station, values: dict[str, Any], why: str) -> None:
    good, bad = made(station, "a"), made(station, "b", **values)
    assert why in refused(station, "*", "--yes")
    assert len(good.steps_saved()) == len(bad.steps_saved()) == 3


def test_copies_links_damage_and_an_unfinished_mirror_are_refused(station: Station) -> None:
    run = made(station, "a")
    shutil.copytree(run.folder, station.runs / "copied")
    (station.runs / "linked").symlink_to(run.folder)
    for name in ("copied", "linked"):
        assert "not started here" in refused(station, name, "--yes")
    mirrored = made(station, "c")
    text = f'[checkpoint]\nmirror = "{station.folder}/there"\n'
    (mirrored.folder / "config.toml").write_text(text)
    mirrored.update(**mirrored.signature(mirrored.read()))
    assert "first: train mirror c" in refused(station, "c", "--yes")
    station.ok("mirror", "c")
    done = station.ok("prune", "c", "--yes", "--keep", "best")
    assert "train mirror c" in done.stderr and mirrored.steps_saved() == [30, 20]
    station.ok("mirror", "c")
    assert len(list((station.folder / "there" / "checkpoints").iterdir())) == 2
    aside = run.checkpoint(10).rename(station.folder / "elsewhere")
    run.checkpoint(10).symlink_to(aside)
    assert "is a link" in refused(station, "a", "--yes")
    run.checkpoint(10).unlink()
    others = run.checkpoints.rename(station.folder / "others")
    run.checkpoints.symlink_to(others)
    assert "checkpoints is a link" in refused(station, "a", "--keep", "last", "--yes")
    run.checkpoints.unlink()
    others.rename(run.checkpoints)
    (run.checkpoint(30) / "model").write_bytes(bytes(999))
    assert "the checkpoint of step 30 is damaged" in refused(station, "a", "--keep", "last", "--yes")
    assert run.steps_saved() == [30, 20] and (aside / "model").exists()


def test_a_run_that_is_started_at_the_same_time_is_safe(station: Station) -> None:
    first, second = made(station, "a"), made(station, "b")
    lock = second.acquire()
    assert lock is not None
    assert "b was started meanwhile; nothing was deleted" in station("prune", "*", "--yes").stderr
    lock.release()
    assert len(first.steps_saved()) == len(second.steps_saved()) == 3
    asked = Terminal(station, "prune", "a")
    asked.wait_for("[y/N] ")
    saved(first, 40)  # by a run that came and went while the user thought
    asked.type("y\n")
    asked.wait_for("changed meanwhile; nothing was deleted")
    asked.process.wait()
    assert asked.process.returncode == 2 and len(first.steps_saved()) == 4


@pytest.mark.parametrize(("answer", "stay"), [("\n", 3), ("no\n", 3), ("y\n", 2)])
def test_a_person_is_asked(station: Station, answer: str, stay: int) -> None:
    run = made(station, "a")
    asked = Terminal(station, "prune", "a")
    asked.wait_for("deletes 1 checkpoint of 1 run, ")
    asked.wait_for("go on? [y/N] ")
    asked.type(answer)
    assert asked.process.wait() == 0 and len(run.steps_saved()) == stay


@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_prune_leaves_whole_checkpoints_and_the_next_one_completes_it(station: Station, count: int) -> None:
    run = made(station, "a")
    (run.checkpoints / ".partial-step-00000040").mkdir()
    code = (
        f"from train import cli, faults; faults.arm('prune.renamed:{count}', 0); "
        "cli.main(['prune', 'a', '--keep', 'last', '--yes'])"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=station.folder, env=station.environment(), check=False)
    assert killed.returncode == -signal.SIGKILL and len(run.steps_saved()) == 3 - count
    for step in run.steps_saved():
        manifest.verified(run, step)
    assert "deletes" in station.ok("prune", "a", "--keep", "last", "--yes").stdout
    assert os.listdir(run.checkpoints) == ["step-00000030"]


def test_frozen_weights_stay_while_a_checkpoint_refers_to_them(station: Station) -> None:
    run = made(station, "a", scores={})
    for step, frozen in ((10, "old"), (20, "used"), (30, "used")):
        saved(run, step, frozen)
    assert len(manifest.frozen_files(run)) == 2
    station.ok("prune", "a", "--keep", "last", "--yes")
    manifest.verified(run, 30)
    assert len(manifest.frozen_files(run)) == 1


def test_what_cannot_be_removed_is_refused_before_anything_is(station: Station) -> None:
    first, second = made(station, "a"), made(station, "b")
    command = [sys.executable, "-m", "train", "prune", "*", "--yes"]
    if os.geteuid() == 0:  # root may write anywhere, unless it gives that right away
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]
    for folder in (second.folder, second.checkpoints, second.checkpoint(10)):
        folder.chmod(0o555)
        done = subprocess.run(
            command, cwd=station.folder, env=station.environment(), capture_output=True, text=True, check=False
        )
        folder.chmod(0o755)
        assert done.returncode == 2 and f"b is not pruned: cannot delete in {folder}; check its owner" in done.stderr
        assert not done.stdout and len(first.steps_saved()) == len(second.steps_saved()) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a run away")
def test_another_users_run_is_refused(station: Station) -> None:
    run = made(station, "a")
    os.chown(run.folder, 4005, 4005)
    text = refused(station, "a", "--yes")
    assert "belongs to" in text and len(run.steps_saved()) == 3


def test_what_a_sweep_reads_later_stays_and_a_queued_run_has_read_its_weights(station: Station) -> None:
    station.more |= {"TRAIN_SLOTS": "1"}
    words = ("--cpu_threads", 1, "--checkpoint.every_steps", 2, "--checkpoint.keep", 9)
    station.ok("run", "digits", "--name", "source", "--steps", 4, *words)
    (station.folder / "idle.py").write_text("import time\ntime.sleep(600)\n")
    station.ok("launch", "--script", "idle.py", "--name", "holder")
    for command, name, more in (("launch", "waiter", ["--queue"]), ("sweep", "later", ["--grid", "seed=0..1"])):
        station.ok(command, "digits", "--name", name, "--init", "source@2", "--steps", 2, "--cpu_threads", 1, *more)
    text = refused(station, "source", "--keep", "last", "--yes")
    assert "source is not pruned: later starts from its step 2; first: train stop later" in text
    station.ok("stop", "later")
    station.ok("prune", "source", "--keep", "last", "--yes")
    assert station.run("source").steps_saved() == [4]
    station.ok("stop", "holder")
    assert station.wait_for_end("waiter")["state"] == "finished"
