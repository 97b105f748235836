"""A loss or metric that communicates waits for ever where another rank has no data. Found before it does.

Where a plan has such steps, collectives are refused in the first step of an attempt, in which all ranks still have
data, and in each step where some have none. Other steps cost nothing; these some 20 us.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from train.errors import TrainingFailed

_CALLS = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_coalesced", "alltoall",
    "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce",
    "reduce_scatter", "_reduce_scatter_base", "scatter", "send",
    # in place of some of those, later (2.13)
    "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
)  # fmt: skip
"""Methods of ProcessGroup that torch.distributed's functions end in. DDP itself calls them from C++, past these."""


_NOTHING = contextlib.nullcontext()


def quiet(what: str, file: Path, waits_for: str) -> contextlib.AbstractContextManager[None]:
    """While this is entered, this thread may not communicate by torch.distributed's functions.

    Args:
        what: the function of the task that runs, and the task's file; for the message.
        waits_for: which ranks have no data, and where; '' where all have, and nothing is refused.

    Raises:
        TrainingFailed: it tries to.
    """
    return _quiet(f"{what} in {file}", waits_for) if waits_for else _NOTHING


@contextlib.contextmanager
def _quiet(what: str, waits_for: str) -> Iterator[None]:
    here = threading.get_ident()
    own = {name: vars(dist.ProcessGroup)[name] for name in _CALLS if name in vars(dist.ProcessGroup)}

    def refusing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here:  # a checkpoint on its way to the disk
                return method(*args, **kwargs)
            raise TrainingFailed(
                f"{what} communicates ({name.strip('_')}) and would wait for ever for {waits_for}; leave out the call, "
                "for means are taken over all ranks without it, or give every rank data (--data.drop_last true, "
                "or batches that divide evenly among the ranks)"
            )

        return call

    try:
        for name, method in own.items():
            setattr(dist.ProcessGroup, name, refusing(name, method))
        yield
    finally:
        for name, method in own.items():
            setattr(dist.ProcessGroup, name, method)
