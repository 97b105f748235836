"""Cuts the batch of a run for its ranks, and checks that every rank gets work."""

from __future__ import annotations

from ..config import Config
from ..errors import Refused
from ..parallel import choose
from .case import Case


def cut_batch(config: Config, local: int, nodes: range) -> None:
    """Choose the size of a new run's micro batches, unless it is given.

    Args:
        local, nodes: as in `check_ranks`.

    Raises:
        Refused: as `check_ranks`, or the given size leaves a rank without work.
    """
    check_ranks(config, local, nodes)
    ranks = local * nodes[-1]
    if not isinstance(config.micro_batch_size, int):
        # rounded up for the smallest number of forward passes, but down if that would leave a rank without work
        size = -(-config.batch_size // ranks)
        config.micro_batch_size = size if -(-config.batch_size // size) >= ranks else config.batch_size // ranks
    micros = -(-config.batch_size // config.micro_batch_size)
    if micros < ranks:
        raise Refused(
            f"a global batch of {config.batch_size} has only {micros} micro batches of {config.micro_batch_size} for "
            f"{ranks} ranks; use --micro_batch_size {config.batch_size // ranks} or less"
        )


def check_ranks(config: Config, local: int, nodes: range) -> None:
    """Check that the `parallel` settings work on each of these numbers of machines, with a sample for every rank.

    Args:
        local: Number of ranks on each machine.
        nodes: Possible numbers of machines.

    Raises:
        Refused: they do not.
    """
    for count in nodes:
        choose.check(config, count * local)
    ranks = nodes[-1] * local
    if config.batch_size < ranks:
        raise Refused(
            f"--batch_size {config.batch_size} is smaller than the number of ranks, {ranks}; "
            f"use at least {ranks}, or fewer ranks"
        )


def check_sync_batchnorm(case: Case) -> None:
    """Check that `sync_batchnorm` has GPUs, and equal micro batches on all ranks."""
    config, length = case.config, case.cut.length
    if not config.sync_batchnorm:
        return
    if case.device.type == "cpu":
        raise Refused("sync_batchnorm works only on GPUs; leave it out")
    assert isinstance(config.micro_batch_size, int)
    share, rest = config.micro_batch_size * case.ranks, length % config.batch_size
    if config.batch_size % share or (rest % share and not config.data.drop_last):
        raise Refused(
            f"sync_batchnorm needs batch_size ({config.batch_size}) and the last batch of an epoch ({rest}) to be "
            f"multiples of micro_batch_size x ranks = {share}; change one, or drop the last batch: "
            "--data.drop_last true"
        )


def warn_of_idle_ranks(case: Case) -> list[str]:
    """Return a warning if a resume has more ranks than a step has micro batches."""
    micros = case.cut.micro_batches(0)
    if micros >= case.ranks:
        return []
    return [f"a step has {micros} micro batches for {case.ranks} ranks, so {case.ranks - micros} ranks have no work"]
