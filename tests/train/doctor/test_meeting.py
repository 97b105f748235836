"""`train doctor --rendezvous` where a run meets already: which, who is missing, whether this machine would fit."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.cluster.conftest import Machines
from tests.train.conftest import Station
from train.doctor import meeting
from train.doctor.finding import OK, PROBLEM, Finding, exit_code

ROOT = Path(__file__).parents[3]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path, 2)
    yield made
    made.close()


def doctor(station: Station, *arguments: object, tree: Path = ROOT) -> dict[str, Finding]:
    """What the doctor finds of the meeting, with this copy of the package."""
    done = station("doctor", *arguments, "--json", env={"PYTHONPATH": str(tree)})
    findings = [Finding(**each) for each in json.loads(done.stdout)]
    assert done.returncode == exit_code(findings), done.stderr
    found = {one.check: one for one in findings}
    assert all(one.remedy for one in findings if one.verdict == PROBLEM)
    return found


def test_a_waiting_run_tells_who_is_missing_and_who_would_not_fit(machines: Machines, tmp_path: Path) -> None:
    assert machines.launch("a", 0, "--steps", 5).returncode == 0
    before = machines.wait_for_reason("a", 0, "waiting for node 1 of 2")
    asked = ("--rendezvous", machines.rendezvous)
    found = doctor(machines.stations[1], *asked)
    assert "node 0 of run a listens there" in found["rendezvous port"].seen
    assert found["run there"].verdict == OK
    assert found["run there"].seen.startswith("run a waits; of 2 nodes there: node 0 (")
    assert found["run there"].seen.endswith("; missing: 1")
    assert [found[f"same {key}"].verdict for key in ("code", "torch", "python")] == [OK] * 3
    assert "same config" not in found
    shutil.copytree(ROOT / "train", tmp_path / "other" / "train", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "other" / "train" / "signals.py").open("a") as file:
        file.write("# changed\n")
    found = doctor(machines.stations[1], *asked, tree=tmp_path / "other")
    assert found["same code"].verdict == PROBLEM and "copy of train/" in found["same code"].seen
    assert found["same torch"].verdict == OK
    assert machines.stations[0].record("a") == before  # it has not noticed


@pytest.mark.minutes
def test_a_run_is_compared_field_by_field_and_trains_on(machines: Machines) -> None:
    assert machines.launch("a", 0, "--steps", 900).returncode == 0
    machines.launch("a", 1, "--steps", 900, "--seed", 3)
    assert "seed" in machines.stations[1].wait_for_end("a")["reason"]
    asked = ("--rendezvous", machines.rendezvous)
    found = doctor(machines.stations[1], "a", *asked)
    assert found["same config"].verdict == PROBLEM and "seed is 3 here, 0 on node 0" in found["same config"].seen
    assert found["same task"].verdict == found["same data"].verdict == OK
    machines.stations[1].ok("rm", "a")
    assert machines.launch("a", 1, "--steps", 900).returncode == 0
    machines.stations[0].wait_for_step("a", 20)
    found = doctor(machines.stations[1], "a", *asked)
    assert (
        "run a trains; of 2 nodes there: node 0" in found["run there"].seen and "missing" not in found["run there"].seen
    )
    assert found["same config"].verdict == OK
    machines.stations[1].ok("run", "fake", "--name", "b", "--steps", 1)
    assert "run a meets there, not b" in doctor(machines.stations[1], "b", *asked)["run there"].seen
    for record in machines.ends("a"):
        assert record["state"] == "finished" and len(record["attempts"]) == 1, record["reason"]


@pytest.mark.parametrize(
    "said",
    [
        b"", b"SSH-2.0-OpenSSH\r\n", b"[]\n", b'{"is": "about"}\n', b'{"is": "about", "run": 1}\n', b"\xff\n",
        b"[" * 500000 + b"\n", b"x" * 3000000,
    ],
)  # fmt: skip
def test_whoever_else_listens_there_is_no_run(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            one, _ = server.accept()
            with one:
                one.recv(100)
                one.sendall(said)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert meeting.ask("127.0.0.1", server.getsockname()[1]) is None
        thread.join(10)


ABOUT = {
    "is": "about", "run": "a", "least": 2, "most": 2, "running": False, "same": {"config": {}},
    "nodes": [{"node": 0, "host": "h", "home": "/a", "nproc": 1}],
}  # fmt: skip


def told(pieces: list[bytes], pause: float = 0.0) -> tuple[dict[str, Any] | None, float]:
    """What is made of an answer that comes in these pieces, and the seconds that it took."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            one, _ = server.accept()
            with one, contextlib.suppress(OSError):
                one.recv(100)
                for piece in pieces:
                    one.sendall(piece)
                    time.sleep(pause)

        threading.Thread(target=answer, daemon=True).start()
        begun = time.monotonic()
        return meeting.ask("127.0.0.1", server.getsockname()[1]), time.monotonic() - begun


