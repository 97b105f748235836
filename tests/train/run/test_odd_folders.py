"""What may lie in a run folder that somebody has edited or made up: nothing waits for it, and the rest is shown."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train.checkpoint import manifest
from train.checkpoint.manifest import Unreadable
from train.monitor.status import RunStatus
from train.run import best, folders
from train.run.run_folder import Run
from train.run.spec import read_spec
from train.views.listing import story

pytestmark = pytest.mark.never_forgiven


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that was evaluated after each of its two checkpoints."""
    run = folders.create(tmp_path, "a", files={"config.toml": "seed = 1\n"}, record={"world_size": 1, "task": "digits"})
    lines = [{"step": step, "epoch": 1, "eval": {"loss": 1 / step, "accuracy": 0.5}} for step in (1, 2)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (1, 2):
        run.checkpoint(step).mkdir()
    return run


def pipe(path: Path) -> None:
    os.mkfifo(path)


def text(content: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(content)


@pytest.mark.parametrize(
    "put",
    [pipe, Path.mkdir, text("\0"), text("checkpoint = 3"), text("[checkpoint]\nbest = 3")],
)  # fmt: skip
def test_a_configuration_that_is_none_hides_nothing_else(run: Run, put: Callable[[Path], Any]) -> None:
    (run.folder / "config.toml").unlink()
    put(run.folder / "config.toml")
    assert "step 2, loss 0.5000" in story(RunStatus(run, run.read_effective()))
    facts = best.facts(run, read_spec(run).best_by)
    assert facts == {
        "checkpoints": [1, 2],
        "best": {"step": 2, "metric": "loss", "value": 0.5},
    }
    assert isinstance(run.read_config(), dict)


@pytest.mark.parametrize("figure", ["NaN", "-1e999"])
def test_a_figure_that_is_none_is_not_the_best(run: Run, figure: str) -> None:
    line = f'{{"step": 1, "epoch": 1, "eval": {{"loss": {figure}}}}}\n'
    run.metrics.write_text(line + run.metrics.read_text().splitlines(keepends=True)[1])
    assert "step 2, loss 0.5000" in story(RunStatus(run, run.read_effective()))


@pytest.mark.parametrize(
    "put",
    [pipe, Path.mkdir, text("5"), text('{"format": []}')],
)  # fmt: skip
def test_a_manifest_that_is_none_is_unreadable(run: Run, put: Callable[[Path], Any]) -> None:
    put(run.checkpoint(1) / "manifest.json")
    with pytest.raises((ValueError, Unreadable)):
        manifest.read_manifest(run.checkpoint(1))
