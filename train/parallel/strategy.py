"""What the training loop asks of a strategy (a way to spread a model over ranks), and what most strategies share.

The loop knows no strategy by name. A step is, on every rank, the same number of micro batches:

    strategy.begin(micro batches of the step)
    for each slot:
        with strategy.micro_batch(number, is_last):
            value = strategy.compute(lambda model: loss(model, batch))
            strategy.backward(value, weight, stats if is_last else None)
            # or, where none of its samples can be read: strategy.backward(None, 0.0, stats if is_last else None)
    sums = strategy.reduce(stats)
    strategy.scale_and_clip_gradients(optimizer, clip_grad_norm, scale)
    strategy.update(optimizer)

To add a strategy: a file beside this one with a subclass of `Strategy`, and a line in the table config/strategies.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import Config
from ..errors import TrainingFailed
from . import torch_private
from .model_buffers import ModelBuffers
from .overlap import DeviceTimer
from .precision import Precision
from .world import World

STEP_STATS = ("loss", "count", "stop", "save", "counted", "copy")
"""Numbers that are all-reduced in every step: the sum of the loss and its number of samples; how many ranks were asked
to stop, want to save, and have a loss that returns a count; and whether to copy the state."""


_NOTHING = contextlib.nullcontext()


class Strategy:
    """How a model is spread. This class is the strategy of one rank and the base of the others: weights of gradients,
    loss scaling, clipping, and buffers that follow rank 0's.

    Other rooms call only its ten public methods. All of them except `micro_batch` and `update` are collectives: all
    ranks call them alike.
    """

    module: nn.Module
    """The model under its own names, as it is evaluated and saved."""
    named: list[tuple[str, nn.Parameter]]
    """The parameters to train, by name."""
    trainable: list[nn.Parameter]
    """The same without names."""
    buffers: ModelBuffers
    stats_dtype: torch.dtype
    """The type of the tensors that carry STEP_STATS."""
    is_ordered = False
    """Whether gradients are added in one order, whatever the number of ranks."""
    measures_communication = True
    """Whether the time in which this rank waits for communication can be separated from computing."""

    def __init__(self, world: World, config: Config, precision: Precision) -> None:
        self.world, self.config, self.precision = world, config, precision
        self._weights: dict[tuple[float, torch.dtype], Tensor] = {}
        self.communication = DeviceTimer(world.device)
        """The seconds in which this rank waits for communication and computes nothing meanwhile. Waiting for a slower
        rank is part of it: it cannot be separated from the network."""

    def place(self, model: nn.Module) -> nn.Module:
        """Take the model, which is on the CPU with its first weights. Call it before an optimizer is made or a state is
        read.

        Returns the model that an optimizer is made for, perhaps with other parameters.
        """
        self._take(model.to(self.world.device))
        return model

    def _take(self, model: nn.Module) -> None:
        """Take a model whose parameters are on their devices."""
        self.module = model
        # of frozen ones not even the values are checked: a mask of infinities, numbers of eight bits
        self.named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.trainable = [parameter for _, parameter in self.named]
        if not self.trainable:
            raise TrainingFailed("the model has no parameter to train; check model() of the task")
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self.buffers = ModelBuffers(model)
        # sums in less than fp32 would be wrong (a third is 0.334 in bf16); a model of float64 loses nothing
        doubles = any(parameter.dtype == torch.float64 for parameter in self.trainable)
        self.stats_dtype = torch.float64 if doubles else torch.float32

    def start(self) -> None:
        """Prepare the first step, with the weights that it starts with."""
        if self.precision.scaler is not None:  # else a rank whose first micro batch cannot be read never scales
            self.precision.scaler.scale(torch.zeros((), device=self.world.device))

    def begin(self, micros: int) -> None:
        """Prepare a step of this many micro batches over all ranks."""

    def micro_batch(self, number: int, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for the forward and backward of a micro batch. `is_last`: it is this rank's last one in the
        step."""
        return _NOTHING

    def compute(self, loss: Callable[[nn.Module], Tensor]) -> Tensor:
        """Compute a training loss, which may call the model or any of its methods."""
        return loss(self.module)

    def _root(self, value: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """Return the scalar to differentiate, scaled if the precision needs it, and the gradient to start with."""
        key = (weight, value.dtype)
        gradient = self._weights.get(key)
        if gradient is None:
            # not torch.tensor: it copies from the host, and waits for the device
            gradient = self._weights[key] = torch.full((), weight, dtype=value.dtype, device=value.device)
        scaler = self.precision.scaler
        return (value if scaler is None else scaler.scale(value)), gradient

    def backward(self, value: Tensor | None, weight: float, stats: Tensor | None) -> None:
        """Add the gradient of the scalar `value` times `weight`; with stats, of shape (n,), it is the last.

        Without a value (no sample of the micro batch could be read) this rank takes part with gradients of zero.
        """
        if value is not None:
            torch_private.backward(*self._root(value, weight))
            return
        # as several ranks would have them, gradients exist after a step without any data
        for parameter in self.trainable if stats is not None else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def reduce(self, stats: Tensor) -> Tensor:
        """Finish the reduction after the last backward of a step: gradients are then sums over all ranks. Returns the
        sums of the stats.

        It may return the tensor that it was given. That tensor is not changed, because the next step uses it too.
        """
        if self.world.size == 1:
            return stats
        with self.communication.waiting():
            return self.world.add(stats.clone())

    def scale_and_clip_gradients(
        self, optimizer: torch.optim.Optimizer, *, clip_norm: float | None, scale: Tensor | None = None,
        measures: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """Multiply gradients by a scalar, clip them to a global 2-norm if one is given, and broadcast rank 0's buffers.

        The last method of a step that waits for other ranks. With `measures` it returns the norm before clipping.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            raise TrainingFailed(
                "a parameter that model() froze is to be trained now, but its gradients would be those of one "
                "rank; make it trainable in model(), or train in two runs, the second with --init"
            )
        if scale is not None:
            gradients = [local(p.grad) for p in self.trainable if p.grad is not None]
            if gradients:
                torch_private.multiply_all_(gradients, scale)
        if self.precision.scaler is not None:
            self.precision.scaler.unscale_(optimizer)
        norm = self._norm() if clip_norm is not None or measures else None
        if clip_norm is not None and norm is not None:
            nn.utils.clip_grads_with_norm_(self.trainable, clip_norm, norm)
        self.buffers.restore()
        # not before the next forward: evaluations and checkpoints, of which every rank writes a part, read buffers too
        self.buffers.broadcast(self.world, self.communication)
        return norm

    def update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Make the step of the optimizer, and clear the gradients. None: only clear them. No collective."""
        scaler = self.precision.scaler
        if optimizer is None:
            pass
        elif scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            torch_private.optimizer_step(optimizer)
        self._clear()

    def _norm(self) -> Tensor:
        """Return the global 2-norm of the gradients."""
        norm = nn.utils.get_total_norm([p.grad for p in self.trainable if p.grad is not None])
        # of parts: what clipping adds to it against division by 0 would be added to each
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _clear(self) -> None:
        """Clear the gradients."""
        for parameter in self.trainable:
            parameter.grad = None

    def not_finite(self) -> str:
        """Return the name of a parameter with a value that is not finite, the same on every rank; '' if all are
        finite."""
        bad = torch.stack([~torch.isfinite(local(parameter)).all() for parameter in self.trainable])
        found = self.world.add(bad.to(torch.float32)).tolist()  # one reduction, one wait
        return next((name for (name, _), count in zip(self.named, found, strict=True) if count), "")


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor that may be spread over ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
