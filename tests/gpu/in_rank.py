"""What a case changes in the ranks of a run: in their processes alone, before they begin.

A zygote that is asked for such ranks forks them as always; `begin` is called there in place of the rank's own function.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

from train.parallel import devices
from train.zygote.client import Zygote

ONE_CARD, OVER_NCCL, SNAPSHOTS = "one card", "one card over NCCL", "snapshots all the time"
"""The changes: all ranks on the first GPU, over gloo, since NCCL refuses two ranks on one card; the same over NCCL,
which takes each rank for a machine of its own; a new snapshot as soon as the one before is there."""


class Forking:
    """A zygote whose ranks begin with these changes."""

    def __init__(self, zygote: Zygote, changes: Sequence[str]) -> None:
        self._zygote, self._changes = zygote, [*changes]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._zygote, name)

    def fork(self, function: str, arguments: Sequence[Any], **more: Any) -> int:
        given = [self._changes, function, [*arguments]]
        return self._zygote.fork("tests.gpu.in_rank:begin", given, **more)


def begin(changes: list[str], function: str, arguments: list[Any], files: list[int]) -> None:
    """Be a rank, with these changes."""
    if OVER_NCCL in changes:
        # NCCL compares cards within a host only; between hosts it uses sockets
        os.environ |= {"NCCL_HOSTID": f"rank{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if ONE_CARD in changes:
        _share_the_card("nccl" if OVER_NCCL in changes else "gloo")
    if SNAPSHOTS in changes:
        from train.checkpoint import snapshot

        snapshot.SHARE = 1e9
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*arguments, files)


def _share_the_card(transport: str) -> None:
    import torch.distributed as dist

    from train.trainer import setup

    join = dist.init_process_group

    def joined(backend: str, **given: Any) -> None:
        join(backend.replace("nccl", transport), **given)

    mock.patch.object(dist, "init_process_group", joined).start()
    mock.patch.object(setup, "pick_device", first_device).start()


def first_device(config: Any, *_: Any) -> Any:
    """In the place of `pick_device`: the device of a single rank."""
    return devices.pick_device(config, 1, 0)
