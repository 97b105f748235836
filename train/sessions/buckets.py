"""Lays out the buckets in which DDP sums gradients, before the first step.

DDP starts with one bucket, and lays its buckets out anew after its first backward. On three or more ranks the layout
decides in which order values are added. So without this, the first step of every resume would add in another order than
the same step of a run that nobody disturbed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import Refused
from ..parallel.torch_private import has_rebuilt_buckets, hook_states, version_of

ORDER_MATTERS = 3
"""Number of ranks from which the order of a sum matters: a + b is b + a."""


def lay_out(module: nn.Module) -> list[str]:
    """Lay out the buckets of every DDP in a module. A collective. Returns lines on what is not exact after a resume.

    Raises:
        Refused: a backward changes the weights, so a pass without data would, too.
    """
    lines: list[str] = []
    for ddp in module.modules():
        if not isinstance(ddp, DistributedDataParallel) or dist.get_world_size(ddp.process_group) < ORDER_MATTERS:
            continue
        if why := _cannot(ddp):
            lines.append(f"{why}: on 3 or more ranks a resumed run can differ in the last bits")
        elif not ddp.find_unused_parameters and not has_rebuilt_buckets(ddp):  # else DDP never changes them
            _pass_zeros(ddp)
            if not has_rebuilt_buckets(ddp):
                lines.append("DDP has not laid out its buckets: on 3 or more ranks a resumed run can differ")
    return lines


def _cannot(ddp: DistributedDataParallel) -> str:
    """Return why the buckets cannot be laid out ahead; '' if they can."""
    if ddp.static_graph:
        return "DDP(static_graph=True) lays out its buckets in its first real step"
    if ddp.mixed_precision is not None:
        return "DDP(mixed_precision=…) lays out its buckets in its first real step"
    if any(isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse for one in ddp.modules()):
        return "DDP lays out buckets of sparse gradients in its first real step"
    if any(state is not None and not isinstance(state, dist.ProcessGroup) for state in hook_states(ddp)):
        return "a communication hook of DDP has a state, which no checkpoint holds"
    return ""


class _Zeros(nn.Module):
    """Stands in for the module inside DDP: uses every parameter, and returns 0.

    No hook, dropout, statistics or compiled code of the real module takes part.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], buffers: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._used, self._its_buffers = tuple(parameters), tuple(buffers)  # of no concern to nn.Module

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield those of the real module: DDP sends rank 0's, as in each forward."""
        yield from self._its_buffers

    def forward(self, _: None) -> Tensor:
        # a chain, so that gradients become ready from the last parameter to the first, as in a real backward
        chain = torch.zeros((), device=self._used[0].device)
        for parameter in self._used:
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            chain = chain + real.sum().to(chain)
        return chain


def _pass_zeros(ddp: DistributedDataParallel) -> None:
    """Run two passes forward and backward in which every gradient is 0."""
    inner, parameters = ddp.module, [one for one in ddp.module.parameters() if one.requires_grad]
    before = [(one.grad, version_of(one)) for one in parameters]
    ddp.module = _Zeros(parameters, inner.named_buffers())
    try:
        for _ in range(2):
            for one in parameters:
                one.grad = None
            with torch.enable_grad():
                value = ddp.forward(None)  # not ddp(None): that would call hooks
            torch.autograd.backward(value, torch.zeros_like(value))
    finally:
        ddp.module = inner
        for one, (gradient, _) in zip(parameters, before, strict=True):
            one.grad = gradient
    if any(version_of(one) != version for one, (_, version) in zip(parameters, before, strict=True)):
        raise Refused("the model's weights change in a backward (an optimizer in a hook?): call its step() in the loop")
