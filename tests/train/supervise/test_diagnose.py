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
