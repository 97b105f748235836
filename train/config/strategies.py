"""The strategies: the values of `parallel.strategy`, and what follows from each for the rest of the program.

To add a strategy, write a file in train/parallel/ with a subclass of its `Strategy`, and add a line to STRATEGIES.
Other code asks this table and compares no names. The table needs no torch: ranks import the class when they start.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyInfo:
    """What the rest of the program knows of a strategy."""

    name: str
    made_by: str
    """FILE:CLASS in train/parallel/."""
    fields: tuple[str, ...] = ()
    """The fields of `parallel` that have an effect with this strategy, but not with every one. With `reduce`, ordered
    sums (parallel/ordered.py) may replace it: each rank has a copy of the model."""
    is_sharded: bool = False
    """Whether each rank holds only a part of the parameters, gradients and optimizer state."""
    model_check: str = ""
    """FILE:FUNCTION there that refuses models that it cannot spread. It takes the model and the config. '': none."""
    is_for_one_rank: bool = False

    @property
    def needs_shared_disk(self) -> bool:
        """Whether several machines need one folder for checkpoints, because every rank writes its part of them.
        Otherwise rank 0 writes alone, and sends the other machines what it has loaded."""
        return self.is_sharded

    @property
    def splits_parameters(self) -> bool:
        """Whether the optimizer, and code that reads weights, see parts of parameters. Reading a whole one needs all
        ranks, and not every model or kernel can do with parts."""
        return self.is_sharded

    @property
    def forward_needs_all_ranks(self) -> bool:
        """Whether a forward gathers parameters, so that no rank may leave one out."""
        return self.is_sharded


STRATEGIES = (
    StrategyInfo("single", "strategy:Strategy", fields=("reduce",), is_for_one_rank=True),
    StrategyInfo("ddp", "ddp:DDP", fields=("reduce", "find_unused_parameters")),
    StrategyInfo("fsdp", "fsdp:FSDP", fields=("wrap",), is_sharded=True, model_check="fsdp:check"),
    StrategyInfo("hsdp", "fsdp:FSDP", fields=("wrap", "shard_size"), is_sharded=True, model_check="fsdp:check"),
)
AUTO = "auto"
_ALONE, _AUTO_OF_SEVERAL = STRATEGIES[:2]


def of(name: object, ranks: int | None = None) -> StrategyInfo:
    """Return the strategy that this value of `parallel.strategy` means. One rank always means `single`.

    Args:
        name: as a user wrote it. A wrong one counts as `auto`: the check of the field refuses it.
        ranks: how many there are; None: several.
    """
    if ranks == 1:
        return _ALONE
    return next((strategy for strategy in STRATEGIES if strategy.name == name), _AUTO_OF_SEVERAL)


def names() -> tuple[str, ...]:
    """Return the values of `parallel.strategy`."""
    return (AUTO, *(strategy.name for strategy in STRATEGIES))


def of_several() -> list[str]:
    """Return the names of the strategies for several ranks."""
    return [strategy.name for strategy in STRATEGIES if not strategy.is_for_one_rank]


def with_field(field: str) -> tuple[str, ...]:
    """Return the values of `parallel.strategy` with which a field of `parallel` has an effect, `auto` last."""
    found = tuple(strategy.name for strategy in STRATEGIES if field in strategy.fields)
    return (*found, AUTO) if of(AUTO).name in found else found
