"""The mirror of a run: what is copied, in which order, and what comes back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import psutil
import pytest

from tests.waiting import eventually
from train.checkpoint.manifest import manifest_text, sha256_of, verify
from train.errors import Refused
from train.mirror import remote, state
from train.mirror.copying import Copier, Lost
from train.mirror.fetching import fetch
from train.run import folders
from train.run.record import FORMAT
from train.run.run_folder import Run

pytestmark = pytest.mark.never_forgiven


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    yield str(tmp_path / "away" / "one") if request.param == "file" else "memory://away/one"
    fsspec.filesystem("memory").store.clear()


def _run(runs: Path, name: str = "one", steps: range = range(1, 3)) -> Run:
    run = folders.create(runs, name, files={"config.toml": "seed = 0\n", "metrics.jsonl": ""}, record={})
    for step in steps:
        _save(run, step)
    return run


def _save(run: Run, step: int) -> None:
    folder = run.checkpoints / f".partial-{step}"
    folder.mkdir()
    for shard in ("a.distcp", ".metadata"):
        (folder / shard).write_bytes(os.urandom(5 << 20 if shard[0] == "a" else 99))
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in folder.iterdir()}
    (folder / "manifest.json").write_text(manifest_text({"format": FORMAT, "step": step, "files": files}))
    folder.rename(run.checkpoint(step))


def test_a_run_comes_back_byte_by_byte(url, tmp_path):
    run = _run(tmp_path / "runs")
    Copier(run, url).copy()
    found, left_out, _ = fetch(url, tmp_path / "elsewhere", None)
    assert found.steps_saved() == [2, 1] and left_out == []
    for step in (1, 2):
        assert verify(found.checkpoint(step)) == verify(run.checkpoint(step))
    assert found.read()["station_digest"] is None
    with pytest.raises(Refused, match="exists"):
        fetch(url, tmp_path / "elsewhere", "one")


KEEPS_UP = """
import sys
from pathlib import Path
import fsspec
from fsspec.implementations.local import LocalFileSystem
from train.mirror import process
from train.run.run_folder import Run


class Client(LocalFileSystem):
    protocol = "lossy"
    calls, made = 0, []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made.append(self)
        self.is_lost = False

    def open(self, path, mode="rb", **kwargs):
        Client.calls += 1
        self.is_lost |= Client.calls == 5  # one connection breaks, once; a client with a lost one stays so
        if self.is_lost:
            raise ConnectionResetError(104, "Connection lost")
        return super().open(path, mode, **kwargs)


