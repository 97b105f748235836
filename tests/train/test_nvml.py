"""The GPUs of this machine: which of them a process sees, and which of the processes there is a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from train import gpus
from train.gpus import Card

OLD = Card("NVIDIA Quadro K620", (5, 0), "GPU-1f0e2d3c-aaaa", number=0)
NEW = Card("NVIDIA B200", (10, 0), "GPU-8932f937-bbbb", number=1)
OTHER = Card("NVIDIA H100", (9, 0), "GPU-89aaf937-cccc", number=2)
ALL = [OLD, NEW, OTHER]


@pytest.mark.parametrize(
    ("visible", "order", "found"),
    [
        (None, None, ALL),
        ("", None, ALL),
        ("1", None, [NEW]),
        (" 2, 0", "PCI_BUS_ID", [OTHER, OLD]),
        ("1", "FASTEST_FIRST", ALL),  # whose number that is, NVML does not say
        ("GPU-8932f937-bbbb", "FASTEST_FIRST", [NEW]),
        ("GPU-89aaf937-cccc,GPU-1f0e2d3c-aaaa", None, [OTHER, OLD]),
        ("MIG-5c89852c-d268-c3f3", None, ALL),
        ("MIG-GPU-8932f937-bbbb/1/0", None, ALL),
        ("-1", None, ALL),
    ],
)
def test_only_the_cards_that_a_run_may_see_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, order: str | None, found: list[Card]
) -> None:
    monkeypatch.setattr(gpus, "cards", lambda: ALL)
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert gpus.seen_here() == found


@pytest.mark.parametrize(
    ("visible", "order", "count", "found"),
    [
        (None, None, 2, [OLD, NEW]),
        (None, "FASTEST_FIRST", 1, ALL),  # the first one is any of them
        ("2,1", None, 1, [OTHER]),
        ("GPU-89aaf937-cccc,GPU-8932f937-bbbb", "FASTEST_FIRST", 2, [OTHER, NEW]),
        ("MIG-5c89852c-d268-c3f3", None, 1, ALL),
        ("GPU-89aaf937-cccc,GPU-8932", None, 2, [OTHER, NEW]),  # CUDA takes the beginning of a UUID, too
        (None, None, 4, []),
        ("0,MIG-5c89852c-d268-c3f3", None, 1, ALL),
    ],
)
def test_the_cards_of_the_ranks_are_the_first_ones_or_all_that_they_could_be(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, order: str | None, count: int, found: list[Card]
) -> None:
    monkeypatch.setattr(gpus, "cards", lambda: ALL)
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert gpus.of_ranks(count) == found


@pytest.mark.skipif(not gpus.sees_host_ids(), reason="process ids here are not the host's")
def test_a_rank_in_a_container_is_found_among_the_hosts_processes(tmp_path: Path) -> None:
    """In a namespace of its own, where it is number 1; beside it one of another run with the same number."""
    code = "import os, sys; lock = open(sys.argv[1]); print(os.getpid(), flush=True); sys.stdin.read()"
    started = []
    for name in ("one", "other"):
        (tmp_path / name).touch()
        command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable]
        whole = [*command, "-c", code, tmp_path / name]
        started.append(subprocess.Popen(whole, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        seen = [process.stdout.readline() for process in started if process.stdout]
        if "" in seen:
            pytest.skip("no namespace can be made here")
        assert seen == ["1\n", "1\n"]
        hosts = [psutil.Process(process.pid).children()[0].pid for process in started]
        processes = dict.fromkeys([os.getpid(), *hosts], 1.0)
        assert gpus.process_of(1, tmp_path / "one", processes) == hosts[0]
        assert gpus.process_of(1, tmp_path / "other", processes) == hosts[1]
        assert gpus.process_of(2, tmp_path / "one", processes) is None
        with (tmp_path / "one").open():
            assert gpus.process_of(os.getpid(), tmp_path / "one", processes) == os.getpid()
    finally:
        for process in started:
            process.communicate("")
