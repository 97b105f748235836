"""Any torchrun program, unmodified: launched with a run folder, logs, stop and restart; and a task under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ports import free_port
from train.launcher import foreground
from train.launcher.launches import NewRun
from train.run import folders, states

if TYPE_CHECKING:
    from conftest import Station

# As the tutorials of PyTorch write it ("Fault-tolerant Distributed Training with torchrun").
SCRIPT = """
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def main(snapshot, steps, pause):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = torch.nn.Linear(8, 1)
    first = 0
    if os.path.exists(snapshot):
        state = torch.load(snapshot, weights_only=True)
        model.load_state_dict(state["model"])
        first = state["step"]
        print(f"resuming from step {first}", flush=True)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(first, steps):
        optimizer.zero_grad()
        x = torch.randn(16, 8)
        loss = F.mse_loss(ddp(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        time.sleep(pause)
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, snapshot + ".new")
            os.replace(snapshot + ".new", snapshot)
    print(f"rank {rank} of {world} done, loss {loss.item():.3f}", file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("arguments", sys.argv[1:], flush=True)
    if "--fail" in sys.argv:
        sys.exit(7)
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
"""


@pytest.fixture(scope="module", autouse=True)
def script(shared_station: Station) -> None:
    (shared_station.folder / "ddp.py").write_text(SCRIPT)


def test_a_script_gets_its_arguments_logs_per_rank_and_is_restarted_after_a_kill(shared_station: Station) -> None:
    station = shared_station
    snapshot = station.folder / "kill.pt"
    done = station.ok(
        "launch", "--script", "ddp.py", "--name", "again", "--nproc", 2, "--max-restarts", 1, "--",
        snapshot, 40, "0.05", "--optim.lr", "3", "--", "-h",
    )  # fmt: skip
    assert done.stdout == "again\n"
    station.wait("again", lambda record: snapshot.exists() and len(record["pids"].get("ranks", [])) == 2, "a snapshot")
    os.kill(station.record("again")["pids"]["ranks"][1], signal.SIGKILL)
    record = station.wait_for_end("again")
    assert record["state"] == states.FINISHED, station.logs("again")
    assert [attempt["end"] for attempt in record["attempts"]] == ["died", "finished"]
    for rank in (0, 1):
        text = station.ok("logs", "again", "--rank", rank).stdout
        assert f"arguments {[str(snapshot), '40', '0.05', '--optim.lr', '3', '--', '-h']}" in text
        assert f"rank {rank} of 2 done" in text
        assert "resuming from step" in text
    assert "resuming" not in station.ok("logs", "again", "--attempt", 1).stdout


@pytest.mark.minutes
def test_a_script_is_stopped_and_continued(shared_station: Station) -> None:
    station = shared_station
    snapshot = station.folder / "stop.pt"
    station.ok("launch", "--script", "ddp.py", "--name", "rests", "--", snapshot, 10**6, "0.02")
    station.wait("rests", lambda record: snapshot.exists(), "a snapshot")
    station.ok("stop", "rests")
    assert station.record("rests")["state"] == states.STOPPED and not station.run("rests").alive()
    refused = station("resume", "rests", "--steps", 5)
    assert refused.returncode == 2 and "script" in refused.stderr
    for command in (["eval", "rests"], ["export", "rests", "--to", "x.pt"]):
        refused = station(*command)
        assert refused.returncode == 2 and "runs a script" in refused.stderr and refused.stderr.count("\n") == 1
    station.ok("resume", "rests")
    station.wait(
        "rests", lambda record: "resuming from step" in station.logs("rests").rpartition("attempt-2")[2], "its resume"
    )
    station.ok("stop", "rests", "--now")
    assert len(station.record("rests")["attempts"]) == 2


def test_a_restart_of_torchrun_finds_its_run_beside_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "job"), ("TORCHELASTIC_RESTART_COUNT", "1")):
        monkeypatch.setenv(name, value)
    damaged = folders.create(tmp_path, "a", files={}, record={})
    (damaged.folder / "run.json").write_text("{")
    ours = folders.create(tmp_path, "b", files={}, record={"torchelastic": f"job/{os.getppid()}"})
    found, lock = foreground.open_under_torchrun(NewRun("digits", runs=str(tmp_path)))
    lock.release()
    assert found.path == ours.path


def test_ranks_that_something_else_than_torchrun_starts_share_a_name_or_its_refusal(shared_station: Station) -> None:
    station, place = shared_station, {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["run", "digits", "--name", "srun", "--steps", 5, "--cpu_threads", 1]
    station.environment("run")  # what the two are forked from is there
    for code, said in ((0, ""), (2, "a run named srun exists")):
        with ThreadPoolExecutor(2) as both:
            ranks = [*both.map(lambda rank: station(*command, env=place | {"RANK": rank}), ("0", "1"))]
        assert [rank.returncode for rank in ranks] == [code, code], ranks
        assert said in ranks[0].stderr
    assert (station.record("srun")["state"], station.record("srun")["world_size"]) == (states.FINISHED, 2)


@pytest.mark.never_forgiven
@pytest.mark.minutes
def test_a_task_trains_under_plain_torchrun_and_continues_after_a_restart(shared_station: Station) -> None:
    station = shared_station
    process = subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts",
            "1", "--monitor-interval", "0.1", "-m", "train", "run", "digits", "--name", "torchrun", "--steps", "120",
            "--checkpoint.every_steps", "10", "--log.every_steps", "1", "--log.samples", "true", "--cpu_threads", "1",
            "--eval.every_epochs", "0",
        ],
        cwd=station.folder, env=station.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    station.wait("torchrun", lambda record: bool(station.run("torchrun").steps_saved()), "a checkpoint")
    os.kill(station.record("torchrun")["pids"]["ranks"][0], signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    record = station.record("torchrun")
    assert record["state"] == states.FINISHED and record["step"] == 120 and record["world_size"] == 2
    assert len(record["attempts"]) == 2 and record["attempts"][1]["from_step"] > 0
    steps = [line["step"] for line in station.metrics("torchrun") if "loss" in line]
    assert steps == list(range(1, 121))
    # every step consumed its global batch once, also around the kill
    samples = station.samples("torchrun")
    assert list(samples) == list(range(1, 121)) and len(samples[1]) == 64
    assert json.loads(station.ok("show", "torchrun", "--json").stdout)["metrics"].keys() == {"loss", "accuracy"}
