"""Where the kernel says that it killed for lack of memory: both versions of control groups, as they lie on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.runs import memory


def process(tmp_path: Path, cgroup: str, mount: str) -> Path:
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(f"30 23 0:26 / /proc rw - proc proc rw\n{mount}\n")
    return folder


def test_version_2_in_a_slice(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    own = top / "user.slice" / "run"
    own.mkdir(parents=True)
    (own / "memory.max").write_text("max\n")
    (own / "memory.events").write_text("low 0\nhigh 0\nmax 0\noom 0\noom_kill 2\n")
    (top / "user.slice" / "memory.max").write_text("1073741824\n")
    (top / "user.slice" / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\n")
    here = process(tmp_path, "0::/user.slice/run\n", f"31 30 0:27 / {top} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate")
    groups = memory.chain(here)
    assert [(g.folder, g.limit, g.kills, g.hits) for g in groups] == [
        (own, None, 2, 0), (top / "user.slice", 1 << 30, 2, 3), (top, None, None, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("root", ["/docker/abc", "/../../elsewhere"])
def test_version_1_in_a_container_that_sees_its_own_group_alone(tmp_path: Path, root: str) -> None:
    top = tmp_path / "cgroup"
    top.mkdir()
    (top / "memory.limit_in_bytes").write_text("104857600\n")
    (top / "memory.failcnt").write_text("7\n")
    (top / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    mount = f"31 30 0:27 {root} {top} ro - cgroup cgroup rw,memory"
    here = process(tmp_path, "5:cpu:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc\n", mount)
    assert memory.chain(here) == [memory.Group(top, 100 << 20, 1, 7)]


def test_where_there_is_nothing_nothing_is_known(tmp_path: Path) -> None:
    assert memory.chain(tmp_path) == []
    assert memory.chain(process(tmp_path, "", "31 30 0:27 / /x rw - tmpfs tmpfs rw")) == []


def test_sizes_in_words() -> None:
    assert [memory.size(n) for n in (5, 2048, 1 << 29, 3 << 29, 1 << 42)] == [
        "5 bytes", "2 KiB", "512 MiB", "1.5 GiB", "4 TiB",
    ]  # fmt: skip
