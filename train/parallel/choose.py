"""Chooses the strategy of a run, and checks whether its ranks can use it.

Checks before a launch must not import the strategies: DTensor brings torch's compiler with it, five seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..config import SPREAD, Config
from ..errors import Refused

if TYPE_CHECKING:
    from .precision import Precision
    from .strategy import Strategy
    from .world import World


def resolve(config: Config, size: int) -> str:
    """Return the strategy that a configuration means for this many ranks. One rank always means single."""
    name = config.parallel.strategy
    if size == 1:
        return "single"
    return "ddp" if name == "auto" else name


def shards(config: Config, size: int) -> bool:
    """Whether each of this many ranks holds only a part of the model."""
    return resolve(config, size) in SPREAD


def check(config: Config, size: int) -> None:
    """Check that this many ranks can train as `parallel` says.

    Raises:
        Refused: they cannot; the message says what to change.
    """
    parallel, name = config.parallel, config.parallel.strategy
    if name == "single" and size > 1:
        raise Refused(f"--parallel.strategy single is for one rank, not {size}; use ddp or leave it out")
    if parallel.reduce == "ordered":
        _check_ordered(config)
    if config.data.leaves_out and shards(config, size):
        raise Refused(
            f"every rank takes part in each forward of {name}, but --data.on_error skip may leave a rank "
            "without a sample; use --parallel.strategy ddp, or --data.on_error stop"
        )
    if parallel.shard_size is not None and name != "hsdp":
        raise Refused(f"--parallel.shard_size is for --parallel.strategy hsdp, not {name}; leave it out")
    if name == "hsdp" and size > 1:
        if parallel.shard_size is None:
            raise Refused(
                "--parallel.strategy hsdp needs --parallel.shard_size: how many ranks share one copy of the model"
            )
        if size % parallel.shard_size:
            raise Refused(
                f"--parallel.shard_size {parallel.shard_size} does not divide the {size} ranks; "
                f"use one of {', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}"
            )
    if parallel.find_unused_parameters and name in SPREAD:
        raise Refused(f"--parallel.find_unused_parameters is for ddp, not {name}; leave it out")
    if parallel.wrap != "auto" and name not in SPREAD and config.compile != "blocks":
        raise Refused(f"--parallel.wrap is for fsdp and hsdp, or --compile blocks, not {name}; leave it out")


def check_model(model: torch.nn.Module, size: int, device: torch.device) -> None:
    """Check that this many ranks can add a model's gradients on this device.

    Raises:
        Refused: they cannot; the message names the parameter or module.
    """
    if size == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise Refused(
                f"{size} ranks cannot add the sparse gradients of {name or 'the model'} "
                f"({type(module).__name__}); leave out sparse=True, or use --nproc 1"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex() and parameter.requires_grad and device.type == "cpu":
            raise Refused(
                f"{size} ranks on a CPU cannot add the complex gradient of {name}, because gloo adds only real "
                "numbers; keep it as real numbers (torch.view_as_real) and use torch.view_as_complex in "
                "forward(), or --nproc 1"
            )


def _check_ordered(config: Config) -> None:
    name = config.parallel.strategy
    if name in SPREAD:
        raise Refused(
            f"--parallel.reduce ordered is for single and ddp, not {name}; use --parallel.strategy ddp, or "
            "--parallel.reduce fast"
        )
    if config.sync_batchnorm:
        raise Refused(
            "--parallel.reduce ordered cannot be combined with sync_batchnorm, whose statistics depend on "
            "the number of ranks; leave out one of them"
        )


def make(world: World, config: Config, precision: Precision) -> Strategy:
    """Make the strategy of a run on these ranks."""
    from .ddp import DDP
    from .fsdp import FSDP
    from .ordered import Ordered
    from .strategy import Strategy

    if config.parallel.reduce == "ordered":
        return Ordered(world, config, precision)
    strategies = {"single": Strategy, "ddp": DDP, "fsdp": FSDP, "hsdp": FSDP}
    return strategies[resolve(config, world.size)](world, config, precision)
