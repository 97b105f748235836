"""Checks whether the ranks of a run can train as `parallel` says, and makes their strategy.

Checks before a launch must not import the strategies: DTensor brings torch's compiler with it, five seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from ..config import Config, strategies
from ..config.strategies import StrategyInfo
from ..errors import Refused

if TYPE_CHECKING:
    from .precision import Precision
    from .strategy import Strategy
    from .world import World


def check(config: Config, size: int) -> None:
    """Check that this many ranks can train as `parallel` says.

    Raises:
        Refused: they cannot; the message says what to change.
    """
    parallel, name = config.parallel, config.parallel.strategy
    strategy = strategies.of(name)
    if strategy.is_for_one_rank and size > 1:
        raise Refused(f"--parallel.strategy {name} is for one rank, not {size}; use ddp or leave it out")
    _check_fields(config, strategy)
    if parallel.reduce == "ordered" and config.sync_batchnorm:
        raise Refused(
            "--parallel.reduce ordered cannot be combined with sync_batchnorm, whose statistics depend on "
            "the number of ranks; leave out one of them"
        )
    if config.data.leaves_out and size > 1:
        _check_skipping(config, strategy)
    if "shard_size" in strategy.fields and size > 1:
        if parallel.shard_size is None:
            raise Refused(
                f"--parallel.strategy {name} needs --parallel.shard_size: how many ranks share one copy of the model"
            )
        if size % parallel.shard_size:
            raise Refused(
                f"--parallel.shard_size {parallel.shard_size} does not divide the {size} ranks; "
                f"use one of {', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}"
            )


def _check_fields(config: Config, strategy: StrategyInfo) -> None:
    """Check that every field of `parallel` that is set has an effect with this strategy. Raises Refused if not."""
    parallel, name = config.parallel, config.parallel.strategy
    is_set = {
        "reduce": parallel.reduce == "ordered",
        "shard_size": parallel.shard_size is not None,
        # one rank needs no search; a run that continues on one may keep the field
        "find_unused_parameters": parallel.find_unused_parameters and not strategy.is_for_one_rank,
        "wrap": parallel.wrap != "auto" and config.compile != "blocks",
    }
    for field in [field for field in is_set if is_set[field] and field not in strategy.fields]:
        users = " and ".join(one for one in strategies.with_field(field) if one != strategies.AUTO)
        if field == "reduce":
            raise Refused(
                f"--parallel.reduce ordered is for {users}, not {name}; use --parallel.strategy ddp, or "
                "--parallel.reduce fast"
            )
        others = ", or --compile blocks" if field == "wrap" else ""
        raise Refused(f"--parallel.{field} is for {users}{others}, not {name}; leave it out")


def _check_skipping(config: Config, strategy: StrategyInfo) -> None:
    """Check that several ranks may leave out samples. Raises Refused: each rank must have some."""
    if strategy.forward_needs_all_ranks:
        raise Refused(
            f"every rank takes part in each forward of {strategy.name}, but --data.on_error skip may leave a rank "
            "without a sample; use --parallel.strategy ddp, or --data.on_error stop"
        )
    if config.sync_batchnorm:
        raise Refused(
            "sync_batchnorm needs a micro batch on every rank, and --data.on_error skip may leave a rank without "
            "one; leave out one of the two"
        )


def check_model(model: torch.nn.Module, *, config: Config, size: int, device: torch.device) -> None:
    """Check that this many ranks can share a model and add its gradients on this device.

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
    strategy = strategies.of(config.parallel.strategy, size)
    if strategy.model_check:
        _loaded(strategy.model_check)(model, config)


def make(world: World, config: Config, precision: Precision) -> Strategy:
    """Make the strategy of a run on these ranks."""
    made_by = strategies.of(config.parallel.strategy, world.size).made_by
    if config.parallel.reduce == "ordered":
        made_by = "ordered:Ordered"
    strategy: Strategy = _loaded(made_by)(world, config, precision)
    return strategy


def _loaded(name: str) -> Any:
    """Return a class or function of this folder, given as FILE:NAME."""
    file, _, inside = name.partition(":")
    return getattr(importlib.import_module(f".{file}", __package__), inside)