fsspec.register_implementation("lossy", Client)
process.keep_up(Run(Path(sys.argv[1])))
print(len(Client.made), Client.calls)
"""


def test_a_mirror_comes_back_after_a_lost_connection(tmp_path):
    run, away = _run(tmp_path / "runs"), tmp_path / "away"
    (run.folder / "config.toml").write_text(f"[checkpoint]\nmirror = 'lossy://{away}'\n")
    run.update(state="finished")
    done = subprocess.run(
        [sys.executable, "-c", KEEPS_UP, str(run.folder)], capture_output=True, text=True, timeout=120, check=True
    )
    clients, calls = map(int, done.stdout.split())
    assert clients == 2 and calls > 10, done.stderr
    assert state.read(run).error == "" and state.read(run).is_complete
    assert fetch(str(away), tmp_path / "elsewhere", None)[0].steps_saved() == [2, 1]


def test_old_checkpoints_go_after_new_ones_have_come(url, tmp_path):
    run = _run(tmp_path / "runs")
    copier = Copier(run, url)
    copier.copy()
    shutil.rmtree(run.checkpoint(1))
    _save(run, 3)
    copier.copy()
    assert {name.split("/")[1] for name in copier.remote.names() if name.startswith("checkpoints/")} == {
        "step-00000002", "step-00000003"
    }  # fmt: skip


def test_a_kill_at_any_moment_leaves_a_mirror_that_can_be_fetched(tmp_path):
    runs, url = tmp_path / "runs", str(tmp_path / "away")
    run = _run(runs, steps=range(1, 2))
    Copier(run, url).copy()
    _save(run, 2)
    killed = 0
    for count in range(1, 40):
        pid = os.fork()
        if not pid:
            left = count

            def beat():
                nonlocal left
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)

            Copier(run, url, beat).copy()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            break
        killed += 1
        found, _, _ = fetch(url, tmp_path / f"fetched{count}", None)
        assert 1 in found.steps_saved()
        for path in (tmp_path / "away" / "checkpoints").glob("*/manifest.json"):
            verify(path.parent)
    assert killed > 3 and code == 0
    found, left_out, _ = fetch(url, tmp_path / "last", None)
    assert found.steps_saved() == [2, 1] and left_out == []


def test_what_is_not_whole_is_left_out_and_named(tmp_path):
    run, url = _run(tmp_path / "runs", steps=range(1, 4)), str(tmp_path / "away")
    Copier(run, url).copy()
    with (tmp_path / "away/checkpoints/step-00000002/a.distcp").open("r+b") as file:
        file.write(b"xx")
    (tmp_path / "away/checkpoints/step-00000003/a.distcp").unlink()
    found, left_out, _ = fetch(url, tmp_path / "elsewhere", "two")
    assert found.steps_saved() == [1]
    assert [line for line in left_out if "step 2 is left out: a.distcp was changed" in line], left_out
    assert [line for line in left_out if "step 3 is left out: a.distcp is missing" in line], left_out


@pytest.mark.parametrize("kind", ["file", "folder", "run.json", "pipe"])
def test_a_fetch_follows_no_link_of_another_user(tmp_path, kind):
    """Root types it, and the mirror is a folder in which another user can write."""
    run, url, secret = _run(tmp_path / "runs"), str(tmp_path / "away"), tmp_path / "secret"
    Copier(run, url).copy()
    secret.mkdir()
    (secret / "key").write_text("secret")
    place = tmp_path / "away" / {"file": "logs/key", "folder": "media", "run.json": "run.json", "pipe": "pipe"}[kind]
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(secret if kind == "folder" else secret / "key")
    with pytest.raises(Refused, match=f"{place} is a link or no plain file"):
        fetch(url, tmp_path / "elsewhere", None)
    assert not [*tmp_path.glob("elsewhere/*")]


def test_a_mirror_never_goes_back(tmp_path):
    run, url = _run(tmp_path / "runs"), str(tmp_path / "away")
    Copier(run, url).copy()
    shutil.rmtree(run.checkpoint(2))
    with pytest.raises(Refused, match="the mirror has step 2"):
        Copier(run, url).copy()
    assert fetch(url, tmp_path / "elsewhere", None)[0].steps_saved() == [2, 1]


def test_a_damaged_checkpoint_is_not_copied_and_named(tmp_path):
    run, url = _run(tmp_path / "runs"), str(tmp_path / "away")
    (run.checkpoint(2) / "a.distcp").write_bytes(b"x" * (5 << 20))
    with pytest.raises(Refused, match="step 2 is damaged on this disk"):
        Copier(run, url).copy()
    assert fetch(url, tmp_path / "elsewhere", None)[0].steps_saved() == [1]


def test_only_one_run_and_one_folder_write_to_a_mirror(tmp_path):
    run, url = _run(tmp_path / "runs"), str(tmp_path / "away")
    Copier(run, url).copy()
    other = _run(tmp_path / "runs", "other")
    with pytest.raises(Refused, match="the mirror of another run"):
        Copier(other, url)
    with pytest.raises(Refused, match="the mirror of another run"):
        remote.check(url, "")
    found, _, _ = fetch(url, tmp_path / "elsewhere", None)
    copier = Copier(found, url)  # its user has resumed it
    _save(found, 3)
    copier.copy()
    with pytest.raises(Lost, match="taken the mirror over"):
        Copier(run, url)
    copied = tmp_path / "runs" / "copied"
    shutil.copytree(found.folder, copied)
    Copier(Run(copied), url).copy()
    with pytest.raises(Lost):
        copier.copy()
    run.folder.rename(tmp_path / "runs" / "renamed")
    renamed = Run(tmp_path / "runs" / "renamed")
    assert state.read(renamed).inode == renamed.folder.stat().st_ino


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(Refused, match="holds other files"):
        remote.check(str(tmp_path), "")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://key:secret@bucket/x", "holds a password"),
        ("s3://bucket/x?token=1", "holds a password or a query"),
        ("simplecache::s3://bucket/x", "chains"),
        ("backup/x", "absolute path"),
        ("foo://bucket/x", "no protocol foo://"),
        ("gs://bucket/x", "pip install gcsfs"),
        ("runs/x", "absolute path"),
    ],
)
def test_a_wrong_url_is_refused_in_one_line(station, url, words):
    done = station.here("launch", "digits", "--name", "demo1", "--steps", "2", "--checkpoint.mirror", url)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert "secret" not in done.stderr
    assert not (station.runs / "demo1").exists()


def _mirror_processes(station) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "train.mirror.process" in line and str(station.runs) in line[-1]:
            found.append(process)
    return found


def _killed_fetched_resumed(station, url: str) -> None:
    fields = ["--steps", 60, "--checkpoint.every_steps", 10]
    station.ok("launch", "digits", "--name", "calm", *fields, "--follow")
    station.ok(
        "launch", "digits", "--name", "demo1", *fields, "--checkpoint.mirror", url, env={"TRAIN_FAULT": "step@0:35"}
    )
    first = eventually("a mirror process", lambda: _mirror_processes(station))[0]
    eventually("a low priority", lambda: first.nice() == 19)
    first.kill()
    eventually("another mirror process", lambda: [one for one in _mirror_processes(station) if one.pid != first.pid])
    station.wait_for_end("demo1")
    eventually("the end of the copying", lambda: not _mirror_processes(station))
    assert "complete, step 60" in station.ok("show", "demo1").stdout
    # as if it had been killed at step 30
    found, left_out, _ = fetch(url, station.folder / "elsewhere", None)
    assert left_out == []
    assert found.newest_checkpoint == 60
    shutil.rmtree(station.runs / "demo1")
    for step in (60, 50):
        shutil.rmtree(found.checkpoint(step), ignore_errors=True)
    record = json.loads((found.folder / "run.json").read_text())
    (found.folder / "run.json").write_text(json.dumps(record | {"state": "running", "weights_sha256": None}))
    assert found.state() == "copy"
    station.ok("resume", "demo1", "--checkpoint.mirror", "", "--follow", "--runs", station.folder / "elsewhere")
    assert found.read()["weights_sha256"] == station.record("calm")["weights_sha256"]


@pytest.mark.minutes
def test_a_killed_run_continues_elsewhere_with_the_same_bits(station, tmp_path):
    _killed_fetched_resumed(station, str(tmp_path / "away"))


@pytest.mark.minutes
def test_a_killed_run_continues_from_a_real_s3_server(station, monkeypatch):
    ThreadedMotoServer = pytest.importorskip("moto.server").ThreadedMotoServer  # the image has no S3 server

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
        for name, value in keys.items():
            monkeypatch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        _killed_fetched_resumed(station, "s3://bucket/demo1")
        kept = (station.folder / "elsewhere" / "demo1" / "environment.json").read_text()
        assert "AWS_ENDPOINT_URL" in kept and "AWS_SECRET" not in json.loads(kept)["values"]
    finally:
        server.stop()


@pytest.mark.minutes
def test_a_broken_mirror_never_stops_a_run_and_is_shown(station, tmp_path):
    away = tmp_path / "away"
    station.ok(
        "launch", "digits", "--name", "demo1", "--epochs", 1000, "--checkpoint.every_steps", 20,
        "--checkpoint.mirror", away / "demo1",
    )  # fmt: skip
    shutil.rmtree(away, ignore_errors=True)
    away.touch()
    eventually("an error is shown", lambda: "fails (first" in station.ok("show", "demo1").stdout)
    step = station.run("demo1").newest_checkpoint
    eventually("training goes on", lambda: station.run("demo1").newest_checkpoint > step)
    station.ok("stop", "demo1")
    away.unlink()
    assert "complete" in station.ok("mirror", "demo1").stderr
    assert "stays" in station.ok("rm", "demo1").stderr
