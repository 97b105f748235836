"""Where a session runs: signs of life, lines, agreed stops, ends and exit codes, in a launched run and outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.train.conftest import PATIENCE
from train.run import states

if TYPE_CHECKING:
    from conftest import Station

# A loop whose state is a number. It ends in the ways that a user's script does.
LOOP = """
import os
import sys
import time

import torch
import torch.distributed as dist

from train.run.heartbeat import TRAINING
from train.run.outcome import Kind
from train.sessions.place import STOP, Place

place = Place.open(save_every=5)
steps, pause, way = int(sys.argv[1]), float(sys.argv[2]), "".join(sys.argv[3:4])
run, made = place.run, place.run.newest_checkpoint
if place.size > 1:
    dist.init_process_group("gloo")
place.began(made, int((run.checkpoint(made) / "bytes").read_text()) if made else 0)


def save():
    assert not place.sync()
    if place.is_first:
        run.checkpoint(made).mkdir(exist_ok=True)
        (run.checkpoint(made) / "bytes").write_text(str(place.metrics_size()))
    if place.size > 1:
        dist.barrier()
    place.saved(made)


def finish():
    save()
    place.end(Kind.FINISHED, step=made, epoch=1)


def before(number, frame):
    print("the script's own handler", flush=True)


place.at_exit(finish, lambda: made == steps)
try:
    while made < steps:
        time.sleep(pause)
        if place.size > 1:
            dist.all_reduce(torch.ones(1))
        made += 1
        if made == 7 and way == "raises":
            raise ValueError("no such luck")
        if made == 7 and way == "exits":
            sys.exit(5)
        if made == 7 and way == "breaks":
            break
        if made == 8 and way == "handles":
            import signal
            signal.signal(signal.SIGTERM, before)
            os.kill(os.getpid(), signal.SIGTERM)
        place.log({"step": made, "epoch": 1, "loss": 1 / made})
        place.beat(TRAINING, made)
        due = place.due(made)
        if due:
            save()
        if due == STOP:
            place.stop_here(step=made, epoch=1)
finally:
    print("left properly", flush=True)
