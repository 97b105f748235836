"""The updates of a step: one loss with one optimizer, or several that take turns on the same batch (a GAN).

Each of several updates has its own strategy, which knows only the parameters of its optimizer. While its loss is
computed, no other parameters require gradients. For checkpoints and the schedule, the optimizers are one.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..config import Config, strategies
from ..errors import Refused, nearest
from ..parallel import choose
from ..parallel.precision import Precision
from ..parallel.strategy import STEP_STATS, Strategy
from ..parallel.world import World
from ..tasks import Task
from .freeze import set_training
from .loss import MOST_PARTS, BatchValue, training_loss
from .objects import call
from .optimizer import check_optimizer, has_modes, keep_dtypes, make_optimizer

_KEYS = ("loss", "optimizer", "every")


@dataclasses.dataclass(kw_only=True)
class Update:
    """One update of a step. `spread_updates` adds the strategy that spreads it over ranks."""

    name: str
    """The task's name for it; '' if there is only one update."""
    loss: Callable[[nn.Module, Any], Any]
    optimizer: torch.optim.Optimizer
    every: int
    """The update runs in each step whose number (counted from 1) is a multiple of this."""

    what: str
    """The loss and its file, for messages."""
    strategy: Strategy = dataclasses.field(init=False)
    others: list[nn.Parameter] = dataclasses.field(default_factory=list)
    """Parameters of the other updates."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def is_due(self, number: int) -> bool:
        """Whether the update runs in a step (counted from 0)."""
        return (number + 1) % self.every == 0

    def compute_loss(self, batch: Any, samples: int) -> BatchValue:
        """Compute the loss of a batch of this many samples, to be differentiated."""
        return training_loss(self.loss, self.strategy.compute, batch=batch, samples=samples, what=self.what)

    def activate(self) -> None:
        """Make only the parameters of this update require gradients."""
        if self.others:
            for parameter in self.others:
                parameter.requires_grad_(False)
            for parameter in self.parameters:
                parameter.requires_grad_(True)

    def make_alone(self, batch: Any, samples: int, slots: int) -> None:
        """Run the update outside of a run: with the same batch in this many micro batches of every rank."""
        strategy, world = self.strategy, self.strategy.world
        self.activate()
        stats = torch.zeros(len(STEP_STATS), dtype=strategy.stats_dtype, device=world.device)
        strategy.begin(slots * world.size)
        for slot in range(slots):
            is_last = slot == slots - 1
            number = world.rank * slots + slot  # neighbours: what ordered sums take; else it is all the same
            with strategy.micro_batch(number, is_last):
                with strategy.precision.autocast():
                    loss = self.compute_loss(batch, samples)
                strategy.backward(loss.value, 1 / (slots * world.size), stats if is_last else None)
        strategy.reduce(stats)
        strategy.scale_and_clip_gradients(self.optimizer, clip_norm=strategy.config.clip_grad_norm)
        strategy.update(self.optimizer)


class JoinedOptimizers(torch.optim.Optimizer):
    """Several optimizers as one: its groups and its state are theirs."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.parts = parts
        held = {id(parameter) for group in groups for parameter in group["params"]}  # others are frozen
        state = {key: value for part in parts for key, value in part.state.items() if id(key) in held}
        self.__setstate__({"param_groups": groups, "state": collections.defaultdict(dict, state)})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called when a state is loaded: the parts get their groups and state."""
        super().__setstate__(state)
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step of all parts. torch does this for a fresh state."""
        for part in self.parts:
            part.step()


