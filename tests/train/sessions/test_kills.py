"""A user's script with a session, killed from outside at any moment: it ends as a run that nobody disturbed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.train.conftest import Station
from tests.train.tiers import later
from train.errors import EXIT_FAILED
from train.run import states

SCRIPT = Path(__file__).with_name("users_script.py")
EPOCHS, PAUSE = 3, 0.03
LINES = EPOCHS * 12
"""Lines in metrics.jsonl of a whole run: one per batch, and one per epoch."""


def launch(station: Station, name: str, ranks: int) -> None:
    shutil.copy(SCRIPT, station.folder / SCRIPT.name)
    arguments = ["{run}", EPOCHS, PAUSE]
    station.ok("launch", "--script", SCRIPT.name, "--name", name, "--nproc", ranks, "--", *arguments)


def lines(station: Station, name: str) -> int:
    path = station.runs / name / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(station: Station, name: str, count: int, attempt: int) -> None:
    """Wait until this attempt has begun and there are so many lines, or the run has ended."""

    def are_there(record: dict[str, Any]) -> bool:
        has_begun = len(record["attempts"]) == attempt and record["attempts"][-1].get("from_step") is not None
        has_ended = record["state"] not in (states.CREATED, states.RUNNING)
        return has_ended or (has_begun and lines(station, name) >= count)

    station.wait(name, are_there, f"{count} lines in attempt {attempt}")


def kill_a_rank(station: Station, name: str, rank: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(station.record(name)["pids"]["ranks"][rank], signal.SIGKILL)


def kill_everything(station: Station, name: str) -> None:
    """Kill the agent, its zygote, the ranks and their data workers."""
    with contextlib.suppress(psutil.NoSuchProcess):
        agent = psutil.Process(station.record(name)["pids"]["agent"])
        for process in [agent, *agent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    station.wait(name, lambda _: not station.run(name).alive(), "its death")


def disturb(station: Station, name: str, ranks: int) -> None:
    """Kill a rank after the first checkpoint, then everything after the second, each at a random moment, and resume."""
    seed = random.randrange(10**6)
    print("moments by", seed)  # for whoever must see it again
    moments = random.Random(seed)
    wait_for_lines(station, name, moments.randint(11, 17), 1)
    time.sleep(moments.random() * PAUSE)
    kill_a_rank(station, name, moments.randrange(ranks))
    wait_for_lines(station, name, moments.randint(21, LINES - 6), 2)
    time.sleep(moments.random() * PAUSE)
    kill_everything(station, name)
    station.ok("resume", name)


def check_equal(station: Station, name: str, calm: str) -> None:
    """Check that this run ended with the weights, the figures and the ends of epochs of the undisturbed one."""
    for each in (name, calm):
        assert station.wait_for_end(each)["state"] == states.FINISHED, station.logs(each)
    record, wanted = station.record(name), station.record(calm)
    assert record["weights_sha256"] == wanted["weights_sha256"] and record["step"] == wanted["step"]
    metrics = [(station.runs / each / "metrics.jsonl").read_text() for each in (name, calm)]
    assert metrics[0] == metrics[1] and metrics[1].count("\n") == LINES
    # what a kill interrupts in the work of an epoch's end is done again, and gives the same
    ends = [(station.runs / each / "epochs.txt").read_text().splitlines() for each in (name, calm)]
    assert list(dict.fromkeys(ends[0])) == ends[1] and len(ends[1]) == EPOCHS


@pytest.mark.never_forgiven
@pytest.mark.parametrize("ranks", [2, *later(1, 3)])
def test_a_killed_rank_and_then_a_kill_of_everything_change_no_bit(station: Station, ranks: int) -> None:
    for name in ("calm", "killed"):  # two launches of one command, side by side
        launch(station, name, ranks)
    disturb(station, "killed", ranks)
    check_equal(station, "killed", "calm")
    attempts = station.record("killed")["attempts"]
    assert [attempt["end"] for attempt in attempts] == ["died", "died", "finished"]
    # a killed rank goes on from memory, or from the disk; a checkpoint is written behind training, so it may be missed
    assert attempts[1]["from_step"] <= 10 and attempts[2]["from_step"] in (5, 10, 15)
    assert len(station.record("calm")["attempts"]) == 1


@pytest.mark.never_forgiven
@pytest.mark.minutes
def test_a_stop_in_the_middle_and_a_resume_change_no_bit(station: Station) -> None:
    for name in ("calm", "stopped"):
        launch(station, name, 2)
    wait_for_lines(station, "stopped", 7, 1)
    station.ok("stop", "stopped")
    record = station.record("stopped")
    assert record["state"] == states.STOPPED, station.logs("stopped")
    # nothing is done twice: the resume goes on after the last line
    assert station.run("stopped").newest_checkpoint == record["step"] == station.metrics("stopped")[-1]["step"]
    station.ok("resume", "stopped")
    check_equal(station, "stopped", "calm")
    assert station.record("stopped")["attempts"][1]["from_step"] == record["step"]


PARTS = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import trainstation as ts

session = ts.session(save_every=2)  # due at the end of the epoch
dist.init_process_group("gloo")
way = sys.argv[1]
model = DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = session.loader(TensorDataset(torch.ones(8, 1)), batch_size=4)
session.register(model=model, optimizer=optimizer)
for epoch in session.epochs(5):
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    if epoch == 2 and (dist.get_rank() == 1 or way == "all"):
        break
if way == "barrier":
    dist.barrier()
session.finish()
"""


def test_ranks_that_leave_the_loop_apart_fail_at_once(station: Station) -> None:
    (station.folder / "parts.py").write_text(PARTS)
    for way in ("one", "barrier", "all"):
        station.ok("launch", "--script", "parts.py", "--name", way, "--nproc", 2, "--", way)
    for way in ("one", "barrier"):
        record = station.wait_for_end(way)
        assert record["state"] == states.FAILED and len(record["attempts"]) == 1, station.logs(way)
        assert record["reason"] == "rank 1 left the loop at epoch 3, rank 0 did not"
    record = station.wait_for_end("all")
    assert record["state"] == states.FINISHED and record["epoch"] == 3, station.logs("all")
    began = time.monotonic()
    done = station("launch", "--script", "parts.py", "--nproc", 2, "--follow", "--", "one")
    assert done.returncode == EXIT_FAILED and time.monotonic() - began < 30


LINGERS = """
import atexit
import threading
import time

import torch

import trainstation as ts
from train.sessions import ending

ending._LINGER = 1.0
session = ts.session()
session.register(model=torch.nn.Linear(1, 1))
for step in session.range(3):
    pass
session.finish()
time.sleep(2.5)
print("exported", flush=True)
threading.Thread(target=time.sleep, args=(600,), name="beater").start()
atexit.register(time.sleep, 600)
"""


def test_a_process_ends_soon_after_its_main_thread(station: Station) -> None:
    (station.folder / "lingers.py").write_text(LINGERS)
    done = station("launch", "--script", "lingers.py", "--name", "lingers", "--follow")
    assert done.returncode == 0 and station.record("lingers")["state"] == states.FINISHED
    printed = station.logs("lingers")
    assert "exported" in printed and "does not end (beater); the process is ended" in printed
