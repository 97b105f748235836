"""What the proof on a GPU says of what it has found, with a device that is made up: that there is one is not needed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import socket
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import recovery as bench
from tests.gpu import __main__ as proof
from tests.gpu import apart, compiler, dp, exact, harness, ranks, recovery, speed, steps, waits
from tests.gpu.harness import FAILED, OK, UNCHECKED, Case, Row, Scale, Stretch
from train.checkpoint.buffers import Buffers, SnapshotMemory
from train.launcher import checks
from train.launcher.request import Request


@pytest.fixture
def scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scale:
    """One large GPU, which nothing may be computed on."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 << 30, 80 << 30))
    return Scale("cuda", False, 1, tmp_path)


def rows(part: Iterator[Case]) -> dict[str, Row]:
    return {row.what: row for case in part for row in case.rows()}


@pytest.mark.parametrize("gpus,minutes", [(1, proof.MINUTES), (2, proof.MINUTES + proof.MINUTES_FOR_RANKS)])
def test_the_parts_fit_into_the_minutes_with_the_start_of_their_processes(gpus: int, minutes: float) -> None:
    about = {name: seconds for name, (_, _, seconds) in proof.PARTS.items()}
    if gpus == 1:
        about["ranks"] = 0
    made = proof.rounds(list(proof.PARTS), False, gpus)
    assert sorted(name for one in made for parts in one for name in parts) == sorted(proof.PARTS)
    seconds = sum(max(apart.START + sum(about[name] for name in parts) for parts in one) for one in made)
    assert seconds + apart.START <= 60 * minutes


def test_ranks_have_a_process_of_their_own_where_there_are_gpus_for_them() -> None:
    assert proof.rounds(["exact", "ranks", "compiled"], False, 2) == [[["exact"], ["compiled"]], [["ranks"]]]
    assert proof.rounds(["exact", "ranks", "speed"], False, 1) == [[["exact"]], [["ranks", "speed"]]]
    assert proof.rounds(["ranks"], False, 1) == [[["ranks"]]]
    assert proof.rounds(["speed", "rates"], True, 0) == [[["speed", "rates"]]]


@pytest.mark.parametrize("name", proof.PARTS)
def test_the_cases_of_a_part_take_the_time_of_the_part(scale: Scale, name: str) -> None:
    scale = dataclasses.replace(scale, gpus=4 if name == "ranks" else 1)
    about = proof.PARTS[name][2]
    seconds = sum(case.seconds for case in proof.cases(name, scale))
    assert 0.8 * about <= seconds + apart.START <= about + apart.START


@pytest.mark.parametrize("found,code", [
    ([], 0), ([{"verdict": "not checked", "late": False}], 0), ([{"verdict": "not checked", "late": True}], 3),
    ([{"verdict": "not checked", "late": True}, {"verdict": "FAILED", "late": False}], 1),
])  # fmt: skip
def test_what_was_left_out_for_lack_of_time_has_a_code_of_its_own(found: list[dict[str, Any]], code: int) -> None:
    assert proof.Found({}, "cuda", False, found).code() == code


def test_every_second_time_ours_goes_first(scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(speed, "_ours", lambda *_: made.append("ours") or (1.0, 0))
    monkeypatch.setattr(speed, "_measured", lambda *_: made.append("theirs") or (1.0, 0))
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 1e12)
    monkeypatch.setattr(speed, "operations", lambda *_: 1e12)
    speed.Beside(scale, "gpt", {"batch_size": 4}).row("gpt", turns=2)
    assert made == ["theirs", "ours", "ours", "theirs"]


class Rising:
    """Events of a device whose clock rises from a third of its height."""

    asked = 0

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        Rising.asked += 1

    def elapsed_time(self, _: Rising) -> float:
        return 50.0 * max(1.0, 3.0 - Rising.asked / 2)


def test_a_clock_that_rises_is_read_at_its_height(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Rising())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    assert waits._cycles_a_second() == pytest.approx(waits._CYCLES / 0.05)


