"""`train exporter`: whatever lies in the folder of runs, Prometheus gets a page that it can read."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from monitored import DEPLOY, Exporter

from tests.cuda.cards import Cards, uuid
from tests.cuda.standin import environment
from tests.ports import free_port
from tests.waiting import eventually
from train.gpus import Card, sees_host_ids
from train.monitor import top
from train.monitor.prometheus import FIGURES, Collector
from train.monitor.status import RunStatus
from train.run import folders, heartbeat, ownership, run_folder
from train.run.record import FORMAT
from train.run.run_folder import Run

if TYPE_CHECKING:
    from conftest import Station

pytestmark = pytest.mark.turns

RECORD = {
    "format": FORMAT, "state": "finished", "stopped_by": None,
    "attempts": [{"number": 1, "started": "2026-01-01T00:00:00+00:00", "end": "finished", "world_size": 1,
                  "from_step": 0, "to_step": 5}],
    "step": 5, "epoch": 1, "world_size": 1, "total_steps": 5, "loss": 0.5, "ended": "2026-01-01T00:10:00+00:00",
    "started": "2026-01-01T00:00:00+00:00", "task": "digits", "device": "cpu",
}  # fmt: skip


def put(runs: Path, name: str | bytes, **changed: Any) -> Path:
    """A run folder as a run leaves it, without the run."""
    folder = Path(os.fsdecode(os.path.join(os.fsencode(runs), os.fsencode(name))))  # noqa: PTH118
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "run.json").write_text(json.dumps(RECORD | changed))
    return folder


def at_work(runs: Path, name: str, pid: int, ranks: list[int], **changed: Any) -> Path:
    """A run that trains, but for the lock, which the test is to hold."""
    attempts = [RECORD["attempts"][0] | {"end": None}]  # type: ignore[index]
    record = {"state": "running", "attempts": attempts, "ended": None, "host": socket.gethostname()}
    folder = put(runs, name, **record | changed)
    logs = folder / "logs" / "attempt-1"
    logs.mkdir(parents=True)
    for rank in ranks:
        (logs / f"rank{rank}.beat").write_bytes(struct.pack("<qqqq", pid, heartbeat.TRAINING, 5, 9))
    return folder


def test_it_tells_of_a_real_run_what_its_files_say(finished: Station, exporters: Callable[..., Exporter]) -> None:
    exporter = exporters(finished.runs, "--recent", "1000")
    found = exporter.metrics()
    record, lines = finished.record("done"), finished.metrics("done")
    of = lambda name: next(value for key, value in found[name].items() if ("run", "done") in key)  # noqa: E731
    assert of("train_run_step") == record["step"] == lines[-2]["step"]
    assert of("train_run_target_steps") == record["total_steps"]
    assert of("train_run_loss") == pytest.approx(record["loss"])
    assert of("train_run_attempts_total") == 1 and of("train_run_deaths_total") == 0
    assert of("train_run_checkpoint_step") == record["step"]
    assert exporter.of("train_run_state", run="done", state="finished") == 1
    assert exporter.of("train_run_state", run="done", state="running") == 0
    assert found["train_runs_disk_size_bytes"][()] > found["train_runs_disk_free_bytes"][()] > 0
    assert "torch" not in Path(f"/proc/{exporter.process.pid}/maps").read_text()
    assert set(found) <= set(FIGURES) | {name for name in found if name.startswith("process_")}


def test_the_keepers_sign_of_life_is_there_while_it_lives(
    station: Station, exporters: Callable[..., Exporter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it has died or is stopped, with the time of the last one; not once it has ended as asked to."""
    monkeypatch.setenv("TRAIN_STATE", str(tmp_path))
    monkeypatch.setenv("TRAIN_WARM", "off")
    exporter = exporters(station.runs)
    keeper = station.start("keeper")
    seen = lambda: exporter.of("train_keeper_last_seen_timestamp_seconds")  # noqa: E731
    try:
        eventually("it is seen", seen)
        first = seen()
        eventually("it is seen again", lambda: seen() > first)
        assert abs(time.time() - seen()) < 10
        keeper.terminate()
        assert keeper.wait(60) == 0
    finally:
        keeper.kill()
    assert seen() is None


