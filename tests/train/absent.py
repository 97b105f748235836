"""A GPU that is not there: our own code computes shapes and devices on it, by torch's own rules, and nothing else.

Under torch's FakeTensorMode a tensor says that it lies on `cuda:0`, operations follow the rules of devices, and nothing
is computed. What would make the host wait for a GPU is seen on its way through the dispatcher.

What cannot be seen: streams, events and pinned memory, which take a driver (`training` says what it leaves out); all
that torch does in C++ by itself (DDP's waits, a kernel's, the copy that a list as an index is); whether a queue of
a thousand kernels is full; fsdp, whose hooks take streams; and autocast, which torch turns off where there is no GPU.
tests/gpu/steps.py looks at those, where there is one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from train.data import loader
from train.data.to_device import mapped
from train.launcher import checks
from train.launcher.request import Request
from train.parallel import strategy
from train.parallel.overlap import DeviceTimer
from train.parallel.rank_env import RankEnv
from train.parallel.world import World
from train.run import folders
from train.run.heartbeat import Heart
from train.signals import StopRequest
from train.trainer import build, prefetch, setup
from train.trainer import train as loop

GPU, _CPU, _META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten
_ALONE = RankEnv()
_UPDATES = ("aten._fused_sgd_.", "aten._fused_adam_.", "aten._fused_adamw_.")
"""What changes weights in one kernel. Of some, torch knows no shapes of a result, for they have none."""
_HERE = (str(Path(torch.__file__).parent), __file__, "<")
"""How files begin whose lines are not to blame."""


class _Fake(FakeTensorMode):
    """torch's mode, which tells torch's C++ that what lies on the GPU lies on `meta`.

    C++ would go on to ask CUDA's driver for a stream, or set its device, and end the process where there is none.
    Python sees the GPU, and so do the rules by which devices may meet.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return _META if args[0].fake_device == GPU else args[0].fake_device
        return super().__torch_dispatch__(func, types, args, _on_gpu(kwargs))


