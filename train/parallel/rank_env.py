"""The rank of this process among those of a run, as torchrun's environment gives it. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ..errors import Refused, is_whole, one_line, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankEnv:
    """Which rank this process is, and where it meets the other ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    init: Any = "env://"
    """An init_method of torch.distributed, a store, or a function without arguments that makes one."""
    nodes: int = 1
    """Number of machines that agents of this package have brought together."""

    @property
    def lead(self) -> int:
        """The first rank with this rank's run folder. It reports failures that all ranks have met."""
        return 0 if self.nodes == 1 else self.rank - self.local_rank


def is_under_torchrun() -> bool:
    """Whether torchrun, or a program that sets the same variables, started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def read_rank_env() -> RankEnv:
    """Return the rank env that torchrun gave this process; see `is_under_torchrun`.

    Raises:
        Refused: the variables are not numbers.
    """
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return RankEnv(
            rank=rank, size=size, local_rank=local_rank, local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size))
        )
    except ValueError as error:
        raise Refused(f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers: {one_line(error)}") from None


STORE = "TRAIN_STORE"
"""Environment variable of a script's ranks: TORCHELASTIC_RUN_ID and the port of the launcher's store."""


def store_port() -> int | None:
    """Return the port of the launcher's store, whatever MASTER_PORT the script sets; None: no launcher of ours."""
    run_id, _, port = os.environ.get(STORE, "").partition(" ")
    # another launcher that the script starts inherits the variable
    return int(port) if port and run_id == os.environ.get("TORCHELASTIC_RUN_ID") else None


def meeting_port(usual: str = "") -> int:
    """Return the port that MASTER_PORT names.

    Args:
        usual: the port if the variable is not set.

    Raises:
        Refused: this is not a port; or neither variable is set and there is no usual port.
    """
    port = os.environ.get("MASTER_PORT") or usual
    if not is_whole(port) or not 0 < whole(port) < 65536 or not (usual or os.environ.get("MASTER_ADDR")):
        given = {name: os.environ.get(name) or "not set" for name in ("MASTER_ADDR", "MASTER_PORT")}
        seen = ", ".join(f"{name} is {value}" for name, value in given.items())
        raise Refused(f"RANK is set, and {seen}: start the ranks with torchrun, or: unset RANK WORLD_SIZE")
    return whole(port)
