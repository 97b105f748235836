"""Where the kernel says that it killed for lack of memory: both versions of control groups, as they lie on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.train.checkpoint.test_snapshots import Kept
from tests.train.conftest import PATIENCE
from train.runs import memory, verdict
from train.runs.verdict import Facts, Road


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


GIB = 1 << 30


@pytest.mark.parametrize(
    ("micro", "peak", "fixed", "limit", "fits"),
    [
        # 2 GiB stay, a sample takes half a GiB: of 9 GiB, a tenth left free, 6.1 are for 12 samples
        (16, 10 * GIB, 2 * GIB, 9 * GIB, 12),
        (16, 10 * GIB, 2 * GIB, 4 * GIB, 3),
        (16, 10 * GIB, 2 * GIB, 2.5 * GIB, None),
        # it was refused before it had taken what it needs: the line would have all fit
        (16, 3 * GIB, 2 * GIB, 9 * GIB, 8),
        (16, 2 * GIB, 2 * GIB, 9 * GIB, 8),
        (16, None, None, None, 8),
        (16, 10 * GIB, 2 * GIB, None, 8),
        (2, 10 * GIB, 2 * GIB, 9 * GIB, 1),
        (1, 10 * GIB, 2 * GIB, 9 * GIB, None),
    ],
)
def test_the_micro_batch_that_would_fit(
    micro: int, peak: float | None, fixed: float | None, limit: float | None, fits: int | None
) -> None:
    assert memory.fitting(micro, peak, fixed, limit) == fits
    words = memory.shortage(memory.Load(64, micro, 2), peak, fixed, limit)
    assert words.startswith(f"global batch 64 in micro batches of {micro} on 2 ranks"), words
    assert ("peak 10 GiB" in words) is (peak == 10 * GIB)
    assert (f"--micro_batch_size {fits} in a new run, or auto" in words) is (fits is not None), words
    assert ("not even a micro batch of 1 would fit" in words) is (fits is None and micro > 1), words
    assert "--parallel.recompute auto" in words


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.11 GiB", 1.5 * GIB),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("std::bad_alloc", 0),
    ],
)
def test_what_was_asked_for_is_read_off_the_message(text: str, wanted: float) -> None:
    assert memory.wanted(text) == wanted


def test_room_is_what_the_tightest_group_has_left_for_each_rank(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    (group / "memory.max").write_text(str(600 << 20))
    (group / "memory.current").write_text(str(300 << 20))
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {100 << 20}\n")
    here = process(tmp_path, "0::/\n", f"31 30 0:27 / {group} rw - cgroup2 cgroup2 rw")
    assert memory.room(2, here).resident == 200 << 20
    (group / "memory.max").write_text("max")
    machine = memory.room(1, here).resident
    assert machine is not None and machine > 200 << 20


def test_a_process_weighs_itself() -> None:
    before = memory.peaks()
    kept = bytearray(64 << 20)
    for place in range(0, len(kept), 4096):
        kept[place] = 1
    assert memory.taken().resident > 64 << 20 and memory.peaks().address_space >= memory.taken().address_space
    assert memory.peaks().resident >= max(before.resident, memory.taken().resident - (1 << 20))


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """A control group with a limit, in which `killed` counts a kill, and below which `proc` is a process."""
    folder = tmp_path / "cgroup"
    folder.mkdir()
    (folder / "memory.max").write_text(str(100 << 20))
    process(tmp_path, "0::/\n", f"31 30 0:27 / {folder} rw - cgroup2 cgroup2 rw")
    killed(folder, 0)
    return folder


def killed(group: Path, times: int) -> None:
    (group / "memory.events").write_text(f"low 0\nhigh 0\nmax {times}\noom {times}\noom_kill {times}\n")


def died_of_memory(kills: memory.Kills) -> bool:
    """Whether a rank that was killed now is said to have been too large."""
    return verdict.who_died(Facts("a", Road.LAUNCHED, exits={0: -9}, killed_at=kills.limit())).recurs


def test_a_kill_of_long_ago_is_not_why_a_rank_dies_now(group: Path) -> None:
    """A notebook's kernel, say, in the same container, days before."""
    kills = memory.Kills(group.parent / "proc")
    killed(group, 1)
    kills.look()
    assert died_of_memory(kills)  # found just now: it may be the rank itself, which nobody has seen die yet
    kills.look()
    assert not died_of_memory(kills)
    killed(group, 2)
    assert died_of_memory(kills)


def test_while_all_ranks_live_kills_are_looked_for_again_and_again(
    steady: Any, group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counted(memory.Kills):
        after = 0
        """Looks since there was a kill."""

        def __init__(self) -> None:
            super().__init__(group.parent / "proc")

        def among(self, pids: Iterable[int]) -> None:
            """The group of these tests is none of it."""

        def look(self) -> None:
            super().look()
            Counted.after += "oom_kill 1" in (group / "memory.events").read_text()
            if Counted.after == 2:
                (group / "looked").touch()

    monkeypatch.setattr(memory, "Kills", Counted)
    monkeypatch.setattr(memory, "_LOOK_EVERY", 0.1)
    looked = f"for i in $(seq {PATIENCE}); do [ -e {group}/looked ] || sleep 1; done"
    kill = f"cp {group}/killed {group}/memory.events; {looked}"
    events = (group / "memory.events").read_text()
    (group / "killed").write_text(events.replace("oom_kill 0", "oom_kill 1"))
    record = Kept(steady).run("another-was-too-large", 2, [f"3 0 sh {kill}", "4 1 SIGKILL"])
    assert record["attempts"][0]["reason"] == "rank 1 died of SIGKILL" and record["state"] == "finished"
