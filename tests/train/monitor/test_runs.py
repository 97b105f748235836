"""Looks at a folder of runs, again and again."""

from __future__ import annotations

from pathlib import Path

from test_exporter import put

from train.monitor.runs import Runs
from train.run import ownership
from train.run.run_folder import Run


def test_a_killed_run_is_read_again_when_it_is_resumed_and_not_before(tmp_path: Path) -> None:
    run = Run(put(tmp_path, "killed", state="running", ended=None))
    run.update(**ownership.sign(run.folder, run.read()))
    runs = Runs(tmp_path)
    (first,) = runs.look()
    (second,) = runs.look()
    assert first.state == "interrupted" and second is first
    lock = run.acquire()
    assert lock is not None
    (alive,) = runs.look()
    assert alive.state == "running"
    lock.release()
    (killed,) = runs.look()
    assert killed.state == "interrupted" and runs.look_at(run) is killed


def test_one_run_is_looked_at_without_forgetting_the_others(tmp_path: Path) -> None:
    for name in ("one", "two"):
        put(tmp_path, name)
    runs = Runs(tmp_path)
    before = {one.name: one for one in runs.look()}
    assert [one.name for one in runs.look(["one"])] == ["one"]
    assert {one.name: one for one in runs.look()} == before
    (tmp_path / "two" / "run.json").write_text("{")
    assert runs.look_at(Run(tmp_path / "two")) is None
