"""What the last words of a process say about its death, and whether it would come again."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from train.supervise.diagnose import failure_of, of_log

OWN = {
    "an exception": "raise ValueError('bad shape')",
    "one of a distributed program": 'print(\'[rank1]: Traceback (most recent call last):\\n[rank1]:   File "a.py"\\n'
    "[rank1]: KeyError: 3'); raise SystemExit(1)",
    "one that others led to": "try: {}['a']\nexcept KeyError: raise ValueError('no a')",
    "a file that is not there": "open('/nowhere/at/all')",
    "what the end of libraries follows": "import atexit\natexit.register(print, 'closing\\n' * 9)\nassert 1 == 2",
    "a message of several lines": "raise RuntimeError('sizes differ:\\n  a 3\\n  b 4')",
    "a group": "raise ExceptionGroup('both', [ValueError('a'), KeyError('b')])",
    "a syntax error": "print(",
    "a bad argument": "import argparse; argparse.ArgumentParser().parse_args(['--lr'])",
    "an exception after one that was survived": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\n"
    "t.start(); t.join()\nraise ValueError('own')",
    "memory that is refused": "bytearray(10**15)",
    "an index out of range on a device": "raise RuntimeError('CUDA error: device-side assert triggered')",
    "the same in the words of torch 2.8 and later": "class AcceleratorError(RuntimeError): pass\n"
    "raise AcceleratorError('CUDA error: device-side assert triggered')",
    "a card without kernels": "raise RuntimeError('CUDA error: no kernel image is available for execution')",
    "a compiled kernel for another card": "raise RuntimeError('Triton Error [CUDA]: device kernel image is invalid')",
    "one of a compiler too new for the driver": "raise RuntimeError('CUDA error: the provided PTX was compiled with an "
    "unsupported toolchain.')",
    "what cuDNN cannot do": "raise RuntimeError('cuDNN error: CUDNN_STATUS_NOT_SUPPORTED')",
}
PASSING = {
    "a peer that is gone": "raise RuntimeError('[gloo/transport/tcp/pair.cc] Connection closed by peer')",
    "a device": "raise RuntimeError('CUDA error: an illegal memory access was encountered')",
    "a device, when Triton starts a kernel": "raise RuntimeError('Triton Error [CUDA]: uncorrectable ECC error "
    "encountered')",
    "a device, when torch's compiler starts one": "raise RuntimeError('CUDA driver error: unspecified launch failure')",
    "cuDNN, of a device": "raise RuntimeError('cuDNN error: CUDNN_STATUS_EXECUTION_FAILED')",
    "GPUs that are gone": "raise RuntimeError('No CUDA GPUs are available')",
    "a driver that does not start": "raise RuntimeError('Unexpected error from cudaGetDeviceCount(). Error 802')",
    "a collective": "class DistBackendError(RuntimeError): pass\n"
    "raise DistBackendError('NCCL error: unhandled system error')",
    "a refused connection": "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)",
    "no room for a thread": 'raise RuntimeError("can\'t start new thread")',
    "no room for a process": "import errno, os\nraise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))",
    "what came from a peer that is gone": "try: raise ConnectionResetError('peer')\n"
    "except OSError as error: raise ValueError('lost a rank') from error",
    "a disk": "import errno, os\nraise OSError(errno.EIO, os.strerror(errno.EIO))",
}
UNCLEAR = {
    "a code without a word": "raise SystemExit(7)",
    "a thread's exception": "import threading, os\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()\n"
    "raise SystemExit(7)",
    "an exception long ago": "import traceback\ntry: 1 / 0\nexcept ArithmeticError: traceback.print_exc()\n"
    "for step in range(99): print('step', step)\nraise SystemExit(7)",
}


def last_words(program: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout, done.returncode


@pytest.mark.parametrize("program", OWN.values(), ids=OWN)
def test_what_would_come_again(program: str) -> None:
    cause = of_log(*last_words(program))
    assert cause is not None and cause.recurs, cause


@pytest.mark.parametrize("program", PASSING.values(), ids=PASSING)
def test_what_was_passing(program: str) -> None:
    cause = of_log(*last_words(program))
    assert cause is not None and not cause.recurs, cause


@pytest.mark.parametrize("program", UNCLEAR.values(), ids=UNCLEAR)
def test_what_nothing_certain_is_known_of(program: str) -> None:
    text, code = last_words(program)
    assert code == 7 and of_log(text, code) is None


def test_memory_that_is_refused_is_called_so_with_its_limit_and_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "bytearray(10**10)"], stderr=subprocess.PIPE, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)),
    )  # fmt: skip
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**42, before[1]))  # the agent has the limits that its ranks inherit
    try:
        cause = of_log(done.stderr, done.returncode)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert cause is not None and cause.recurs
    for words in ("out of memory", "MemoryError", "4 TiB", "ulimit -v", "halve the micro batch"):
        assert words in cause.reason


def test_memory_and_busy_machines_of_a_task_are_told_alike() -> None:
    refused = failure_of(MemoryError("Unable to allocate 7.11 PiB for an array"), None)
    assert refused["recurs"] and "out of memory" in refused["reason"] and "halve the micro batch" in refused["reason"]
    allocator = failure_of(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), None
    )
    assert allocator["recurs"] and "out of memory" in allocator["reason"]
    assert not failure_of(RuntimeError("can't start new thread"), None)["recurs"]
    assert not failure_of(BlockingIOError(11, "Resource temporarily unavailable"), None)["recurs"]


def test_a_message_of_torch_that_has_a_remedy_ends_with_it() -> None:
    twice = (
        "Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of"
    )
    for error, remedy in (
        (RuntimeError(twice + " x" * 400), "use_reentrant=False"),
        (ValueError("Expected more than 1 value per channel when training, got [1, 16]"), "--data.drop_last true"),
    ):
        failure = failure_of(error, None)
        assert failure["recurs"] and remedy in failure["reason"] and len(failure["reason"]) < 400


def test_a_gpu_that_is_too_small_is_not_tried_again_and_one_that_others_fill_is() -> None:
    import torch

    text = (
        "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 79.11 GiB of which 5.00 GiB is free. "
        "Process 25454 has 70.00 GiB memory in use. Process 77 has 4.11 GiB memory in use. Of the allocated memory {} "
        "is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and {} is reserved by "
        "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )
    for asked, allocated, unallocated, recurs in (
        ("20.00 GiB", "60.00 GiB", "512.00 MiB", True),
        ("20.00 GiB", "50.00 GiB", "9.50 GiB", True),
        ("20.00 GiB", "50.00 GiB", "8.00 GiB", False),
        ("20.00 GiB", "3.86 GiB", "0 bytes", False),
    ):
        said = text.format(asked, allocated, unallocated)
        failure = failure_of(torch.OutOfMemoryError(said), None)
        assert failure["recurs"] is recurs and "halve --micro_batch_size in a new run" in failure["reason"]
        log = f"Traceback (most recent call last):\n  x\ntorch.OutOfMemoryError: {said}\n"
        found = of_log(log, 1)
        assert found is not None and found.recurs is recurs