@pytest.mark.parametrize("theirs,ours,verdict,words", [
    (1.0, 1.0, OK, "1.000 of a hand-written loop"),
    (RuntimeError("no compiler"), 1.0, UNCHECKED, "the hand-written loop fails: RuntimeError: no compiler"),
    (1.0, RuntimeError("oh"), FAILED, "ours, where the hand-written loop trains: RuntimeError: oh"),
])  # fmt: skip
def test_what_the_hand_written_loop_can_do_is_ours_to_do(
    scale: Scale, monkeypatch: pytest.MonkeyPatch, theirs: Any, ours: Any, verdict: str, words: str
) -> None:
    def told(value: Any) -> tuple[float, int]:
        if isinstance(value, Exception):
            raise value
        return value, 0

    monkeypatch.setattr(speed, "_ours", lambda *_: told(ours))
    monkeypatch.setattr(speed, "_measured", lambda *_: told(theirs))
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 1e12)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 30, 8 << 30))
    row = speed.Beside(scale, "gpt", {"batch_size": 4}).row("gpt", turns=1)
    assert row.verdict == verdict and words in row.found


def test_a_full_device_is_a_row_that_was_not_checked(scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(_: Scale, task: str, flags: dict[str, Any], *__: Any, **___: Any) -> tuple[float, int]:
        if (task, flags["precision"]) == ("resnet", "fp32"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1.0, 1

    monkeypatch.setattr(speed, "_ours", ours)
    found = rows(speed.precisions(scale))
    assert found["resnet, fp32"].verdict == UNCHECKED and "out of memory" in found["resnet, fp32"].found
    assert "times fp32" not in found["resnet, bf16"].found and "1.00 times fp32" in found["gpt, bf16"].found


def test_time_is_not_taken_while_memory_for_checkpoints_is_found(tmp_path: Path) -> None:
    is_there = threading.Event()
    thread = threading.Thread(target=is_there.wait, name="reserve")
    thread.start()
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with Stretch(Scale("cpu", True, 0, tmp_path), 3, least=2) as stretch:
        for step in range(1, 12):
            optimizer.step()
            if step == 5:
                is_there.set()
                thread.join()
    assert (stretch.begun, stretch.steps, stretch.is_over, stretch.counted) == (6, 3, True, 11)


class Held:
    """An event behind a sleep of the device."""

    is_done = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.is_done


@pytest.mark.parametrize("is_done,is_pinned,problem", [
    (False, True, ""), (True, True, "the host did not come through step 12"), (False, False, "not in pinned memory"),
])  # fmt: skip
def test_a_host_that_waits_for_a_held_device_and_a_copy_that_waits_are_seen(
    monkeypatch: pytest.MonkeyPatch, is_done: bool, is_pinned: bool, problem: str
) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: time.sleep(0.0))
    monkeypatch.setattr(torch.cuda, "Event", Held)
    monkeypatch.setattr(Held, "is_done", is_done)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_pinned)
    monkeypatch.setattr(steps, "_PREPARED", lambda batch, *_: batch)
    watch = steps.Watch(is_gpu=True)
    for _ in range(steps.LAST):
        watch.prepared([torch.zeros(1), 3], 0)
        watch.after_step()
    assert modes == ["error", "default"]
    assert problem in watch.problem() if problem else not watch.problem()


@pytest.mark.parametrize("gpus,has_hsdp", [(2, False), (3, False), (4, True)])
def test_hsdp_of_less_than_four_ranks_is_not_said_to_be_ok(
    scale: Scale, monkeypatch: pytest.MonkeyPatch, gpus: int, has_hsdp: bool
) -> None:
    monkeypatch.setattr(ranks, "compare", lambda _, __, what, *___: Row(what, "equal", OK))
    for name in ("_collective", "_ordered_on_one", "_scaling"):
        monkeypatch.setattr(ranks, name, lambda *_, name=name: Row(name, ""))
    monkeypatch.setattr(dp, "types", lambda _: Row("dp", ""))
    found = rows(ranks.part(Scale("cuda", False, gpus, scale.folder)))
    assert found[f"fsdp, {gpus} ranks"].verdict == OK
    assert (f"hsdp, {gpus} ranks" in found) == has_hsdp and ("hsdp" in found) != has_hsdp


