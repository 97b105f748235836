"""FSDP2 (`fully_shard`): parameters, gradients and the optimizer's state are spread over the ranks.

Zhao et al., "PyTorch FSDP", 2023. With `hsdp` over groups of `parallel.shard_size` ranks, each of which holds the whole
model among its members; between the groups gradients are all-reduced, as with ddp.

A forward is a collective, because it gathers parameters, so no rank may leave one out.

With bf16 and fp16, units are gathered in that type (`MixedPrecisionPolicy`), and gradients are summed in fp32. Autocast
alone would cast gathered fp32 weights, and the backward pass would keep the casts of all units: the whole model on each
rank. The forward still runs under autocast, which now has no weights to cast: it matches the types of inputs, buffers
and weights, and computes losses in fp32, as on one rank. torch would cast the inputs of units instead, and so round
what the model keeps in fp32.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..config import Config
from ..errors import Refused, TrainingFailed
from .strategy import Strategy
from .torch_private import Norm, set_group_timeout
from .wrap_units import norms, wrapped


def check(model: nn.Module, config: Config) -> None:
    """Check that a model can be spread in these units.

    Raises:
        Refused: it cannot; the message names the parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise Refused(
                f"fsdp cannot spread {name}, because it has no dimension; give it one (torch.ones(1)), or use "
                "--parallel.strategy ddp"
            )
        if not parameter.is_contiguous():
            raise Refused(
                f"fsdp cannot spread {name}, because it is not contiguous (strides {parameter.stride()}); make it "
                "so in model(), torch.nn.Parameter(tensor.contiguous()), or use --parallel.strategy ddp"
            )
    seen: set[int] = set()
    for unit in [*wrapped(model, config), model]:
        own = [(name, p) for name, p in unit.named_parameters() if id(p) not in seen]
        seen |= {id(parameter) for _, parameter in own}
        other = [name for name, parameter in own if parameter.dtype != own[0][1].dtype]
        if other:
            raise Refused(
                f"fsdp cannot gather {own[0][0]} and {other[0]} together, because their types differ; name "
                "classes that hold one type each with --parallel.wrap, or use --parallel.strategy ddp"
            )


class FSDP(Strategy):
    """fsdp and hsdp."""

    measures_communication = False

    def place(self, model: nn.Module) -> nn.Module:
        self._share = self.config.parallel.shard_size or self.world.size  # ranks that hold one copy of the model
        mesh, same_part = self._groups()
        self._divisor = self._find_divisor(model, mesh)
        mixes = self.precision.products is not None
        found = [*(norms(model) if mixes else ()), *wrapped(model, self.config), model]
        # each unit goes to the device by itself and only this rank's part of it stays there: all of the model may not
        # fit. With the root, last, goes what is in no unit
        for unit in dict.fromkeys(found):
            # the root too: an evaluation would leave its parameters gathered, and the next step would use old ones
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=self._policy(unit))
            if same_part is not None:
                self._add_over(unit, same_part)
        if mixes and self.world.device.type == "cpu":
            for part in model.modules():
                if isinstance(part, (nn.LayerNorm, nn.GroupNorm)):
                    part.register_forward_pre_hook(_cast_as_weights)
        self._take(model)
        return model

    def _groups(self) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
        """Return the ranks that hold one copy of the model among them, and the group that holds the same part as this
        rank; None for the group if there is one copy."""
        kind, copies = self.world.device.type, self.world.size // self._share
        if copies == 1:  # no groups beside the one that all ranks have
            assert dist.group.WORLD is not None
            return DeviceMesh.from_group(dist.group.WORLD, kind, mesh_dim_names=("shard",)), None
        mesh = init_device_mesh(kind, (copies, self._share), mesh_dim_names=("replicate", "shard"))
        if self.world.timeout is not None:  # a mesh makes groups with torch's own
            set_group_timeout(self.world.timeout, (None, *mesh.get_all_groups()))
        return mesh["shard"], mesh["replicate"].get_group()

    def _policy(self, unit: nn.Module) -> MixedPrecisionPolicy:
        """Return the types in which a unit's weights are gathered and its gradients summed.

        Only fp32 is cast, as by autocast. Norms with running statistics stay in fp32: their kernels take weights of
        the type of the statistics alone.
        """
        own = next((one for one in unit.parameters() if not isinstance(one, DTensor)), None)
        if isinstance(unit, Norm) or own is None or own.dtype != torch.float32:
            return MixedPrecisionPolicy()
        products = self.precision.products
        sums = None if products is None else torch.float32
        return MixedPrecisionPolicy(products, reduce_dtype=sums, cast_forward_inputs=False)

    def _find_divisor(self, model: nn.Module, mesh: DeviceMesh) -> float:
        """Return what a sum of gradients over the ranks of a copy is divided by.

        NCCL gives the mean. Asked for a mean of fp32 or bf16, gloo silently gives the sum (torch 2.7); for other types
        torch divides. So without NCCL we find out by trying.
        """
        if self.world.device.type == "cuda":
            return float(self._share)
        found = set()
        for dtype in sorted({p.dtype for p in model.parameters() if p.requires_grad}, key=str):
            probe = nn.utils.skip_init(nn.Linear, 1, self._share, bias=False, dtype=dtype, device=self.world.device)
            nn.init.ones_(probe.weight)
            fully_shard(probe, mesh=mesh, reshard_after_forward=True)
            probe(torch.ones(1, 1, dtype=dtype, device=self.world.device)).sum().backward()
            assert isinstance(probe.weight.grad, DTensor)
            found.add(self._share / probe.weight.grad.full_tensor().mean().item())
        if len(found) > 1:
            raise TrainingFailed(
                "the model has parameters of several types, whose gradients cannot be added alike on this "
                "device; use --parallel.strategy ddp"
            )
        return found.pop() if found else 1.0

    def _add_over(self, unit: nn.Module, group: dist.ProcessGroup) -> None:
        """After a unit's gradients are summed inside a copy, sum them over the copies.

        With the two-dimensional mesh given to it, fully_shard would do the same by itself, but not on a CPU.
        """
        assert isinstance(unit, FSDPModule)

        def add(gradients: Tensor) -> None:
            dist.all_reduce(gradients, group=group)
            if gradients.is_cuda:
                # torch has made them on another stream than this one, and keeps those alone from being written over
                # there that it adds by itself: of a unit that is used twice these are free as soon as they are added
                gradients.record_stream(torch.cuda.current_stream(gradients.device))

        unit.set_all_reduce_hook(add)

    def micro_batch(self, number: int, is_last: bool) -> contextlib.AbstractContextManager[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(is_last)
        self.module.set_is_last_backward(is_last)
        return contextlib.nullcontext()

    def backward(self, value: Tensor | None, weight: float, stats: Tensor | None) -> None:
        assert value is not None  # choose.check has refused to leave out samples
        # weights are made for a sum
        torch.autograd.backward(*self._root(value, weight * self._divisor))


def _cast_as_weights(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Give a norm an input of the type of its weights. On a GPU autocast makes both fp32, on a CPU it does not."""
    weight = module.weight
    if weight is None or not inputs or inputs[0].dtype != torch.float32:
        return None
    return (inputs[0].to(weight.dtype), *inputs[1:])
