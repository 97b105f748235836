"""Ranks are forked from a process that has imported everything once, and are whole processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.train import forks
from tests.train.conftest import lives
from tests.waiting import eventually
from train import causes
from train.errors import Refused
from train.run import folders, states
from train.run.spec import read_spec
from train.signals import POLITE
from train.supervise.ranks import TaskRanks, flight_recorder
from train.zygote.client import Zygote

pytestmark = pytest.mark.never_forgiven

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
        "parents": {rank.ppid() for rank in ranks},
        "titles": [rank.cmdline() for rank in ranks],
        "sessions": [os.getsid(rank.pid) == rank.pid for rank in ranks],
        "inputs": [str(Path(f"/proc/{rank.pid}/fd/0").readlink()) for rank in ranks],
        "has_torch": "libtorch" in Path(f"/proc/{pids['agent']}/maps").read_text(),
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


def test_ranks_are_forked_by_one_process_and_are_found_by_name(killed: dict[str, Any]) -> None:
    assert len(killed["parents"]) == 1 and not killed["parents"] & killed["agents"]
    assert [" ".join(title).strip() for title in killed["titles"]] == ["train-rank 0 w", "train-rank 1 w"]


def test_the_agent_has_not_imported_torch(killed: dict[str, Any]) -> None:
    assert not killed["has_torch"]


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
    assert killed["record"]["state"] == states.STOPPED and killed["left"] == []


def test_where_an_interpreter_has_threads_from_its_start_a_run_is_refused(station: Station) -> None:
    (station.folder / "sitecustomize.py").write_text(
        "import sys, threading\n"
        "if any(word.endswith('zygote/server.py') for word in sys.orig_argv):\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    path = os.pathsep.join([str(station.folder), station.environment()["PYTHONPATH"]])
    done = station("launch", "digits", "--name", "t", env={"PYTHONPATH": path, "TRAIN_WARM": "off"})
    assert done.returncode == 2 and "has other threads (Thread-1 (wait))" in done.stderr
    assert not station.run("t").folder.exists()


@pytest.fixture
def zygote(station: Station) -> Iterator[Zygote]:
    made = forks.zygote(station.environment())
    yield made
    made.close()


def refuse() -> None:
    raise Refused("no")


def change() -> tuple[list[int], bytes]:
    KEPT.append(2)
    return KEPT, b"x" * 10**6  # more than a pipe holds


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(folder: str, fails: bool) -> int:
    left = os.fork()  # with all open files, as multiprocessing.Manager's server is
    if left == 0:
        signal.pause()
    (Path(folder) / "left").write_text(str(left))
    if fails:
        raise Refused("no")
    return left


KEPT = [1]
HERE = "tests.train.supervise.test_ranks"


def test_a_refusal_of_a_fork_is_one_here(zygote: Zygote) -> None:
    with pytest.raises(Refused, match=r"^no$"):
        zygote.call(f"{HERE}:refuse")


def test_what_a_call_returns_comes_back_and_what_it_changes_does_not(zygote: Zygote) -> None:
    for _ in range(2):
        assert zygote.call(f"{HERE}:change") == ([1, 2], b"x" * 10**6)
    assert KEPT == [1]


def test_a_check_that_is_killed_is_refused_in_a_line(zygote: Zygote) -> None:
    with pytest.raises(Refused, match="died of SIGKILL"):
        zygote.call(f"{HERE}:die")


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_call_leaves_behind_keeps_nobody_waiting_and_is_ended(
    fails: bool, zygote: Zygote, tmp_path: Path
) -> None:
    if fails:
        with pytest.raises(Refused, match=r"^no$"):
            zygote.call(f"{HERE}:leave", str(tmp_path), True)
    else:
        assert zygote.call(f"{HERE}:leave", str(tmp_path), False) == int((tmp_path / "left").read_text())
    is_ended(int((tmp_path / "left").read_text()))


def is_ended(pid: int) -> None:
    """Wait until this process is dead: what is orphaned is reaped by another."""
    eventually("it is dead", lambda: not lives(pid), 20)


def wait(seconds: float, files: list[int]) -> None:
    time.sleep(seconds)


def test_signals_that_ask_ranks_to_stop_do_not_end_the_process_that_forks_them(zygote: Zygote) -> None:
    """Slurm sends them to all processes of a job."""
    waits = zygote.fork(f"{HERE}:wait", [600], files=[0, 1, 2])
    for number in (*POLITE, signal.SIGHUP):
        os.kill(psutil.Process(waits).ppid(), number)
    assert zygote.call(f"{HERE}:change")[0] == [1, 2] and lives(waits)
    zygote.signal(waits, signal.SIGKILL)
    while waits not in (ended := zygote.ended(60.0)):  # the check has ended, too
        assert ended
    assert ended[waits] == -signal.SIGKILL


def test_what_a_zygote_has_forked_dies_with_it_and_with_who_has_asked_for_it(zygote: Zygote, station: Station) -> None:
    files = [0, 1, 2]
    first = zygote.fork(f"{HERE}:wait", [600], files=files)
    os.kill(psutil.Process(first).ppid(), signal.SIGKILL)
    assert zygote.ended(60.0) == {first: -signal.SIGKILL} and zygote.is_lost
    other = forks.zygote(station.environment())
    second = other.fork(f"{HERE}:wait", [600], files=files)
    other.close()
    is_ended(second)


SERVERS = {
    "manager": "import multiprocessing\n    globals()['kept'] = multiprocessing.get_context('fork').Manager().dict()",
    "session": "if not os.fork():\n        os.setsid()\n        import time\n        time.sleep(1000)",
}


@pytest.mark.parametrize("server", SERVERS)
def test_a_task_with_a_server_of_its_own_is_launched_and_lets_go_of_its_run(server: str, station: Station) -> None:
    begins = f'    {SERVERS[server]}\n    if "RANK" not in'
    (station.folder / "serves.py").write_text(TASK.replace('    if "RANK" not in', begins))
    process = station.start("launch", "serves.py", "--name", "s", "--nproc", 2, "--steps", 2, *QUICK, "--follow")
    try:
        assert process.wait(90) == 0, process.stdout.read()
    finally:
        process.kill()
    assert station.wait_for_end("s")["state"] == states.FINISHED


def test_a_fork_that_the_machine_has_no_room_for_is_told_as_passing(
    station: Station, zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    station.runs.mkdir()
    run = folders.create(station.runs, "f", files={"config.toml": "cpu_threads = 1\n"}, record={"world_size": 2})
    lock = run.acquire()
    assert lock is not None
    forked: list[int] = []

    def fork(*_: object, **__: object) -> int:  # the second one fails
        if forked:
            raise BlockingIOError(11, os.strerror(11))
        forked.append(real(f"{HERE}:wait", [600], files=[0, 1, 2]))
        return forked[0]

    real = zygote.fork
    monkeypatch.setattr(zygote, "fork", fork)
    ranks = TaskRanks(run, read_spec(run), lock=lock, count=2, zygote=zygote)
    ranks.start(read_spec(run), run.begin_attempt(2, 0))
    eventually("all ranks have ended", ranks.wait)
    lock.release()
    assert causes.BUSY.matches(ranks.problem) and ranks.exits == {0: 1}
    is_ended(forked[0])
