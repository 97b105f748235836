"""A loss over all samples of a step, whoever computes them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import train
from tests.tasks import TASKS
from tests.train.specs import with_spec
from train.errors import Refused
from train.trainer.evaluate import evaluate_run

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

CONTRAST: dict[str, Any] = {
    "task": TASKS / "contrast.py", "batch_size": 12, "data__drop_last": "true", "precision": "fp64",
    "schedule__decay": "constant",
}  # fmt: skip


def test_three_ranks_compute_what_one_does_with_all_rows(engine: Any) -> None:
    engine.run("contrast-one", 1, **CONTRAST, micro_batch_size=12)
    assert engine.run("contrast-three", 3, **CONTRAST, micro_batch_size=4)["state"] == "finished"
    assert engine.losses("contrast-three") == pytest.approx(engine.losses("contrast-one"), rel=1e-9)
    for name, value in engine.weights("contrast-one").items():
        torch.testing.assert_close(engine.weights("contrast-three")[name], value, rtol=1e-9, atol=1e-12)


def test_killed_and_resumed_it_ends_bit_for_bit_as_undisturbed(engine: Any) -> None:
    flags = CONTRAST | {"micro_batch_size": 2, "checkpoint__every_steps": 3, "parallel__strategy": "fsdp"}
    engine.run("contrast-fsdp", 2, **flags)
    engine.run("contrast-stopped", 2, steps=4, **flags)
    engine.resume("contrast-stopped", 2, epochs=2.5)
    weights = [engine.station.record(name)["weights_sha256"] for name in ("contrast-fsdp", "contrast-stopped")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.drop_last", "false"], "use --data.drop_last true"),
        (["--micro_batch_size", 3], "no multiple of micro_batch_size x ranks = 9"),
        (["--parallel.reduce", "ordered"], "--parallel.reduce ordered must not"),
    ],
)
def test_ranks_with_different_numbers_of_rows_are_refused(station: Any, flags: list[Any], message: str) -> None:
    sizes = ["--batch_size", 12, "--micro_batch_size", 4, "--data.drop_last", "true"]
    done = station("run", TASKS / "contrast.py", "--spawn", 3, *sizes, *flags)
    assert done.returncode == 3 and message in done.stderr  # that a loss gathers, training alone shows


def test_an_evaluation_on_several_ranks_is_refused_at_launch_at_a_resume_and_alone(engine: Any) -> None:
    station, file = engine.station, engine.station.folder / "gathers.py"
    file.write_text((TASKS / "contrast.py").read_text().replace(" if model.training else other", ""))
    words = "write in loss(): rows = train.gather(rows) if model.training else rows"
    flags = CONTRAST | {"task": file, "micro_batch_size": 4, "steps": 2}
    with pytest.raises(Refused, match=re.escape(words)):
        engine.run("gathers-three", 3, **flags)
    assert engine.run("gathers", 1, **flags)["state"] == "finished"
    with pytest.raises(Refused, match=f"{re.escape(words)}.*; continue on one rank: train resume gathers --nproc 1"):
        engine.resume("gathers", 3, epochs=3)
    run = station.run("gathers")
    assert evaluate_run(*with_spec(run), None)[0] == 2
    run.update(world_size=3)
    with pytest.raises(Refused, match=re.escape(words)):
        evaluate_run(*with_spec(run), None)


def test_outside_of_a_run_rows_are_those_that_were_given() -> None:
    assert train.gather(torch.ones(3, 2)).shape == (3, 2)
