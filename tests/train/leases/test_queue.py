"""Runs that wait: for cores, and for other runs; stopped, killed and suspended while they wait."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.train.conftest import Station
from tests.waiting import eventually
from train.leases import locks
from train.leases.locks import Holder
from train.run.states import rests_by_itself

SHORT = ["--steps", 3, "--cpu_threads", 1, "--log.tensorboard", "false"]
CORES = {"TRAIN_SLOTS": "2"}


def _hold_both_cores(station: Station, name: str) -> None:
    """Start a run of two ranks that does nothing until it is stopped."""
    station.more |= CORES
    (station.folder / "idle.py").write_text("import time\ntime.sleep(600)\n")
    station.ok("launch", "--script", "idle.py", "--name", name, "--nproc", 2)


def _waiter(station: Station, name: str) -> int:
    """The process that waits: the only one that holds the run's lock; 0: none."""
    found = (station.runs / name / "lock").stat().st_ino
    lines = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    return next((int(line[4]) for line in lines if line[5].endswith(f":{found}")), 0)


def test_runs_wait_their_turn_and_keep_their_place(station: Station) -> None:
    _hold_both_cores(station, "queue-long")
    told = station.ok("launch", "digits", "--name", "queue-now", *SHORT, "--follow").stderr
    assert "2 of the 2 cores here are held by" in told and "(queue-long, since" in told and "--queue" in told
    for name in ("queue-1", "queue-2"):
        station.ok("launch", "digits", "--name", name, *SHORT, "--queue")
    station.wait("queue-2", lambda record: record["reason"] == "waits for 1 core, place 2, after queue-1")
    assert station.record("queue-1")["state"] == "queued"
    listed = station.ok("queue").stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["1", "queue-1"], ["2", "queue-2"]]
    assert "queue-long" in station.ok("gpus").stdout
    refused = station("rm", "queue-1")
    assert refused.returncode == 2 and "queue-1 is queued; stop it first: train stop queue-1" in refused.stderr
    again = station("resume", "queue-1")
    assert again.returncode == 2 and "waits already; see: train queue" in again.stderr

    os.kill(_waiter(station, "queue-1"), signal.SIGKILL)  # the second is first now, and the first comes back before it
    station.wait("queue-2", lambda record: record["reason"].startswith("waits for 1 core, first in the queue: core 0"))
    assert station.run("queue-1").read_effective()["state"] == "interrupted"
    assert "killed while it waited" in station.ok("show", "queue-1").stdout
    station.ok("resume", "queue-1", "--queue")
    station.wait("queue-2", lambda record: record["reason"] == "waits for 1 core, place 2, after queue-1")

    stopped = station.ok("stop", "queue-2").stdout + station.ok("stop", "queue-2").stderr
    assert station.record("queue-2")["state"] == "stopped" and "while it waited" in stopped
    station.ok("stop", "queue-long")
    assert station.wait_for_end("queue-1")["state"] == "finished"
    station.ok("resume", "queue-2", "--follow")
    digests = {station.record(name)["weights_sha256"] for name in ("queue-now", "queue-1", "queue-2")}
    assert len(digests) == 1 and None not in digests


