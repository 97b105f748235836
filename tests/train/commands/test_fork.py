"""`train fork`: what goes on from a checkpoint is the same where nothing differs, and differs where it is to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import Station
from train.checkpoint import manifest as manifests

pytestmark = pytest.mark.never_forgiven

FIELDS = (
    "--steps",
    24,
    "--batch_size",
    90,
    "--checkpoint.every_steps",
    8,
    "--checkpoint.keep",
    9,
    "--cpu_threads",
    1,
    "--log.every_steps",
    1,
)


@pytest.fixture(scope="module")
def trained(shared_station: Station) -> Station:
    """With the run `fork-of` of two ranks, which has checkpoints of steps 8, 16 and 24."""
    shared_station.ok("run", "digits", "--name", "fork-of", "--spawn", 2, *FIELDS)
    shared_station.ok("run", "digits", "--name", "fork-frozen", "--freeze", "0", *FIELDS)
    return shared_station


def figures(station: Station, name: str) -> tuple[Any, ...]:
    lines = [(line["step"], line.get("loss"), line.get("eval")) for line in station.metrics(name)]
    record = station.record(name)
    return record["weights_sha256"], record["metrics"], lines


def test_a_fork_in_which_nothing_differs_ends_as_its_run_even_if_killed(trained: Station) -> None:
    done = trained.ok("fork", "fork-of", "--name", "fork-same", "--checkpoint", 8, "--follow")
    assert done.stdout == "fork-same\n" and "fork-same continues from fork-of after step 8" in done.stderr
    assert figures(trained, "fork-same") == figures(trained, "fork-of")
    assert trained.record("fork-same")["attempts"][0]["from_step"] == 8
    trained("fork", "fork-of", "--name", "fork-killed", "--checkpoint", 8, "--follow", env={"TRAIN_FAULT": "decided"})
    before = trained.wait_for_end("fork-killed")["wandb_id"]
    trained.ok("resume", "fork-killed", "--follow")
    assert figures(trained, "fork-killed") == figures(trained, "fork-of")
    assert trained.record("fork-killed")["wandb_id"] == before
    assert len({trained.record(name)["wandb_id"] for name in ("fork-of", "fork-same", "fork-killed")}) == 3
    shown = trained.ok("show", "fork-same").stdout
    assert "forked from  fork-of after step 8" in shown
    assert trained.record("fork-of")["state"] == "finished"


def test_what_is_changed_holds_from_the_checkpoint_on_and_over_a_resume(trained: Station, engine: Any) -> None:
    changes = {"optim__lr": 0.01, "schedule__decay": "constant", "steps": 30}
    engine.fork("fork-of", "fork-other", 16, 2, optim__weight_decay=0.3, **changes)
    before, after = (
        [line for line in trained.metrics(name) if "lr" in line] for name in ("fork-of", "fork-other")
    )  # fmt: skip
    assert after[:16] == before[:16] and [line["lr"] for line in after[16:]] == [0.01] * 14
    copied = manifests.read_manifest(trained.run("fork-other").checkpoint(16))
    assert copied["changed"] == ["weight_decay"]
    # its own checkpoints have the new value
    trained.ok("fork", "fork-other", "--name", "fork-again", "--checkpoint", 24, "--follow")
    assert figures(trained, "fork-again") == figures(trained, "fork-other")
    assert figures(trained, "fork-other")[0] != figures(trained, "fork-of")[0]
    engine.fork("fork-of", "fork-decayed", 16, 2, **changes)
    assert figures(trained, "fork-decayed")[0] != figures(trained, "fork-other")[0], "weight decay did nothing"
    (given,) = (line for line in trained.ok("show", "fork-again").stdout.splitlines() if line.startswith("  set "))
    assert all(f"--{field}" in given for field in ("batch_size 90", "optim.lr 0.01", "steps 30")), "as all runs before"
    assert "schedule.warmup" not in given, "only the defaults set it"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nobody"], "there is no run nobody"),
        (["fork-of", "--checkpoint", "9"], "no checkpoint of step 9"),
        (["fork-of", "--steps", "24"], "the new run would end after step 24"),
        (["fork-of", "--checkpoint", "8", "--task.width", "20"], "Size mismatch .* --init fork-of@8"),
        (["fork-of", "--optim.name", "adamw"], "--optim.name adamw cannot load the state .*--init fork-of@24"),
        (["fork-of", "--checkpoint", "8", "--ema.decay", "0.9"], "Missing key"),
        (["fork-of", "--optim.lr", "x"], "--optim.lr x"),
        (["fork-of", "--init", "nowhere.pth"], "a fork uses the weights of its checkpoint"),
        (["fork-of", "--micro_batch_size", "auto"], "auto does not work for a fork"),
        (["fork-of", "--optim.rl", "1"], "did you mean --optim.lr"),
        (["fork-of", "--name", "fork-of"], "a run named fork-of exists"),
    ],
)
def test_what_cannot_go_on_is_refused_and_leaves_nothing(trained: Station, arguments: list[str], words: str) -> None:
    before = sorted(path.name for path in Path(trained.runs).iterdir())
    steps = [] if "--steps" in arguments or "nobody" in arguments else ["--steps", "40"]
    done = trained.here("fork", *map(str, [*arguments, *steps]))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert re.search(words, done.stderr), done.stderr
    assert sorted(path.name for path in Path(trained.runs).iterdir()) == before


def test_a_damaged_checkpoint_is_refused(station: Station) -> None:
    station.ok("run", "digits", "--name", "hurt", *FIELDS)
    folder = station.run("hurt").checkpoint(24)
    next(folder.glob("*.distcp")).write_bytes(b"")
    done = station("fork", "hurt", "--steps", 40)
    assert done.returncode == 2 and "the checkpoint of step 24 is damaged" in done.stderr
    assert json.loads((folder / "manifest.json").read_text())["step"] == 24


def test_a_fork_without_a_whole_checkpoint_does_not_begin_at_random(trained: Station) -> None:
    trained("fork", "fork-of", "--name", "fork-lost", "--checkpoint", 16, "--follow", env={"TRAIN_FAULT": "update:1"})
    for folder in trained.run("fork-lost").checkpoints.iterdir():
        next(folder.glob("*.distcp")).write_bytes(b"")
    for _ in range(2):
        done = trained("resume", "fork-lost", "--follow")
        assert done.returncode == 3 and "train fork fork-of --checkpoint 16" in done.stderr, done.stderr


def test_a_fork_of_a_fork_at_its_first_step_has_the_changes_of_both(trained: Station, engine: Any) -> None:
    engine.fork("fork-of", "fork-wd", 16, 2, optim__weight_decay=0.3)
    engine.fork("fork-wd", "fork-wd-lr", 16, 2, optim__lr=0.02)
    engine.fork("fork-of", "fork-both", 16, 2, optim__weight_decay=0.3, optim__lr=0.02)
    assert figures(trained, "fork-wd-lr") == figures(trained, "fork-both")
    assert figures(trained, "fork-wd-lr")[0] != figures(trained, "fork-wd")[0]


def test_the_command_that_a_refused_resume_names_works(trained: Station) -> None:
    done = trained("resume", "fork-frozen", "--compile", "true", "--steps", 30, "--optim.lr", 0.01)
    assert "train fork fork-frozen --name NEW --compile true --steps 30 --optim.lr 0.01" in done.stderr
