"""What a zygote has imported leaves no threads behind, and its forks have as many as they are told."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.train import forks
from tests.train.conftest import Station
from train.zygote.server import SIGNALS


def report(threads: int, files: list[int]) -> None:
    """In a fork: threads of the process before and after it has so many, and what OpenBLAS has."""
    import os

    from threadpoolctl import threadpool_info

    from train.supervise import worker

    before = len(os.listdir("/proc/self/task"))
    worker.limit_threads(threads)
    blas = [one["num_threads"] for one in threadpool_info() if one["internal_api"] == "openblas"]
    print(before, os.environ.get("OPENBLAS_NUM_THREADS"), blas, len(SIGNALS), flush=True)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_fork_begins_with_one_thread_and_has_as_many_as_it_is_told(station: Station, threads: int) -> None:
    zygote = forks.zygote(station.environment())
    with tempfile.TemporaryFile() as out, Path("/dev/null").open() as nothing:
        files = [nothing.fileno(), out.fileno(), out.fileno()]
        pid = zygote.fork("tests.train.zygote.test_zygote_imports:report", [threads], files=files)
        while pid not in (ended := zygote.ended(1.0)):
            pass
        zygote.close()
        out.seek(0)
        said = out.read().decode()
    assert ended[pid] == 0, said
    before, variable, blas, _ = said.split(maxsplit=3)
    assert (before, variable) == ("1", "None") and blas in (f"[{threads}]", "[]"), said


def test_the_agent_and_commands_that_only_look_import_no_torch() -> None:
    text = "import sys, train.launcher.agent, train.launcher.create_run, train.supervise.attempts, train.views.follow\n"
    done = subprocess.run(
        [sys.executable, "-c", text + "print('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_listing_imports_neither_the_fields_nor_what_starts_runs() -> None:
    """They take as long as all else that `train ls` does for a hundred runs."""
    text = "import sys, train.cli, train.commands.ls\n"
    heavy = ("pydantic", "train.config.fields", "train.zygote.client", "train.launcher.request", "train.tasks")
    text += f"print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