def read_updates(task: Task, model: nn.Module, config: Config) -> list[Update]:
    """Return what the task's updates() returns, checked; or its loss with its optimizer.

    Raises:
        Refused: something in it is missing, unknown or wrong.
    """
    if task.updates is None:
        assert task.loss is not None
        return [
            Update(
                name="",
                loss=task.loss,
                optimizer=make_optimizer(task, model, config),
                every=1,
                what=f"loss in {task.file}",
            )
        ]
    if strategies.of(config.parallel.strategy).splits_parameters:
        raise Refused(
            f"--parallel.strategy {config.parallel.strategy} makes one update per step, but {task.file} has "
            "updates(); use --parallel.strategy ddp"
        )
    where = f"updates in {task.file}"
    made = call(task, "updates()", task.updates, model, config)
    if not isinstance(made, dict) or not made or not all(isinstance(name, str) and name for name in made):
        raise Refused(f'{where} must return a dict: {{"d": {{"loss": f, "optimizer": o}}, …}}')
    updates = [_read(name, entry, where) for name, entry in made.items()]
    if all(update.every > 1 for update in updates):
        raise Refused(f'{where}: every update leaves out steps ("every"); at least one must run in every step')
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    seen: dict[int, str] = {}
    plain = torch.optim.Optimizer
    for update in updates:
        for group in update.optimizer.param_groups:  # frozen ones are to stay frozen
            group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        check_optimizer(update.optimizer, model, task, config)
        if not update.parameters:
            raise Refused(f"{where}: all parameters of {update.name} are frozen; leave it out, or freeze fewer")
        kind = type(update.optimizer)
        keeps_more = kind.state_dict is not plain.state_dict or kind.load_state_dict is not plain.load_state_dict
        if has_modes(update.optimizer) or keeps_more:
            raise Refused(
                f"{where}: {update.name} has an optimizer with train() and eval(), or with its own state_dict(); "
                "only optimizer() may return one"
            )
        for parameter in update.parameters:
            other = seen.setdefault(id(parameter), update.name)
            if other != update.name:
                raise Refused(f"{where}: {names.get(id(parameter), 'a parameter')} is in {other} and in {update.name}")
    for left_out in [one for one in names if one not in seen]:
        raise Refused(
            f"{where}: {names[left_out]} is in no optimizer; give it to one, or freeze it (requires_grad_(False))"
        )
    return updates


def losses_kept(updates: list[Update], device: torch.device) -> dict[str, torch.Tensor]:
    """Return tensors of the state for the last loss of each update that leaves out steps, and for the parts of it.
    Later lines repeat them."""
    sizes = {
        name: (size, update.strategy.stats_dtype)
        for update in updates
        if update.every > 1
        for name, size in ((update.name, len(STEP_STATS)), (parts_kept(update.name), 2 * MOST_PARTS))
    }
    return {name: torch.zeros(size, dtype=dtype, device=device) for name, (size, dtype) in sizes.items()}


def parts_kept(update: str) -> str:
    """Return the name in the state of the parts of an update's last loss."""
    return f"{update}.parts"


def _read(name: str, entry: Any, where: str) -> Update:
    if not isinstance(entry, dict):
        raise Refused(f'{where}: {name} must be a dict: {{"loss": f, "optimizer": o}}, got {type(entry).__name__}')
    for key in entry:
        if key not in _KEYS:
            raise Refused(f"{where}: {name} has an unknown key {key!r}{nearest(str(key), _KEYS)}")
    loss, optimizer, every = entry.get("loss"), entry.get("optimizer"), entry.get("every", 1)
    if not callable(loss):
        raise Refused(f'{where}: {name} needs "loss", a function of (model, batch)')
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Refused(f'{where}: {name} needs "optimizer", a torch.optim.Optimizer; got {type(optimizer).__name__}')
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise Refused(f'{where}: {name} has "every" {every!r}; a whole number of steps, 1 or more')
    return Update(name=name, loss=loss, optimizer=optimizer, every=every, what=f"loss of {name} in {where}")


def spread_updates(
    task: Task, model: nn.Module, *, config: Config, world: World, precision: Precision
) -> tuple[list[Update], torch.optim.Optimizer]:
    """Spread a model, which is on the CPU with its first weights, and prepare its updates. A collective.

    Returns them, and one optimizer for all.
    """
    set_training(model, config.freeze)  # what is frozen as a whole has no statistics to sum up
    if task.updates is None:
        strategy = choose.make(world, config, precision)
        (update,) = read_updates(task, strategy.place(model), config)
        update.strategy = strategy
        return [update], update.optimizer
    updates = read_updates(task, model.to(world.device), config)
    for update in updates:
        update.others = [parameter for other in updates if other is not update for parameter in other.parameters]
        update.strategy = choose.make(world, config, precision)
        update.activate()
        update.strategy.place(model)
    for update in updates:  # what makes and loads the state of optimizers asks for gradients of all
        for parameter in update.parameters:
            parameter.requires_grad_(True)
    return updates, keep_dtypes(JoinedOptimizers([update.optimizer for update in updates]))
