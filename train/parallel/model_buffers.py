"""The buffers of a model, which are kept in their tensors and are the same on all ranks after a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import TrainingFailed
from . import torch_private
from .overlap import DeviceTimer
from .world import World


class ModelBuffers:
    """The buffers of a model that are not empty."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = [buffer for buffer in model.buffers() if buffer.numel()]
        self._places: list[tuple[nn.Module, str, str, Tensor]] = []
        """For each buffer its module, its name in the module and in the model, and the tensor."""
        for prefix, module in model.named_modules():
            for name, buffer in torch_private.buffers_of(module).items():
                if buffer is not None and buffer.numel():
                    self._places.append((module, name, f"{prefix}.{name}" if prefix else name, buffer))

    def statistics(self) -> list[Tensor]:
        """Return the floating-point buffers of modules in training mode, such as BatchNorm's running mean."""
        moving = {id(buffer) for module, _, _, buffer in self._places if module.training}
        return [one for one in self.tensors if one.is_floating_point() and id(one) in moving]

    def restore(self) -> None:
        """Write buffers that a forward has reassigned (`self.mean = 0.9 * self.mean + …`) back into their old tensors.

        Sums and broadcasts keep these tensors.

        Raises:
            TrainingFailed: a buffer of the state now has another shape or type.
        """
        for module, name, full_name, buffer in self._places:
            now = torch_private.buffers_of(module).get(name)
            if now is buffer:
                continue
            if now is not None and (now.shape, now.dtype) == (buffer.shape, buffer.dtype):
                with torch.no_grad():
                    buffer.copy_(now)
                torch_private.buffers_of(module)[name] = buffer
            elif torch_private.is_persistent(module, name):  # others are caches, which may grow
                raise TrainingFailed(
                    f"the buffer {full_name} of the model was {_form(buffer)} and is {_form(now)} after a step, so no "
                    "checkpoint could be loaded; keep its shape and type, or register it with persistent=False"
                )

    def broadcast(self, world: World, communication: DeviceTimer) -> None:
        """Send rank 0's buffers to every rank, so that every rank continues with what a checkpoint holds."""
        if world.size == 1 or not self.tensors:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.tensors:
            by_type.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for buffers in by_type.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                with communication.waiting():
                    dist.broadcast(flat.view(torch.uint8), src=0)  # bytes: gloo knows few types
                if not world.is_first:
                    parts = flat.split([buffer.numel() for buffer in buffers])
                    views = [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)]
                    torch_private.copy_all(buffers, views)

    def copies(self) -> list[Tensor]:
        """Return copies of the buffers, for `put_back`."""
        return [buffer.clone() for buffer in self.tensors]

    def put_back(self, copies: list[Tensor]) -> None:
        """Give the buffers the values that they had when `copies` were made."""
        self.restore()
        with torch.no_grad():
            for buffer, before in zip(self.tensors, copies, strict=True):
                buffer.copy_(before)


def _form(buffer: Tensor | None) -> str:
    return "None" if buffer is None else f"{str(buffer.dtype).removeprefix('torch.')} {tuple(buffer.shape)}"
