"""What the process inside tmux imports, once, for itself, for the checks, and for every rank that it forks.

Nothing here computes, starts a thread of Python's, or touches a GPU, so that a fork of this process is clean.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_LIBRARIES = (
    "_asyncio", "_bisect", "_blake2", "_bz2", "_contextvars", "_csv", "_datetime", "_decimal", "_elementtree",
    "_hashlib", "_heapq", "_json", "_lzma", "_opcode", "_pickle", "_posixsubprocess", "_queue", "_random", "_sha2",
    "_sha512", "_socket", "_ssl", "_typing", "_uuid", "_zoneinfo", "array", "binascii", "cmath", "fcntl", "math",
    "mmap", "numpy", "psutil", "pydantic_core", "pyexpat", "resource", "select", "termios", "unicodedata", "zlib",
)  # fmt: skip
"""The shared libraries, of Python's and others', that are loaded for BESIDE and for the agent. One lock lets one be
loaded at a time, so each of them would wait for all of torch's."""
BESIDE = ("asyncio", "multiprocessing.reduction", "unittest.mock", "sympy", "networkx")
"""What torch and its compiler import of others' modules, written in Python: that needs no torch, whose libraries a
second core loads meanwhile."""
_BLAS = "OPENBLAS_NUM_THREADS"
"""What NumPy's OpenBLAS reads as it is loaded; runs/warm.py sets it too, which imports nothing of this package."""
_loading: list[threading.Thread] = []
"""Who loads torch's libraries, if somebody does."""
CHECKS = ("train.runs.readmit",)
"""What a request is checked with: torch, and none of its compiler."""
_LITTER = ("torch.distributed.nn.jit.instantiator", "torch._dynamo")
"""Of torch; one makes a temporary folder as it is imported, and takes it away at exit. Of newer ones the other is the
first to ask where such go, which makes a file there to see, and takes it away."""
RANKS = (
    *_LITTER, "torch.distributed.checkpoint", "torch.utils.tensorboard", "train.engine.finish",
    "train.engine.train", "train.engine.setup", "train.parallel.ddp", "train.parallel.fsdp", "train.parallel.ordered",
    "train.parallel.single", "train.runs.worker", "threadpoolctl",
)  # fmt: skip
"""What a rank needs besides, which takes longer: torch's optimizers load the compiler, of newer ones the first step."""
_DISPENSABLE = ("torch.utils.tensorboard", "threadpoolctl")
"""Of these a checkout that was not installed may have none: docs/gpu.md."""


def load(modules: tuple[str, ...]) -> None:
    """Import these. What they leave in memory is kept out of collections, here and in forked processes."""
    with uncollected(), _frames_known():
        if not _loading:
            begin()
        while _loading:
            _loading.pop().join()
        for name in modules:
            if name in _LITTER:
                _load_whole(name)
            elif name in _DISPENSABLE:
                _import_where_there((name,))
            else:
                importlib.import_module(name)


def begin() -> None:
    """Load the shared libraries of torch on a thread, a third of its import, which finds them loaded then; and import
    meanwhile what is not torch's.

    Nothing that links Python is among them, whose making could want the lock of the interpreter, while who holds it
    waits for the lock of the loader. Nobody may fork this process before `load` has come back, for a library would be
    loaded in part there; to execute another program is no harm.
    """
    torch = find_spec("torch")
    if "torch" in sys.modules or torch is None or not torch.submodule_search_locations:
        return
    with uncollected():
        with _one_thread():
            _import_where_there(_LIBRARIES)
        folder = Path(torch.submodule_search_locations[0]) / "lib"
        _loading.append(threading.Thread(target=_open_libraries, args=(folder,), daemon=True))
        _loading[-1].start()
        _import_where_there(BESIDE)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let NumPy, imported now, begin no threads for its arithmetic, unless the user has said how many: OpenBLAS begins
    one a core, here and again in each rank, and each looks for work, without a pause, for the first 50 ms. A rank sets
    how many it has (processes/children.py)."""
    if _BLAS in os.environ:
        yield
        return
    os.environ[_BLAS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_BLAS, None)


def _import_where_there(names: tuple[str, ...]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _open_libraries(folder: Path) -> None:
    """As torch does, in its order and with its flags. Where one is not found, torch looks elsewhere, or says so."""
    load = ctypes.CDLL(None).dlopen  # by a foreign call, without the lock of the interpreter
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, scope in (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_LOCAL)):
        if not load(os.fsencode(folder / name), os.RTLD_NOW | scope):
            return


def _load_whole(name: str) -> None:
    """Import this, where torch has it. The end of a session waits for that: a process that left between the making of
    a file or folder and its removal, or the note of it, would leave it behind."""
    ended = []
    # not masked: libraries have threads, and one of those would take it
    before = signal.signal(signal.SIGHUP, lambda *_: ended.append(True))
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    finally:
        signal.signal(signal.SIGHUP, before)
    if ended:
        os.kill(os.getpid(), signal.SIGHUP)


@contextlib.contextmanager
def _frames_known() -> Iterator[None]:
    """Give `inspect` the module of a frame by its name. torch asks for it wherever it makes an operator, and to find it
    by its file Python looks up where each module of the process really lies: a tenth of a second, all in all."""
    search = inspect.getmodule

    def module_of(asked: Any, _filename: str | None = None) -> Any:
        if inspect.isframe(asked):
            module = sys.modules.get(asked.f_globals.get("__name__", ""))
            if module is not None and getattr(module, "__file__", None) == asked.f_code.co_filename:
                return module
        return search(asked, _filename)

    inspect.getmodule = module_of  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getmodule = search


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Imports leave little garbage, and looking for it takes a sixth of their time. Frozen, it is not looked at again,
    nor copied by a fork for having been looked at."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def is_clean() -> bool:
    """Whether a fork of this process is whole: no other thread of Python's that could hold a lock, no GPU in use."""
    import torch

    return threading.active_count() == 1 and not torch.cuda.is_initialized() and not _is_poisoned()


def _is_poisoned() -> bool:
    """Whether torch would refuse GPUs to a fork, for CUDA was asked something here; torch knows it in a fork only."""
    import torch

    ask = getattr(torch._C, "_cuda_isInBadFork", None)
    if ask is None:
        return False
    child = os.fork()
    if child == 0:
        os._exit(bool(ask()))
    return os.waitpid(child, 0)[1] != 0
