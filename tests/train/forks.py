"""The command `train` in a fork of a process that has imported its libraries: what tests wait for is not their import.

What runs is the command line, from its arguments to its exit code, in a process of its own with the files, folder and
environment that it is given. What differs from `python -m train` is how the process came to be; tests that are about
that, about signals or about a terminal start a real one.
"""

from __future__ import annotations

import atexit
import importlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import BinaryIO

from train.runs import warm
from train.runs.processes.forked import Passed

PRELOAD = [
    "train.runs.processes.forked",
    "train.engine.train",
    "train.runs.admit",
    "torch.distributed.checkpoint",
    "pytest",  # what starting a process from a test would import
]
set_forkserver_preload(PRELOAD)


def fits(environ: Mapping[str, str]) -> bool:
    """Whether a fork of the server is what a new process with these variables would be."""
    return not any(key.startswith(warm.READ_AT_LOADING) for key in environ)


def train(
    arguments: list[str], folder: Path, environment: Mapping[str, str], patience: float
) -> subprocess.CompletedProcess[str]:
    """Run `train ARGUMENTS` in this folder to its end, as subprocess.run would.

    Raises:
        subprocess.TimeoutExpired: it took longer than `patience`, in seconds, and was killed.
    """
    command = [sys.executable, "-m", "train", *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = (Passed(out.fileno()), Passed(err.fileno()))
        process = multiprocessing.get_context("forkserver").Process(
            target=_main, args=(command, str(folder), dict(environment), files)
        )
        process.start()
        process.join(patience)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, patience, _text(out), _text(err))
        return subprocess.CompletedProcess(command, process.exitcode, _text(out), _text(err))


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return io.TextIOWrapper(io.BytesIO(file.read()), encoding="utf-8").read()  # line ends as text=True reads them


def _main(command: list[str], folder: str, environment: dict[str, str], files: tuple[Passed, Passed]) -> None:
    """In the fork: what `python -m train` does after its interpreter has started."""
    code = 1
    try:
        for fd, file in enumerate(files, start=1):
            os.dup2(file.fd, fd)
            os.close(file.fd)
        for name, fd in (("stdout", 1), ("stderr", 2)):
            stream = open(fd, "w", errors="strict" if fd == 1 else "backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        time.tzset()
        tempfile.tempdir = None
        sys.path[:] = [folder, *(entry for entry in sys.path if entry != "")]
        sys.argv = [str(Path(importlib.import_module("train").__file__ or "").with_name("__main__.py")), *command[3:]]
        importlib.import_module("train.cli").main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(code)
