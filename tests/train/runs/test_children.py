"""Ranks of a launched task are forked from a process that has imported everything once, and are whole processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.train.conftest import lives
from train.errors import Refused
from train.record import folders, store
from train.runs.apart import Told, call
from train.runs.processes import flight_recorder
from train.runs.processes.children import Children
from train.runs.supervise import Supervisor
from train.runs.verdict import Road
from train.signals import StopRequest

if TYPE_CHECKING:
    from conftest import Station

TASK = """
import os
import sys
import threading

import numpy
import torch
from threadpoolctl import threadpool_info
from torch import nn
from torch.utils.data import TensorDataset

print("begins with", {m: m in sys.modules for m in ("torch._dynamo", "torch.distributed.checkpoint")}, flush=True)
seen = os.environ.get("LEFT_BY_A_CHECK")
os.environ["LEFT_BY_A_CHECK"] = "yes"


def model(config):
    return nn.Linear(64, 64)


def datasets(config):
    if "RANK" not in os.environ:  # what a fork does not survive: a pool of OpenMP threads in use, and other threads
        torch.set_num_threads(2)
        torch.randn(2000, 2000).sum()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return TensorDataset(torch.randn(64, 64)), None


def loss(model, batch):
    if "said" not in globals():
        globals()["said"] = True
        pools = {pool["num_threads"] for pool in threadpool_info()}
        print("threads", torch.get_num_threads(), pools, os.environ["OMP_NUM_THREADS"], flush=True)
        print("left", seen, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
        print("by torchrun", "TORCHELASTIC_RUN_ID" in os.environ, flush=True)
        os.system("echo a process of its own")
    return model(batch[0]).square().mean()
"""
QUICK = ["--log.every_steps", 1, "--log.tensorboard", "false", "--cpu_threads", 1, "--batch_size", 16]


@pytest.fixture(scope="module")
def killed(shared_station: Station) -> dict[str, Any]:
    """What was seen of a run of two ranks, one of which was killed, and which was then stopped."""
    station = shared_station
    (station.folder / "whole.py").write_text(TASK)
    station.ok("launch", "whole.py", "--name", "w", "--nproc", 2, "--steps", 10**7, *QUICK, env={"TRAIN_WARM": "off"})
    station.wait("w", lambda record: record["step"] >= 2 and len(record["pids"]["ranks"]) == 2, "step 2")
    pids = station.record("w")["pids"]
    ranks = [psutil.Process(pid) for pid in pids["ranks"]]
    seen: dict[str, Any] = {
        "parents": {rank.ppid() for rank in ranks} | {pids["agent"]},
        "titles": [rank.cmdline() for rank in ranks],
        "sessions": [os.getsid(rank.pid) == rank.pid for rank in ranks],
        "inputs": [str(Path(f"/proc/{rank.pid}/fd/0").readlink()) for rank in ranks],
        "terminal": str(Path(f"/proc/{pids['agent']}/fd/0").readlink()),
    }
    os.kill(pids["ranks"][1], signal.SIGKILL)
    station.wait("w", lambda record: len(record["attempts"]) == 2 and record["step"] >= 2, "its second attempt")
    station.wait("w", lambda record: bool(record["attempts"][-1].get("ready")), "its second start")
    again = station.record("w")
    seen["agents"] = {pids["agent"], again["pids"]["agent"]}
    station.ok("stop", "w")
    seen["record"] = station.wait_for_end("w")
    seen["logs"] = [
        (station.run("w").logs(attempt) / f"rank{rank}.log").read_text() for attempt in (1, 2) for rank in (0, 1)
    ]
    seen["left"] = [pid for pid in [*pids.values()][1] + again["pids"]["ranks"] if psutil.pid_exists(pid)]
    return seen


def test_ranks_are_children_of_the_agent_and_are_found_by_name(killed: dict[str, Any]) -> None:
    assert len(killed["parents"]) == 1
    for rank, title in enumerate(killed["titles"]):
        assert "train.runs.rank" in title and "train.runs.agent" not in " ".join(title)
        assert title[0] == sys.executable and rank in (0, 1)


def test_what_is_typed_in_the_terminal_of_a_run_does_not_reach_its_ranks(killed: dict[str, Any]) -> None:
    assert killed["sessions"] == [True, True] and set(killed["inputs"]) == {os.devnull}
    assert killed["terminal"].startswith("/dev/pts/")


def test_a_rank_begins_with_all_imports_made_also_after_a_death(killed: dict[str, Any]) -> None:
    assert len(killed["agents"]) == 1
    for log in killed["logs"]:
        assert "begins with {'torch._dynamo': True, 'torch.distributed.checkpoint': True}" in log


def test_torch_warns_ranks_of_nothing_that_is_asked_of_it_here(killed: dict[str, Any]) -> None:
    for log in killed["logs"]:
        said = [line for line in log.splitlines() if "deprecated" in line or "FutureWarning" in line]
        assert not said


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_what_a_user_says_of_the_flight_recorder_stays(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, "0")
    assert not [set_here for set_here in flight_recorder(tmp_path) if set_here.endswith("BUFFER_SIZE")]
    monkeypatch.delenv(name)
    assert [value for key, value in flight_recorder(tmp_path).items() if key.endswith("BUFFER_SIZE")] == ["2000"]


def test_what_a_task_does_while_it_is_checked_does_not_reach_its_ranks(killed: dict[str, Any]) -> None:
    for number, log in enumerate(killed["logs"]):
        assert f"left None rank {number % 2} of 2" in log, log


def test_all_libraries_have_the_threads_of_a_rank(killed: dict[str, Any]) -> None:
    for log in killed["logs"]:
        assert "threads 1 {1} 1\n" in log


def test_what_a_process_of_a_rank_writes_is_in_its_log_and_the_run_ends_as_asked(killed: dict[str, Any]) -> None:
    assert all("a process of its own\n" in log for log in killed["logs"])
    assert killed["record"]["state"] == store.STOPPED and killed["left"] == []


@pytest.mark.minutes
def test_where_an_interpreter_has_threads_from_its_start_torchrun_starts_the_ranks(station: Station) -> None:
    (station.folder / "whole.py").write_text(TASK)
    (station.folder / "sitecustomize.py").write_text(
        "import sys, threading\n"
        "if 'train.runs.cold' in sys.orig_argv:\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    path = os.pathsep.join([str(station.folder), station.environment()["PYTHONPATH"]])
    station.ok(
        "launch",
        "whole.py",
        "--name",
        "t",
        "--nproc",
        2,
        "--steps",
        2,
        *QUICK,
        "--follow",
        env={"PYTHONPATH": path, "TRAIN_WARM": "off"},
    )
    for rank in (0, 1):
        assert "by torchrun True\n" in (station.run("t").logs(1) / f"rank{rank}.log").read_text()


def test_a_refusal_is_told_before_the_one_who_asked_is_ready_to_hear_it(tmp_path: Path) -> None:
    told: list[float] = []

    def refuse() -> None:
        raise Refused("no")

    def fail(error: BaseException) -> int:
        (tmp_path / "told").write_text(str(error))
        return 2

    def meanwhile() -> None:
        deadline = time.monotonic() + 60
        while not (tmp_path / "told").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        told.append(time.monotonic())

    with pytest.raises(Told) as caught:
        call(refuse, fail, meanwhile)
    assert caught.value.code == 2 and (tmp_path / "told").read_text() == "no" and told


def test_what_a_call_returns_comes_back_and_what_it_changes_does_not() -> None:
    kept = [1]

    def change() -> tuple[list[int], bytes]:
        kept.append(2)
        return kept, b"x" * 10**6  # more than a pipe holds

    assert call(change, lambda error: 1, lambda: None) == ([1, 2], b"x" * 10**6)
    assert kept == [1]


def test_a_check_that_is_killed_is_refused_in_a_line() -> None:
    with pytest.raises(Refused, match="died of SIGKILL"):
        call(lambda: os.kill(os.getpid(), signal.SIGKILL), lambda error: 1, lambda: None)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_call_leaves_behind_keeps_nobody_waiting_and_is_ended(fails: bool, tmp_path: Path) -> None:
    def leave() -> int:
        left = os.fork()  # with all open files, as multiprocessing.Manager's server is
        if left == 0:
            signal.pause()
        (tmp_path / "left").write_text(str(left))
        if fails:
            raise Refused("no")
        return left

    begun = time.monotonic()
    if fails:
        with pytest.raises(Told):
            call(leave, lambda error: 2, lambda: None)
    else:
        assert call(leave, lambda error: 2, lambda: None) == int((tmp_path / "left").read_text())
    is_ended(int((tmp_path / "left").read_text()))
    assert time.monotonic() - begun < 30


def is_ended(pid: int) -> None:
    """Wait until this process is dead: what is orphaned is reaped by another."""
    deadline = time.monotonic() + 20
    while lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_task_with_a_server_of_its_own_is_launched_and_lets_go_of_its_run(station: Station) -> None:
    server = (
        "import multiprocessing\n    globals()['kept'] = multiprocessing.get_context('fork').Manager().dict()\n    "
    )
    (station.folder / "serves.py").write_text(TASK.replace('    if "RANK" not in', f'    {server}if "RANK" not in'))
    process = station.start("launch", "serves.py", "--name", "s", "--nproc", 2, "--steps", 2, *QUICK, "--follow")
    try:
        assert process.wait(90) == 0, process.stdout.read()
    finally:
        process.kill()
    assert station.wait_for_end("s")["state"] == store.FINISHED


def test_a_title_is_cut_to_the_room_that_there_is(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "from train.runs import title\n"
        "for words in (('python', '-m', 'short'), ('python', 'x' * 10000)):\n"
        "    title.show(*words)\n"
        "    print(open('/proc/self/cmdline').read().rstrip('\\0').split('\\0'))\n"
        "print(os.environ['KEPT'])\n"
    )
    command = [sys.executable, "-c", script, "some", "arguments"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"KEPT": "all of it"},
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    short, long, kept = done.stdout.splitlines()
    assert re.match(r"\['python', '-m', 'short *'\]", short)
    assert 100 < len(long) < 10000 and kept == "all of it"


def test_a_fork_that_the_machine_has_no_room_for_is_told_as_passing(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.runs import cause

    station.runs.mkdir()
    run = folders.create(station.runs, "f", {"config.toml": "cpu_threads = 1\n"}, {"world_size": 2})
    lock = run.acquire()
    assert lock is not None
    children, forks = Children(run, lock, 2), []

    def fork() -> int:  # the second one fails
        forks.append(1)
        if len(forks) == 2:
            raise BlockingIOError(11, os.strerror(11))
        pid = real()
        if pid == 0:
            threading.Event().wait()
        return pid

    real = os.fork
    monkeypatch.setattr(os, "fork", fork)
    children.start(run.begin_attempt(2))
    deadline = time.monotonic() + 60
    while not children.wait():
        assert time.monotonic() < deadline
    lock.release()
    assert cause.is_busy(children.problem) and children.exits() == {0: 1}
    assert not psutil.pid_exists(children.pids()[0])


def test_the_id_of_a_rank_that_is_gone_is_not_signalled(station: Station, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another's: the peers are ended seconds after the death."""
    station.runs.mkdir()
    run = folders.create(station.runs, "g", {"config.toml": "cpu_threads = 1\n"}, {"world_size": 2, "max_restarts": 0})
    lock = run.acquire()
    assert lock is not None
    pids, signalled = list[int](), list[int]()

    def fork() -> int:  # the second one ends at once, the first one waits for it for ever
        pid = real_fork()
        if pid == 0 and not pids:
            threading.Event().wait()
        if pid == 0:
            os._exit(1)
        pids.append(pid)
        return pid

    def kill(pid: int, number: int) -> None:
        signalled.append(pid)
        real_kill(pid, number)

    real_fork, real_kill = os.fork, os.kill
    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(os, "kill", kill)
    stop = StopRequest(())
    Supervisor(run, Children(run, lock, 2), Road.LAUNCHED, stop, say=lambda _: None).keep()
    lock.release()
    assert set(signalled) == {pids[0]}
