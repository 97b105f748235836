"""What befalls programs of users' own: their exceptions, edits, hangs, stops, lack of memory. Real faults."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.train.conftest import PATIENCE, Station
from tests.train.tiers import later
from train.run import states

pytestmark = pytest.mark.turns

QUICK = ["--max-restarts", 2]


def write(station: Station, text: str, name: str = "script.py") -> Path:
    path = station.folder / name
    head = "import os, sys, time\nrank, attempt = int(os.environ['RANK']), int(os.environ['TRAIN_ATTEMPT'])\n"
    path.write_text(head + textwrap.dedent(text))
    return path


def run(station: Station, text: str, *options: object, arguments: tuple[object, ...] = ()) -> dict[str, object]:
    """Launch a script as run `a` and wait for its end. Its record."""
    write(station, text)
    station.ok("launch", "--script", "script.py", "--name", "a", *options, "--", *arguments)
    return station.wait_for_end("a")


def wait_for_words(station: Station, attempt: int, words: str) -> None:
    log = station.run("a").logs(attempt) / "rank0.log"
    station.wait("a", lambda _: log.exists() and words in log.read_text(), f"{words} of attempt {attempt}")


def ends(record: dict[str, object]) -> list[str]:
    return [attempt["end"] for attempt in record["attempts"]]  # type: ignore[attr-defined]


def test_the_rank_with_an_error_is_named_and_gets_the_time_to_print_it(station: Station) -> None:
    text = """
dead = os.environ["TRAIN_RUN_DIR"] + "/dead"
if rank == 1:
    try:
        raise ValueError("label 17")
    finally:
        open(dead, "w").close()
        time.sleep(2.5)
while not os.path.exists(dead):
    time.sleep(0.02)
raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242")
"""
    record = run(station, text, "--nproc", 2)
    assert record["reason"] == "rank 1: ValueError: label 17; see: train logs a --rank 1"


def test_a_script_is_not_started_again_unless_its_user_says_so(station: Station) -> None:
    record = run(station, "print('to work')\nif rank == 1: raise ValueError('bad shape')\ntime.sleep(60)", "--nproc", 2)
    assert record["state"] == states.FAILED and ends(record) == ["died"]
    assert record["reason"] == "rank 1 exited with code 1: ValueError: bad shape; see: train logs a --rank 1"
    assert "| ValueError: bad shape" in station.ok("show", "a").stdout
    record = run_again(station, "os.kill(os.getpid(), 9)", "b")
    assert (record["state"], record["reason"], ends(record)) == (states.FAILED, "rank 0 died of SIGKILL", ["died"])


@pytest.mark.parametrize("fault", ["os.kill(os.getpid(), 9)", "sys.exit(7)"], ids=["killed", "a code"])
def test_a_script_is_started_again_as_often_as_its_user_says(station: Station, fault: str) -> None:
    record = run(station, f"if attempt < 3:\n    {fault}\nprint('fine')", *QUICK)
    assert record["state"] == states.FINISHED and ends(record) == ["died", "died", "finished"]
    record = run_again(station, fault, "b", "--max-restarts", 1)
    assert record["state"] == states.FAILED and ends(record) == ["died", "died"]


def test_a_script_that_refuses_its_arguments_is_never_started_again(station: Station) -> None:
    record = run(station, "import argparse; argparse.ArgumentParser().parse_args()", *QUICK, arguments=("--no",))
    assert record["state"] == states.FAILED and ends(record) == ["died"]
    why = "script.py: error: unrecognized arguments: --no"
    assert record["reason"] == f"rank 0 exited with code 2, so it is not restarted: {why}; see: train logs a --rank 0"


def kill_all(station: Station, name: str) -> None:
    station.wait(name, lambda record: (record.get("pids") or {}).get("ranks"), "the process ids")
    pids = station.record(name)["pids"]
    for pid in (pids["agent"], *pids["ranks"]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    station.wait(name, lambda _: not station.run(name).alive(), "its death")


def test_the_keeper_starts_a_script_again_only_if_its_user_says_so(station: Station) -> None:
    write(station, "print('up', flush=True)\nif attempt == 1: time.sleep(1000)")
    station.ok("launch", "--script", "script.py", "--name", "a")
    station.ok("launch", "--script", "script.py", "--name", "b", "--max-restarts", 1)
    for name in ("a", "b"):
        kill_all(station, name)
    said = station.ok("keeper", "--once").stderr
    assert "a: left alone, because it is a script whose restart begins at step 0" in said
    assert station.wait_for_end("b")["state"] == states.FINISHED
    assert (station.run("a").state(), len(station.record("a")["attempts"])) == (states.INTERRUPTED, 1)


@pytest.mark.minutes
def test_deaths_are_counted_anew_after_an_attempt_that_ran_well(station: Station) -> None:
    text = "time.sleep(3 if attempt in (2, 4) else 0)\nif attempt < 6: os.kill(os.getpid(), 9)"
    record = run(station, text, "--max-restarts", 2, "--watch.healthy_minutes", "0.04")
    assert record["state"] == states.FINISHED and len(ends(record)) == 6
    record = run_again(station, "if attempt < 9: os.kill(os.getpid(), 9)", "b", "--max-restarts", 2)
    assert record["state"] == states.FAILED and len(ends(record)) == 3
    assert "died 3 times before it had run 10 minutes" in str(record["reason"])


def run_again(station: Station, text: str, name: str, *options: object) -> dict[str, object]:
    write(station, text)
    station.ok("launch", "--script", "script.py", "--name", name, *options)
    return station.wait_for_end(name)


@pytest.mark.minutes
def test_a_script_that_neither_speaks_nor_computes_is_a_hang(station: Station) -> None:
    text = """
    import subprocess
    if attempt == 1 and rank == 1:
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    if attempt == 1:
        for second in range(4):  # as long as one rank computes or speaks, all is well
            end = time.time() + 1
            while time.time() < end: pass
        for second in range(4):
            print(second); time.sleep(1)
        time.sleep(1000)
    """
    record = run(station, text, "--nproc", 2, "--watch.hang_minutes", "0.05", *QUICK)
    assert record["state"] == states.FINISHED and ends(record) == ["died", "finished"]
    assert "no output and no use of the CPU" in record["attempts"][0]["reason"]  # type: ignore[index]
    logs = station.run("a").logs(1)
    assert (logs / "rank0.log").read_text() == "0\n1\n2\n3\n"
    assert "script.py" in (logs / "rank1.stack.txt").read_text()


def test_stop_and_show_say_what_a_stop_does_to_a_script(station: Station) -> None:
    write(station, "print('up', flush=True)\ntime.sleep(1000)")
    station.ok("launch", "--script", "script.py", "--name", "dies")
    station.wait("dies", lambda _: "up" in station.logs("dies"), "its start")
    said = station.ok("stop", "dies").stderr
    assert "waiting for dies to stop; to end it at once: train stop dies --now" in said
    assert (
        "died of SIGTERM" in said
        and "unless the script loads its own checkpoint" in said
        and "continue with" not in said
    )
    assert "died of SIGTERM" in station.ok("show", "dies").stdout
    write(
        station, "import signal\nsignal.signal(15, lambda *_: sys.exit(0))\nprint('up', flush=True)\ntime.sleep(1000)"
    )
    done = station.ok("launch", "--script", "script.py", "--name", "saves")
    station.wait("saves", lambda _: "up" in station.logs("saves"), "its start")
    said = station.ok("stop", "saves").stderr
    assert "ended by itself on SIGTERM, with code 0" in said
    assert done.returncode == 0 and station.record("saves")["state"] == states.STOPPED


HELPERS = """
import subprocess
kinds = {"session": dict(start_new_session=True), "group": dict(process_group=0), "twice": dict(start_new_session=True)}
for kind, how in kinds.items():  # "twice": its own parent ends at once
    code = "import os, sys, time; sys.argv[1] == 'twice' and os.fork() and os._exit(0); time.sleep(1000)"
    subprocess.Popen([sys.executable, "-c", code, kind, "helper-of", sys.argv[1]], **how)
subprocess.run(["tmux", "-L", sys.argv[2], "new-session", "-d", "sleep 1000"], check=True)
print("up", flush=True)
time.sleep(1000)
"""


def test_whatever_a_script_has_started_ends_with_it_except_a_tmux_server(station: Station) -> None:
    def helpers(name: str) -> list[int]:
        lines = {one.pid: one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])}
        return [pid for pid, line in lines.items() if line[-2:] == ["helper-of", name]]

    write(station, HELPERS)
    servers = [f"helper-{os.getpid()}-{name}" for name in "ab"]
    for name, server in zip("ab", servers, strict=True):
        station.ok("launch", "--script", "script.py", "--name", name, "--", name, server)
    for name in "ab":
        station.wait(name, lambda _, name=name: "up" in station.logs(name), "its start")  # type: ignore[misc]
        station.wait(name, lambda _, name=name: len(helpers(name)) == 3, "its helpers")  # type: ignore[misc]
    os.kill(station.record("b")["pids"]["agent"], signal.SIGKILL)
    station.ok("stop", "a", "--now")
    assert not helpers("a")
    deadline = time.monotonic() + PATIENCE
    while helpers("b") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not helpers("b") and station.run("b").state() == states.INTERRUPTED
    for server in servers:  # it may hold the runs that a script has launched
        subprocess.run(["tmux", "-L", server, "kill-server"], check=True)


def test_the_process_that_sends_curves_may_end_later(station: Station) -> None:
    text = """