@pytest.mark.minutes
def test_ranks_tell_what_they_do(station: Station, exporters: Callable[..., Exporter]) -> None:
    exporter = exporters(station.runs)  # before there is a folder
    assert exporter.of("train_runs", state="running") == 0
    run = station.start(
        "run", "digits", "--name", "two", "--spawn", 2, "--epochs", 100000, "--log.every_steps", 1, "--cpu_threads", 1
    )
    try:
        station.wait_for_step("two", 3)
        step = eventually("rank 1 is seen", lambda: exporter.of("train_rank_step", run="two", rank="1"))
        eventually("it goes on", lambda: (exporter.of("train_rank_step", run="two", rank="1") or 0) > step)
        for rank in ("0", "1"):
            memory = exporter.of("train_rank_resident_memory_bytes", run="two", rank=rank)
            assert memory is not None and memory > 50 << 20
        assert exporter.of("train_run_ranks", run="two") == 2
        assert 0 <= exporter.of("train_run_data_wait_ratio", run="two") <= 1  # type: ignore[operator]
        assert exporter.of("train_run_samples_per_second", run="two") > 0  # type: ignore[operator]
        moved = exporter.of("train_run_last_progress_timestamp_seconds", run="two")
        assert moved is not None and abs(time.time() - moved) < 60
    finally:
        run.terminate()  # politely: its ranks are to end with it
        run.wait()


def damage(runs: Path) -> None:
    """Every kind of damage, and of malice, that a folder can hold."""
    put(runs, "empty").joinpath("run.json").write_text("")
    put(runs, "binary").joinpath("run.json").write_bytes(os.urandom(5000))
    put(runs, "half").joinpath("run.json").write_text(json.dumps(RECORD)[:40])
    with (put(runs, "huge") / "run.json").open("r+b") as file:
        file.truncate(1 << 40)
    for name, file in (("pipe", "run.json"), ("pipe-lock", "lock"), ("pipe-lines", "metrics.jsonl")):
        folder = put(runs, name, state="running")
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)
    for name, target in (("zero", "/dev/zero"), ("loop", "run.json")):
        folder = put(runs, f"link-{name}")
        (folder / "run.json").unlink()
        (folder / "run.json").symlink_to(target)
    (runs / "link-here").symlink_to(runs)
    (runs / "a-file").write_text("no folder")
    put(runs, "folder").joinpath("run.json").unlink()
    (runs / "folder" / "run.json").mkdir()
    put(runs, "types", state=5, attempts="x", step="y", epoch=[], world_size={})
    put(runs, "numbers", step=10**400, loss=1e400, epoch=-1, world_size=10**18, total_steps=0.5, state="failed")
    put(runs, "task", task='t"\n\\\ud800x' * 100, device=["cuda"])
    lines = put(runs, "lines", state="running")
    lines.joinpath("metrics.jsonl").write_bytes(b"\xff\xfe\n{}\n[]\n" + b'{"step_time": 0, "data_wait": "x"}\n')
    beats = put(runs, "beats", state="running", world_size=10**9)
    (beats / "logs" / "attempt-1").mkdir(parents=True)
    for number in (*range(2000), 999999):
        (beats / "logs" / "attempt-1" / f"rank{number}.beat").write_bytes(os.urandom(32))
    put(runs, 'name"\n\\ {x}')
    put(runs, b"bytes-\xff\xfe")