print("after the loop", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def script(shared_station: Station) -> None:
    (shared_station.folder / "loop.py").write_text(LOOP)


def _python(station: Station, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "loop.py", *map(str, arguments)], cwd=station.folder, env=station.environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _name(errors: str) -> str:
    return errors.split("; see: train show ")[1].split()[0]


def _steps(station: Station, name: str) -> list[int]:
    return [json.loads(line)["step"] for line in (station.runs / name / "metrics.jsonl").read_text().splitlines()]


def _trains_again(record: dict[str, Any]) -> bool:
    return len(record["attempts"]) == 2 and bool(record["attempts"][1]["ready"])


def _end(station: Station, *arguments: object) -> tuple[int, str, str]:
    output, errors = (process := _python(station, *arguments)).communicate(timeout=PATIENCE)
    assert "left properly" in output
    return process.returncode, _name(errors), errors


def test_a_launched_session_is_killed_stopped_and_resumed_like_a_task(shared_station: Station) -> None:
    station, name = shared_station, "lent"
    station.ok("launch", "--script", "loop.py", "--name", name, "--nproc", 2, "--max-restarts", 3, "--", 150, "0.02")
    station.wait(name, lambda record: len(station.run(name).steps_saved()) > 1, "a checkpoint")
    os.kill(station.record(name)["pids"]["ranks"][1], signal.SIGKILL)
    station.wait(name, _trains_again, "its second attempt")
    stopped = station.ok("stop", name)
    record = station.record(name)
    assert f"continue with: train resume {name}" in stopped.stdout + stopped.stderr
    assert record["reason"] == f"stopped after step {record['step']} (train stop)", station.logs(name)
    assert record["session"] and station.run(name).newest_checkpoint == record["step"]
    station.ok("resume", name)
    record = station.wait_for_end(name)
    assert record["state"] == states.FINISHED, station.logs(name)
    assert [attempt["end"] for attempt in record["attempts"]] == ["died", "stopped", "finished"]
    assert record["attempts"][2]["from_step"] == record["attempts"][1]["to_step"]
    assert _steps(station, name) == [*range(1, 151)]
    shown = station.ok("show", name).stdout
    assert "attempt 1    steps 1-" in shown and "rank 1 died of SIGKILL" in shown


def test_a_session_under_plain_python_stops_whoever_else_handles_the_signal_and_is_resumed(
    shared_station: Station,
) -> None:
    station = shared_station
    output, errors = (process := _python(station, 30, 0, "handles")).communicate(timeout=PATIENCE)
    name, made = _name(errors), output.splitlines()
    assert process.returncode == 75 and made == ["the script's own handler", "left properly"], errors
    assert f"stopped after step 8; continue with: train resume {name}" in errors
    record = station.record(name)
    assert (record["state"], record["reason"]) == (states.STOPPED, "stopped after step 8 (SIGTERM)")
    assert record["session"] and not station.run(name).alive()
    shown = station.ok("show", name).stdout
    assert f"continue: train resume {name}" in shown and "attempt 1    steps 1-8, 1 rank, stopped" in shown
    station.run(name).update(script_arguments=["30", "0"])
    station.ok("resume", name)
    assert station.wait_for_end(name)["state"] == states.FINISHED, station.logs(name)
    assert _steps(station, name) == [*range(1, 31)]


@pytest.mark.minutes
def test_train_stop_reaches_a_session_under_plain_python(shared_station: Station) -> None:
    station = shared_station
    before = {path.name for path in station.runs.glob("loop-*")}
    process = _python(station, 10**6, "0.02")
    while not (new := [path for path in station.runs.glob("loop-*/checkpoints/*") if path.parts[-3] not in before]):
        assert process.poll() is None
        time.sleep(0.05)
    name = new[0].parts[-3]
    assert station.run(name).alive() and station("resume", name).returncode == 2
    stopped = station.ok("stop", name)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75 and "left properly" in output and "after the loop" not in output, errors
    assert f"(train stop); continue with: train resume {name}" in stopped.stdout + stopped.stderr


@pytest.mark.parametrize(
    ("way", "code", "state", "reason"),
    [
        ("raises", 3, states.FAILED, "ValueError: no such luck"),
        pytest.param("exits", 5, states.FAILED, "the script called sys.exit with code 5", marks=pytest.mark.minutes),
        ("breaks", 0, states.FINISHED, ""),
    ],
)
def test_the_ends_of_a_script_are_told_apart(
    shared_station: Station, way: str, code: int, state: str, reason: str
) -> None:
    ended, name, errors = _end(shared_station, 9, 0, way)
    record = shared_station.record(name)
    assert (ended, record["state"], record["reason"]) == (code, state, reason), errors
    assert len(record["attempts"]) == 1 and record["attempts"][0]["end"] == state
    assert ("Traceback" in errors) == (way == "raises")


def test_a_run_of_its_own_without_a_checkpoint_leaves_nothing(shared_station: Station) -> None:
    (shared_station.folder / "refused.py").write_text(
        "from train.sessions.place import Place\nPlace.open()\nPlace.open()\n"
    )
    done = subprocess.run(
        [sys.executable, "refused.py"], cwd=shared_station.folder, env=shared_station.environment(),
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[1:] == [
        "train: this process has a session already; open one session, in the first line of main()"
    ]
    assert not [*shared_station.runs.glob("refused-*")]


def test_a_process_that_opens_a_session_again_refuses_the_run(shared_station: Station) -> None:
    text = """
import multiprocessing

import train.sessions.place

train.sessions.place.Place.open(save_every=5)
process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
"""
    (shared_station.folder / "again.py").write_text(text)
    shared_station.ok("launch", "--script", "again.py", "--name", "opened-again", "--max-restarts", 2)
    record = shared_station.wait_for_end("opened-again")
    assert record["state"] == states.FAILED and len(record["attempts"]) == 1
    assert record["reason"].endswith("put what the script does below: if __name__ == '__main__':")
