"""A hang is found, explained and survived."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.train.conftest import Station
from tests.waiting import eventually
from train import programs
from train.run import folders, heartbeat
from train.run.spec import read_spec
from train.supervise import health
from train.supervise.health import TaskHealth

pytestmark = pytest.mark.turns

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
def test_hang_minutes_0_never_ends_a_run(station: Station) -> None:
    env = {"TRAIN_FAULT": "step@0:10:stop"}
    station.ok("launch", "digits", "--name", "a", *FIELDS, "--watch.hang_minutes", 0, env=env)
    eventually("a rank stands still", lambda: stands_still(station))
    station.ok("stop", "a", "--now")
    assert [attempt["end"] for attempt in station.record("a")["attempts"]] == ["stopped"]


NEVER = """
import os
import time
from torch import nn, ones
from torch.utils.data import Dataset


class Never(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        open("waits", "w").close()
        time.sleep(1e6)


def model(config):
    return nn.Linear(4, 1)


def datasets(config):
    return Never(), None


def loss(model, batch):
    return model(batch).square().mean()
"""


def test_a_stop_does_not_wait_for_a_batch_that_never_comes(station: Station) -> None:
    (station.folder / "never.py").write_text(NEVER)
    flags = ["--steps", 4, "--log.tensorboard", "false", "--cpu_threads", 1, "--watch.hang_minutes", 0]
    station.ok("launch", "never.py", "--name", "a", "--nproc", 2, "--data.workers", 1, *flags)
    eventually("a rank waits", (station.folder / "waits").exists)
    station.ok("stop", "a")
    record = station.record("a")
    assert (record["state"], record["stopped_by"]) == ("stopped", "user")
    assert "since it was asked to stop, while starting after step 0" in record["reason"]
    assert not station.run("a").alive()


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


COMPILES = """
import time
from torch import nn, ones
from torch.utils.data import TensorDataset


def slow(graph, inputs):
    if inputs[-1].shape[0] == 3:  # the short last batch, long after the start
        time.sleep(12)
    return graph.forward


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, points):
        return self.body(points)


def model(config):
    net = Net()
    net.compile(backend=slow)
    return net


def datasets(config):
    return TensorDataset(ones(83, 4)), None


def loss(model, batch):
    time.sleep(0.05)
    return model(batch[0]).square().mean()
"""


@pytest.mark.minutes
def test_a_rank_that_compiles_for_long_is_no_hang_and_is_shown(station: Station) -> None:
    (station.folder / "compiles.py").write_text(COMPILES)
    flags = ["--batch_size", 8, "--steps", 14, "--log.tensorboard", "false"]
    station.ok("launch", "compiles.py", "--name", "a", *flags, "--cpu_threads", 1, "--watch.hang_minutes", 0.1)
    eventually("it compiles", lambda: "compiling" in station.ok("top", "--once").stdout)
    assert station.wait_for_end("a")["state"] == "finished"
    assert len(station.record("a")["attempts"]) == 1


@pytest.mark.parametrize(("phase", "is_hang"), [("TRAINING", True), ("EVALUATING", True), ("COMPILING", False)])
@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_rank_may_compile_longer_than_it_may_be_silent(
    phase: str, is_hang: bool, is_stopping: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STOP_WAIT", 0.1)
    config = {"config.toml": b"[watch]\nhang_minutes = 0.001\n"}
    run = folders.create(tmp_path, "a", files=config, record={"step": 0, "epoch": 0, "world_size": 2})
    run.logs(1).mkdir(parents=True)
    waits, works = (heartbeat.Heart(run.logs(1) / f"rank{rank}.beat") for rank in range(2))
    waits.beat(heartbeat.TRAINING, 3)  # in a collective, for the other one
    works.beat(getattr(heartbeat, phase), 3)
    watch = TaskHealth(run.read_config(), run.logs(1), [0, 1], kill=lambda *_: None)
    until = time.monotonic() + 0.4
    while time.monotonic() < until:
        watch.look([1, 2], [1, 2], {}, is_stopping)
        time.sleep(0.01)
    assert bool(watch.hang) is is_hang


WORKS, WAITS = "while True: pass", "import time; time.sleep(1000)"


@pytest.mark.parametrize(
    ("phases", "computes", "is_hang"),
    [
        (("TRAINING", "TRAINING"), True, True),  # as ranks that wait in a collective of NCCL
        # the script evaluates, for as long as it likes
        pytest.param(("TRAINING", "EVALUATING"), True, False, marks=pytest.mark.minutes),
        (("TRAINING", "EVALUATING"), False, True),
        pytest.param(("", ""), True, False, marks=pytest.mark.minutes),  # no session
        (("", ""), False, True),
    ],
)
def test_a_session_shows_its_life_by_steps_while_it_trains_and_else_as_any_script(
    phases: tuple[str, str], computes: bool, is_hang: bool, tmp_path: Path
) -> None:
    limit = 0.6 if is_hang else 10.0  # a busy machine lets a process wait for its turn
    watch = {"hang_minutes": limit / 60}
    run = folders.create(tmp_path, "a", files={}, record={"script": "/own.py", "world_size": 2, "watch": watch})
    run.logs(1).mkdir(parents=True)
    for rank, phase in enumerate(phases):
        if phase:
            heartbeat.Heart(run.logs(1) / f"rank{rank}.beat").beat(getattr(heartbeat, phase), 3)
    own = [subprocess.Popen([sys.executable, "-c", WORKS if computes else WAITS]) for _ in phases]
    pids, killed = [process.pid for process in own], []
    looks = programs.SCRIPT.health(run, read_spec(run), attempt=1, ranks=[0, 1], kill=lambda pid, _: killed.append(pid))
    until = time.monotonic() + limit + 2
    while time.monotonic() < until and not looks.hang:
        looks.look(pids, pids, {}, False)
        time.sleep(0.05)
    for process in own:
        process.kill()
        process.wait()
    assert (bool(looks.hang), sorted(killed)) == (is_hang, sorted(pids) if is_hang else [])
    looks.close()


def test_a_session_that_is_gone_is_no_stop_for_its_other_ranks(tmp_path: Path) -> None:
    run = folders.create(tmp_path, "a", files={}, record={"script": "/own.py", "world_size": 2})
    run.logs(1).mkdir(parents=True)
    saves, leaves = (heartbeat.Heart(run.logs(1) / f"rank{rank}.beat") for rank in range(2))
    saves.beat(heartbeat.SAVING, 3)
    leaves.beat(heartbeat.ENDING, 3)
    sent: list[int] = []
    watch = programs.SCRIPT.health(run, read_spec(run), attempt=1, ranks=[0, 1], kill=lambda _, sign: sent.append(sign))
    watch.look([1], [1, 2], {1: 75}, True)  # rank 1 has left after a stop, while rank 0 commits
    assert sent == [] and watch.is_ending