def _on_gpu(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Of a tensor that C++ makes beside another: see above."""
    return {name: GPU if value == _META else value for name, value in (kwargs or {}).items()}


class Watch(TorchDispatchMode):
    """Sees every operation, and notes what would wait for the GPU, with the line that asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        """`function (file:line) what`, in order."""
        self.kernels = self.brought = 0
        """Operations on the GPU, and tensors that came to it from pinned memory."""
        self._pinned: dict[int, Tensor] = {}

    def pinned(self, tree: Any) -> Any:
        """The same, of which all tensors count as pinned."""
        self._pinned |= {_memory(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
        return tree

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = _on_gpu(kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if tensor.device == GPU]
        self.kernels += bool(there)
        if func is _aten._local_scalar_dense.default or func is _aten.equal.default:
            return self._looked_at(func, args, there)
        if func is _aten._to_copy.default:
            self._copied(args[0], kwargs.get("device", args[0].device), None, kwargs.get("non_blocking"))
        elif func is _aten.copy_.default:
            self._copied(args[1], args[0].device, args[0], (*args, kwargs.get("non_blocking"))[2])
        elif there:
            self._mixed(func, [tensor for tensor in tensors if tensor.device == _CPU])
        if str(func).startswith(_UPDATES):
            return None
        if func.namespace == "c10d":
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        made = func(*args, **kwargs)
        return self.pinned(made) if kwargs.get("pin_memory") else made

    def _looked_at(self, func: Any, args: Any, there: list[Tensor]) -> Any:
        """Of a value on the GPU there is none: it is 0, or no difference."""
        if there:
            self._waits(f"looks at a value ({func})")
            return True if func is _aten.equal.default else args[0].dtype.is_floating_point * 0.0
        try:
            return func(*args)
        except DataDependentOutputException:  # it came from there
            return 0.0

    def _copied(self, source: Tensor, device: torch.device, target: Tensor | None, is_asynchronous: Any) -> None:
        """To the host, torch takes pinned memory for a copy that nobody waits for."""
        if source.device == device:
            return
        self.brought += device == GPU
        host = source if device == GPU else target
        if not is_asynchronous:
            self._waits(f"copies {tuple(source.shape)} from {source.device} to {device}")
        elif host is not None and _memory(host) not in self._pinned:
            self._waits(f"copies {tuple(source.shape)} from {source.device} to {device}, and not by pinned memory")

    def _mixed(self, func: Any, host: list[Tensor]) -> None:
        """A scalar on the host is an argument of a kernel like any number; all else would have to be copied."""
        if any(tensor.dim() for tensor in host) or (host and ("index" in str(func) or "_fused" in str(func))):
            self._waits(f"takes a tensor of the host ({func})")

    def _waits(self, what: str) -> None:
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_HERE):
            frame = frame.f_back
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        function = frame.f_code.co_qualname.split(".<locals>")[0].split(".")[-1]
        self.waits.append(f"{function} ({place}) {what}")


def _memory(tensor: Tensor) -> int:
    """What a tensor has in common with its views."""
    return int(tensor.untyped_storage()._cdata)


class _Sums:
    """In the place of Readback, which copies the sums to pinned memory, and asks an event for them a step later."""

    def __init__(self, device: torch.device) -> None:
        self.last = torch.empty(0)

    def __class_getitem__(cls, _: Any) -> type[_Sums]:
        return cls

    def put(self, step: Any, sums: Tensor) -> None:
        self.last = sums


def _apply(self: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """What moves a model. torch's own writes into parameters, and of fake ones not the device (2.7), or refuses."""
    for child in self.children():
        child._apply(change)
    with torch.no_grad():
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._parameters[name] = nn.Parameter(change(parameter), parameter.requires_grad)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = change(buffer)
    return self


@contextlib.contextmanager
def training(
    folder: Path, task: Path | str, flags: dict[str, Any], rank_env: RankEnv = _ALONE
) -> Iterator[tuple[Any, Watch]]:
    """A run that trains on the GPU that is not there: the engine's loop, after all that sets a rank up.

    Left out is what takes a driver: to count GPUs, to take one and ask what it is, to pin memory, the events by which
    time on a GPU is told and sums are read a step later, and the GPU's generator, which is one of the CPU here. Of
    several ranks the others say on the host what this one says; what they tell each other on the GPU goes nowhere.
    """
    texts = {name: str(value) for name, value in flags.items()} | {"device": "cuda"}
    watch, fake = Watch(), _Fake(allow_non_fake_inputs=True)
    with _kept(), contextlib.ExitStack() as held:
        for place, name, instead in (
            (torch.cuda, "default_generators", (torch.Generator(),)),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),  # a broadcast asks, since 2.13
            (setup, "pick_device", lambda *_: GPU),
            (setup, "take_device", lambda device: None),
            (loader, "pinned", lambda items, *_: _fetched(items, fake, watch)),
            (build, "make_datasets", _on_host(build.make_datasets)),
            (loop, "DataWait", lambda _: prefetch.DataWait(_CPU)),
            (loop, "Readback", _Sums),
            (strategy, "DeviceTimer", lambda _: DeviceTimer(_CPU)),
            (setup, "join", _join),
            (World, "with_own_group", lambda world: world),
            (World, "on_first", lambda world, action: action()),
            (World, "broadcast", lambda world, value, source=0: value),
            (World, "gather", lambda world, value: [value] * world.size),
            (World, "any", lambda world, flag: flag),
            (nn.Module, "_apply", _apply),
            (FakeTensor, "is_meta", property(lambda tensor: False)),  # asked of C++, which believes so
            (FakeTensor, "is_cuda", property(lambda tensor: tensor.fake_device == GPU)),
        ):
            held.enter_context(mock.patch.object(place, name, instead, create=place is FakeTensor))
        held.enter_context(mock.patch.dict(os.environ))
        with mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False):
            with mock.patch.object(torch.cuda, "device_count", lambda: rank_env.size):
                prepared = checks.prepare(Request(str(task), texts, ranks=rank_env.size))
            run = folders.create(folder, "run", prepared.files, prepared.record)
            run.begin_attempt(1)
            held.enter_context(fake)
            held.enter_context(watch)
            heart = Heart(run.logs(1) / "rank0.beat")
            job, done = setup.set_up(run, rank_env, 1, StopRequest(()), False, heart, held)
        made = loop.Loop(job, done)
        job.strategy.module.train()
        job.strategy.start()
        try:
            yield made, watch
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _on_host(function: Any) -> Any:
    """The same, of real tensors: what the host does with data before any of it goes to the GPU."""

    def call(*arguments: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments)

    return call


def _fetched(items: Iterator[Any], fake: _Fake, watch: Watch) -> Iterator[Any]:
    """Real items, then their tensors as if they were in pinned memory."""
    end = object()
    while (item := _on_host(next)(items, end)) is not end:
        yield mapped(item, lambda value: watch.pinned(fake.from_tensor(value)) if isinstance(value, Tensor) else value)


def _join(config: Any, rank_env: RankEnv, device: torch.device) -> World:
    if rank_env.size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank_env.rank, world_size=rank_env.size)
    return World(rank_env.rank, rank_env.size, rank_env.local_rank, device)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Leave this process's arithmetic as it was."""
    strict, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    switches: list[tuple[Any, str]] = [(cudnn, "benchmark"), (cudnn, "allow_tf32"), (matmul, "allow_tf32")]
    switches += [(torch.utils.deterministic, "fill_uninitialized_memory")]
    newer = (cudnn, matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))
    switches += [(place, "fp32_precision") for place in newer if hasattr(place, "fp32_precision")]
    values = [getattr(place, name) for place, name in switches]
    try:
        yield
    finally:
        for (place, name), value in zip(switches, values, strict=True):
            setattr(place, name, value)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)
