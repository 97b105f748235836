"""`train doctor --job`: real ranks that meet, one that is missing, one that runs other code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from machines import by_name

from tests.ports import free_port
from train.doctor.finding import OK, PROBLEM, Finding, exit_code

ROOT = Path(__file__).parents[3]


def rank(number: int, size: int, port: int, package: Path = ROOT, seconds: int = 60) -> subprocess.Popen[str]:
    """One rank of a job that nobody has started, as srun or a hand would."""
    outer = {key: value for key, value in os.environ.items() if not key.startswith(("TRAIN_", "TORCHELASTIC"))}
    place = {"RANK": str(number), "WORLD_SIZE": str(size), "LOCAL_RANK": str(number)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "train", "doctor", "--job", "--json", "--timeout", str(seconds)],
        cwd=package, env=outer | place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def told(process: subprocess.Popen[str]) -> dict[str, Finding]:
    out, err = process.communicate(timeout=180)
    findings = [Finding(**each) for each in json.loads(out)]
    assert process.returncode == exit_code(findings), err
    return by_name(findings)


@pytest.mark.minutes
def test_ranks_that_are_well_and_one_that_runs_other_code(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "train", tmp_path / "train", ignore=ignore)
    with (tmp_path / "train" / "faults.py").open("a") as file:
        file.write("# a line that the others have not\n")
    port = free_port()
    ranks = [rank(0, 3, port), rank(1, 3, port), rank(2, 3, port, tmp_path)]
    findings = told(ranks[0])
    assert [process.wait(60) for process in ranks[1:]] == [0, 0]
    assert [process.communicate()[0] for process in ranks[1:]] == ["", ""]  # one speaks for all
    assert findings["same code"].verdict == PROBLEM
    assert "rank 2" in findings["same code"].seen
    assert "rank 0" not in findings["same code"].seen
    assert findings["clocks"].verdict == OK
    assert findings["all-reduce of 64 MiB"].verdict == OK
    assert "the right sum" in findings["all-reduce of 64 MiB"].seen


@pytest.mark.minutes
def test_ranks_that_come_are_not_missed_for_those_that_do_not() -> None:
    port = free_port()
    ranks = [rank(number, 5, port, seconds=20) for number in (0, 3, 4)]
    findings = told(ranks[0])
    assert findings["ranks"].seen.endswith("missing: rank 1, 2")
    assert [process.wait(60) for process in ranks[1:]] == [0, 0]


@pytest.mark.minutes
def test_a_rank_that_finds_nobody_says_where_it_looked() -> None:
    port = free_port()
    lonely = rank(1, 2, port, seconds=5)
    findings = told(lonely)
    assert findings["ranks"].verdict == PROBLEM
    assert f"cannot reach 127.0.0.1:{port}" in findings["ranks"].seen
    assert f"--rendezvous 127.0.0.1:{port}" in findings["ranks"].remedy


@pytest.mark.minutes
def test_under_torchrun_and_alone() -> None:
    outer = {key: value for key, value in os.environ.items() if not key.startswith("TRAIN_")} | {
        "PYTHONPATH": str(ROOT)
    }
    doctor = ["-m", "train", "doctor", "--job", "--json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command in ([*torchrun, *doctor], [sys.executable, *doctor, "--nproc", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=outer, timeout=180)
        assert done.returncode == 0, done.stderr
        findings = by_name([Finding(**each) for each in json.loads(done.stdout)])
        assert findings["ranks"].seen.startswith("2 on 1 host")
        assert findings["all-reduce of 1 MiB"].verdict == OK
