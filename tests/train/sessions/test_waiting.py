"""A run that is asked to stop ends also while it waits for a batch that does not come."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.train.conftest import PATIENCE, Station
from tests.train.tiers import later
from train.run import states

pytestmark = pytest.mark.never_forgiven

MOST = 60.0
"""Seconds until such a run has ended, also beside others: it waits ten for the batch. Without an end it waits 600."""
SLEEPS = "sleeps"
"""A file: while it is there, sample 30 is not read. It is of batch 7, and of the last rank."""
SCRIPT = """
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import trainstation as ts


class Data(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 30 and os.path.exists("sleeps"):
            time.sleep(600)
        return torch.full((4,), float(index)) / 40 + torch.rand(4)


def main(workers, accumulated):
    session = ts.session(save_every=5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = session.loader(Data(), batch_size=4, num_workers=workers, shuffle=False)
    session.register(model=model, optimizer=optimizer)
    for epoch in session.epochs(2):
        loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, loader.start):
            loss = model(batch).square().mean()
            loss.backward()
            session.log(loss=loss, number=number)
            if number % accumulated == accumulated - 1:
                optimizer.step()
                optimizer.zero_grad()
    session.finish()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def script(station: Station) -> None:
    (station.folder / "stuck.py").write_text(SCRIPT)
    (station.folder / SLEEPS).touch()


def until_it_waits(station: Station, name: str) -> None:
    path = station.runs / name / "metrics.jsonl"
    station.wait(name, lambda _: path.exists() and path.read_bytes().count(b"\n") == 7, "7 batches")
    time.sleep(0.5)


def digest(station: Station, name: str) -> str:
    record = station.wait_for_end(name)
    assert record["state"] == states.FINISHED, station.logs(name)
    return str(record["weights_sha256"])


@pytest.mark.turns
@pytest.mark.parametrize(("ranks", "step"), [(2, 5), *later((1, 7))])
def test_a_stop_is_heeded_while_a_worker_is_stuck(station: Station, ranks: int, step: int) -> None:
    start = ["launch", "--script", "stuck.py", "--nproc", ranks, "--name"]
    station.ok(*start, "stuck", "--", 1, 1)
    until_it_waits(station, "stuck")
    began = time.monotonic()
    station.ok("stop", "stuck")
    assert time.monotonic() - began < MOST
    record = station.record("stuck")
    assert (record["state"], record["reason"]) == (states.STOPPED, f"stopped after step {step} (train stop)")
    assert station.run("stuck").newest_checkpoint == step
    if ranks > 1:
        assert "at the checkpoint of step 5, because rank 1 has waited 10 s for a batch" in station.logs("stuck")
    (station.folder / SLEEPS).unlink()
    station.ok("resume", "stuck")
    station.ok(*start, "calm", "--", 0, 1)
    assert digest(station, "stuck") == digest(station, "calm")


@pytest.mark.parametrize(
    ("workers", "accumulated", "number", "step"),
    [(0, 1, signal.SIGTERM, 7), *later((1, 1, signal.SIGINT, 7), (1, 2, signal.SIGTERM, 0))],
)
def test_a_signal_ends_the_wait_of_a_run_of_its_own(
    station: Station, workers: int, accumulated: int, number: int, step: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "stuck.py", str(workers), str(accumulated)], cwd=station.folder, env=station.environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        until = time.monotonic() + PATIENCE
        while sum(path.read_bytes().count(b"\n") for path in station.runs.glob("*/metrics.jsonl")) < 7:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - began < MOST and process.returncode == 75, errors
    said = f"stopped after step {step}" if step else "stopped before the first checkpoint, because rank 0 has waited"
    assert said in errors and "Traceback" not in errors, errors
