"""A hang is found, explained and survived."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.train.conftest import Station
from tests.waiting import eventually

FIELDS = (
    "--steps", 40, "--batch_size", 60, "--micro_batch_size", 20, "--checkpoint.every_steps", 5, "--log.every_steps", 1,
    "--log.tensorboard", "false", "--task.width", 8, "--cpu_threads", 1,
)  # fmt: skip


def stands_still(station: Station) -> bool:
    """Whether a rank does: found by its folder, for it may stop with the record in its hands, where pids belong."""
    return any(
        process.info["status"] == psutil.STATUS_STOPPED and process.info["cwd"] == str(station.folder)
        for process in psutil.process_iter(["cwd", "status"])
    )


def test_a_rank_that_stands_still_is_noticed_its_stacks_are_kept_and_the_run_goes_on(station: Station) -> None:
    # the fault stops one rank (SIGSTOP) at its 30th step of an attempt: the second attempt is over before that
    station.ok("run", "digits", "--name", "base", "--spawn", 2, *FIELDS)
    env = {"TRAIN_FAULT": "step@1:30:stop"}
    station.ok(
        "launch", "digits", "--name", "a", "--nproc", 2, *FIELDS, "--watch.hang_minutes", 0.1, "--follow", env=env
    )
    record = station.record("a")
    first, second = record["attempts"]
    assert "no progress" in first["reason"] and "training" in first["reason"]
    assert second["end"] == "finished"
    assert record["weights_sha256"] == station.record("base")["weights_sha256"]
    stack = (station.runs / "a" / "logs" / "attempt-1" / "rank0.stack.txt").read_text()
    assert "trainer/train.py" in stack or "_step" in stack, stack


@pytest.mark.minutes
def test_a_run_that_is_frozen_with_its_agent_hangs_no_more_when_it_is_let_go(station: Station) -> None:
    """As `docker pause` does, for longer than a hang takes."""
    long = [*FIELDS, "--steps", 10**6, "--watch.hang_minutes", 0.2]
    deep = station.folder / ("too-long-for-a-socket" * 6)
    deep.mkdir()
    # no socket fits in there: the zygote is the agent's own
    station.ok("launch", "digits", "--name", "a", *long, env={"TRAIN_WARM": "off", "TMPDIR": str(deep)})
    station.wait_for_step("a", 5)
    agent = psutil.Process(station.record("a")["pids"]["agent"])
    ranks, server = agent.children(recursive=True), agent.parent()
    assert server is not None and "tmux" in server.name()
    for process in ranks:
        process.suspend()
    time.sleep(1)  # the agent has seen their last sign of life
    server.suspend()  # first: it lets what stops in its panes go on at once
    agent.suspend()
    time.sleep(15)
    assert agent.status() == psutil.STATUS_STOPPED
    at = station.record("a")["step"]
    agent.resume()
    time.sleep(1)  # in which it looks at ranks that have not moved
    for process in [*ranks, server]:
        process.resume()
    station.wait_for_step("a", at + 100)
    station.ok("stop", "a")
    assert [attempt["end"] for attempt in station.record("a")["attempts"]] == ["stopped"]


@pytest.mark.minutes
def test_hang_minutes_0_never_ends_a_run(station: Station) -> None:
    env = {"TRAIN_FAULT": "step@0:10:stop"}
    station.ok("launch", "digits", "--name", "a", *FIELDS, "--watch.hang_minutes", 0, env=env)
    eventually("a rank stands still", lambda: stands_still(station))
    station.ok("stop", "a", "--now")
    assert [attempt["end"] for attempt in station.record("a")["attempts"]] == ["stopped"]


ALONE = """
import os
from torch import nn, ones
from torch.utils.data import TensorDataset


def model(config):
    return nn.Linear(4, 1)


def datasets(config):
    if os.environ.get("RANK") == "1":
        raise ValueError("no disk here")
    return TensorDataset(ones(64, 4)), None


def loss(model, batch):
    return model(batch[0]).square().mean()
"""


@pytest.mark.minutes
def test_a_rank_that_is_refused_alone_before_it_meets_the_others_keeps_nobody_waiting(station: Station) -> None:
    (station.folder / "alone.py").write_text(ALONE)
    flags = ["--steps", 4, "--log.tensorboard", "false", "--cpu_threads", 1, "--parallel.timeout_minutes", 1000]
    done = station("launch", "alone.py", "--name", "a", "--nproc", 2, *flags, "--follow")
    record = station.record("a")
    assert done.returncode == 3 and record["state"] == "failed", done.stderr
    assert record["reason"].startswith("rank 1: datasets() failed: ") and "no disk here" in record["reason"]
    assert len(record["attempts"]) == 1


HOLDS = """
import os, time
from pathlib import Path
from torch import nn, ones
from torch.utils.data import TensorDataset

HERE = Path(__file__).parent


def model(config):
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def datasets(config):
    return TensorDataset(ones(64, 4)), None


def loss(model, batch):
    # of rank 1 a process holds the connections that its death would close: as with NCCL, nobody notices it
    mine = HERE / f"pid{os.environ['RANK']}"
    if not mine.exists():  # whole, once the other rank sees it: it would wait for ever for a process without a number
        whole = mine.with_suffix(".new")
        whole.write_text(str(os.getpid()))
        whole.rename(mine)
    if os.environ["TRAIN_ATTEMPT"] == "1" and os.environ["RANK"] == "1" and not (HERE / "held").exists():
        while not (HERE / "pid0").exists():
            time.sleep(0.01)
        (HERE / "held").touch()
        peer = (HERE / "pid0").read_text()
        if os.fork() == 0:
            os.setsid()
            while Path(f"/proc/{peer}").exists():
                time.sleep(0.05)
            os._exit(0)
    return model(batch[0]).square().mean()
"""


@pytest.mark.minutes
def test_a_rank_that_dies_while_all_hash_their_weights_is_noticed_by_its_agent(station: Station) -> None:
    (station.folder / "holds.py").write_text(HOLDS)
    flags = ["--steps", 4, "--log.tensorboard", "false", "--cpu_threads", 1, "--parallel.timeout_minutes", 1000,
             "--parallel.strategy", "fsdp", "--parallel.wrap", "Linear"]  # fmt: skip
    env = {"TRAIN_FAULT": "digest@1"}
    station.ok("launch", "holds.py", "--name", "a", "--nproc", 2, *flags, env=env)
    station.wait("a", lambda record: len(record["attempts"]) > 1, "its second attempt")
    assert station.record("a")["attempts"][0]["reason"] == "rank 1 died of SIGKILL"
    station.ok("stop", "a", "--now")
