"""`train wait`: the worst of several ends, a line for each, and a run that comes back by itself has not ended."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.train.conftest import Station
from tests.train.terminal import Terminal
from tests.waiting import eventually

SLEEPER = """
import pathlib, time
while not pathlib.Path("{name}.end").exists():
    time.sleep(0.05)
raise SystemExit(int(pathlib.Path("{name}.end").read_text()))
"""


def launch(station: Station, name: str, *options: object) -> None:
    """A script that lives until `end` says how it ends."""
    (station.folder / f"{name}.py").write_text(SLEEPER.format(name=name))
    station.ok("launch", "--script", f"{name}.py", "--name", name, *options)


def end(station: Station, name: str, code: int) -> None:
    path = station.folder / f"{name}.end"
    path.with_suffix(".new").write_text(str(code))
    path.with_suffix(".new").rename(path)


def ended(waiting: Any) -> tuple[int, list[str]]:
    out, _ = waiting.communicate(timeout=240)
    return waiting.returncode, out.splitlines()


def test_the_worst_end_counts_and_each_run_has_a_line_as_it_ends(station: Station) -> None:
    for name in ("wait-a", "wait-b", "wait-c"):
        launch(station, name)
    both, all_three = station.start("wait", "wait-a", "wait-b"), station.start("wait", "wait-*")
    end(station, "wait-a", 0)
    assert all_three.stdout.readline() == "wait-a finished\n"
    station.ok("stop", "wait-b")
    code, lines = ended(both)
    assert code == 75 and lines[0] == "wait-a finished" and lines[1].startswith("wait-b stopped"), lines
    end(station, "wait-c", 1)
    code, lines = ended(all_three)
    assert code == 3 and len(lines) == 2 and lines[1].startswith("wait-c failed: "), lines
    assert station("wait", "wait-a").returncode == 0


def test_the_time_ends_the_waiting_only_and_unknown_names_and_odd_times_are_refused(station: Station) -> None:
    launch(station, "wait-d")
    over = station("wait", "wait-d", "--timeout", "0.2")
    assert over.returncode == 124 and over.stdout == "" and "left alone: wait-d" in over.stderr
    assert station.run("wait-d").state() == "running"
    for words in (["none"], ["wait-d", "none"], ["none*"], ["wait-d", "--timeout", "soon"], []):
        refused = station("wait", *words)
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, refused
    launch(station, "wait-e")
    end(station, "wait-e", 0)
    typed = Terminal(station, "wait", "wait-d", "wait-e")
    typed.wait_for("wait-e finished")
    typed.ctrl_c()
    assert typed.end() == 130 and "still running, and left alone: wait-d" in typed.output
    assert station.run("wait-d").state() == "running"
    waiting = station.start("wait", "wait-d")
    end(station, "wait-d", 0)
    assert ended(waiting) == (0, ["wait-d finished"])


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_killed_run_has_ended_only_if_no_keeper_brings_it_back(station: Station, is_kept: bool) -> None:
    station.more["TRAIN_STATE"] = str(station.folder / "state")  # a killed keeper leaves its sign of life
    keeper = station.start("keeper") if is_kept else None
    try:
        if keeper:
            assert "keeping" in keeper.stdout.readline()
        name = f"wait-kept-{is_kept}"
        launch(station, name, "--on-restart", "")
        eventually("it runs", lambda: station.run(name).state() == "running" and station.record(name)["pids"])
        waiting = station.start("wait", name)
        os.kill(station.record(name)["pids"]["agent"], signal.SIGKILL)
        if not keeper:
            code, lines = ended(waiting)
            assert code == 3 and lines[0].startswith(f"{name} was interrupted"), lines
            return
        eventually("the keeper resumes it", lambda: len(station.record(name)["attempts"]) == 2)
        assert waiting.poll() is None
        end(station, name, 0)
        code, lines = ended(waiting)
        assert code == 0 and lines[-1] == f"{name} finished", lines
    finally:
        if keeper:
            keeper.kill()
            keeper.wait()
