"""The run folder: made as a whole, changed as a whole, alive exactly while its lock is held."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train.errors import Refused
from train.monitor.status import RunStatus
from train.monitor.top import Page
from train.run import folders, heartbeat, run_folder, states
from train.run.record import FORMAT
from train.run.run_folder import Run
from train.views.listing import listing, story

pytestmark = pytest.mark.never_forgiven


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return folders.create(tmp_path / "runs", "a", files={"config.toml": "x = 1\n"}, record={"world_size": 1})


def test_a_run_appears_with_all_its_files(run: Run) -> None:
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "checkpoints", "config.toml", "lock", "logs", "run.json",
    ]  # fmt: skip
    record = run.read()
    assert (record["name"], record["state"], record["attempts"]) == ("a", states.CREATED, [])
    assert record["metrics"] == {} and record["weights_sha256"] is None


WITHOUT_LOCKS = """
import ctypes, struct, sys
from pathlib import Path

def program(*lines):
    return ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))

# a filter of system calls: flock(2) answers EOPNOTSUPP, as on a file system that has none
number, libc = int(sys.argv[2]), ctypes.CDLL(None)
rules = program((0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 95), (0x06, 0, 0, 0x7FFF0000))
whole = struct.pack("HxxxxxxP", 4, ctypes.addressof(rules))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, whole, 0, 0) == 0

from train.errors import Refused
from train.run import folders
from train.run.run_folder import Run

runs = Path(sys.argv[1])
run = Run(runs / "a")
for ask in (run.alive, run.acquire, run.update, lambda: folders.create(runs, "b", files={}, record={})):
    try:
        print("answered", ask())
    except Refused as error:
        print(error)
