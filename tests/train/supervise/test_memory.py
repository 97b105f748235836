"""Where the kernel says that it killed for lack of memory: control groups of both versions, as they lie on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from train import programs
from train.supervise import decide, memory
from train.supervise.decide import Facts, LaunchMode

pytestmark = pytest.mark.never_forgiven

MIB = 1 << 20


@pytest.fixture
def process(tmp_path: Path) -> Path:
    """A process in the group `user.slice/run`, around which there is a limit of 600 MiB."""
    run = tmp_path / "user.slice" / "run"
    run.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    (run / "memory.max").write_text("max\n")
    (tmp_path / "user.slice" / "memory.max").write_text(f"{600 * MIB}\n")
    (tmp_path / "user.slice" / "memory.current").write_text(f"{300 * MIB}\n")
    (tmp_path / "user.slice" / "memory.stat").write_text(f"anon 1\ninactive_file {100 * MIB}\n")
    killed(tmp_path, 0)
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "cgroup").write_text("0::/user.slice/run\n")
    return folder


def killed(top: Path, times: int) -> None:
    text = f"low 0\nhigh 0\nmax {times}\noom {times}\noom_kill {times}\n"
    (top / "user.slice" / "run" / "memory.events").write_text(text)


def died_of_memory(kills: memory.Kills) -> bool:
    """Whether a rank that was killed now is said to have been too large."""
    return decide.who_died(
        Facts("a", LaunchMode.LAUNCHED, programs.TASK, exits={0: -9}, killed_at=kills.limit())
    ).recurs


def test_the_groups_around_a_process_and_what_they_leave(tmp_path: Path, process: Path) -> None:
    slice_ = tmp_path / "user.slice"
    assert memory.limits(process, tmp_path) == {slice_: 600 * MIB}
    assert memory.left(process, tmp_path) == 400 * MIB
    (slice_ / "memory.max").write_text("max\n")
    assert memory.left(process, tmp_path) > 400 * MIB, "the machine's own"


@pytest.mark.parametrize("path", ["/docker/abc", "/../../elsewhere"])
def test_a_container_sees_its_own_group_alone(tmp_path: Path, process: Path, path: str) -> None:
    (tmp_path / "memory.max").write_text(str(100 * MIB))
    (process / "cgroup").write_text(f"0::{path}\n")
    assert memory.limits(process, tmp_path) == {tmp_path: 100 * MIB}


def test_version_1_tells_the_same_in_other_files(tmp_path: Path) -> None:
    """In a container: the path is that of the host, and the files lie at the top."""
    top, process = tmp_path / "sys" / "memory", tmp_path / "proc"
    top.mkdir(parents=True)
    process.mkdir()
    (process / "cgroup").write_text("7:cpuset:/\n4:memory:/docker/abc\n0::/\n")
    (top / "memory.limit_in_bytes").write_text(f"{200 * MIB}\n")
    (top / "memory.usage_in_bytes").write_text(f"{150 * MIB}\n")
    (top / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {50 * MIB}\n")
    (top / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    kills = memory.Kills(process, top.parent)
    assert memory.limits(process, top.parent) == {top: 200 * MIB} and memory.left(process, top.parent) == 100 * MIB
    (top / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert died_of_memory(kills) and "200 MiB" in str(kills.limit())
    (top / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    assert memory.limits(process, top.parent) == {}


def test_without_control_groups_nothing_is_known(tmp_path: Path, process: Path) -> None:
    (process / "cgroup").write_text("4:cpuset:/docker/abc\n")
    assert memory.limits(process, tmp_path) == {} and memory.Kills(process, tmp_path).limit() is None


def test_a_kill_of_long_ago_is_not_why_a_rank_dies_now(tmp_path: Path, process: Path) -> None:
    """A notebook's kernel, say, in the same container, days before."""
    kills = memory.Kills(process, tmp_path)
    killed(tmp_path, 1)
    kills.look()
    assert died_of_memory(kills)  # found just now: it may be the rank itself, whose death was not seen yet
    assert "600 MiB" in str(kills.limit())
    kills.look()
    assert not died_of_memory(kills)
    killed(tmp_path, 2)
    assert died_of_memory(kills)