def test_a_run_waits_for_others_and_stops_with_them(station: Station) -> None:
    _hold_both_cores(station, "after-long")
    for wrong, said in (
        (["--after", "nobody"], "there is no run nobody"), (["--after", "after-1"], "cannot wait for itself"),
        (["--after", ","], "--after is empty"),
        (["--after", "after-long", "--no-lease"], "--no-lease waits for nothing"),
        (["--queue", "--nnodes", "2", "--node-rank", "0", "--rendezvous", "127.0.0.1:9"], "several machines"),
    ):  # fmt: skip
        refused = station("launch", "digits", "--name", "after-1", *SHORT, *wrong)
        assert refused.returncode == 2 and said in refused.stderr and refused.stderr.count("\n") == 1, refused.stderr
        assert not (station.runs / "after-1").exists()
    station.ok("launch", "digits", "--name", "after-1", *SHORT, "--after", "after-long")
    station.ok("launch", "digits", "--name", "after-2", *SHORT, "--after", "after-1,after-long")
    station.wait("after-2", lambda record: record["reason"] == "waits for after-1, after-long")
    words = [line.split() for line in station.ok("queue").stdout.splitlines()]
    assert [[line[0], line[1], *line[3:-1]] for line in words[1:]] == [
        ["-", "after-1", "after-long"], ["-", "after-2", "after-1,", "after-long"],
    ]  # fmt: skip
    listed = json.loads(station.ok("queue", "--json").stdout)
    assert [(one["run"], one["state"], one["place"], one["after"]) for one in listed][1:] == [
        ("after-2", "queued", None, ["after-1", "after-long"])
    ]
    os.kill(_waiter(station, "after-2"), signal.SIGKILL)
    station.ok("resume", "after-2", "--queue")
    station.wait("after-2", lambda record: record["reason"] == "waits for after-1, after-long")
    station.ok("stop", "after-long")
    first, second = station.wait_for_end("after-1"), station.wait_for_end("after-2")
    assert first["state"] == "stopped" and not rests_by_itself(first)
    assert first["reason"] == "stopped, because after-long was stopped, for which it waited"
    assert second["reason"].startswith("stopped, because after-") and second["state"] == "stopped"
    refused = station("launch", "digits", "--name", "after-3", *SHORT, "--after", "after-1")
    assert refused.returncode == 2 and "after-1 was stopped; continue it first: train resume after-1" in refused.stderr
    refused = station("resume", "after-2", "--queue")
    assert refused.returncode == 2 and "was stopped; continue it first: train resume after-" in refused.stderr
    station.ok("resume", "after-1", "--follow")
    station.ok("launch", "digits", "--name", "after-3", *SHORT, "--after", "after-1", "--follow")
    assert station.record("after-3")["state"] == "finished"


def test_a_keeper_that_stops_everything_brings_queued_runs_back(station: Station) -> None:
    _hold_both_cores(station, "kept-long")
    station.ok("launch", "digits", "--name", "kept-queued", *SHORT, "--queue")
    keeper = station.start("keeper")
    assert "keeping the runs in" in keeper.stdout.readline()
    keeper.terminate()
    keeper.communicate(timeout=station.patience)
    assert station.record("kept-queued")["state"] == "stopped" and rests_by_itself(station.record("kept-queued"))
    station.ok("resume", "kept-long")
    keeper = station.start("keeper")
    station.wait("kept-queued", lambda record: record["state"] == "queued")
    os.kill(killed := _waiter(station, "kept-queued"), signal.SIGKILL)
    eventually("it is back", lambda: _waiter(station, "kept-queued") not in (0, killed))
    station.wait("kept-queued", lambda record: record["state"] == "queued")
    station.ok("stop", "kept-long")
    assert station.wait_for_end("kept-queued")["state"] == "finished"
    keeper.terminate()
    keeper.communicate(timeout=station.patience)


SLOW = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
def model(config): return nn.Linear(4, 1)
def datasets(config): return TensorDataset(torch.randn(400, 4, generator=torch.Generator().manual_seed(1))), None
def loss(model, batch):
    time.sleep(float(os.environ["PAUSE"]))
    return model(batch[0]).square().mean()
