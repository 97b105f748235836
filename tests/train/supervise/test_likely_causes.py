"""A run that failed for its machine names what is likely behind it, and the check that looks for that."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from train.commands.doctor import NAMES
from train.supervise import diagnose

RECORDED = {
    "DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2\nncclSystemError: System call (e.g. socket, malloc) "
    "or external library call failed or device error.": "train doctor --job",
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB": (
        "--only 'GPU memory'"
    ),
    "RuntimeError: GET was unable to find an engine to execute this computation": (
        "--only 'GPU memory,compute capability'"
    ),
    "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory. Please try to raise your shared memory limit.": "--only 'shared memory'",
    "RuntimeError: unable to allocate shared memory(shm) for file </torch_17_33_0>: No space left on device (28)": (
        "--only 'shared memory'"
    ),
    "RuntimeError: unable to mmap 128 bytes from file </torch_99_41_7>: Cannot allocate memory (12)": (
        "--only 'shared memory'"
    ),
    "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1f'": "--only 'shared memory'",
    "NVRM: Xid (PCI:0000:65:00): 62, pid=1234, name=python, 2027(21d8) 8500": "--only 'GPUs,GPUs stay",
    "rank 1 died of SIGBUS": "--only 'shared memory'",
    "RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed. ": "--only 'memory,",
    "the checkpoint of step 20 could not be saved: No space left on device": "--only 'room on disk,",
    "OSError: [Errno 24] Too many open files": "--only 'open files'",
    "RuntimeError: No CUDA GPUs are available": "--only 'GPUs,GPUs stay",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": "--only 'GPU memory errors",
    "AcceleratorError: CUDA error: CUDA unknown error - this may be due to an incorrectly set up environment": "GPUs",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver": (
        "--only 'driver'"
    ),
    "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version": "--only 'driver'",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": "compute capability",
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED": "LD_LIBRARY_PATH",
    "ImportError: libtorch_cuda.so: undefined symbol: ncclCommRegister": "LD_LIBRARY_PATH",
    "no progress for 301 s while training after step 17; stacks of the ranks: attempt-1/rank*.stack.txt": "--job",
    "out of memory: rank 0 was killed at the limit of 2 GiB of its container": "--only 'memory'",
    "RuntimeError: [gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.0.0.2]:4711": "--job",
    "OSError: [Errno 116] Stale file handle": "file locks",
}


@pytest.mark.parametrize("message", RECORDED, ids=lambda message: message[:50])
def test_a_recorded_message_leads_to_its_check(message: str) -> None:
    assert RECORDED[message] in diagnose.hint(message)


@pytest.mark.parametrize(
    "message",
    [
        "the loss is nan at step 3; lower --optim.lr", "ValueError: shapes (3,4) and (5,) not aligned", "", "KeyError",
        "FileNotFoundError: [Errno 2] No such file or directory: '/dev/shm/imagenet/train.bin'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/opt/torch_2_7_1/data.bin'", "KeyError: 'Xid'",
        "AcceleratorError: CUDA error: an illegal instruction was encountered",
    ],
)  # fmt: skip
def test_a_fault_of_the_program_leads_to_none(message: str) -> None:
    assert diagnose.hint(message) == ""


def test_every_check_that_is_named_exists(station: Any) -> None:
    named = {check for one in diagnose.TABLE for check in one.checks or ()}
    assert named <= set(NAMES)
    there = {finding["check"] for finding in json.loads(station("doctor", "--json").stdout)}
    assert there <= set(NAMES)


def test_only_the_checks_that_are_asked_for_are_shown(station: Any) -> None:
    done = station("doctor", "--json", "--only", "Shared Memory, driver")
    found = json.loads(done.stdout)
    assert [finding["check"] for finding in found] == ["shared memory", "driver"]
    plain = subprocess.run(
        [sys.executable, "-m", "train", "doctor", "--only", "memory", "--json"],
        capture_output=True, text=True, check=False, env=station.environment(), timeout=240,
    )  # fmt: skip
    assert [finding["check"] for finding in json.loads(plain.stdout)] == ["memory"]
    for arguments, words in (
        (("--only", "shm"), "unknown check 'shm'"), (("--only", ","), "unknown check ''"),
        (("--only", "memory", "--job"), "give one of them"),
    ):  # fmt: skip
        refused = station("doctor", *arguments)
        assert refused.returncode == 2 and words in refused.stderr


TASK = """
import os, signal, time
import numpy as np, torch
from torch import nn
from torch.utils.data import Dataset

{settings}

class Data(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        {item}
        return torch.zeros({size}), index % 2

def datasets(config): return Data(), None
def model(config): return nn.Linear({size}, 2)
def loss(model, batch):
    {loss}
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def task(station: Any, item: str = "pass", loss: str = "pass", size: int = 8) -> None:
    text = textwrap.dedent(TASK).format(settings="", item=item, loss=loss, size=size)
    (station.folder / "own.py").write_text(text)


def last(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.splitlines()[-1]


def test_a_data_worker_that_is_killed(station: Any) -> None:
    task(station, item="os.kill(os.getpid(), signal.SIGKILL) if index == 40 else None")
    done = station(
        "launch", "own.py", "--name", "one", "--data.workers", 1, "--max-restarts", 0, "--batch_size", 8, "--follow"
    )
    assert (
        done.returncode == 3
        and "a data worker that was killed" in last(done)
        and "--only 'memory,shared memory'" in last(done)
    )
    assert "train doctor --only" in station.record("one")["reason"]
    assert "train doctor --only" in station.ok("show", "one").stdout
