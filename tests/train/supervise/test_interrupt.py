"""Ctrl-C in a foreground run, as a terminal sends it, to the whole group. The second one waits for nothing."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.train.terminal import Terminal
from tests.train.tiers import later
from tests.waiting import eventually
from train.run import states

if TYPE_CHECKING:
    from conftest import Station

TASK = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

class Data(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        {item}
        return torch.ones(4)

def model(config):
    return nn.Linear(4, 1)

def datasets(config):
    return Data(), {evaluation}

calls = []

def hang():
    open("hangs", "w").close()
    time.sleep(10000)

def loss(model, batch):
    calls.append(1)
    {loss}
    return model(batch).square().mean()
"""
SLOW = "time.sleep(0.05)"
QUICK = ["--epochs", "1000", "--batch_size", "16", "--log.every_steps", "1", "--log.tensorboard", "false",
         "--cpu_threads", "1"]  # fmt: skip


def write(station: Station, item: str = "pass", loss: str = SLOW, evaluation: str = "None") -> None:
    (station.folder / "task.py").write_text(TASK.format(item=item, loss=loss, evaluation=evaluation))


def here(station: Station) -> list[psutil.Process]:
    """The processes that were started in the station's folder."""
    return [
        process for process in psutil.process_iter(["cwd", "status", "cmdline"])
        if process.info["cwd"] == str(station.folder) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]  # fmt: skip


def check_gone(station: Station, name: str) -> None:
    assert not station.run(name).alive()
    assert not here(station), here(station)


@pytest.mark.never_forgiven
@pytest.mark.parametrize("case", ["one rank", *later("loader worker")])
def test_a_second_ctrl_c_ends_a_hanging_run_at_once_with_all_its_ranks(station: Station, case: str) -> None:
    if case == "loader worker":
        write(station, item="index == 3 and hang()")
        ranks = ["--data.workers", "1"]
    else:
        write(station, loss="dist.get_rank() == 1 and len(calls) > 1 and hang()")
        ranks = ["--spawn", "2"]
    terminal = Terminal(station, "run", "task.py", "--name", "h", *ranks, *QUICK)
    terminal.wait_for("samples, ")
    station.wait("h", lambda _: (station.folder / "hangs").exists(), "what hangs")
    terminal.ctrl_c()
    terminal.wait_for("h: stopping after this step; Ctrl-C again ends it at once")
    assert terminal.process.poll() is None
    time.sleep(1)  # no less than interrupt._SAME apart on a busy machine
    terminal.ctrl_c()
    assert terminal.end() == 130, terminal.output
    assert "without saving; train resume h starts at step 1" in terminal.output
    assert "Traceback" not in terminal.output
    record = station.run("h").read_effective()
    assert (record["state"], record["attempts"][-1]["end"]) == (states.STOPPED, "stopped")
    assert record["reason"] == "stopped at once (Ctrl-C twice); there is no checkpoint"
    check_gone(station, "h")


@pytest.mark.minutes
def test_a_run_ended_at_once_goes_on_from_its_last_checkpoint_when_its_user_says_so(station: Station) -> None:
    write(station, loss="time.sleep(10000 if len(calls) == 12 and calls.append(1) is None else 0.01)")
    terminal = Terminal(station, "run", "task.py", "--name", "c", *QUICK, "--checkpoint.every_steps", "2")
    station.wait("c", lambda _: 10 in station.run("c").steps_saved(), "the checkpoint of step 10")
    time.sleep(1)
    terminal.ctrl_c()
    terminal.wait_for("again ends it at once")
    time.sleep(1)  # no less than interrupt._SAME apart on a busy machine
    terminal.ctrl_c()
    assert terminal.end() == 130, terminal.output
    step = station.run("c").steps_saved()[0]
    assert f"train resume c continues after step {step}" in terminal.output
    station.ok("resume", "--all")
    station.ok("keeper", "--once")
    assert len(station.record("c")["attempts"]) == 1
    station.ok("resume", "c", "--steps", step + 2, "--follow")
    assert station.record("c")["attempts"][-1]["from_step"] == step


@pytest.mark.never_forgiven
def test_one_ctrl_c_saves_and_two_signals_in_one_instant_are_one(station: Station) -> None:
    write(station)
    terminal = Terminal(station, "run", "task.py", "--name", "p", *QUICK)
    station.wait_for_step("p", 2)
    terminal.process.send_signal(signal.SIGINT)  # as timeout(1): to the process, and then to its group
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == 75, terminal.output
    assert terminal.output.count("again ends it at once") == 1
    assert station.run("p").steps_saved() == [station.record("p")["step"]]


def test_ctrl_z_suspends_the_ranks_too_and_they_go_on_with_it(station: Station) -> None:
    write(station)
    terminal = Terminal(station, "run", "task.py", "--name", "z", *QUICK)
    station.wait_for_step("z", 2)
    rank = psutil.Process(station.record("z")["pids"]["ranks"][0])
    os.kill(terminal.process.pid, signal.SIGTSTP)
    both = (rank, psutil.Process(terminal.process.pid))
    eventually("both are stopped", lambda: all(one.status() == psutil.STATUS_STOPPED for one in both))
    step = station.record("z")["step"]
    os.kill(terminal.process.pid, signal.SIGCONT)
    station.wait_for_step("z", step + 3)
    terminal.ctrl_c()
    assert terminal.end() == 75, terminal.output


@pytest.mark.minutes
def test_ctrl_c_twice_ends_the_following_of_a_launched_run_and_not_the_run(station: Station) -> None:
    write(station)
    terminal = Terminal(station, "launch", "task.py", "--name", "f", "--follow", *QUICK)
    station.wait_for_step("f", 2)
    terminal.ctrl_c()
    terminal.ctrl_c()
    assert terminal.end() == 130
    assert "Traceback" not in terminal.output and "f continues" in terminal.output
    assert station.run("f").read_effective()["state"] == states.RUNNING
    station.ok("stop", "f")
