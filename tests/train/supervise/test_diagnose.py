"""What the last words of a process say about its death, and whether it would come again."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from train.supervise.diagnose import failure_of, in_log

NOTHING = {
    "an exception": "Traceback (most recent call last):\n  File 'a.py', line 1\nValueError: bad shape",
    "a peer that is gone": "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer",
    "a device": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "memory long ago": "MemoryError, trying half of it\n" + "step\n" * 20,
    "own words": "ValueError: cannot allocate memory for a box; can't start new thread",
    "nothing": "",
}


@pytest.mark.parametrize("text", NOTHING.values(), ids=NOTHING)
def test_a_log_says_nothing_certain_about_most_ends(text: str) -> None:
    assert in_log(text) is None


def test_a_busy_machine_is_no_reason_to_give_up() -> None:
    for text in ("RuntimeError: can't start new thread", "[rank1]: BlockingIOError: [Errno 11] Resource temporarily"):
        cause = in_log(f"Traceback (most recent call last):\n  x\n{text}\nclosing\n")
        assert cause is not None and not cause.recurs and cause.reason == text.removeprefix("[rank1]: ")


def test_memory_that_is_refused_is_called_so_with_its_limit_and_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "bytearray(10**10)"], stderr=subprocess.PIPE, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)),
    )  # fmt: skip
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**42, before[1]))  # the agent has the limits that its ranks inherit
    try:
        cause = in_log(done.stderr)
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


SAID = ("CUDA error: x", "Connection refused", "NCCL error", "can't start new thread", "cannot allocate memory")


def test_only_the_layer_that_fails_says_what_may_pass() -> None:
    import torch

    def failure(text: str, cause: Exception | None = None) -> Any:
        try:
            raise RuntimeError(text) from cause
        except RuntimeError as error:
            return failure_of(error, None)

    for text in SAID:
        own = failure(text)
        assert own["recurs"] and own["is_own"] and "out of memory" not in own["reason"], own
    behind = failure("step 3 failed", RuntimeError("CUDA error: unspecified launch failure"))
    assert not behind["recurs"] and not behind["is_own"]
    model = type("ConnectionNet", (torch.nn.Linear,), {})(1, 1)
    try:
        model.load_state_dict({})  # torch names the user's class
    except RuntimeError as error:
        assert "ConnectionNet" in str(error) and failure_of(error, None)["recurs"]
    try:
        (lambda: torch.ones(2) @ torch.ones(3))()  # C code raises it in the user's line
    except RuntimeError as error:
        assert failure_of(error, None)["recurs"] and not failure_of(error, None)["is_own"]


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
        found = in_log(log)
        assert (found is not None and found.recurs) is recurs


def test_a_port_that_is_in_use_is_named() -> None:
    said = "The server socket has failed to listen on any local network address. port: 12355, useIpv6: false, code: -98"
    found = in_log(
        f"Traceback\ntorch.distributed.DistNetworkError: {said}, name: EADDRINUSE, message: address in use\n"
    )
    assert found is not None and found.reason.startswith("port 12355 is in use by another process")


def test_the_death_of_a_data_worker_that_torch_turns_into_another_error_is_told() -> None:
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    assert worker.pid is not None
    earlier = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a loader of an earlier test has set torch's handler
    torch._C._set_worker_pids(id(worker), (worker.pid,))
    try:
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(AttributeError) as caught:
            try:
                torch._C._error_if_any_worker_fails()  # what torch's handler of SIGCHLD calls
            except RuntimeError:
                raise AttributeError("The underlying op of 'profiler.exit' has no overload name 'a'") from None
    finally:
        torch._C._remove_worker_pids(id(worker))
        worker.join()
        signal.signal(signal.SIGCHLD, earlier)
    found = failure_of(caught.value, None)
    assert f"DataLoader worker (pid {worker.pid}) is killed by signal: Killed" in found["reason"]
    assert not found["recurs"] and not found["is_own"]
