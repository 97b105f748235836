"""`train run --spawn N`: N ranks on this machine, started by torch.multiprocessing."""

from __future__ import annotations

import contextlib
from pathlib import Path

from train.record.store import Lock, Run
from train.runs import interrupt
from train.runs.processes.forked import Forked
from train.runs.supervise import Supervisor
from train.runs.verdict import Road
from train.signals import StopRequest

_GRACE = 5.0
"""Seconds in which the process that started ranks will have ended them after a second Ctrl-C."""


def warm_up() -> None:
    """Start the server that forks ranks, while this process still checks the request.

    It imports torch once for all ranks and computes nothing, so a fork of it is clean.
    """
    from multiprocessing import forkserver, set_forkserver_preload

    set_forkserver_preload(
        ["train.runs.unmoved", "train.runs.processes.forked", "train.engine.train", "train.runs.admit"]
    )
    with contextlib.chdir(Path(__file__).parents[2]):  # where it looks first: a train.py beside the user is not ours
        forkserver.ensure_running()


def spawn(run: Run, lock: Lock, ranks: int, stop: StopRequest, is_attended: bool = False) -> int:
    """Train with so many ranks and wait for their end. Returns the exit code.

    Args:
        is_attended: whether somebody may type Ctrl-C, and type it again; then to be called from the main thread.
    """
    supervisor = Supervisor(run, Forked(run, lock, ranks), Road.SPAWNED, stop)
    if is_attended:
        interrupt.listen(run, stop, supervisor.end_at_once, _GRACE)
    return supervisor.keep()
