"""Variables are read as the libraries read them, and an error that follows from one alone is not repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.conftest import Station
from train import variables

pytestmark = pytest.mark.turns

_MEETS = """
import os, sys, tempfile
import torch.distributed as dist
for number, value in enumerate(sys.argv[1:]):
    os.environ["GLOO_SOCKET_IFNAME"] = value
    try:
        dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/{number}", rank=0, world_size=1)
        dist.destroy_process_group()
        print("takes")
    except RuntimeError:
        print("refuses")
"""
NAMES = ("lo", "lo,", "lo,lo", "l", "^docker", "=lo", "lo0", "^lo", " lo", "lo,nope", "nope", "lo,,lo", "")
"""Names of interfaces, in gloo's language and in others."""


def test_gloo_takes_what_is_said_that_it_takes() -> None:
    done = subprocess.run([sys.executable, "-c", _MEETS, *NAMES], capture_output=True, text=True, check=True)
    said = ["refuses" if variables.gloo_problem(name) else "takes" for name in NAMES]
    assert dict(zip(NAMES, said, strict=True)) == dict(zip(NAMES, done.stdout.split(), strict=True))


@pytest.mark.parametrize(
    ("wish", "fits"),
    [
        ("eth", True), ("=eth", False), ("=eth0", True), ("^eth", False), ("^docker,lo", True), ("^=eth0", False),
        ("ib,eth", True), ("=^eth0", False), ("eth0:5000", True), ("e", True), ("", True),
    ],
)  # fmt: skip
def test_how_nccl_reads_names_of_interfaces(wish: str, fits: bool) -> None:
    # NCCL user guide, environment variables, NCCL_SOCKET_IFNAME; src/misc/utils.cc
    assert variables.nccl_takes(wish, "eth0") is fits


def test_ranks_of_one_machine_meet_though_gloo_cannot_use_what_is_set(station: Station) -> None:
    done = station.ok(
        "launch", "digits", "--name", "a", "--nproc", 2, "--steps", 2, "--follow", env={"GLOO_SOCKET_IFNAME": "^lo"}
    )
    assert "warning: GLOO_SOCKET_IFNAME is ^lo; gloo takes whole names" in done.stderr
    assert [attempt["end"] for attempt in station.record("a")["attempts"]] == ["finished"]


def test_a_run_on_several_machines_is_refused_before_it_is_made(station: Station) -> None:
    where = ("--nnodes", 2, "--node-rank", 0, "--rendezvous", "127.0.0.1:29477", "--name", "a")
    done = station("launch", "digits", *where, env={"GLOO_SOCKET_IFNAME": "=lo"})
    assert done.returncode == 2 and "try: export GLOO_SOCKET_IFNAME=lo" in done.stderr
    done = station("launch", "digits", env={"TORCH_DISTRIBUTED_DEBUG": "loud"})
    assert done.returncode == 2 and "TORCH_DISTRIBUTED_DEBUG is loud" in done.stderr
    done = station("run", "digits", env={"TORCH_LOGS": "loud"})
    assert done.returncode == 2 and "torch cannot be imported: ValueError" in done.stderr
    done = station("run", "digits", env={"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"})
    assert done.returncode == 2 and "MASTER_PORT is not set" in done.stderr
    assert not station.runs.exists() or not list(station.runs.iterdir())


def test_a_script_that_dies_of_a_setting_is_not_started_again(station: Station, tmp_path: Path) -> None:
    script = tmp_path / "meets.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    done = station("launch", "--script", script, "--name", "a", "--follow", env={"GLOO_SOCKET_IFNAME": "nope"})
    assert done.returncode == 3 and len(station.record("a")["attempts"]) == 1
    assert "GLOO_SOCKET_IFNAME is nope" in station.record("a")["reason"]
