"""`train prove` on programs that are exact and on programs that are not. Real runs, real signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import PATIENCE, Station
from tests.train.tiers import later
from train.proof import moments
from train.proof.compare import Difference
from train.proof.prove import NOT_EXACT, Proof

pytestmark = pytest.mark.never_forgiven

SCRIPT = """
import os
import random
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import trainstation as ts

COUNTED = 0


def main(what):
    global COUNTED
    session = ts.session(seed=3, save_minutes=0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.linspace(-1, 1, 96).reshape(24, 4)
    loader = session.loader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=6)
    session.register(model=model, optimizer=optimizer)
    hidden, unseeded = 1.0, random.Random()
    for epoch in session.epochs(50):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            if what == "local":
                hidden *= 0.97
                loss = loss * hidden
            if what == "module":
                COUNTED += 1
                loss = loss * (1 + 0.01 * (COUNTED % 17))
            if what == "unseeded":
                loss = loss * (1 + 0.01 * unseeded.random())
            if what == "pid":
                loss = loss * (1 + os.getpid() % 7 / 100)
            if what == "fails" and hidden == 1.0 and epoch > 3 and "TRAIN_ATTEMPT" in os.environ:
                if int(os.environ["TRAIN_ATTEMPT"]) > 1:
                    raise ValueError("nothing was carried over")
            if what == "crashes" and epoch == 2 and os.environ["TRAIN_ATTEMPT"] == "1":
                raise ValueError("a sample is broken")
            loss.backward()
            optimizer.step()
            session.log(loss=loss, **({"seconds": time.time()} if what == "time" else {}))


if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.fixture
def station(station: Station) -> Station:
    (station.folder / "program.py").write_text(SCRIPT)
    return station


