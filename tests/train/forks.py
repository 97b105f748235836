"""The command `train` in a fork of a process that has imported its libraries: what tests wait for is not their import.

What runs is the command line, from its arguments to its exit code, in a process of its own with the files, folder and
environment that it is given. What differs from `python -m train` is how the process came to be; tests that are about
that, about signals or about a terminal start a real one.
"""

from __future__ import annotations

import atexit
import importlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from train import hash_seed
from train.zygote import client as zygotes
from train.zygote.server import LIBRARIES, READ_AT_LOADING, SIGNALS

IMPORTS = (
    *LIBRARIES, *zygotes.CHECKS, *zygotes.RANKS, "torchvision.datasets", "torchvision.models",
    "torchvision.transforms.v2", "matplotlib.figure", "rich.table", "pytest", "tests.train.forks",
)  # fmt: skip
_held: dict[str, dict[str, str]] = {}
"""Maps the libraries that processes load before all others to how the lender of such processes is found."""


def held_warm(environment: Mapping[str, str]) -> dict[str, str]:
    """A lender with everything imported, from the first call to the end of the tests; returns how it is found."""
    before = environment.get("LD_PRELOAD", "")
    if before not in _held:
        folder = tempfile.mkdtemp(prefix="train-tests-")  # short: the name of a socket has little room
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        found = {"TMPDIR": folder, zygotes.OFF: "on"}
        process = zygotes.start_lender(hash_seed.with_seed({**environment, **found}), IMPORTS)
        assert process is not None and process.stdin is not None
        atexit.register(process.kill)
        _held[before] = found
    return _held[before]


def zygote(environment: Mapping[str, str]) -> zygotes.Zygote:
    """A zygote from that lender, in the current folder."""
    return zygotes.acquire(hash_seed.with_seed({**environment, **held_warm(environment)}), IMPORTS)


def fits(environ: Mapping[str, str]) -> bool:
    """Whether a fork of the server is what a new process with these variables would be."""
    return not any(key.startswith(READ_AT_LOADING) for key in environ)


def train(
    arguments: list[str], folder: Path, base: Mapping[str, str], environment: Mapping[str, str], patience: float
) -> subprocess.CompletedProcess[str]:
    """Run `train ARGUMENTS` in this folder to its end, as subprocess.run would.

    Args:
        base: the environment of the zygote.
        environment: of the command.

    Raises:
        subprocess.TimeoutExpired: it took longer than `patience`, in seconds, and was killed.
    """
    command = [sys.executable, "-m", "train", *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, Path(os.devnull).open("rb") as nothing:
        made = zygote(base)
        try:
            files = [nothing.fileno(), out.fileno(), err.fileno()]
            pid = made.fork("tests.train.forks:main", [command, str(folder)], files=files, environ=environment)
            deadline = time.monotonic() + patience
            while pid not in (ended := made.ended(1.0)):
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(command, patience, _text(out), _text(err))
        finally:
            made.close()
        return subprocess.CompletedProcess(command, ended[pid], _text(out), _text(err))


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return io.TextIOWrapper(io.BytesIO(file.read()), encoding="utf-8").read()  # line ends as text=True reads them


def main(command: list[str], folder: str, files: list[int]) -> None:
    """In the fork: what `python -m train` does after its interpreter has started."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = open(fd, "w", errors="strict" if fd == 1 else "backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(folder)
    time.tzset()
    tempfile.tempdir = None
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != "")]
    sys.argv = [str(Path(importlib.import_module("train").__file__ or "").with_name("__main__.py")), *command[3:]]
    code = 1
    try:
        importlib.import_module("train.cli").main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(code)
