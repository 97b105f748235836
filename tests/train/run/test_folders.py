"""Which run a name means, in a folder of runs that several machines may see."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from train.errors import Refused
from train.launcher import resumable
from train.run import folders

pytestmark = pytest.mark.never_forgiven

HERE, ELSEWHERE = socket.gethostname(), "another-host"


def part(runs: Path, node: int, host: str, **more: Any) -> None:
    """Node's part of the run `a`."""
    cluster = {"least": 2, "most": 2, "node": node, "rendezvous": "127.0.0.1:29400", "wait_minutes": 1.0}
    where = folders.of_node(runs, node) if node else runs
    folders.create(where, "a", files={}, record={"cluster": cluster, "host": host, **more})


def test_a_machine_finds_its_own_part_of_a_run_that_machines_share(tmp_path: Path) -> None:
    part(tmp_path, 0, ELSEWHERE)
    part(tmp_path, 1, HERE)
    assert folders.of_this_machine(tmp_path, "a") == folders.of_this_machine(tmp_path, "a", 1) == tmp_path / ".nodes/1"
    assert folders.of_this_machine(tmp_path, "a", 0) == tmp_path  # as it is asked for
    with pytest.raises(Refused, match="node 2 has no part of it here"):
        folders.of_this_machine(tmp_path, "a", 2)
    assert folders.find(tmp_path, "a").folder == tmp_path / "a"  # to look at, and to stop: the whole run


def test_what_an_engine_starts_is_node_0s_on_any_machine(tmp_path: Path) -> None:
    part(tmp_path, 0, ELSEWHERE, submission="1")
    part(tmp_path, 1, HERE, submission="1")
    assert folders.of_this_machine(tmp_path, "a") == tmp_path


@pytest.mark.parametrize("name", ["../../b", "..", ".", "*", "b/../a", "", "x" * 300])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    part(tmp_path / "runs", 1, HERE)
    folders.create(tmp_path, "b", files={}, record={"host": HERE})
    with pytest.raises(Refused):
        folders.find(tmp_path / "runs", name)


def test_a_keeper_takes_up_no_part_of_another_machine(tmp_path: Path) -> None:
    part(tmp_path, 0, ELSEWHERE, state="running")
    part(tmp_path, 1, HERE, state="running")
    zero, one = folders.every_here(tmp_path)
    assert resumable.is_resumable(zero.read_effective()) is False
    assert not resumable.is_kept_elsewhere(one.read()) and resumable.is_resumable(one.read_effective()) is not False


def test_deaths_of_a_node_that_keeps_no_checkpoint_are_counted_by_its_steps(tmp_path: Path) -> None:
    part(tmp_path, 1, HERE)
    run = folders.Run(folders.of_node(tmp_path, 1) / "a")
    record = run.read() | {"state": "running", "attempts": [{"number": 1}]}
    for step in (1000, 2000, 3000, 4000):
        record |= {"step": step}
        record["kept"] = resumable.keeper_count(run, record)  # type: ignore[arg-type]
        assert record["kept"] == {"step": step, "times": 1, "attempts": 1}
