"""One place where a run ends: a supervisor killed before it has written the end leaves nothing that a resume loses."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import train
from tests.train.tiers import later
from train import signals
from train.launcher.stopping import stop_and_wait
from train.run import folders, outcome, states
from train.run.outcome import Kind, Outcome

if TYPE_CHECKING:
    from conftest import Station

FIELDS = ["--steps", 12, "--batch_size", 60, "--checkpoint.every_steps", 5, "--log.tensorboard", "false",
          "--cpu_threads", 1, "--precision", "fp64", "--eval.every_epochs", 0.5]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(shared_station: Station) -> dict[str, Any]:
    shared_station.ok("run", "digits", "--name", "undisturbed", "--spawn", 2, *FIELDS)
    return shared_station.record("undisturbed")


@pytest.mark.never_forgiven
@pytest.mark.parametrize("road", ["launch", *later("spawn", "alone")])
def test_a_supervisor_killed_before_it_wrote_the_end_leaves_a_run_that_a_resume_finishes(
    station: Station, undisturbed: dict[str, Any], road: str
) -> None:
    name, killed = "a", {"TRAIN_FAULT": "decided"}
    if road == "launch":
        station.ok("launch", "digits", "--name", name, "--nproc", 2, *FIELDS, env=killed)
        station.wait_for_end(name)
    else:
        ranks = ["--spawn", 2] if road == "spawn" else []
        done = station("run", "digits", "--name", name, *ranks, *FIELDS, env=killed)
        assert done.returncode == -signal.SIGKILL, done.stderr
    run = station.run(name)
    told = outcome.read(run.logs(1), 0)
    assert told is not None and (told.kind, told.step) == (Kind.FINISHED, 12)
    before = station.record(name)
    assert (before["state"], before["weights_sha256"]) == (states.RUNNING, None) and run.state() == states.INTERRUPTED
    assert before["attempts"][0]["end"] is None
    station.ok("resume", name, "--follow")
    after = station.record(name)
    assert after["state"] == states.FINISHED and after["weights_sha256"] == told.figures["weights_sha256"]
    assert [attempt["end"] for attempt in after["attempts"]] == ["died", "finished"]
    if road != "alone":  # another number of ranks sums in another order
        assert [after[key] for key in ("step", "epoch", "weights_sha256", "metrics", "checkpoints", "best")] == [
            undisturbed[key] for key in ("step", "epoch", "weights_sha256", "metrics", "checkpoints", "best")
        ]


@pytest.mark.never_forgiven
@pytest.mark.minutes
def test_a_rank_killed_after_it_said_that_all_is_done_costs_nothing(station: Station) -> None:
    done = station("run", "digits", "--name", "a", "--spawn", 2, *FIELDS, env={"TRAIN_FAULT": "finished@0"})
    assert done.returncode == 0, done.stderr
    record = station.record("a")
    assert record["state"] == states.FINISHED and record["weights_sha256"] and len(record["attempts"]) == 1


@pytest.mark.minutes
def test_a_stop_of_the_keeper_is_known_from_one_of_a_user_by_a_field(station: Station) -> None:
    """For spawned ranks too, whose own words are the same both times: that they were sent a SIGTERM."""
    for name, wanted, by in (("mine", states.POLITE, signals.USER), ("its", states.FOR_KEEPER, signals.KEEPER)):
        process = station.start("run", "digits", "--name", name, "--spawn", 2, *FIELDS, "--steps", 10**6)
        station.wait_for_step(name, 2)
        stop_and_wait(station.run(name), wanted)
        output = process.communicate()[0]
        assert process.returncode == 75, output
        record = station.record(name)
        assert (record["state"], record["stopped_by"]) == (states.STOPPED, by)
        assert record["reason"] == f"stopped after step {record['step']} ({states.WHO[wanted]})"
    said = station.ok("keeper", "--once").stderr
    assert "its: resumed" in said and "mine" not in said
    station.ok("stop", "its")
    assert station.record("its")["stopped_by"] == signals.USER


def test_a_run_that_was_not_stopped_was_stopped_by_nobody(tmp_path: Path) -> None:
    run = folders.create(
        tmp_path, "a", files={}, record={"state": states.FAILED, "reason": "the task says: (train stop)"}
    )
    assert run.read()["stopped_by"] is None
    run.begin_attempt(1, 0)
    run.end_attempt(states.STOPPED, "", state=states.STOPPED, stopped_by=signals.USER)
    run.begin_attempt(1, 0)
    assert run.read()["stopped_by"] is None


def test_what_a_rank_leaves_behind_is_read_back_and_garbage_is_nothing(tmp_path: Path) -> None:
    left = Outcome(
        rank=3,
        kind=Kind.DIED,
        step=7,
        reason="ValueError: bad",
        recurs=True,
        traceback="a\nb\n",
        figures={"best": None},
    )
    outcome.write(tmp_path, left)
    assert outcome.read(tmp_path, 3) == left and outcome.read(tmp_path, 0) is None
    for rank, text in ((0, "{"), (1, "[]"), (2, '{"kind": "sleeping"}'), (4, '{"kind": "died", "unknown": 1}')):
        (tmp_path / f"rank{rank}.outcome.json").write_text(text)
    (tmp_path / "rankx.outcome.json").write_text("{}")
    assert outcome.read_all(tmp_path) == {3: left}
    assert outcome.read_all(tmp_path / "nowhere") == {}


def test_the_cause_is_the_fault_that_would_come_again_and_then_the_first_one() -> None:
    lost = Outcome(rank=0, kind=Kind.DIED, recurs=False, time=1.0)
    bad, worse = (
        Outcome(rank=1, kind=Kind.DIED, recurs=True, time=2.0),
        Outcome(rank=2, kind=Kind.FAILED, recurs=True, time=3.0),
    )
    assert outcome.first_fault({0: lost, 2: worse, 1: bad}) == bad
    assert outcome.first_fault({0: lost}) == lost
    assert outcome.first_fault({0: Outcome(rank=0, kind=Kind.FINISHED)}) is None


def _ends_written_in(path: Path) -> list[int]:
    """Lines that write how a run ends: the end of an attempt, or a state that is one."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        states = [ast.unparse(word.value) for word in node.keywords if word.arg == "state"]
        ends = name in ("update", "note") and any(state != "states.CREATED" for state in states)
        if name == "end_attempt" or ends:
            lines.append(node.lineno)
    return lines


