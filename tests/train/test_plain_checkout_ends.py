"""However a case of the proof on a GPU ends, the others are made and the table is printed."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.gpu import __main__ as proof
from tests.gpu import apart, compiler, ranks, steps
from tests.gpu.harness import UNCHECKED, Case, Row, Scale, made
from train.errors import Refused
from train.parallel import ddp

ROOT = Path(__file__).parents[2]
SLOWER, HIDDEN, LOADER = (
    "a loader slower than the device",
    "batches fetched while the device computes",
    "loader to device",
)


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
    code, rows, table = proved(tmp_path, "--parts", "inputs,rates", "--patience", 20, fault=fault)
    assert code == 1 and rows[SLOWER]["verdict"] == "FAILED" and rows[SLOWER]["found"].startswith(found), rows
    assert rows[LOADER]["verdict"] == "figure" and rows[HIDDEN]["verdict"] == "not checked"
    assert rows["matrix products, bf16"]["verdict"] == "figure"
    assert f"| inputs | {SLOWER} | {found}" in table
    assert not list(tmp_path.glob(".test-gpu-*"))


@pytest.mark.bench
def test_a_case_that_the_time_ends_has_not_failed(tmp_path: Path) -> None:
    code, rows, table = proved(tmp_path, "--parts", "steps,rates", "--minutes", 0.7, fault="step:3:stop")
    assert code == proof.LEFT_OUT and not [row for row in rows.values() if row["verdict"] == "FAILED"]
    assert "| rates | left out | no time was left |" in table
    assert "when the time was over" in table and "There was not the time for all" in table


@pytest.mark.bench
def test_what_does_not_fit_by_the_pace_of_this_machine_is_named(tmp_path: Path) -> None:
    pace, found = apart.Pace(), list[dict[str, Any]]()
    pace.add(1.0, 1000.0)
    turn = apart.Turn(["rates"], "cpu", True, str(tmp_path), time.monotonic() + 300)
    apart.make(turn, pace, found.append)
    assert [row["what"] for row in found] == ["matrix products, fp32", "matrix products, bf16"]
    assert all(row["late"] and row["found"].startswith("about 1500 s, and ") for row in found)


@pytest.mark.bench
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_ctrl_c_there_is_a_table_and_no_process(tmp_path: Path, number: int) -> None:
    file = tmp_path / "found.json"
    process = start(tmp_path, "--parts", "rates,exact", "--json", file)
    assert process.stderr is not None
    for line in process.stderr:
        if "digits, fp32" in line:
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    os.kill(process.pid, number)
    table, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said, said
    assert "| exact | the rest, and all parts after it | interrupted |  | not checked |" in table
    assert json.loads(file.read_text())["rows"][-1]["found"] == "interrupted"
    assert not psutil.wait_procs(family, timeout=30)[1] and not list(tmp_path.glob(".test-gpu-*"))


@pytest.mark.bench
def test_processes_side_by_side_end_with_ctrl_c_and_each_row_is_written_at_once(tmp_path: Path) -> None:
    file, is_over = tmp_path / "found.json", threading.Event()
    found = proof.Found({"gpus": []}, "cpu", True, file=str(file))
    ends = time.monotonic() + 300

    def turn(name: str) -> apart.Turn:
        return apart.Turn([name], "cpu", True, str(tmp_path), ends, 200.0, is_over=is_over)

    def end() -> None:
        while not file.exists() or not json.loads(file.read_text())["rows"]:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    works = [functools.partial(apart.make, turn(name), apart.Pace(), found.add) for name in ("exact", "rates")]
    with pytest.raises(KeyboardInterrupt):
        proof._side_by_side([*works, end], is_over)
    assert [row["part"] for row in found.rows] == sorted(
        (row["part"] for row in found.rows), key=list(proof.PARTS).index
    )
    assert found.rows[-1]["part"] == "exact" and found.rows[-1]["found"] == "interrupted"
    assert json.loads(file.read_text())["rows"] == found.rows


@pytest.mark.bench
def test_a_full_disk_takes_the_file_and_not_the_table(tmp_path: Path) -> None:
    process = start(tmp_path, "--parts", "rates", "--json", "/dev/full")
    table, said = process.communicate(timeout=120)
    assert process.returncode == 0 and "| rates | matrix products, bf16 |" in table
    assert "tests.gpu: /dev/full could not be written: No space left on device" in said
    assert not Path("/dev/full").is_file()


@pytest.mark.bench
@pytest.mark.parametrize("arguments", [("--json", "/nowhere/found.json"), ("--folder", "/proc")])
def test_where_nothing_can_be_written_it_is_said_before_anything_is_made(tmp_path: Path, arguments: Any) -> None:
    process = start(tmp_path, *arguments)
    table, said = process.communicate(timeout=120)
    assert process.returncode == 2 and not table and said.count("\n") == 1 and arguments[1] in said, said


def test_a_driver_that_torch_cannot_use_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("here is one that it can")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Refused, match=r"^torch cannot use the GPU: .*[Dd]river[^\n]*$"):
        proof._machine("cuda")


def test_a_card_without_kernels_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, minor = "GeForce GT 710", 2 << 30, 5

        def __init__(self, index: int) -> None:
            self.major = 9 - 6 * index

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "sm_80 sm_90", raising=False)
    with pytest.raises(Refused, match=r"no kernels for GeForce GT 710.*to leave out GPU 1: CUDA_VISIBLE_DEVICES"):
        proof._machine("cuda")


def test_without_a_compiler_or_headers_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert compiler._no_library() == ""
    with monkeypatch.context() as other:
        other.setattr(compiler.sysconfig, "get_paths", lambda **_: {"include": str(tmp_path)})
        assert compiler._no_library().startswith(f"torch.compile needs Python.h, which is not in {tmp_path}")
    with monkeypatch.context() as other:
        other.setenv("CC", "false")
        assert "torch.compile needs a C compiler that works; false: it ended with 1" in compiler._no_library()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler._no_library().startswith("torch.compile needs a C compiler, and here is none")


@pytest.mark.parametrize("error,verdict", [
    (torch.OutOfMemoryError("CUDA out of memory"), UNCHECKED), (RuntimeError("CUDA error"), "FAILED"),
])  # fmt: skip
def test_a_card_that_is_too_small_is_no_fault(error: Exception, verdict: str) -> None:
    def find() -> Row:
        raise error

    here, there = Pipe()
    assert not apart._is_found(there, "checkpoint", Case("what", 1.0, find))
    row = here.recv()[1]
    assert (row["what"], row["verdict"]) == ("what", verdict) and str(error) in row["found"]


def test_ordered_sums_on_cards_of_two_kinds_are_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", ["H100", "T4"].__getitem__)
    row = ranks._ordered_on_one(Scale("cuda", False, 2, tmp_path), {}, 2)
    assert row.verdict == UNCHECKED and "here are H100 and T4" in row.found


def test_steps_are_watched_with_all_that_can_lie_in_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DDP is that of a run of several ranks, and flags are taken by a run."""
    scale, used = Scale("cpu", True, 0, tmp_path), list[object]()
    cases = {case.what.partition(": ")[2]: case for case in steps.part(scale)}
    assert {rest for _, _, all_ in steps.CASES for rest in all_} == {
        steps.WORKERS, steps.MICRO, steps.DDP, steps.MEMORY,
    }  # fmt: skip
    assert {precision for _, precision, _ in steps.CASES} == {"fp32", "bf16", "fp16"}
    forward = ddp._Parallel.forward

    def seen(one: ddp._Parallel, *arguments: Any) -> Any:
        used.append(one)
        return forward(one, *arguments)

    monkeypatch.setattr(ddp._Parallel, "forward", seen)
    (row,) = cases[f"gpt, bf16, {steps.DDP}"].rows()
    assert isinstance(row, Row) and row.verdict == UNCHECKED and len(used) > steps.LAST
    task, _, flags = cases[f"gpt, bf16, {steps.MICRO}"].given[1:4]
    record = made(scale, task, flags).read()
    assert record["state"] and flags["micro_batch_size"] * 2 == flags["batch_size"] and flags["clip_grad_norm"]
