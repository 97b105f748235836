"""A user's script with a session, killed from outside at any moment: it ends as an uninterrupted run."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.train.conftest import Station
from tests.train.tiers import later
from train.errors import EXIT_FAILED
from train.run import states

SCRIPT = Path(__file__).with_name("users_script.py")
EPOCHS, PAUSE = 3, 0.03
UPDATES = EPOCHS * 6


@pytest.mark.turns
@pytest.mark.never_forgiven
@pytest.mark.parametrize("ranks", [2, *later(1, 3)])
def test_breaks_of_all_kinds_change_no_bit(station: Station, ranks: int) -> None:
    shutil.copy(SCRIPT, station.folder / SCRIPT.name)
    done = station("prove", "--script", SCRIPT.name, "--nproc", ranks, "--json", "--", "{run}", EPOCHS, PAUSE)
    found = json.loads(done.stdout)
    assert (done.returncode, found["verdict"], found["updates"]) == (0, "EXACT", UPDATES), done.stdout + done.stderr
    assert [one["kind"] for one in found["breaks"]] == ["stop", "rank", "all", "save"]
    assert found["digests"].keys() >= {"model", "optimizer", "scheduler", "scaler", "average", "values.best"}
    # a stop repeats nothing, and a checkpoint is there before everything is killed
    assert found["breaks"][0]["repeated"] == 0 and found["breaks"][2]["repeated"] < found["breaks"][2]["update"]


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


@pytest.mark.turns
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


@pytest.mark.turns
def test_a_process_ends_soon_after_its_main_thread(station: Station) -> None:
    (station.folder / "lingers.py").write_text(LINGERS)
    done = station("launch", "--script", "lingers.py", "--name", "lingers", "--follow")
    assert done.returncode == 0 and station.record("lingers")["state"] == states.FINISHED
    printed = station.logs("lingers")
    assert "exported" in printed and "does not end (beater); the process is ended" in printed