print("noted", run.note(step=1))
"""


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="system calls have other numbers")
def test_where_there_are_no_locks_a_run_is_refused_and_none_is_made(run: Run) -> None:
    number = {"x86_64": "73", "aarch64": "32"}[os.uname().machine]
    command = [sys.executable, "-c", WITHOUT_LOCKS, str(run.folder.parent), number]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    *refused, noted = done.stdout.splitlines()
    assert len(refused) == 4 and noted == "noted False"
    for line in refused:
        assert "cannot be locked (Operation not supported)" in line and "train doctor --only 'file locks'" in line
    assert [path.name for path in run.folder.parent.iterdir()] == ["a"]


def test_a_run_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        folders.create(tmp_path, "a", files={}, record={"oops": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_given_once(run: Run) -> None:
    before = (run.folder / "run.json").read_bytes()
    with pytest.raises(Refused, match="exists"):
        folders.create(run.folder.parent, "a", files={"config.toml": "other"}, record={})
    assert (run.folder / "run.json").read_bytes() == before
    assert os.listdir(run.folder.parent) == ["a"]


def _create(runs: Path, barrier: object, number: int) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    try:
        folders.create(runs, "same", files={"who": str(number)}, record={"world_size": number})
    except Refused:
        sys.exit(2)


def test_of_several_who_make_the_same_run_one_succeeds(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(4):
        barrier = context.Barrier(4)
        runs = tmp_path / str(attempt)
        makers = [context.Process(target=_create, args=(runs, barrier, number)) for number in range(4)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        assert sorted(maker.exitcode for maker in makers) == [0, 2, 2, 2]
        winner = next(number for number, maker in enumerate(makers) if maker.exitcode == 0)
        # no mixture of two
        assert (runs / "same" / "who").read_text() == str(winner)
        assert Run(runs / "same").read()["world_size"] == winner
        assert os.listdir(runs) == ["same"]


def test_a_run_is_alive_exactly_while_its_lock_is_held(run: Run) -> None:
    assert not run.alive()
    lock = run.acquire()
    assert lock is not None and run.alive()
    lock.release()
    assert not run.alive()


def test_a_run_lives_as_long_as_the_last_process_that_inherited_its_lock(run: Run) -> None:
    lock = run.acquire()
    assert lock is not None
    children = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[lock.fd]) for _ in range(2)
    ]
    lock.release()
    for child in children:
        assert run.alive()
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert not run.alive()


def test_only_one_of_two_takes_the_lock(run: Run) -> None:
    first = run.acquire()
    assert first is not None
    assert run.acquire(patience=0.0) is None
    first.release()
    second = run.acquire(patience=0.0)
    assert second is not None
    second.release()


def test_looking_whether_a_run_lives_does_not_keep_others_from_taking_the_lock(run: Run) -> None:
    fd = os.open(run.folder / "lock", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)  # an observer in the middle of its look
    assert not run.alive()
    observer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2)"], pass_fds=[fd])
    os.close(fd)
    lock = run.acquire(patience=60.0)
    observer.wait()
    assert lock is not None
    lock.release()


def test_a_recorded_running_without_a_process_is_shown_as_interrupted(run: Run) -> None:
    lock = run.acquire()
    assert lock is not None
    assert run.begin_attempt(2, 0) == 1
    assert run.state() == states.RUNNING
    lock.release()
    assert run.state() == states.INTERRUPTED and "train resume" in run.read_effective()["reason"]
    assert run.read()["state"] == states.RUNNING, "looking changes nothing on disk"


def _bump(folder: Path, key: str, times: int) -> None:
    for _ in range(times):
        Run(folder).update(lambda record: record.update({key: record.get(key, 0) + 1}), durable=False)


def test_changes_of_several_processes_are_never_lost(run: Run) -> None:
    context = multiprocessing.get_context("fork")
    keys = ["x", "x", "y", "z"]
    workers = [context.Process(target=_bump, args=(run.folder, key, 40)) for key in keys]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        assert run.read()["name"] == "a"  # a reader sees a whole record at any time
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    record = run.read()
    assert (record["x"], record["y"], record["z"]) == (80, 40, 40)


def test_a_killed_writer_leaves_the_old_record_or_the_new_one(run: Run) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(8):
        writer = context.Process(target=_bump, args=(run.folder, "n", 10**6))
        writer.start()
        before = run.read().get("n", 0)
        while run.read().get("n", 0) < before + 5:
            pass
        writer.kill()
        writer.join()
        assert isinstance(run.read()["n"], int)
    run.update(last=True)  # and nobody holds the folder's lock
    assert run.read()["last"] is True


def test_a_failed_change_leaves_the_record_and_no_file(run: Run) -> None:
    before = sorted(os.listdir(run.folder))
    with pytest.raises(TypeError):
        run.update(bad=object())
    assert "bad" not in run.read() and sorted(os.listdir(run.folder)) == before


def test_a_run_has_the_name_of_its_folder(run: Run) -> None:
    moved = run.folder.rename(run.folder.with_name("renamed"))
    assert folders.find(moved.parent, "renamed").read()["name"] == "renamed"
    with pytest.raises(Refused, match="no run a"):
        folders.find(moved.parent, "a")


def test_a_removed_run_leaves_nothing_and_a_living_one_stays(run: Run) -> None:
    lock = run.acquire()
    assert lock is not None
    with pytest.raises(Refused, match="train stop a"):
        folders.remove(run)
    assert run.read()["state"] == states.CREATED
    lock.release()
    folders.remove(run)
    assert os.listdir(run.folder.parent) == []


def test_attempts_are_counted_and_keep_how_they_ended(run: Run) -> None:
    run.begin_attempt(2, 0)
    run.end_attempt("died", "rank 1 died of SIGKILL", last_lines=["its last words"])
    assert run.begin_attempt(3, 0) == 2
    assert run.note_ready(7)
    run.end_attempt(states.FINISHED, "", state=states.FINISHED)
    record = run.read()
    assert [(a["number"], a["world_size"], a["end"]) for a in record["attempts"]] == [
        (1, 2, "died"), (2, 3, "finished"),
    ]  # fmt: skip
    assert [attempt["to_step"] for attempt in record["attempts"]] == [0, 7] and record["state"] == states.FINISHED
    assert record["attempts"][0]["last_lines"] == ["its last words"]
    assert record["started"] == record["attempts"][0]["started"] and record["ended"]
    assert run.logs(2).is_dir()


def test_an_attempt_that_nobody_survived_is_known_by_the_last_signs_of_life_of_its_ranks(run: Run) -> None:
    run.begin_attempt(2, 0)
    assert run.note_ready(3)
    for rank, step in ((0, 5), (1, 4)):
        heartbeat.Heart(run.logs(1) / f"rank{rank}.beat").beat(heartbeat.TRAINING, step)
    (run.folder / ".run.json.123").write_text("{")  # the kill hit in the middle of a write
    run.begin_attempt(2, 0)
    first = run.read()["attempts"][0]
    assert (first["end"], first["to_step"]) == ("died", 5)
    assert first["started"] <= first["ended"] <= run_folder.now()
    assert not list(run.folder.glob(".run.json.*")) and not list(run.logs(1).iterdir())


def test_an_attempt_came_as_far_as_the_memory_of_another_machine_says(run: Run) -> None:
    run.begin_attempt(2, 0)
    run.note_ready(0)
    run.update(step=502)
    run.end_attempt("died", "killed")
    run.begin_attempt(2, 0)
    run.end_attempt("died", "nobody came")  # it made no step
    run.begin_attempt(2, 0)
    run.note_ready(502)
    run.end_attempt("died", "killed")
    run.begin_attempt(2, 0)
    run.note_ready(503)
    assert [attempt["to_step"] for attempt in run.read()["attempts"]] == [502, 0, 503, None]
    run.end_attempt("stopped", "")
    run.begin_attempt(2, 0)
    run.note_ready(500)  # memory is gone, a checkpoint is left: what was made twice was made
    assert [attempt["to_step"] for attempt in run.read()["attempts"]] == [502, 0, 503, 503, None]


def test_only_published_checkpoints_count(run: Run) -> None:
    for name in ("step-00000010", "step-00000200", ".partial-step-00000300-1", "step-x", ".damaged-step-00000020"):
        (run.checkpoints / name).mkdir()
    assert run.steps_saved() == [200, 10]


def test_fresh_names_are_legal_and_nobodys(tmp_path: Path) -> None:
    names = []
    for stem in ("my task.v2", "..", "ü", "-", "x" * 200, "a"):
        names += [folders.fresh_name(tmp_path, stem) for _ in range(1)]
        folders.check_free(tmp_path, names[-1])
    first = folders.fresh_name(tmp_path, "same")
    for taken in (first, re.sub(r"(\d{6})$", lambda m: f"{int(m[1]) + 1:06}", first)):
        (tmp_path / taken).mkdir()
    assert not (tmp_path / folders.fresh_name(tmp_path, "same")).exists()


def test_runs_are_listed_without_what_is_no_run(run: Run) -> None:
    runs = run.folder.parent
    (runs / "junk").mkdir()
    (runs / "file").write_text("x")
    (runs / ".creating-b-1").mkdir()
    (runs / ".creating-b-1" / "run.json").write_text("{}")
    assert [other.name for other in folders.every(runs)] == ["a"]
    assert list(folders.every(runs / "nowhere")) == []


def test_the_record_on_disk_is_plain_json(run: Run) -> None:
    run.update(loss=0.5, name="forged")
    assert json.loads((run.folder / "run.json").read_text())["loss"] == 0.5
    assert run.read()["name"] == "a"


def test_a_process_that_stands_still_with_the_record_in_its_hands_keeps_no_note_waiting(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "NOTE_PATIENCE", 0.2)
    code = (
        "import fcntl, os, signal, sys\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run.folder)]) as holder:
        assert os.WIFSTOPPED(os.waitpid(holder.pid, os.WUNTRACED)[1])
        assert not run.note(step=3)
        holder.kill()
    assert run.note(step=4)
    assert run.read()["step"] == 4


def test_times_that_are_none_are_told_as_unknown(run: Run) -> None:
    damaged = run.read() | {"started": "yesterday"}
    assert " ? " in listing([RunStatus(run, damaged)], runs=run.folder.parent).splitlines()[1]


def test_a_record_is_read_also_where_memory_is_tight(run: Run) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from train.run.run_folder import Run\n"
        "taken = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (taken + (16 << 20),) * 2)\n"
        "print(Run(Path(sys.argv[1])).read()['state'])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.folder)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == states.CREATED, done.stderr


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"attempts": "x"}, "attempts is not of type list"), ({"attempts": [{}]}, "attempts.end is missing"),
        ({"metrics": {"loss": "x"}}, "metrics is not of type float"), ({"step": True}, "step is not of type int"),
        ({"loss": 10**400}, "loss is too large"), ({"cluster": {"least": 1}}, "cluster.most is missing"),
    ],
)  # fmt: skip
def test_a_record_whose_fields_are_not_what_they_must_be_is_refused_in_a_line(
    run: Run, damage: dict[str, Any], said: str
) -> None:
    (run.folder / "run.json").write_text(json.dumps(run.read() | damage))
    with pytest.raises(Refused, match=rf"run.json is damaged \({said}\); repair it, or .* train rm a"):
        run.read()


def test_fields_of_a_newer_version_are_kept(run: Run) -> None:
    (run.folder / "run.json").write_text(json.dumps(run.read() | {"newer": [1, {"a": None}]}))
    run.update(step=3)
    assert run.read()["newer"] == [1, {"a": None}] and run.read()["step"] == 3


def test_a_damaged_run_is_named_in_a_line_and_hides_no_other(station: Any) -> None:
    for name in ("pipe", "half", "types", "whole"):
        folders.create(station.runs, name, files={}, record={"world_size": 1})
    (station.runs / "pipe" / "run.json").unlink()
    os.mkfifo(station.runs / "pipe" / "run.json")
    (station.runs / "half" / "run.json").write_text('{"state": "fin')
    (station.runs / "types" / "run.json").write_text(f'{{"format": {FORMAT}, "state": 5}}')
    done = station.ok("ls")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["NAME", "whole"]
    assert len(done.stderr.splitlines()) == 3 and all(name in done.stderr for name in ("pipe", "half", "types"))
    for command in ("show", "resume"):
        assert station(command, "types").returncode == 2
    station.ok("rm", "types")
    assert not (station.runs / "types").exists()


def test_what_others_wrote_steers_no_terminal(run: Run) -> None:
    evil = "boom \x1b]0;owned\x07\x1b[2J\nstate: finished"
    (run.folder / "run.json").write_text(json.dumps(run.read() | {"state": "failed", "reason": evil, "task": evil}))
    page = "\n".join(row.text for row in Page(run.folder.parent).rows(120, 30))
    for text in (story(RunStatus(run, run.read_effective())), page):
        assert "boom" in text and "\x1b" not in text and "\x07" not in text
        assert not any(line.startswith("state: ") for line in text.splitlines())


def test_a_run_that_lies_elsewhere_behind_a_link_is_removed_with_it(run: Run, tmp_path: Path) -> None:
    moved = tmp_path / "disk" / "a"
    moved.parent.mkdir()
    run.folder.rename(moved)
    run.folder.symlink_to(moved)
    folders.remove(run)
    assert not moved.exists() and not os.listdir(run.folder.parent)
