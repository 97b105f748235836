"""Checks the threads beside which data workers are forked.

A fork copies the locks of all threads, but only the thread that forks. A lock that another thread holds at that moment
is never released in the worker. So a task's own threads are refused, and threads of libraries are named in a warning.
"""

from __future__ import annotations

import functools
import logging
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ..errors import Refused
from .hand_over import OF_TASKS, Names

log = logging.getLogger("train")

_KNOWN = ("train", "torch", "tqdm", "tensorboard", "wandb", "execnet")
"""Packages whose threads hold no lock that a worker needs."""
_KNOWN_NAMES = ("asyncio_", "fsspecIO", "zarr_io", "QueueFeederThread")
"""Prefixes of names of a library's threads that run Python's own code. These libraries handle forks."""
_PACKAGES = ("site-packages", "dist-packages")
_ENDING = 1.0
"""Seconds to wait for a thread that is about to end."""


def problem(names: Names = OF_TASKS) -> str:
    """Return which threads run here that a worker would lack, and what to do; '' if there are none.

    Threads that Python does not know do not count: those of OpenMP and BLAS wait without a lock, the C library takes
    care of its locks at a fork, and gloo and NCCL start after the workers.
    """
    until = time.monotonic() + _ENDING
    while found := _owners().get(""):
        if time.monotonic() > until:
            count = "1 thread" if len(found) == 1 else f"{len(found)} threads"
            running = f"{count} of the {names.whole} {'is' if len(found) == 1 else 'are'}"
            return (
                f"{running} running before data workers are forked ({', '.join(sorted(found)[:5])}): a worker "
                f"could wait for its locks forever; start it in __getitem__, or use {names.none}"
            )
        time.sleep(0.02)
    return ""


def check(names: Names = OF_TASKS) -> None:
    """Check that workers can be forked here, and warn of threads of libraries.

    Raises:
        Refused: the task has threads here.
    """
    if text := problem(names):
        raise Refused(text)
    for package, found in sorted(_owners().items()):
        if package not in _KNOWN:
            log.warning(
                "warning: data workers are forked beside threads of %s (%s); if training waits for data forever, use "
                "%s", package, ", ".join(sorted(found)[:5]), names.none,
            )  # fmt: skip


def _owners() -> dict[str, list[str]]:
    """Return the names of other threads by the package that they belong to; '' is the task or an unknown owner."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    found: dict[str, list[str]] = {}
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that holds itself would keep its callers, and their loaders' workers
    for ident, frame in frames.items():
        if ident == threading.main_thread().ident:
            continue
        thread = threads.get(ident)
        name = thread.name if thread is not None else "without a name"
        if not name.startswith(_KNOWN_NAMES):
            found.setdefault(_owner(thread, frame), []).append(name)
    return found


def _owner(thread: threading.Thread | None, frame: FrameType) -> str:
    """Return the package that a thread belongs to; '' if it is the task's or not known.

    A thread of a pool belongs to the task whatever it does now: in a worker the pool would wait for missing threads.
    """
    codes = []
    if thread is not None:
        codes = [_code(getattr(thread, "_target", None)), _code(type(thread).run)]
    here: FrameType | None = frame
    while here is not None:
        codes.append(here.f_code)
        here = here.f_back
    packages = [_package(code.co_filename) for code in codes if code is not None]
    if "" in packages:
        return ""
    return next((package for package in packages if package != "Python"), "")


def _code(function: Any) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _package(file: str) -> str:
    """Return the installed package that a file belongs to; 'Python' for its own library; '' for neither."""
    path = Path(file)
    for number, part in enumerate(path.parts):
        if part in _PACKAGES:
            return path.parts[number + 1].removesuffix(".py")
    if path.is_relative_to(Path(__file__).parents[1]):
        return "train"
    return "Python" if path.is_relative_to(sysconfig.get_path("stdlib")) or file.startswith("<frozen") else ""