@pytest.mark.parametrize("kind", ["exact", "compiled", "steps", "speed", "precisions"])
def test_runs_are_asked_for_as_a_gpu_has_them_in_flags_that_a_run_takes(
    scale: Scale, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Up to the device: what would be refused there would be found on a GPU alone."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def note(_: Scale, task: str, *rest: Any, **__: Any) -> Any:
        asked.append((task, next(value for value in rest if isinstance(value, dict))))
        return (1.0, 1) if kind in ("speed", "precisions") else Row("", "")

    monkeypatch.setattr(exact, "compare", note)
    monkeypatch.setattr(steps, "_unwatched", note)
    monkeypatch.setattr(steps, "_on_cpu", lambda _: Row("", ""))
    monkeypatch.setattr(speed, "_ours", note)
    monkeypatch.setattr(speed, "_measured", lambda *_: (1.0, 1))
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 1e12)
    monkeypatch.setattr(speed, "operations", lambda *_: 1e12)
    monkeypatch.setattr(compiler, "missing", lambda _: "")
    parts = {
        "exact": exact.part,
        "compiled": exact.compiled,
        "steps": steps.part,
        "speed": speed.part,
        "precisions": speed.precisions,
    }
    rows(parts[kind](scale))
    seen = set()
    for task, flags in asked:
        texts = {name: str(value) for name, value in flags.items()}
        texts |= {"device": "cpu", "cpu_threads": "1", "steps": "20", "task.count": "64"}
        if texts["precision"] not in ("fp32", "bf16"):  # which a CPU has
            texts["precision"] = "bf16"
        key = (task, *sorted(texts.items()))
        if key not in seen:
            seen.add(key)
            checks.prepare(Request(str(harness.TASKS / f"{task}.py"), texts))
    assert {"gpt"} | ({"resnet"} if kind != "compiled" else set()) <= {task for task, _ in asked}


class Unborn:
    """Plain torchrun that lives, and whose ranks never come to a step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._plain = folder, recovery.Plain.__new__(recovery.Plain)
        self._plain.folder = folder
        (folder / "log").write_text("starting\nRuntimeError: no NCCL\n")

    def step(self) -> int:
        return self._plain.step()

    def ranks(self) -> list[int]:
        return []

    def lives(self) -> bool:
        return True

    def end(self) -> None:
        pass

    def digest(self) -> str:
        return ""

    def twice(self) -> int:
        return self._plain.twice()


def test_torchrun_that_never_makes_a_step_is_not_said_to_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PATIENCE", 0.3)
    way = Unborn(tmp_path)
    began = time.monotonic()
    found = bench.live(way, [3], random.Random(0), patience=0.01)
    assert time.monotonic() - began >= 0.3 and (found.recoveries, found.hangs, found.twice) == ([], 1, 0)
    assert recovery._without(way._plain) == "plain torchrun made no step: RuntimeError: no NCCL"


def test_a_rank_is_killed_once_memory_has_a_state() -> None:
    """Read from outside, as the memory of another process, which has none that other tests may have left here."""
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            for entry in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(OSError):
                    if "memfd:train-snapshot-" in str(entry.readlink()):
                        os.close(int(entry.name))
            memory = SnapshotMemory()
            buffers = Buffers(memory.address)
            there.sendall(b".")
            there.recv(1)
            buffers.reserve(1 << 16)
            slot = buffers.begin()
            buffers.seal(slot, buffers.map()[slot], 7, b"plain", 8)
            there.sendall(b".")
            there.recv(1)
        finally:
            os._exit(0)
    kept = recovery.Kept.__new__(recovery.Kept)
    kept.process = types.SimpleNamespace(pid=child)  # type: ignore[assignment]
    try:
        here.settimeout(60)
        assert here.recv(1) == b"." and kept._kept() == 0
        here.sendall(b".")
        assert here.recv(1) == b"." and kept._kept() == 7
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        here.close()
        there.close()
