"""What the process inside tmux imports, once, for itself, for the checks, and for every rank that it forks.

Nothing here computes, starts a thread of Python's, or touches a GPU, so that a fork of this process is clean.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import threading
from collections.abc import Iterator

CHECKS = ("train.runs.readmit",)
"""What a request is checked with: torch, and none of its compiler."""
_LITTER = "torch.distributed.nn.jit.instantiator"
"""Of torch; makes a temporary folder as it is imported, and takes it away at exit."""
RANKS = (
    _LITTER, "torch.distributed.checkpoint", "torch.utils.tensorboard", "train.engine.finish", "train.engine.setup",
    "train.parallel.ddp", "train.runs.worker", "threadpoolctl",
)  # fmt: skip
"""What a rank needs besides, which takes longer: torch's optimizers load the compiler."""


def load(modules: tuple[str, ...]) -> None:
    """Import these. What they leave in memory is kept out of collections, here and in forked processes."""
    with _uncollected():
        for name in modules:
            if name == _LITTER:
                _load_whole(name)
            else:
                importlib.import_module(name)


def _load_whole(name: str) -> None:
    """Import this, where torch has it. The end of a session waits for that: a process that left between the making of
    a folder and the note that it is to be removed would leave it behind."""
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
def _uncollected() -> Iterator[None]:
    """Imports leave little garbage, and looking for it takes a sixth of their time. Frozen, it is not looked at again,
    nor copied by a fork for having been looked at."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
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
