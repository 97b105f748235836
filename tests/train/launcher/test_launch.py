"""A launched run lives in tmux and outlives what is done to it: real tmux, real signals, real kills."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.train.conftest import PATIENCE, lives
from tests.waiting import eventually
from train import doing
from train.launcher import tmux
from train.run import states

if TYPE_CHECKING:
    from conftest import Station

TASK = """
import os
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset


@dataclass
class Settings:
    pause: float = 0.02


def model(config):
    global pause
    pause = config.task.pause
    print("token", os.environ.get("SECRET_TOKEN"), "in", os.getcwd(), flush=True)
    return nn.Linear(4, 1)


def datasets(config):
    return TensorDataset(torch.linspace(0, 1, 256).reshape(64, 4)), None


def loss(model, batch):
    time.sleep(pause)
    return model(batch[0]).square().mean()
"""
QUICK = ["--log.every_steps", 1, "--log.tensorboard", "false", "--cpu_threads", 1]
LONG = [*QUICK, "--steps", 10**6]
SECRET = "s3cr3t-of-the-launching-shell"


@pytest.fixture(scope="module", autouse=True)
def task(shared_station: Station) -> None:
    (shared_station.folder / "slow.py").write_text(TASK)


def sessions(station: Station) -> list[str]:
    done = subprocess.run(
        tmux.tmux(station.runs, "list-sessions", "-F", "#{session_name}"), capture_output=True, text=True, check=False
    )
    return done.stdout.split()


def gone(pids: list[int]) -> bool:
    """Wait until none of these processes lives."""
    deadline = time.monotonic() + 60
    while any(map(lives, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def old_server(shared_station: Station) -> Iterator[None]:
    """A tmux server of this runs folder that is older than any run, with an environment of its own."""
    shared_station.runs.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "TMUX"} | {"SECRET_TOKEN": "that of the old server"}
    command = tmux.tmux(shared_station.runs, "new-session", "-d", "-s", "older", "sleep 1000")
    subprocess.run(command, env=environment, check=True)
    yield
    subprocess.run(tmux.tmux(shared_station.runs, "kill-server"), capture_output=True, check=False)


@pytest.fixture(scope="module")
def stopped(shared_station: Station, old_server: None) -> dict[str, Any]:
    """What was seen of a run that was launched, whose tmux server was killed, and that was stopped."""
    station, seen = shared_station, {}
    process = subprocess.Popen(
        [*station_command(), "launch", "slow.py", "--name", "s", "--nproc", "2", "--follow", *map(str, LONG)],
        cwd=station.folder, env=station.environment() | {"SECRET_TOKEN": SECRET}, text=True,  # starts cold
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    station.wait_for_step("s", 3)
    seen["sessions"] = sessions(station)
    seen["pids"] = station.record("s")["pids"]
    seen["arguments"] = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    seen["second launch"] = station("launch", "slow.py", "--name", "s")
    seen["resume of a running one"] = station("resume", "s")
    seen["rm of a running one"] = station("rm", "s")
    subprocess.run(tmux.tmux(station.runs, "kill-server"), check=True)
    seen["at the kill"] = station.record("s")["step"]
    station.wait_for_step("s", seen["at the kill"] + 20)
    seen["attach"] = station("attach", "s")
    seen["stop"] = station("stop", "s")
    seen["alive after stop"] = station.run("s").alive()
    seen["record"] = station.run("s").read_effective()
    seen["stop again"] = station("stop", "s")
    seen["out"], seen["err"] = process.communicate(timeout=120)
    seen["code"] = process.returncode
    return seen


def station_command() -> list[str]:
    import sys

    return [sys.executable, "-m", "train"]


def test_launch_prints_the_name_alone_on_stdout(stopped: dict[str, Any]) -> None:
    assert stopped["out"] == "s\n"


def test_the_run_lives_in_a_session_of_its_name(stopped: dict[str, Any]) -> None:
    assert stopped["sessions"] == ["older", "train-s"]
    assert stopped["record"]["tmux_session"] == "train-s"


def test_the_environment_of_the_launching_shell_reaches_every_rank_although_the_server_is_older(
    stopped: dict[str, Any], shared_station: Station
) -> None:
    for rank in (0, 1):
        text = shared_station.ok("logs", "s", "--rank", rank).stdout
        assert f"token {SECRET} in {shared_station.folder}\n" in text


@pytest.mark.never_forgiven
def test_no_secret_stands_in_the_arguments_of_a_process(stopped: dict[str, Any]) -> None:
    assert any("train-rank" in arguments for arguments in stopped["arguments"])
    assert not any(SECRET in arguments for arguments in stopped["arguments"])


@pytest.mark.never_forgiven
def test_a_name_in_use_is_refused_and_its_run_goes_on(stopped: dict[str, Any]) -> None:
    for what, words in (
        ("second launch", "exists"),
        ("resume of a running one", "is running"),
        ("rm of a running one", "train stop s"),
    ):
        done = stopped[what]
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr, done


def test_the_run_outlives_its_tmux_server(stopped: dict[str, Any]) -> None:
    assert stopped["record"]["step"] >= stopped["at the kill"] + 20
    assert len(stopped["record"]["attempts"]) == 1
    assert stopped["attach"].returncode == 2 and "train logs s" in stopped["attach"].stderr


@pytest.mark.never_forgiven
def test_stop_saves_and_returns_when_nothing_of_the_run_lives(stopped: dict[str, Any], shared_station: Station) -> None:
    assert stopped["stop"].returncode == 0 and "train resume s" in stopped["stop"].stderr
    assert not stopped["alive after stop"]
    record = stopped["record"]
    assert record["state"] == states.STOPPED and "train stop" in record["reason"]
    assert shared_station.run("s").steps_saved()[0] == record["step"]
    assert gone([stopped["pids"]["agent"], *stopped["pids"]["ranks"]])


def test_stopping_twice_is_no_error(stopped: dict[str, Any]) -> None:
    assert stopped["stop again"].returncode == 0 and "stopped" in stopped["stop again"].stderr


def test_follow_exits_75_when_the_run_is_stopped(stopped: dict[str, Any]) -> None:
    assert stopped["code"] == 75
    assert "train resume s" in stopped["err"].splitlines()[-1]


@pytest.mark.never_forgiven
def test_a_killed_agent_leaves_no_rank_and_a_killed_rank_is_started_again(shared_station: Station) -> None:
    station = shared_station
    every = ["--checkpoint.every_steps", 5, "--task.pause", 0.05]
    station.ok("launch", "slow.py", "--name", "k", "--nproc", 2, *LONG, *every)
    station.wait(
        "k",
        lambda record: record["step"] >= 8 and bool(record["pids"].get("ranks")) and station.run("k").steps_saved(),
        "step 8, its ranks and a checkpoint",
    )
    pids = station.record("k")["pids"]
    os.kill(pids["agent"], signal.SIGKILL)
    assert gone(pids["ranks"]), "orphans go on training"
    assert station.wait_for_end("k")["state"] == states.INTERRUPTED

    saved = station.run("k").steps_saved()[0]
    station.ok("resume", "k", "--steps", saved + 40)
    station.wait(
        "k",
        lambda record: record["step"] >= saved + 8 and len(record["pids"].get("ranks", [])) == 2,
        "its ranks and steps",
    )
    record = station.record("k")
    ranks = record["pids"]["ranks"]
    assert set(ranks).isdisjoint(pids["ranks"])
    os.kill(ranks[1], signal.SIGKILL)
    record = station.wait_for_end("k")
    assert record["state"] == states.FINISHED and record["step"] == saved + 40
    first, second, third = record["attempts"]
    assert [attempt["end"] for attempt in (first, second, third)] == ["died", "died", "finished"]
    assert "all its processes were killed" in first["reason"]
    assert "SIGKILL" in second["reason"]
    assert second["from_step"] == saved < third["from_step"]
    for number in (1, 2, 3):
        names = sorted(path.name for path in station.run("k").logs(number).glob("*.log"))
        assert names == ["rank0.log", "rank1.log"]
    assert [line["step"] for line in station.metrics("k")] == list(range(1, saved + 41))
    story = station.ok("show", "k").stdout
    assert "died: rank" in story and "steps redone" in story


def test_ctrl_s_in_the_terminal_of_a_run_stops_nobody(shared_station: Station) -> None:
    station, name = shared_station, "ctrl-s"
    station.ok("launch", "slow.py", "--name", name, *LONG, "--checkpoint.every_steps", 5)
    station.wait(name, lambda record: record["step"] >= 2 and bool(record["pids"].get("ranks")), "step 2 and its rank")
    keys = tmux.tmux(station.runs, "send-keys", "-t", f"=train-{name}:", "C-s")
    subprocess.run(keys, check=True)
    station.wait_for_step(name, station.record(name)["step"] + 40)  # some looks of the agent, each with its bar
    os.kill(station.record(name)["pids"]["ranks"][0], signal.SIGKILL)
    station.wait(
        name, lambda record: len(record["attempts"]) == 2 and record["pids"].get("ranks"), "its second attempt"
    )
    station.ok("stop", name, "--now")


def test_where_a_folder_takes_no_request_stop_says_how_else(shared_station: Station) -> None:
    station, name = shared_station, "no-request"
    station.ok("launch", "slow.py", "--name", name, *LONG)
    station.wait(name, lambda record: record["step"] >= 3 and bool(record["pids"].get("ranks")), "its ranks")
    (station.runs / name / "stop").mkdir()  # what no file can take the place of
    done, agent = station("stop", name), station.record(name)["pids"]["agent"]
    assert done.returncode == 2 and f"kill {agent}\n" in done.stderr and done.stderr.count("\n") == 1, done
    (station.runs / name / "stop").rmdir()
    station.ok("stop", name)
    record = station.run(name).read_effective()
    assert (record["state"], record["stopped_by"]) == (states.STOPPED, "user")
    assert station.run(name).steps_saved()[:1] == [record["step"]]


def test_stop_now_does_not_save(shared_station: Station) -> None:
    shared_station.ok("launch", "slow.py", "--name", "now", *LONG)
    shared_station.wait_for_step("now", 3)
    assert shared_station.ok("stop", "now", "--now").stdout == ""
    record = shared_station.wait_for_end("now")
    assert record["state"] == states.STOPPED and "--now" in record["reason"]
    assert shared_station.run("now").steps_saved() == []
    eventually("its terminal goes after it", lambda: "train-now" not in sessions(shared_station))


def test_without_restarts_a_death_before_any_checkpoint_fails_the_run(shared_station: Station) -> None:
    process = shared_station.start("launch", "slow.py", "--name", "m", "--max-restarts", 0, "--follow", *LONG)
    shared_station.wait(
        "m", lambda record: record["step"] >= 2 and bool(record["pids"].get("ranks")), "step 2 and its rank"
    )
    os.kill(shared_station.record("m")["pids"]["ranks"][0], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    record = shared_station.wait_for_end("m")
    assert process.returncode == 3 and "SIGKILL" in output.splitlines()[-1]
    assert record["state"] == states.FAILED and len(record["attempts"]) == 1


def test_an_error_of_the_task_is_not_tried_again_and_follow_exits_3_with_its_line(shared_station: Station) -> None:
    text = TASK.replace("    time.sleep(pause)\n", "    calls.append(1)\n    assert len(calls) < 4, 'enough'\n")
    (shared_station.folder / "breaks.py").write_text(text + "\n\ncalls = []\n")
    line = text.splitlines().index("    assert len(calls) < 4, 'enough'") + 1
    done = shared_station("launch", "breaks.py", "--name", "e", "--follow", *QUICK, "--steps", 9)
    assert done.returncode == 3 and done.stdout == "e\n"
    last = done.stderr.splitlines()[-1]
    assert f"line {line}: AssertionError: enough" in last
    record = shared_station.record("e")
    assert record["state"] == states.FAILED and record["reason"] in last and len(record["attempts"]) == 1
    assert "Traceback" in shared_station.ok("logs", "e").stdout


@pytest.mark.never_forgiven
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, "train stop"])
def test_an_ended_launch_leaves_nothing(station: Station, how: signal.Signals | str) -> None:
    endless = TASK + "\n\ndef lengths(config):\n    open('reached', 'w').close()\n    while True:\n        pass\n"
    (station.folder / "hangs.py").write_text(endless)
    station.more["TMPDIR"] = str(station.folder)
    process = station.start("launch", "hangs.py", "--name", "i.1")
    eventually("the launch has come that far", (station.folder / "reached").exists, 120)
    ours = [p.pid for p in psutil.process_iter() if p.pid != process.pid and _is_at(p.pid, station.folder)]
    assert len(ours) >= 2, "the agent, and the fork that checks"
    if how == "train stop":
        assert station.ok("ls").stdout.splitlines()[1].split()[:2] == ["i.1", "checking"]
        for command in (["rm", "i*"], ["resume", "i.1"], ["launch", "hangs.py", "--name", "i.1"]):
            done = station(*command)
            assert done.returncode == 2 and done.stderr.count("\n") == 1 and "train stop i.1" in done.stderr, done
        station.ok("stop", "i.1")
    else:
        process.send_signal(how)
    output, _ = process.communicate(timeout=PATIENCE)
    codes = {"train stop": 2, signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}
    assert process.returncode == codes[how] and "Traceback" not in output
    assert gone(ours)
    eventually("its session has ended", lambda: sessions(station) == [])
    assert not station.runs.exists() and not list(station.folder.glob("train-launch-*"))


def _is_at(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").resolve() == folder.resolve()
    except OSError:
        return False


def test_a_launch_that_waits_names_the_function_after_20_seconds_and_then_every_minute() -> None:
    lines: list[str] = []
    with doing.noted() as notes, doing.now("lengths()"):
        waiting = doing.Waiting("g", notes, lines.append)
        waiting.look()
        assert lines == []
        # as wide as a note, so that nothing of the note before stays behind it
        os.pwrite(notes, f"{time.monotonic() - 20.2} lengths()".ljust(os.fstat(notes).st_size).encode(), 0)
        waiting.look()
        waiting.look()
    assert lines == ["g: lengths() has run for 20 s; Ctrl-C ends the launch"]


@pytest.mark.never_forgiven
def test_of_two_launches_of_one_name_one_succeeds_and_its_run_is_whole(station: Station) -> None:
    (station.folder / "slow.py").write_text(TASK)
    arguments = ["launch", "slow.py", "--name", "two", *QUICK, "--steps", 5]
    both = [station.start(*arguments) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], outputs
    assert station.wait_for_end("two")["state"] == states.FINISHED


def test_a_session_starts_while_the_server_of_the_last_one_is_leaving(tmp_path: Path) -> None:
    """What `train resume` meets right after a stop: about one in six would be refused by tmux."""
    for number in range(60):
        assert tmux.new_session(tmp_path, f"s{number}", ["sh", "-c", f"echo {number} >> {tmp_path}/begun"]) == ""
    eventually("all have begun", lambda: len((tmp_path / "begun").read_text().split()) >= 60)
    assert sorted(map(int, (tmp_path / "begun").read_text().split())) == list(range(60))  # none twice


@pytest.mark.never_forgiven
def test_no_file_of_the_users_is_taken_for_a_module_of_this_package_or_of_pythons(station: Station) -> None:
    for module in ("train", "json", "profile", "select", "sympy"):  # of the terminal's process, of torch, and others
        (station.folder / f"{module}.py").write_text(f"open('executed-{module}', 'w').close()\n")
    (station.folder / "beside.py").write_text("HERE = 'beside'\n")
    (station.folder / "slow.py").write_text(f"from beside import HERE\n{TASK}")
    few = [*QUICK, "--steps", 3, "--task.pause", 0]
    command = [sys.executable, "-P", "-m", "train", "launch", "slow.py", "--name", "cold", *map(str, few)]
    subprocess.run(command, cwd=station.folder, env=station.environment(), check=True)
    assert station.wait_for_end("cold")["state"] == states.FINISHED
    station.ok("run", "slow.py", "--name", "spawned", "--spawn", 2, "--batch_size", 8, *few)
    assert not list(station.folder.glob("executed-*"))
    (station.folder / "train.py").write_text("import beside\nprint('mine', beside.HERE)\n")
    station.ok("launch", "--script", "train.py", "--name", "script")
    assert station.wait_for_end("script")["state"] == states.FINISHED
    assert "mine beside\n" in (station.run("script").logs(1) / "rank0.log").read_text()


@pytest.mark.never_forgiven
def test_a_resume_that_is_refused_has_changed_nothing(station: Station) -> None:
    (station.folder / "slow.py").write_text(TASK)
    station.ok("run", "slow.py", "--name", "task", *QUICK, "--steps", 3, "--task.pause", 0)
    (station.folder / "fails.py").write_text("raise SystemExit(1)\n")
    (station.folder / "other.py").write_text("print('other')\n")
    station.ok("launch", "--script", "fails.py", "--name", "script", "--max-restarts", 0)
    station.wait_for_end("script")
    changed = {"task": ["--steps", 9], "script": ["--script", "other.py"]}

    def files(name: str) -> dict[str, bytes]:
        folder = station.runs / name
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "lock"}

    before = {name: files(name) for name in changed}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nodes = ["--nnodes", "1:2", "--node-rank", 0, "--rendezvous", f"127.0.0.1:{taken.getsockname()[1]}"]
        done = station("resume", "task", *changed["task"], *nodes)
    assert done.returncode == 2 and "cannot listen there" in done.stderr
    assert files("task") == before["task"]
    for name, flags in changed.items():
        (station.runs / name / "environment.json").unlink()
        (station.runs / name / "environment.json").mkdir()  # what no file can take the place of
        done = station("resume", name, *flags)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done
        assert files(name).items() <= before[name].items() | {("script.until-attempt-1.py", b"raise SystemExit(1)\n")}


def test_a_resume_from_another_folder_imports_what_lies_where_the_run_was_launched(station: Station) -> None:
    (station.folder / "tasks").mkdir()
    (station.folder / "elsewhere").mkdir()
    for folder, word in ((station.folder, "first"), (station.folder / "elsewhere", "other")):
        (folder / "helper_of_run.py").write_text(f"WORD = {word!r}\n")
    (station.folder / "tasks" / "t.py").write_text(
        "import helper_of_run, sys, torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\n"
        "print('imports', helper_of_run.WORD, file=sys.stderr, flush=True)\n"
        "def model(config):\n    return nn.Linear(4, 1)\n"
        "def datasets(config):\n    return TensorDataset(torch.ones(64, 4)), None\n"
        "def loss(model, batch):\n    return model(batch[0]).square().mean()\n"
    )
    fields = ["--cpu_threads", "1", "--log.tensorboard", "false"]
    station.ok("launch", "tasks/t.py", "--name", "h", *fields, "--steps", 3, "--follow")
    environment = station.environment() | {"TRAIN_WARM": "off"}
    command = [*station_command(), "resume", "h", "--runs", str(station.runs), "--steps", "6", "--follow"]
    subprocess.run(command, cwd=station.folder / "elsewhere", env=environment, check=True, timeout=PATIENCE)
    logs = [(station.run("h").logs(attempt) / "rank0.log").read_text() for attempt in (1, 2)]
    assert all("imports first\n" in log for log in logs)


@pytest.mark.never_forgiven
def test_a_launch_leaves_no_environment_among_temporary_files(station: Station) -> None:
    (station.folder / "t").mkdir()
    extra = {"TMPDIR": str(station.folder / "t"), "TRAIN_WARM": "off", "SOME_TOKEN": "s3cr3t"}
    environment = station.environment() | extra
    command = [*station_command(), "launch", "digits", "--name", "k", "--steps", "1000000", "--runs", str(station.runs)]
    process = subprocess.Popen(command, cwd=station.folder, env=environment, stdout=subprocess.DEVNULL)
    eventually(
        "the run is there, or the launch over",
        lambda: station.run("k").folder.exists() or process.poll() is not None,
        every=0.005,
    )
    process.kill()
    process.wait()
    assert not list((station.folder / "t").rglob("request.json"))
    station.wait_for_step("k", 1)
    station.ok("stop", "k", "--now")