def test_only_one_module_writes_how_a_run_ends() -> None:
    root = Path(train.__file__).parent
    writers = {str(path.relative_to(root)) for path in root.rglob("*.py") if _ends_written_in(path)}
    assert writers == {"supervise/attempts.py"}


@pytest.mark.minutes
def test_what_a_rank_of_a_foreign_torchrun_died_of_is_left_behind_and_the_run_is_interrupted(station: Station) -> None:
    """Whether it is begun again is that torchrun's business."""
    task = station.folder / "fails.py"
    task.write_text(
        "import os, torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\n"
        "def model(config):\n    return nn.Linear(4, 1)\n"
        "def datasets(config):\n    return TensorDataset(torch.ones(64, 4)), None\n"
        "def loss(model, batch):\n"
        "    if os.environ['RANK'] == '1': raise ValueError('bad shape')\n"
        "    return model(batch[0]).square().mean()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0",
         "-m", "train", "run", "fails.py", "--name", "t", "--steps", "9", "--cpu_threads", "1"],
        cwd=station.folder, env=station.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and "bad shape" in done.stderr
    assert station.run("t").state() == states.INTERRUPTED and not station.run("t").alive()
    cause = outcome.first_fault(outcome.read_all(station.run("t").logs(1)))
    assert cause is not None and (cause.rank, cause.recurs) == (1, True) and "bad shape" in cause.reason
