"""Each example trains as its first line says, to the figure that it names, and ends with the same weights if killed."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.conftest import Station
from tests.waiting import eventually
from train.run.run_folder import Run

pytestmark = pytest.mark.never_forgiven

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FALLING = ("loss", "ema.fid", "bits_per_char")
"""Figures of which less is better."""


EVERY = 50
"""Steps from one checkpoint to the next. Each example has several times as many."""


def saved(run: Run) -> list[int]:
    """The steps of which a run has checkpoints."""
    return [int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")]


def commands(example: Path) -> list[list[str]]:
    """What the first line says to run, without `train`; the last command is `train launch examples/NAME.py …`."""
    line = example.read_text().splitlines()[0].partition(": ")[2]
    return [shlex.split(command)[1:] for command in line.split(" && ")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    """A folder that has what a checkout has for the examples, and runs of its own."""
    made = Station(tmp_path_factory.mktemp("checkout"))
    for name in ("examples", "docs"):
        (made.folder / name).symlink_to(ROOT / name)
    yield made
    made.close()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_says_how_to_run_it(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 80
    assert commands(example)[-1][:2] == ["launch", f"examples/{example.name}"]
    assert f"(../examples/{example.name})" in (ROOT / "docs" / "recipes.md").read_text()


@pytest.mark.minutes
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_trains_to_what_it_says_and_a_kill_changes_nothing(checkout: Station, example: Path) -> None:
    *before, launch = commands(example)
    for command in before:
        checkout.ok(*command)
    name, killed = f"example-{example.stem}", f"example-{example.stem}-killed"
    checkout.ok(*launch, "--name", name, "--checkpoint.every_steps", EVERY, "--checkpoint.keep", 1000, "--follow")
    whole = checkout.record(name)
    says = re.search(r"Ends at (\S+) ([\d.]+)", example.read_text())
    assert says is not None
    figure, stated = whole["metrics"][says[1]], float(says[2])
    assert figure <= stated if says[1] in FALLING else figure >= stated, f"{says[1]} {figure}, not {stated}"

    # a fork of the last third or so, which costs less than a second run
    late = max(step for step in saved(checkout.run(name)) if step <= 0.75 * whole["step"])
    checkout.ok("fork", name, "--name", killed, "--checkpoint", late, "--checkpoint.every_steps", EVERY // 5)
    run = checkout.run(killed)
    eventually("a checkpoint", lambda: max(saved(run), default=0) > late, every=0.02)
    pids = checkout.record(killed)["pids"]
    for pid in (pids["agent"], *pids["ranks"]):
        os.kill(pid, signal.SIGKILL)
    assert checkout.wait_for_end(killed)["state"] == "interrupted"
    checkout.ok("resume", killed, "--follow")
    record = checkout.record(killed)
    assert whole["world_size"] == 2 and record["attempts"][-1]["from_step"] > late
    assert (record["weights_sha256"], record["metrics"]) == (whole["weights_sha256"], whole["metrics"])
