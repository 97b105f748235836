"""How many CPU threads a rank takes: what the user set, else one for a small model, else its share of the cores."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from train.engine import threads

if TYPE_CHECKING:
    from conftest import Station

SHORT = ["--steps", 2, "--log.tensorboard", "false"]


def recorded(station: Station, name: str) -> int:
    return int(tomllib.loads((station.runs / name / "config.toml").read_text())["cpu_threads"])


@pytest.mark.minutes
def test_what_the_user_sets_wins_and_a_resume_keeps_it(station: Station) -> None:
    done = station.ok("run", "digits", "--name", "omp", *SHORT, env={"OMP_NUM_THREADS": "3"})
    assert recorded(station, "omp") == 3 and "3 CPU threads a rank (by OMP_NUM_THREADS)" in done.stderr
    station.ok("run", "digits", "--name", "flag", "--cpu_threads", 1, *SHORT, env={"OMP_NUM_THREADS": "3"})
    assert recorded(station, "flag") == 1
    station.ok("resume", "omp", "--steps", 4, "--follow", env={"OMP_NUM_THREADS": "1"})
    assert recorded(station, "omp") == 3


@pytest.mark.parametrize(
    ("omp", "device", "inputs", "expected"),
    [("3", "cpu", 10, 3), ("4,2", "cpu", 10, 4), ("many", "cpu", 10, 1), ("0", "cpu", 1000, 4), (None, "cpu", 10, 1),
     (None, "cpu", 1000, 4), (None, "cuda", 10, 4)],
)  # fmt: skip
def test_a_small_model_takes_one_thread_and_another_its_share(
    monkeypatch: pytest.MonkeyPatch, omp: str | None, device: str, inputs: int, expected: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    monkeypatch.setattr(threads.cores, "usable", lambda: 8.5)
    assert threads.choose(2, torch.device(device), nn.Linear(inputs, 100))[0] == expected
