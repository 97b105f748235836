"""A session goes on from memory after a killed rank: no checkpoint is needed, and no bit changes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.train.conftest import Station
from tests.train.tiers import later
from train.run import states

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
import trainstation as ts

def main():
    how, ranks = sys.argv[1], int(os.environ["WORLD_SIZE"])
    session = ts.session(seed=0, save_minutes=0, snapshots=how != "off")
    if ranks > 1:
        dist.init_process_group("gloo")
    x = torch.randn(240, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard
        fully_shard(model)
    elif ranks > 1:
        model = DistributedDataParallel(model, broadcast_buffers=False)  # each rank has statistics of its own
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = session.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12)
    session.register(model=model, optimizer=optimizer)
    session.values.setdefault("seen", 0)
    for epoch in session.epochs(10):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.values["seen"] += 1 + dist.get_rank() if ranks > 1 else 1
            session.log(loss=loss, seen=session.values["seen"])
            time.sleep(0.03)
    session.finish()

main()
"""


def launched(station: Station, name: str, how: str, ranks: int) -> None:
    (station.folder / "mine.py").write_text(SCRIPT)
    station.ok("launch", "--script", "mine.py", "--name", name, "--nproc", ranks, "--", how)


def kill(station: Station, name: str, rank: int, after: int) -> int:
    """Kill a rank after this update, and return the update that was made last."""
    run: Path = station.runs / name
    until = time.monotonic() + 120
    while True:
        steps = [one["step"] for one in station.metrics(name)] if (run / "metrics.jsonl").exists() else []
        if steps and steps[-1] >= after:
            break
        assert time.monotonic() < until, station.logs(name)
        time.sleep(0.01)
    os.kill(station.record(name)["pids"]["ranks"][rank], signal.SIGKILL)
    return int(steps[-1])


@pytest.mark.never_forgiven
@pytest.mark.parametrize(("how", "ranks"), [("ddp", 2), *later(("fsdp", 2), ("one", 1), ("ddp", 3))])
def test_killed_ranks_cost_a_few_updates_and_no_bit(station: Station, how: str, ranks: int) -> None:
    for name in ("calm", "killed"):
        launched(station, name, how, ranks)
    first = kill(station, "killed", ranks - 1, 60)
    station.wait(
        "killed", lambda record: (record["attempts"][1:] or [{}])[-1].get("from_step") is not None, "a restart"
    )
    second = kill(station, "killed", 0, 130)
    for name in ("calm", "killed"):
        assert station.wait_for_end(name)["state"] == states.FINISHED, station.logs(name)
    calm, killed = station.record("calm"), station.record("killed")
    assert killed["weights_sha256"] == calm["weights_sha256"]
    assert station.metrics("killed") == station.metrics("calm")
    begins = [one["from_step"] for one in killed["attempts"]]
    assert begins[0] == 0 and len(begins) == 3
    assert first - 60 < begins[1] <= first + 2 and second - 60 < begins[2] <= second + 2  # there was no checkpoint
    assert "snapshots in memory: 2 x" in station.logs("killed")


@pytest.mark.minutes
def test_without_snapshots_a_killed_rank_begins_at_the_last_checkpoint(station: Station) -> None:
    launched(station, "off", "off", 1)
    kill(station, "off", 0, 40)
    assert station.wait_for_end("off")["state"] == states.FINISHED, station.logs("off")
    assert [one["from_step"] for one in station.record("off")["attempts"]] == [0, 0]