def test_a_sign_of_life_behind_the_answer_is_none_of_it() -> None:
    found, _ = told([json.dumps(ABOUT).encode() + b'\n{"is": "alive"}\n'])
    assert found == ABOUT


@pytest.mark.parametrize(
    "change",
    [
        {"most": 10**18}, {"most": 0}, {"same": {}}, {"same": {"config": [1]}}, {"nodes": [5]},
        {"nodes": [{"node": [0], "host": "h", "home": "/a", "nproc": 1}]},
    ],
)  # fmt: skip
def test_a_table_of_another_release_is_no_run(change: dict[str, Any]) -> None:
    assert told([json.dumps(ABOUT | change).encode() + b"\n"])[0] is None


def listening(said: bytes) -> tuple[socket.socket, int]:
    """A stranger who answers everybody so, and its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = server.accept()
                with one, contextlib.suppress(OSError):
                    one.recv(100)
                    one.sendall(said)

    threading.Thread(target=answer, daemon=True).start()
    return server, server.getsockname()[1]


@pytest.mark.parametrize("said", ["2.0; rm -rf ~", "$(reboot)", "`reboot`\n", "", None, [1], "9" * 1000])
def test_what_a_stranger_calls_its_version_stands_in_no_command(said: Any, station: Station) -> None:
    same = {"config": {}, "torch": said, "python": said, "code": "1"}
    about = ABOUT | {"same": same, "run": "a" * 5000, "most": 60_000}
    server, port = listening(json.dumps(about).encode() + b"\n")
    with server:
        found = doctor(station, "--rendezvous", f"127.0.0.1:{port}")
    for key in ("torch", "python"):
        assert found[f"same {key}"].verdict == PROBLEM
        assert found[f"same {key}"].remedy.startswith("train doctor  # ")
    assert all(len(one.seen) < 3000 for one in found.values())


def test_a_version_that_is_one_stands_in_the_command_that_mends_it(station: Station) -> None:
    same = {"config": {}, "torch": "2.1.0+cu121", "python": "3.10.4", "code": "1"}
    server, port = listening(json.dumps(ABOUT | {"same": same}).encode() + b"\n")
    with server:
        found = doctor(station, "--rendezvous", f"127.0.0.1:{port}")
    assert found["same torch"].remedy == "pip install torch==2.1.0"
    assert found["same python"].remedy.endswith("with Python 3.10.4")


def test_one_that_says_a_letter_now_and_then_is_not_heard_to_its_end() -> None:
    found, seconds = told([b"{"] * 100, pause=0.5)
    assert found is None and seconds < 20


def test_a_name_that_no_host_can_have_is_a_finding(station: Station) -> None:
    assert doctor(station, "--rendezvous", "a..b:29400")["rendezvous name"].verdict == PROBLEM


def test_a_name_is_for_a_rendezvous(station: Station) -> None:
    for arguments, words in ((("a",), "--rendezvous"), (("a", "--rendezvous", "127.0.0.1:2"), "there is no run a")):
        done = station("doctor", *arguments)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
