"""The proof on a GPU, without one: however a case ends the others are made, in flags that a run takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import __main__ as proof
from tests.gpu import apart, exact, harness, ranks, steps
from tests.gpu.harness import FAILED, FIGURE, UNCHECKED, Case, Row, Scale
from train.errors import Refused
from train.launcher import checks
from train.launcher.request import Request
from train.parallel import ddp

ROOT = Path(__file__).parents[2]
SLOWER, HIDDEN = "a loader slower than the device", "batches fetched while the device computes"


@pytest.fixture
def scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scale:
    """One large GPU, which nothing may be computed on."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 << 30, 80 << 30))
    return Scale("cuda", False, 1, tmp_path)


def start(folder: Path, *arguments: object, fault: str = "") -> subprocess.Popen[str]:
    command = ["-m", "tests.gpu", "--device", "cpu", "--folder", folder, *arguments]
    return subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=ROOT, env=os.environ | {"TRAIN_FAULT": fault},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def proved(folder: Path, *arguments: object, fault: str = "") -> tuple[int, dict[str, Any], str]:
    """The code, the rows by what they are about, and the table."""
    file = folder / "found.json"
    process = start(folder, "--json", file, *arguments, fault=fault)
    table, said = process.communicate(timeout=300)
    assert file.exists(), said
    found = json.loads(file.read_text())
    assert found["small"]  # or nothing on a CPU would ever end
    return process.returncode, {row["what"]: row for row in found["rows"]}, table


@pytest.mark.bench
@pytest.mark.parametrize("fault,found", [
    ("step:3:stop", "it hangs: no end after"), ("step:3:kill", "its process was ended by SIGKILL"),
])  # fmt: skip
def test_a_case_that_hangs_or_dies_has_failed_and_the_others_are_made(tmp_path: Path, fault: str, found: str) -> None:
    code, rows, table = proved(tmp_path, "--parts", "inputs", "--patience", 20, fault=fault)
    assert code == 1 and rows[SLOWER]["verdict"] == "FAILED" and rows[SLOWER]["found"].startswith(found), rows
    assert rows[HIDDEN]["verdict"] == "not checked"
    assert f"| inputs | {SLOWER} | {found}" in table
    assert not list(tmp_path.glob(".test-gpu-*"))


def test_a_driver_that_torch_cannot_use_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("here is one that it can")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Refused, match=r"^torch cannot use the GPU: .*[Dd]river[^\n]*$"):
        proof.machine("cuda")


def test_a_card_without_kernels_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, minor = "GeForce GT 710", 2 << 30, 5

        def __init__(self, index: int) -> None:
            self.major = 9 - 6 * index

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "sm_80 sm_90", raising=False)
    with pytest.raises(Refused, match=r"no kernels for GeForce GT 710.*to leave out GPU 1: CUDA_VISIBLE_DEVICES"):
        proof.machine("cuda")


@pytest.mark.parametrize("found,code", [
    ([], 0), ([Row("", "", UNCHECKED)], 0), ([Row("", "", UNCHECKED, late=True)], 3),
    ([Row("", "", UNCHECKED, late=True), Row("", "", FAILED)], 1),
])  # fmt: skip
def test_what_was_left_out_for_lack_of_time_has_a_code_of_its_own(found: list[Row], code: int) -> None:
    assert proof.Found({}, "cuda", False, rows=found).code() == code


@pytest.mark.parametrize("parts,gpus,minutes,ends", [
    (("steps", "inputs"), 1, None, (54, 72)), (("recovery", "speed", "ranks"), 1, None, (90, 264, 300)),
    (("recovery", "ranks"), 1, 7, (300, 420)), (("ranks",), 4, None, (240,)),
])  # fmt: skip
def test_each_part_has_its_share_of_the_time(
    parts: tuple[str, ...], gpus: int, minutes: float | None, ends: tuple[float, ...]
) -> None:
    found = proof.time_limits(parts, gpus, 100.0, minutes)
    assert [*found] == [*parts] and [*found.values()] == pytest.approx([100.0 + end for end in ends])


