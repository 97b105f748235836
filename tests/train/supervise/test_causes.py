"""The table of causes: what each recorded message leads to, for a task and for a script alike."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
import torch.distributed as dist

from train import causes
from train.commands.doctor import NAMES
from train.supervise import last_words
from train.supervise.diagnose import failure_of, in_log

FULL = (
    "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 79.11 GiB of which 5.00 GiB is free. "
    "Process 25454 has 70.00 GiB memory in use. Process 77 has 4.11 GiB memory in use. Of the allocated memory {} "
    "is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and {} is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
ONCE = "Expected to mark a variable ready only once"
LISTEN = "The server socket has failed to listen on any local network address. port: 12355, useIpv6: false, code: -98"
GPU = "halve the micro batch (of a task: --micro_batch_size in a new run, or resume with"
HALVE = "halve the micro batch (of a task: --micro_batch_size in a new run), use fewer"

CERTAIN: list[tuple[BaseException, bool, str, str, str]] = [
    # the exception, whether it recurs, how the reason begins, what the remedy says, the check
    (MemoryError("Unable to allocate 7.11 PiB for an array"), True, "out of memory (MemoryError: Unable to", HALVE,
     "--only 'memory'"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), True,
     "out of memory (RuntimeError: DefaultCPUAllocator", HALVE, "--only 'memory'"),
    (OSError(12, "Cannot allocate memory"), True, "out of memory (OSError: [Errno 12]", HALVE, "--only 'memory'"),
    (RuntimeError("can't start new thread"), False, "RuntimeError: can't start new thread", "", ""),
    (BlockingIOError(11, "Resource temporarily unavailable"), False, "BlockingIOError: [Errno 11] Resource", "", ""),
    (torch.OutOfMemoryError(FULL.format("20.00 GiB", "60.00 GiB", "512.00 MiB")), True,
     "out of memory (OutOfMemoryError: CUDA out of", GPU, "--only 'GPU memory'"),
    (torch.OutOfMemoryError(FULL.format("20.00 GiB", "50.00 GiB", "9.50 GiB")), True, "out of memory (O", GPU, "GPU"),
    (torch.OutOfMemoryError(FULL.format("20.00 GiB", "50.00 GiB", "8.00 GiB")), False, "out of memory (O", GPU, "GPU"),
    (torch.OutOfMemoryError(FULL.format("20.00 GiB", "3.86 GiB", "0 bytes")), False, "out of memory (O", GPU, "GPU"),
    (RuntimeError("CUDA error: out of memory"), False, "out of memory (RuntimeError: CUDA error", GPU, "'GPU memory'"),
    (dist.DistNetworkError(f"{LISTEN}, name: EADDRINUSE, message: address in use"), False,
     "port 12355 is in use by another process", "do not set MASTER_PORT", ""),
    (RuntimeError(f"{ONCE}. This error is caused by one of the following reasons: 1) Use of {'x ' * 400}"), True,
     f"RuntimeError: {ONCE}: ddp got one gradient twice", "{'use_reentrant': False}", ""),
    (RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one. This error "
                  "indicates that your module has parameters that were not used in producing loss."), True,
     "ddp needs a gradient of every parameter in every step", "find_unused_parameters=True", ""),
    (ValueError("Expected more than 1 value per channel when training, got input size torch.Size([1, 16])"), True,
     "ValueError: Expected more than 1 value per channel when training: BatchNorm cannot", "--data.drop_last true", ""),
    (RuntimeError("put_ does not have a deterministic implementation, but you set 'torch.use_deterministic"), True,
     "RuntimeError: put_ has no deterministic implementation on this device", "--deterministic false", ""),
    (RuntimeError("[enforce fail at gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find address for: ib7"),
     True, "GLOO_SOCKET_IFNAME is not set: gloo takes whole names", "try: export GLOO_SOCKET_IFNAME=",
     "--only 'GLOO_SOCKET_IFNAME'"),
    (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:77, internal error: Bootstrap : no socket interface"),
     True, "NCCL_SOCKET_IFNAME is not set: NCCL finds no such", "try: export NCCL_SOCKET_IFNAME==",
     "--only 'NCCL_SOCKET_IFNAME'"),
    (RuntimeError("makeDeviceForInterface(): unsupported gloo device"), True,
     "GLOO_DEVICE_TRANSPORT is not set: this torch has no such transport (RuntimeError: make", "unset it", ""),
    (RuntimeError("Unrecognized CachingAllocator option: max_splitt"), True,
     "PYTORCH_CUDA_ALLOC_CONF is not set: torch knows no such option (RuntimeError: Unrecognized", "", ""),
    (ValueError("Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR "
                "expected, but not set"), True, "MASTER_ADDR is not set: torchrun sets it (ValueError: Error", "", ""),
    (RuntimeError("Invalid value for environment variable: TORCH_NCCL_ASYNC"), True,
     "TORCH_NCCL_ASYNC is not set: torch cannot read that (RuntimeError: Invalid", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("error", "recurs", "reason", "remedy", "check"), CERTAIN, ids=lambda value: str(value)[:40])
def test_a_certain_cause_is_told_alike_of_a_task_and_of_a_script(
    error: BaseException, recurs: bool, reason: str, remedy: str, check: str
) -> None:
    task = failure_of(error, None)
    assert (task["recurs"], task["is_own"]) == (recurs, False), task
    assert task["reason"].startswith(reason) and remedy in task["reason"] and len(task["reason"]) < 600
    hint = causes.hint(task["reason"])
    assert check in hint if check else hint == ""
    log = f"Traceback (most recent call last):\n  x\n[rank1]: {type(error).__name__}: {error}\nclosing\n"
    script = in_log(log)
    assert script is not None and (script.reason, script.recurs) == (task["reason"], recurs)
    above = in_log(log + "step\n" * 20, last_words.raised(log))
    assert above == script and in_log(log + "step\n" * 20) is None


OF_SCRIPTS = {
    "train.py: error: the following arguments are required: --local_rank": 'read int(os.environ["LOCAL_RANK"])',
    "ImportError: attempted relative import with no known parent package": "train launch --module PACKAGE.NAME",
    "RuntimeError: An attempt has been made to start a new process before the current": "if __name__ == '__main__':",
}


@pytest.mark.parametrize("message", OF_SCRIPTS)
def test_a_fault_of_a_script_is_followed_by_its_remedy(message: str) -> None:
    found = in_log(message)
    assert found is not None and found.recurs
    assert found.reason.startswith(f"{message}; ") and found.reason.endswith(OF_SCRIPTS[message])
    assert causes.hint(found.reason) == ""


NOTHING = {
    "an exception": "Traceback (most recent call last):\n  File 'a.py', line 1\nValueError: bad shape",
    "a peer that is gone": "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer",
    "a device": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "memory long ago": "MemoryError, trying half of it\n" + "step\n" * 20,
    "own words": "ValueError: cannot allocate memory for a box; can't start new thread",
    "a library": "ImportError: /lib/libgomp.so.1: cannot allocate memory in static TLS block",
    "nothing": "",
}


@pytest.mark.parametrize("text", NOTHING.values(), ids=NOTHING)
def test_a_log_says_nothing_certain_about_most_ends(text: str) -> None:
    assert in_log(text) is None


LIKELY = {
    "DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2\nncclSystemError: System call (e.g. socket, malloc) "
    "or external library call failed or device error.": "train doctor --job",
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


@pytest.mark.parametrize("message", LIKELY, ids=lambda message: message[:50])
def test_a_recorded_message_leads_to_its_check(message: str) -> None:
    assert LIKELY[message] in causes.hint(message)


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
    assert causes.hint(message) == ""


def test_every_check_that_is_named_exists(station: Any) -> None:
    named = {check for one in causes.TABLE for check in one.checks or ()}
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