def test_no_damage_is_a_word_to_the_scraper(
    tmp_path: Path, exporters: Callable[..., Exporter], tools: Path, station: Station
) -> None:
    runs = tmp_path / "broken"
    damage(runs)
    exporter = exporters(runs)
    page = exporter.page()
    found = exporter.metrics()
    assert found["train_exporter_problems_total"][()] == 0, exporter.log.read_text()
    assert found["train_runs_damaged"][()] >= 8
    assert exporter.of("train_run_step", run='name"\n\\ {x}') == 5
    assert exporter.of("train_run_step", run="bytes-\\udcff\\udcfe") == 5
    assert len(page.splitlines()) < 5000
    assert "Traceback" not in exporter.log.read_text() + page
    # promtool also says what in the names is against the conventions
    done = subprocess.run(
        [tools / "promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr
    done = station("top", "--once", "--runs", runs)  # who shares the gathering bears it too
    assert done.returncode == 0, done.stderr


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed=st.dictionaries(st.sampled_from([*RECORD, "script", "host", "pids"]), JSON, max_size=5), line=JSON)
def test_no_record_makes_it_fail(tmp_path: Path, changed: dict[str, Any], line: Any) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    folder = tmp_path / "runs" / "any"
    if not folder.exists():
        put(tmp_path / "runs", "any")
    (folder / "run.json").write_text(json.dumps(RECORD | changed))
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    registry = CollectorRegistry()
    registry.register(Collector(tmp_path / "runs", 5))
    assert "train_exporter_problems_total 0.0" in generate_latest(registry).decode()


def test_the_number_of_series_is_bounded(tmp_path: Path, exporters: Callable[..., Exporter]) -> None:
    runs = tmp_path / "many"
    for number in range(300):
        put(runs, f"run-{number:03}", ended=f"2026-01-01T{number // 60:02}:{number % 60:02}:00+00:00")
    exporter = exporters(runs, "--recent", "5")
    found = exporter.metrics()
    names = {dict(key)["run"] for key in found["train_run_step"]}
    assert names == {f"run-{number:03}" for number in range(295, 300)}  # those that ended last
    assert exporter.of("train_runs", state="finished") == 300
    assert found["train_runs_left_out"][()] == 295
    folders.delete_locked(run_folder.Run(runs / "run-299"))
    assert exporter.of("train_run_step", run="run-299") is None  # removed: gone at once
    assert exporter.of("train_run_step", run="run-294") == 5


@pytest.mark.minutes
def test_a_driver_that_never_answers_holds_nothing_up(
    tmp_path: Path, exporters: Callable[..., Exporter], gpus: Cards
) -> None:
    exporter = exporters(tmp_path / "none", env=environment(gpus))
    assert exporter.of("train_gpu_up", gpu="0") == 1
    assert exporter.of("train_gpu_info", gpu="0", uuid=uuid(0), name='Stand-in "A"') == 1
    assert exporter.of("train_gpu_utilization_ratio", gpu="1") == pytest.approx(0.51)
    assert exporter.of("train_gpu_throttled", gpu="0", reason="power_cap") == 1
    gpus.hangs.touch()
    assert exporter.of("train_gpu_up", gpu="0") == 0
    assert exporter.of("train_runs", state="running") == 0


def test_a_gpu_that_is_cut_into_parts_is_up(tmp_path: Path, exporters: Callable[..., Exporter], gpus: Cards) -> None:
    gpus.write(0, answers=2)
    gpus.write(1, answers=0)
    exporter = exporters(tmp_path / "none", env=environment(gpus))
    assert exporter.of("train_gpu_up", gpu="0") == 1
    assert exporter.of("train_gpu_memory_used_bytes", gpu="0") is None
    assert exporter.of("train_gpu_up", gpu="1") != 1


def test_the_cards_are_known_without_torch(gpus: Cards) -> None:
    code = "from train.gpus import cards; print(*((card, card.number) for card in cards()), sep='\\n')"
    whole = os.environ | environment(gpus)
    for lost in (None, 0):  # a GPU that fell off the bus hides none of those after it
        if lost is not None:
            gpus.write(lost, answers=0)
        done = subprocess.run([sys.executable, "-c", code], env=whole, capture_output=True, text=True, check=False)
        found = done.stdout.splitlines()
        assert found[-1] == repr((Card('Stand-in "A"', (9, 0), uuid(1)), 1)), done.stderr
        assert len(found) == (2 if lost is None else 1)


@pytest.mark.parametrize(
    "arguments",
    [["--port", "65536"], ["--address", "192.0.2.1"], ["--address", "no such host"], ["--recent", "100000"]],
    ids=" ".join,
)  # fmt: skip
def test_a_wrong_request_is_refused_in_a_line(arguments: list[str], station: Station) -> None:
    done = station("exporter", *arguments)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert not station.runs.exists()


def test_a_port_that_is_taken_is_named(station: Station) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        done = station("exporter", "--port", port)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and f"--port {port}: Address already in use" in done.stderr


def test_every_figure_is_in_the_documentation() -> None:
    text = (DEPLOY / "README.md").read_text()
    missing = [name for name in FIGURES if f"`{name}`" not in text]
    assert not missing


def test_a_run_that_was_killed_is_told_of_however_long_ago_it_was_started(
    tmp_path: Path, exporters: Callable[..., Exporter]
) -> None:
    for number in range(5):
        put(tmp_path, f"ended-{number}", started="2026-01-02T00:00:00+00:00", ended="2026-01-02T01:00:00+00:00")
    killed = Run(put(tmp_path, "killed", state="running", started="2026-01-01T00:00:00+00:00", ended=None))
    killed.update(**ownership.sign(killed.folder, killed.read()))
    shutil.copytree(killed.folder, tmp_path / "copied")
    exporter = exporters(tmp_path, "--recent", "3")
    assert exporter.of("train_run_state", run="killed", state="interrupted") == 1
    assert exporter.of("train_run_state", run="copied", state="copy") == 1


def test_a_run_that_failed_is_told_of_behind_whatever_has_finished_since(
    tmp_path: Path, exporters: Callable[..., Exporter]
) -> None:
    ago = lambda **time: (datetime.datetime.now(datetime.UTC) - datetime.timedelta(**time)).isoformat()  # noqa: E731
    put(tmp_path, "failed", state="failed", ended=ago(hours=2))
    put(tmp_path, "long-ago", state="failed", ended=ago(days=2))
    for number in range(25):
        put(tmp_path, f"finished-{number:02}", ended=ago(minutes=60 - number))
    exporter = exporters(tmp_path, "--recent", "20")
    assert exporter.of("train_run_state", run="failed", state="failed") == 1
    assert exporter.of("train_run_state", run="long-ago", state="failed") is None
    names = {dict(key)["run"] for key in exporter.metrics()["train_run_step"]}
    assert names == {"failed", *(f"finished-{number:02}" for number in range(5, 25))}


@pytest.mark.parametrize(
    ("changed", "is_told"),
    [
        ({"state": "queued", "end": None}, False),  # Slurm has put it back: its attempt had no time to end itself
        ({"state": "running", "end": None}, True),
    ],
)
def test_a_run_that_only_waits_is_not_one_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], is_told: bool
) -> None:
    attempt = RECORD["attempts"][0] | {"end": changed["end"]}  # type: ignore[index]
    record = RECORD | {"name": "waits", "state": changed["state"], "attempts": [attempt], "ended": None}
    at_work(tmp_path, "waits", 1, [0])
    collector = Collector(tmp_path, 5)
    one = RunStatus(Run(tmp_path / "waits"), record)  # type: ignore[arg-type]
    monkeypatch.setattr(collector._runs, "look", lambda names=None: [one])
    told = {family.name for family in collector.collect() if any(family.samples)}
    of_an_attempt = {"train_run_last_progress_timestamp_seconds", "train_run_phase", "train_rank_step"}
    assert told & of_an_attempt == (of_an_attempt if is_told else set())
    page = top.Page(tmp_path)
    monkeypatch.setattr(page._looked, "look", lambda names=None: [one])
    assert any("training" in row.text for row in page.rows(120, 100)) == is_told


@pytest.mark.skipif(not sees_host_ids(), reason="process ids here are not the host's")
def test_a_rank_that_computes_on_two_gpus_has_the_memory_of_both(
    tmp_path: Path, exporters: Callable[..., Exporter], gpus: Cards
) -> None:
    own = os.getpid()
    gpus.write(0, pid=own, bytes=2 << 30)
    gpus.write(1, pid=own, bytes=3 << 30)
    folder = at_work(tmp_path / "runs", "one", own, [0])
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        exporter = exporters(tmp_path / "runs", env=environment(gpus))
        assert exporter.of("train_rank_gpu_memory_bytes", run="one", rank="0") == 5 << 30


def test_of_a_script_its_name_is_told_and_not_where_it_lies(tmp_path: Path, exporters: Callable[..., Exporter]) -> None:
    put(tmp_path, "one", task=None, script="/home/ann/secret-project/train.py")
    (labels,) = exporters(tmp_path).metrics()["train_run_info"]
    assert dict(labels)["task"] == "train.py"