import subprocess, sys
command = [sys.executable, "-c", "import time; time.sleep(600)", "train.trainer.loggers.wandb"]
print("started", subprocess.Popen(command, start_new_session=True).pid)
"""
    run(station, text)
    feed = psutil.Process(int(station.logs("a").split("started ")[1].split()[0]))
    assert feed.is_running() and feed.status() != psutil.STATUS_ZOMBIE
    feed.kill()


def test_a_script_that_ends_before_its_processes_is_told_so(station: Station) -> None:
    text = """
import subprocess
for is_daemon in (False, True):
    print("started", subprocess.Popen(["sleep", "600"], start_new_session=is_daemon).pid)
"""
    record = run(station, text)
    pids = re.findall(r"started (\d+)", station.logs("a"))
    assert record["state"] == states.FINISHED and len(pids) == 2
    assert record["reason"] == f"left processes behind ({', '.join(sorted(pids, key=int))}); they were ended"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "finished: left processes behind" in station.ok("show", "a").stdout


@pytest.mark.never_forgiven
def test_nothing_is_invented_about_the_steps_of_a_script(station: Station) -> None:
    record = run(station, "if attempt == 1: os.kill(os.getpid(), 9)", *QUICK)
    shown = station.ok("show", "a").stdout
    assert (
        "steps redone -\n" in shown and "time lost    -\n" in shown and "0.0 s" not in shown and "steps 0" not in shown
    )
    assert station.ok("ls").stdout.splitlines()[1].split()[2:4] == ["-", "1"]
    attempt = record["attempts"][0]  # type: ignore[index]
    assert attempt["from_step"] is None and attempt["to_step"] is None


def test_logs_show_bars_folded_and_say_which_attempt_is_shown(station: Station) -> None:
    text = """
    for percent in range(100): print(f"\\r{percent} %", end="", flush=True)
    print(f" of attempt {attempt}", flush=True)
    if attempt == 1: os.kill(os.getpid(), 9)
    """
    run(station, text, *QUICK)
    last = station.ok("logs", "a")
    assert last.stdout == "99 % of attempt 2\n"
    assert "attempt 2 of 2" in last.stderr and "--attempt all" in last.stderr
    every = station.ok("logs", "a", "--attempt", "all")
    assert every.stdout == "99 % of attempt 1\n99 % of attempt 2\n"
    assert station.ok("logs", "a", "--attempt", "1").stdout == "99 % of attempt 1\n"
    assert station.record("a")["attempts"][0]["last_lines"] == ["99 % of attempt 1"]
    assert station.ok("logs", "a", "--attempt", "all", "--follow").stdout == every.stdout
    assert station("logs", "a", "--attempt", "some").returncode == 2


def test_an_edited_script_runs_as_it_is_now_and_that_is_said(station: Station) -> None:
    text = "import beside\nprint({}, beside.word, sys.argv[1:], flush=True)\ntime.sleep(1000 if attempt < 3 else 0)"
    path, beside = write(station, text.format(1)), station.folder / "beside.py"
    beside.write_text("word = 'old'")
    station.ok("launch", "--script", "script.py", "--name", "a", *QUICK, "--", "x")
    wait_for_words(station, 1, "1 old ['x']")
    write(station, text.format(2))
    station.wait("a", lambda record: (record.get("pids") or {}).get("ranks"), "the rank's process id")
    os.kill(station.record("a")["pids"]["ranks"][0], signal.SIGKILL)
    wait_for_words(station, 2, "2 old ['x']")
    station.ok("stop", "a", "--now")
    beside.write_text("word = 'new'")
    said = station.ok("resume", "a").stderr
    assert f"{path}, {beside} changed since a was launched; the new version runs" in said
    assert station.wait_for_end("a")["state"] == states.FINISHED
    assert "2 new ['x']" in station.ok("logs", "a").stdout


def test_a_script_that_is_gone_is_refused(station: Station) -> None:
    path = write(station, "print('up', flush=True)\ntime.sleep(1000)")
    station.ok("launch", "--script", "script.py", "--name", "a")
    wait_for_words(station, 1, "up")
    station.ok("stop", "a", "--now")
    path.unlink()
    done = station("resume", "a")
    assert (done.returncode, done.stderr) == (2, f"train: a runs {path}: there is no such file; put it back\n")
    assert station.record("a")["state"] == states.STOPPED


@pytest.mark.never_forgiven
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch", "--script", "script.py", "--optim.lr", "1"], "--optim.lr is for tasks"),
        (["launch", "--script", "script.py", "--watch.hang_minutes", "soon"], "--watch.hang_minutes soon"),
        (["launch", "--script", "script.py", "--watch.healthy_minutes", "0"], "--watch.healthy_minutes 0"),
        (["launch", "--script", "nowhere.py"], "there is no file"),
        (["launch", "--script", "script.py", "--module", "json.tool"], "give one of: a TASK, or --script FILE"),
        (["launch", "--script", "script.py", "--on-restart", "--from 'a b"], "a quote is not closed"),
        (["launch", "--script", "script.py", "--on-restart", "--from {newest:{run}/a b}"], "with a closing brace"),
        (["launch", "--script", "script.py", "--", "--from", "{newest:a}"], "only --on-restart takes {newest:GLOB}"),
        (["launch", "digits", "--on-restart", "--x"], "--on-restart is for scripts"),
        (["launch", "--module", "no_such.module"], "there is no module no_such here"),
        (["launch", "--module", "json.nothing"], "there is no module json.nothing here"),
        (["launch", "--module", "json"], "a package without __main__.py"),
        (["launch", "--module", "a/b.py"], "there is no module a/b here"),
    ],
)
def test_wrong_requests_get_one_line(station: Station, arguments: list[str], words: str) -> None:
    write(station, "")
    done = station(*arguments)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert not list(station.runs.glob("*"))


HOG = """
import os, sys
data = []
while True:
    data.append(bytearray(os.urandom(1 << 20)) * 8)
