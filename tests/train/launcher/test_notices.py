"""A person is told of a run's end: once, by whatever is still alive, and the address stays a secret."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.train.conftest import Station
from tests.train.hooks import Hook, hook
from tests.waiting import eventually
from train.launcher import notices
from train.run import durable

SECRET = "c0ffee-c0ffee"
QUICK = ("--cpu_threads", 1, "--log.tensorboard", "false", "--task.width", 8, "--batch_size", 60)


@pytest.fixture
def server() -> Iterator[Hook]:
    with hook() as made:
        yield made


def by(server: Hook) -> dict[str, str]:
    return {"TRAIN_NOTIFY": f"{server.url}/{SECRET}"}


def is_sending(station: Station, name: str) -> bool:
    return durable.is_locked(station.runs / name / ".notice.lock")


def wait_for_sender(station: Station, name: str) -> None:
    """Wait until the process that tells of the end has come and gone."""
    path = station.runs / name / ".notice.lock"
    eventually("the sender's end", lambda: path.exists() and not is_sending(station, name))


def check_hidden(folder: Path) -> None:
    for path in folder.rglob("*"):
        assert not path.is_file() or path.name == ".notify" or SECRET not in path.read_text(errors="replace"), path


def test_a_finished_run_is_told_of_once_with_its_result(station: Station, server: Hook) -> None:
    done = station.ok("launch", "digits", "--name", "vit", "--epochs", 2, "--follow", *QUICK, env=by(server))
    eventually("the notice", lambda: station.record("vit").get("noticed"))
    [text] = server.texts
    assert (
        text.startswith("vit finished after ")
        and f"accuracy {station.record('vit')['metrics']['accuracy']:.4f}" in text
    )
    record = station.record("vit")
    assert (record["notify"], record["noticed"]) == (server.place, f"finished {record['ended']}")
    assert f"  notices      to {server.place}\n" in station.ok("show", "vit").stdout
    assert "secrets" not in done.stderr  # a run can do without it
    check_hidden(station.runs)

    station.ok("keeper", "--once", env=by(server))
    assert len(server.received) == 1
    station.run("vit").update(noticed="")
    server.code = 404
    notices.deliver(station.run("vit"), again=(0.05, 0.05))  # without an address
    assert "TRAIN_NOTIFY is not set where the run ended" in station.ok("show", "vit").stdout
    assert "sending" not in station.ok("keeper", "--once").stderr and not station.record("vit")["noticed"]
    os.environ.update(by(server))
    notices.deliver(station.run("vit"), again=(0.05, 0.05))
    assert len(server.received) == 4
    assert f"): {server.place} answered 404" in " ".join(station.ok("show", "vit").stdout.split())
    station.ok("keeper", "--once", env=by(server))
    assert len(server.received) == 4 and station.record("vit")["noticed"] == f"finished {record['ended']}"
    assert station("rm", "vit").returncode == 0


def test_a_run_that_failed_is_told_of_and_one_that_its_user_stops_is_not(station: Station, server: Hook) -> None:
    nan = ("--optim.lr", "1e30", "--on_nan", "stop", *QUICK)
    station("launch", "digits", "--name", "nan", "--follow", *nan, env=by(server))
    eventually("the notice", lambda: server.received)
    assert server.texts[0].startswith("nan failed: the loss is nan at step ")
    assert server.texts[0].endswith("; look: train logs nan")
    station.ok("launch", "digits", "--name", "rests", "--epochs", 1000, *QUICK, env=by(server))
    station.wait_for_step("rests", 1)
    station.ok("stop", "rests")
    wait_for_sender(station, "rests")
    assert len(server.received) == 1 and "noticed" not in station.record("rests")


def test_without_a_keeper_a_run_that_a_signal_stops_is_told_of(station: Station, server: Hook) -> None:
    other = station.start("keeper", "--runs", station.folder / "elsewhere")  # keeps none of these
    assert "keeping the runs in" in other.stdout.readline()
    station.ok("launch", "digits", "--name", "a", "--epochs", 1000, *QUICK, env=by(server))
    station.wait_for_step("a", 1)
    os.kill(station.record("a")["pids"]["agent"], signal.SIGTERM)
    eventually("the notice", lambda: server.received)
    [text] = server.texts
    assert text.startswith("a was stopped after step ")
    assert text.endswith(" (SIGTERM), and is not started again; go on: train resume a")
    other.terminate()
    other.communicate(timeout=station.patience)


def test_the_command_of_a_run_is_for_its_owner_alone_and_stays_with_forks_and_resumes(station: Station) -> None:
    command = f"cat >>told  # {SECRET}"
    told = station.folder / "told"

    def lines(count: int) -> list[str]:
        eventually(f"line {count}", lambda: told.exists() and len(told.read_text().splitlines()) == count)
        return told.read_text().splitlines()

    station.ok("launch", "digits", "--name", "a", "--epochs", 1, "--notify", command, "--follow", *QUICK)
    assert lines(1)[0].startswith("a finished after ")
    path = station.runs / "a" / ".notify"
    assert path.read_text() == command and stat.S_IMODE(path.stat().st_mode) == 0o600
    shown = station.ok("show", "a").stdout
    assert " --notify … " in " ".join(shown.split()) and "  notices      to a command\n" in shown
    assert SECRET not in shown + station.ok("show", "a", "--json").stdout
    check_hidden(station.runs)
    station.ok("archive", "a", "--to", station.folder / "a.tar")
    with tarfile.open(station.folder / "a.tar") as tar:
        assert not [name for name in tar.getnames() if "/.not" in name]

    station.ok("resume", "a", "--epochs", 2, "--follow")
    assert lines(2)[1].startswith("a finished after ")
    station.ok("fork", "a", "--name", "b", "--epochs", 3, "--follow")
    assert lines(3)[2].startswith("b finished after ")
    station.ok("resume", "b", "--epochs", 4, "--notify", "", "--follow")
    assert station.record("b")["notify"] is None and not (station.runs / "b" / ".notify").read_text()
    assert len(told.read_text().splitlines()) == 3


def test_the_keeper_tells_of_a_run_that_it_leaves_alone_and_not_of_one_that_it_resumes(
    station: Station, server: Hook
) -> None:
    (station.folder / "sleeps.py").write_text("import time; time.sleep(1000)")
    station.ok("launch", "--script", "sleeps.py", "--name", "gone", env=by(server))
    again = ("--notify", f"cat >>{shlex.quote(str(station.folder / 'told'))}")
    station.ok("launch", "digits", "--name", "back", "--epochs", 5, "--checkpoint.every_steps", 1, *again, *QUICK)
    station.wait_for_step("back", 3)
    for name in ("gone", "back"):
        station.wait(name, lambda record: bool(record["pids"].get("ranks")), "ranks")
        os.kill(station.record(name)["pids"]["agent"], signal.SIGKILL)
        station.wait(name, lambda record: record["state"] == "interrupted", "its death")
    assert not server.received
    said = station.ok("keeper", "--once", env=by(server)).stderr
    assert "gone: sending the notice of its end" in said and "back: resumed" in said
    eventually("the notice", lambda: server.received)
    assert server.texts[0].startswith("gone was interrupted: its processes died, and is not started again")
    station.wait_for_end("back")
    eventually("its notice", lambda: station.record("back").get("noticed"))
    [line] = (station.folder / "told").read_text().splitlines()
    assert line.startswith("back finished after ")


def test_the_keeper_sends_what_a_killed_sender_has_not_sent_but_not_for_a_copy(station: Station) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    env = {"TRAIN_NOTIFY": f"http://127.0.0.1:{port}/{SECRET}"}
    station.ok("launch", "digits", "--name", "a", "--epochs", 1, "--follow", *QUICK, env=env)
    eventually("the sender", lambda: is_sending(station, "a"))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "train.launcher.notices" in words and str(station.runs / "a") in words:
                assert SECRET not in " ".join(words)
                process.kill()
    eventually("its death", lambda: not is_sending(station, "a"))
    assert "noticed" not in station.record("a")
    (station.runs / "a" / ".notify").write_text(f"touch {station.folder}/executed")  # by whoever can write there
    with hook(port) as server:
        station.ok("keeper", "--once", env=env)
        (station.runs / "a" / ".notify").unlink()
        station.ok("keeper", "--once", env=env)
        eventually("the notice", lambda: station.record("a").get("noticed"))
        station.ok("keeper", "--once", env=env)
        assert len(server.received) == 1 and not (station.folder / "executed").exists()


def test_a_run_that_another_run_launches_is_not_told_of(station: Station, server: Hook) -> None:
    env = {**by(server), "TRAIN_RUN_DIR": str(station.runs / "outer")}
    station.ok("launch", "digits", "--name", "inner", "--epochs", 1, "--follow", *QUICK, env=env)
    assert station.record("inner")["notify"] is None
    station.ok("fork", "inner", "--name", "mine", "--epochs", 2, "--follow", env=by(server))
    eventually("the notice of the fork", lambda: server.received)
    assert [text.split(" after ")[0] for text in server.texts] == ["mine finished"]


def test_a_foreground_run_is_told_of(station: Station, server: Hook) -> None:
    station.ok("run", "digits", "--name", "a", "--epochs", 1, *QUICK, env=by(server))
    eventually("the notice", lambda: server.received)
    assert server.texts[0].startswith("a finished after ")


def test_an_address_is_tried_at_once_and_a_wrong_one_is_refused(station: Station, server: Hook) -> None:
    def notify(*words: str, code: int, **env: str) -> str:
        done = station("notify", *words, env=env)
        assert done.returncode == code and (done.stdout + done.stderr).count("\n") == 1
        assert SECRET not in done.stdout + done.stderr
        return done.stdout or done.stderr

    assert "export TRAIN_NOTIFY=https://" in notify("--test", code=2)
    assert "not set" in notify(code=2, TRAIN_NOTIFY="")
    assert f"go to {server.place} (TRAIN_NOTIFY)" in notify(code=0, **by(server))
    assert notify("--test", code=0, **by(server)) == f"TRAIN_NOTIFY: {server.place} answered 200\n"
    server.code = 410
    assert "answered 410" in notify("--test", code=3, **by(server))
    assert "exit code 3" in notify("--test", code=3, TRAIN_NOTIFY=f"exit 3  # {SECRET}")
    for words, env in ((["--notify", f"ftp://{SECRET}"], {}), ([], {"TRAIN_NOTIFY": f"ftp://{SECRET}"})):
        done = station("launch", "digits", "--name", "never", *words, env=env)
        assert done.returncode == 2 and "URL of ftp" in done.stderr and SECRET not in done.stderr
    assert not station.runs.exists()