"""


def test_a_run_that_gives_way_comes_back_and_ends_with_the_same_bits(station: Station) -> None:
    station.more |= {"TRAIN_SLOTS": "1", "TRAIN_GIVES_WAY_EVERY": "1", "PAUSE": "0.02"}
    (station.folder / "bare.py").write_text("print(1)\n")
    (station.folder / "slow.py").write_text(SLOW)
    for arguments, said in (
        (["--script", "bare.py", "--gives-way", "all"], "opens no session"),
        (["digits", "--gives-way", "never"], "must be mine"),
        (["digits", "--gives-way", "all", "--no-lease"], "--no-lease"),
    ):  # fmt: skip
        refused = station("launch", *arguments, "--name", "way")
        assert refused.returncode == 2 and said in refused.stderr and not (station.runs / "way").exists()
    same = ["--steps", 1000, "--batch_size", 8, *SHORT[2:]]
    station.ok("launch", "slow.py", "--name", "way", *same, "--gives-way", "mine")
    station.wait_for_step("way", 5)
    for name in ("way-1", "way-2"):
        pushed = len(station.record("way")["attempts"])
        station.ok("launch", "digits", "--name", name, *SHORT, "--queue", "--follow")
        waited = station.record("way")
        assert waited["attempts"][pushed - 1]["reason"].endswith(f"(gave way to {name})"), waited
        station.wait("way", lambda record, by=pushed: len(record["attempts"]) > by)  # type: ignore[misc]
    assert station.wait_for_end("way")["state"] == "finished"
    record = station.record("way")
    assert record["gave_way"]["times"] == 2 and record["gave_way"]["seconds"] > 0
    assert "gave way     2 times" in station.ok("show", "way").stdout
    station.ok("launch", "slow.py", "--name", "way-calm", *same, "--follow", env={"PAUSE": "0"})
    assert record["weights_sha256"] == station.record("way-calm")["weights_sha256"]


@pytest.mark.turns
def test_a_run_that_has_just_given_way_rests_and_an_older_one_steps_in(station: Station) -> None:
    station.more |= {"TRAIN_SLOTS": "2", "PAUSE": "0.02"}
    (station.folder / "slow.py").write_text(SLOW)
    for name, every in (("rest-old", "1"), ("rest-young", "600")):
        env = {"TRAIN_GIVES_WAY_EVERY": every}
        station.ok("launch", "slow.py", "--name", name, "--steps", 100_000, *SHORT[2:], "--gives-way", "mine", env=env)
    seen, is_over = set[str](), threading.Event()

    def look() -> None:
        while not is_over.is_set():
            seen.update(station.run(name).read_effective()["state"] for name in ("rest-old", "rest-young"))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    for name, gives in (("rest-1", "rest-young"), ("rest-2", "rest-old")):
        station.ok("launch", "digits", "--name", name, *SHORT, "--queue", "--follow")
        assert station.record(gives)["gave_way"]["times"] == 1
        station.wait(gives, lambda record: record["state"] == "running")
    is_over.set()
    watcher.join()
    assert "queued" in seen and seen <= {"created", "queued", "running"}  # at no moment stopped or interrupted
    assert station.record("rest-young")["gave_way"]["times"] == 1


def test_a_keeper_without_a_folder_for_leases_resumes_all_the_same(station: Station) -> None:
    station.ok("launch", "digits", "--name", "no-folder", "--epochs", 3, "--checkpoint.every_steps", 1, *SHORT[2:])
    station.wait_for_step("no-folder", 2)
    os.kill(station.record("no-folder")["pids"]["agent"], signal.SIGKILL)
    station.wait("no-folder", lambda record: record["state"] == "interrupted")
    (station.folder / "file").write_text("")
    station.more["TRAIN_LEASES"] = str(station.folder / "file" / "leases")
    said = station.ok("keeper", "--once").stderr
    assert "no-folder: resumed" in said and "no GPU or core can be reserved" in said, said
    assert station.wait_for_end("no-folder")["state"] == "finished"


def test_what_anybody_can_write_into_the_shared_folder_stops_nobody(station: Station) -> None:
    """Garbage, a huge note, a FIFO and a link, under the names of cores and tickets, some of them locked."""
    station.more |= CORES
    station.leases.mkdir(mode=0o1777)
    os.mkfifo(station.leases / "core-0")
    names = [f"ticket-core-0-{number:020d}-0-{number:08d}" for number in range(4)]
    os.mkfifo(station.leases / names[0])
    (station.leases / names[1]).symlink_to(station.folder / "elsewhere")
    held = []
    for name, content in ((names[2], b"{" * 100_000), (names[3], b"\xff\x00[1]" * 1_000_000)):
        held.append(locks.hold(station.leases / name, Holder()))
        (station.leases / name).write_bytes(content)
    told = station.ok("launch", "digits", "--name", "hostile", *SHORT, "--follow").stderr
    assert station.record("hostile")["state"] == "finished" and "Traceback" not in told
    station.ok("launch", "digits", "--name", "hostile-2", *SHORT, "--queue")
    assert station.ok("queue").stdout.count("somebody") == 2 and "core" in station.ok("gpus").stdout.lower()
    for fd in held:
        assert fd is not None
        os.close(fd)
    assert station.wait_for_end("hostile-2")["state"] == "finished"
    assert not (station.folder / "elsewhere").exists()