"""
TASK = """
import os, torch
from torch.utils.data import TensorDataset
def model(config): return torch.nn.Linear(4, 1)
def datasets(config): return TensorDataset(torch.zeros(64, 4)), None
def loss(model, batch):
    held = []
    while {when}:
        held.append(torch.ones(1 << 21))
    return model(batch[0]).square().mean()
"""
MEGABYTES = 1200


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group (version 2) with a limit of memory, for real: needs root."""
    folder = Path(f"/sys/fs/cgroup/train-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    limit = folder / "memory.max"
    if not limit.exists():
        folder.rmdir()
        pytest.skip("no control groups of version 2 that limit memory")
    limit.write_text(str(MEGABYTES << 20))
    yield folder
    deadline = time.monotonic() + PATIENCE
    while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)
    folder.rmdir()


def within(folder: Path, station: Station, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `train ARGUMENTS` in a control group; the tmux server that it starts lives there too."""
    return subprocess.run(
        [sys.executable, "-m", "train", *map(str, arguments)], cwd=station.folder, env=station.environment(), text=True,
        stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False,
        preexec_fn=lambda: (folder / "cgroup.procs").write_text(str(os.getpid())) and None,
    )  # fmt: skip


@pytest.mark.parametrize("what", ["script", *later("task", "task's loader")])
def test_out_of_memory_is_called_so_with_its_limit_and_not_tried_again(
    control_group: Path, station: Station, what: str
) -> None:
    fields = ["--steps", 3, "--micro_batch_size", 4, "--log.tensorboard", "false", "--eval.every_epochs", 0]
    if what == "script":
        write(station, f"if rank == 1:\n{textwrap.indent(HOG, '    ')}\ntime.sleep(1000)")
        order = ["launch", "--script", "script.py", "--nproc", 2]
    else:
        text = TASK.format(when="int(os.environ['RANK']) == 1" if what == "task" else False)
        if what == "task's loader":
            hog = f"class Hog(TensorDataset):\n    def __getitem__(self, index): exec({HOG!r}, {{}})\n"
            text = text.replace("def model", hog + "def model").replace("return TensorDataset", "return Hog")
            fields += ["--data.workers", 1]
        (station.folder / "task.py").write_text(text)
        order = ["launch", "task.py", "--nproc", 2 if what == "task" else 1, *fields]
    done = within(control_group, station, *order, "--name", "a", "--follow")
    record = station.wait_for_end("a")
    assert done.returncode == 3, done.stderr
    assert record["state"] == states.FAILED and len(record["attempts"]) == 1, record
    assert "out of memory" in record["reason"] and "1.2 GiB" in record["reason"]
    assert "--micro_batch_size in a new run" in record["reason"]
    assert record["reason"] in done.stderr


def test_memory_that_a_limit_of_the_process_refuses_is_called_so(station: Station) -> None:
    record = run(
        station,
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\ndata = bytearray(3 << 30)",
    )
    assert record["state"] == states.FAILED and len(ends(record)) == 1
    assert "out of memory" in str(record["reason"]) and "MemoryError" in str(record["reason"])


def test_a_finished_script_is_told_so(station: Station) -> None:
    write(station, "pass")
    station.ok("launch", "--script", "script.py", "--name", "a", "--follow")
    assert station.ok("resume", "a").stderr == "a has already finished\n"