def test_a_part_whose_time_is_over_is_left_out_and_the_next_is_made(
    scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(Exception):
        pass

    def leave(code: int) -> None:
        raise Ended(code)

    cases = [("steps", Case("a", Row, ("a", "made"))), ("inputs", Case("b", Row, ("b", "made")))]
    for name in ("end_with_parent", "zygote"):
        monkeypatch.setattr(apart, name, lambda *_: None)
    for name in ("setsid", "dup2"):
        monkeypatch.setattr(apart.os, name, lambda *_: None)
    monkeypatch.setattr(apart, "cases", lambda *_: cases)
    monkeypatch.setattr(apart, "_leave", leave)
    here, there = Pipe(duplex=False)
    with pytest.raises(Ended, match="0"):
        apart.serve(there, scale, {"steps": time.monotonic() - 1, "inputs": time.monotonic() + 60}, 0)
    rows = [message for _ in range(4) if isinstance(message := here.recv(), Row)]
    assert [(row.what, row.verdict, row.late) for row in rows] == [("a", UNCHECKED, True), ("b", FIGURE, False)]


@pytest.mark.parametrize("error,verdict", [
    (torch.OutOfMemoryError("CUDA out of memory"), UNCHECKED), (RuntimeError("CUDA error"), FAILED),
])  # fmt: skip
def test_a_card_that_is_too_small_is_no_fault(error: Exception, verdict: str) -> None:
    def find() -> Row:
        raise error

    here, there = Pipe()
    assert not apart.is_found(there, "checkpoint", Case("what", find))
    row = here.recv()
    assert (row.part, row.what, row.verdict) == ("checkpoint", "what", verdict) and str(error) in row.found


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
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
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


def test_ddp_of_one_rank_is_that_of_a_run_of_several(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used, forward = list[object](), ddp.DDPModule.forward

    def seen(one: ddp.DDPModule, *arguments: Any) -> Any:
        used.append(one)
        return forward(one, *arguments)

    monkeypatch.setattr(ddp.DDPModule, "forward", seen)
    cases = {case.what.partition(": ")[2]: case for case in steps.part(Scale("cpu", True, 0, tmp_path))}
    (row,) = cases[f"gpt, bf16, {steps.SPREAD['ddp']}"].rows()
    assert row.verdict == UNCHECKED and len(used) > steps.LAST


@pytest.mark.parametrize("kind,tasks", [
    (exact, {"resnet", "gpt", "own"}), (ranks, {"gpt"}),
])  # fmt: skip
def test_runs_are_asked_for_as_a_gpu_has_them_in_flags_that_a_run_takes(
    scale: Scale, monkeypatch: pytest.MonkeyPatch, kind: Any, tasks: set[str]
) -> None:
    """Up to the device: what would be refused there would be found on a GPU alone."""
    asked: dict[tuple[Any, ...], dict[str, str]] = {}

    def note(_: Scale, task: str, *rest: Any, **__: Any) -> Any:
        flags = next(value for value in rest if isinstance(value, dict))
        texts = {name: str(value) for name, value in flags.items()}
        texts |= {"device": "cpu", "cpu_threads": "1", "steps": "20", "task.count": "64"}
        if texts["precision"] not in ("fp32", "bf16"):  # which a CPU has
            texts["precision"] = "bf16"
        asked[task, *sorted(texts.items())] = texts
        return Row("", "")

    for module in (exact, ranks):
        monkeypatch.setattr(module, "compare", note)
        monkeypatch.setattr(module, "ordered_on_one", lambda *_: Row("", ""))
    monkeypatch.setattr(ranks, "_collective", lambda *_: Row("", ""))
    monkeypatch.setattr(exact, "no_compiler", lambda _: "")
    for case in kind.part(Scale("cuda", False, 1 if kind is exact else 4, scale.folder)):
        list(case.rows())
    for (task, *_), texts in asked.items():
        file = harness.TASKS / f"{task}.py"
        checks.prepare(Request(str(file) if file.exists() else task, flags=texts), ranks=4 if kind is ranks else 1)
    assert {task for task, *_ in asked} == tasks