def proved(station: Station, *arguments: object, code: int) -> tuple[dict[str, Any], str]:
    station.patience = 4 * PATIENCE  # five runs, each of which imports torch
    done = station("prove", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    (file,) = station.runs.glob("prove-*/proof.json")
    found: dict[str, Any] = json.loads(file.read_text())
    assert done.stdout.startswith(f"{found['verdict']}  ")
    return found, done.stdout


@pytest.mark.turns
def test_an_exact_script_is_called_exact_and_says_what_each_break_cost(station: Station) -> None:
    found, said = proved(station, "--script", "program.py", "--updates", 40, "--", "plain", code=0)
    assert (found["verdict"], found["updates"], found["ranks"]) == ("EXACT", 40, 1)
    assert [one["kind"] for one in found["breaks"]] == ["stop", "rank", "all", "save"]
    assert all(one["back"] > 0 for one in found["breaks"])
    assert {"model", "optimizer"} <= found["digests"].keys() and found["has_samples"] and found["has_figures"]
    assert "metrics and samples equal" in said and found["script_files"]
    # only the proof is left, and nobody sees it as a run
    (folder,) = station.runs.glob("prove-*")
    assert [path.name for path in folder.iterdir()] == ["proof.json"]
    assert json.loads(station.ok("ls", "--json").stdout) == []


@pytest.mark.turns
@pytest.mark.parametrize("what", ["local", *later("module")])
def test_what_a_checkpoint_lacks_is_found_with_the_break_and_the_tensors(station: Station, what: str) -> None:
    found, said = proved(station, "program.py", "--updates", 30, "--kills", 1, "--keep", "--", what, code=3)
    assert found["verdict"] == "NOT EXACT" and found["cause"].startswith("stopped at "), said
    assert found["difference"]["update"] > 1 and {"model", "optimizer"} & {*found["difference"]["names"]}
    assert any("elements, largest distance" in line for line in found["tensors"]), said
    assert "look for a variable, object or file that changes in training" in said
    (folder,) = station.runs.glob("prove-*")
    assert (folder / "calm" / "run.json").exists()


@pytest.mark.turns
@pytest.mark.parametrize("what", ["unseeded", *later("pid")])
def test_what_differs_without_any_kill_is_called_so(station: Station, what: str) -> None:
    found, said = proved(station, "program.py", "--updates", 12, "--kills", 1, "--", what, code=3)
    assert found["verdict"] == "NOT EXACT" and not found["cause"], said
    assert "without any kill: first difference at update" in said and "look for a clock, a generator" in said


def test_lines_that_are_logged_after_other_updates_point_to_a_counter() -> None:
    found = Difference(0, ("metrics",), ("model", "samples"), ("loss", "step"), 9)
    said = Proof(verdict=NOT_EXACT, difference=found, cause="rank 0 killed at 8").text()
    assert "only what is logged, first at update 9, after rank 0 killed at 8" in said
    assert "write enumerate(loader, loader.start)" in said


@pytest.mark.minutes
def test_a_figure_of_the_time_is_named_and_does_not_count(station: Station) -> None:
    found, said = proved(station, "program.py", "--updates", 12, "--kills", 1, "--", "time", code=0)
    assert found["not_compared"] == ["seconds"] and "not compared" in said


@pytest.mark.turns
def test_a_run_that_cannot_continue_has_failed(station: Station) -> None:
    found, said = proved(station, "program.py", "--updates", 40, "--kills", 2, "--", "fails", code=3)
    assert found["verdict"] == "FAILED" and "nothing was carried over" in said and "after" in found["reason"]


def test_a_script_that_does_not_start_has_failed_with_its_last_lines(station: Station) -> None:
    (station.folder / "program.py").write_text("import trainstation as ts\nts.session()\nfor epoch in 3\n")
    found, said = proved(station, "program.py", code=3)
    assert "| SyntaxError: expected ':'" in said
    command = found["reason"].partition("see: train ")[2]
    assert command.startswith("logs calm") and "SyntaxError" in station.ok(*command.split()).stdout


@pytest.mark.turns
def test_a_calm_run_that_dies_by_itself_has_failed(station: Station) -> None:
    """A restart would get past it."""
    found, said = proved(station, "program.py", "--updates", 20, "--kills", 1, "--", "crashes", code=3)
    assert found["verdict"] == "FAILED" and found["reason"].startswith("the calm run: "), said
    assert "a sample is broken" in found["reason"] and not found["breaks"]


@pytest.mark.turns
@pytest.mark.parametrize("ranks", [2, *later(1)])
def test_a_task_is_exact(station: Station, ranks: int) -> None:
    flags = ("--steps", 30, "--updates", 20, "--task.width", 8, "--batch_size", 60, "--micro_batch_size", 8)
    told = station.folder / "told"
    station.more = {"TRAIN_NOTIFY": f"touch {told}"}
    found, said = proved(station, "digits", "--nproc", ranks, *flags, code=0)
    assert (found["verdict"], found["updates"], found["ranks"]) == ("EXACT", 20, ranks), said
    assert not told.exists(), "nobody is told of the runs of a proof"
    assert len(found["breaks"]) == 4 and {"model", "optimizer"} <= found["digests"].keys()


@pytest.mark.minutes
def test_a_task_that_gives_way_is_exact(station: Station) -> None:
    flags = ("--steps", 60, "--updates", 40, "--task.width", 8, "--kills", 7)
    seed = next(seed for seed in range(99) if moments.WAY in [one.kind for one in moments.choose(40, 7, 1, seed)])
    found, said = proved(station, "digits", *flags, "--moments", seed, code=0)
    assert found["verdict"] == "EXACT" and any(one["kind"] == moments.WAY for one in found["breaks"]), said


@pytest.mark.minutes
def test_a_run_that_ends_before_is_compared_at_its_end(station: Station) -> None:
    flags = ("--steps", 9, "--kills", 2, "--task.width", 8)
    found, _ = proved(station, "digits", *flags, code=0)
    assert found["updates"] == 9


@pytest.mark.parametrize(("arguments", "said"), [
    (("--script", "bare.py"), "bare.py opens no session"),
    (("program.py", "--kills", "30", "--updates", "20", "--", "plain"), "give more --updates"),
    (("digits", "--kills", "0"), "must be a whole number of at least 1"),
    (("digits", "--follow"), "leave it out"),
    (("digits", "--checkpoint.mirror", "elsewhere"), "a proof is not mirrored"),
    (("digits", "--steps", "4"), "ended by itself after update 4, too early for 4 breaks"),
    (("--script", "missing.py"), "there is no file"),
    ((), "give one of"),
])  # fmt: skip
def test_a_wrong_request_is_one_line_and_leaves_nothing(
    station: Station, arguments: tuple[str, ...], said: str
) -> None:
    (station.folder / "bare.py").write_text("print(1)\n")
    done = station("prove", *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not list(station.folder.glob("runs/*"))


def test_ctrl_c_ends_everything(station: Station) -> None:
    process = station.start("prove", "program.py", "--updates", 100000, "--", "plain")
    deadline = time.monotonic() + PATIENCE
    while not list(station.runs.glob("prove-*/calm/digests.rank0.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    record = json.loads(next(station.runs.glob("prove-*/calm/run.json")).read_text())
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    assert not list(station.runs.glob("prove-*"))
    for pid in (record["pids"]["agent"], *record["pids"]["ranks"]):
        until = time.monotonic() + 30
        while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.minutes
def test_python_returns_the_facts(station: Station) -> None:
    code = (
        "import trainstation as ts\n"
        "facts = ts.prove(script='program.py', arguments=['plain'], updates=12, kills=1)\n"
        "print(facts['verdict'], facts['updates'], callable(ts.prove))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=station.folder, env=station.environment(), capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["EXACT", "12", "True"], done.stdout + done.stderr
