"""All uses of private parts of torch, checked on torch 2.7.1 to 2.13.

If a newer torch has moved one, we use the public way instead, or leave the feature out. Three more uses are elsewhere:
`UntypedStorage._new_shared` (data/image_files.py), `_shutdown_workers` (data/loader.py), and the names of DCP's
metadata (checkpoint/load.py).
"""

from __future__ import annotations

import contextlib
import datetime
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.optim import optimizer as torch_optimizer

BatchNorm = _BatchNorm
"""Base of torch's batch normalizations."""
Norm = _NormBase
"""Base of all modules of torch with running statistics."""
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer: dictionaries of the hooks of its step."""
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_PROFILED: Any = getattr(torch_optimizer.Optimizer, "profile_hook_step", None)
_PROFILED_CODE = _PROFILED(lambda: None).__code__ if _PROFILED is not None else object()
_GRADED: Any = getattr(torch_optimizer, "_use_grad_for_differentiable", None)
_GRADED_CODE = _GRADED(lambda: None).__code__ if _GRADED is not None else object()
_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_UNKNOWN = {"": "a torch that keeps its hooks elsewhere"}
_VERSION: Callable[[Any], int] = operator.attrgetter("_version")
_RUN_BACKWARD: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)

copy_all: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
"""Copy tensors into others with one kernel on a GPU: starting one kernel for each takes longer than these copies."""
add_all_: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_add_
multiply_all_: Callable[[list[Tensor], Tensor], None] = torch._foreach_mul_


def backward(root: Tensor, gradient: Tensor) -> None:
    """Do what `torch.autograd.backward(root, gradient)` does with a scalar, without its checks of the arguments.

    In a step of a small model the checks cost more than the backward pass.
    """
    if _RUN_BACKWARD is None:
        torch.autograd.backward(root, gradient)
    else:
        _RUN_BACKWARD((root,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Do what `optimizer.step()` does, without torch's two wrappers of it if no hook or profiler needs the outer one.

    The inner one also tells torch's compiler where a graph ends. Nothing compiles a step that is called from here.
    """
    wrapped: Any = type(optimizer).step
    # a class's step may be wrapped again by its user, who copies the marks of torch's wrapper
    inner = wrapped.__wrapped__ if getattr(wrapped, "__code__", None) is _PROFILED_CODE else None
    if inner is None or "step" in vars(optimizer) or _has_hooks(optimizer):
        optimizer.step()
    elif getattr(inner, "__code__", None) is _GRADED_CODE:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(optimizer.defaults["differentiable"])
        try:
            inner.__wrapped__(optimizer)
        finally:
            torch._C._set_grad_enabled(before)
    else:
        inner(optimizer)


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a profiler or a hook follows the optimizer's step."""
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
        return True
    own = vars(optimizer)
    for name in HOOKS:
        if own.get(name, _UNKNOWN):
            return True
    return any(getattr(torch_optimizer, name, _UNKNOWN) for name in _GLOBAL_HOOKS)


def after_gradients(action: Callable[[], None]) -> None:
    """Run `action` once all gradients are computed, before DDP waits for its buckets. Call it in a backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def has_rebuilt_buckets(ddp: Any) -> bool:
    """Whether DDP has laid out its buckets by the order in which gradients become ready."""
    return bool(getattr(ddp, "_has_rebuilt_buckets", True))


def hook_states(ddp: Any) -> list[Any]:
    """Return the states of DDP's communication hooks."""
    return [state for _, state in getattr(ddp, "_comm_hooks", ())]


def version_of(value: Any) -> int:
    """Return a number that changes with each write to a tensor, without waiting for the device; 0 for other things."""
    return getattr(value, "_version", 0)


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return `version_of` of many tensors, in a third of the time."""
    return [*map(_VERSION, tensors)]


def cuda_architectures() -> list[str]:
    """Return the architectures that this torch has code for. `torch.cuda.get_arch_list` opens the driver first, after
    which no fork is safe."""
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return str(flags).split() if flags else []


def grow_segments() -> None:
    """Let the allocator of GPU memory grow its segments, as expandable_segments:True in its variable does.

    A forked rank has loaded torch already, and newer versions read the variable then.
    """
    set_allocator = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if set_allocator is not None and torch.version.hip is None:
        set_allocator("expandable_segments:True")


def limit_compile_threads(threads: int) -> None:
    """Set how many processes of a rank compile kernels, unless the user has set TORCHINDUCTOR_COMPILE_THREADS. By
    default torch starts one per core of the machine, at most 32, in every rank."""
    if _COMPILE_THREADS in os.environ:
        return
    os.environ[_COMPILE_THREADS] = str(min(threads, 32))
    inductor: Any = sys.modules.get("torch._inductor.config")
    if inductor is not None:  # it has read the variable
        inductor.compile_threads = min(threads, 32)


def is_in_bad_fork() -> bool:
    """Whether this process was forked from one that has used CUDA, so that it cannot use a GPU itself."""
    return bool(getattr(torch.cuda, "_is_in_bad_fork", lambda: False)())


@contextlib.contextmanager
def noting_operators(note: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Context manager that calls `note` with the name and the arguments of each operator that torch computes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            note(func.overloadpacket.__name__, args)
            return func(*args, **(kwargs or {}))

    with Notes():
        yield


def set_group_timeout(timeout: datetime.timedelta, groups: Iterable[Any]) -> None:
    """Set the timeout of process groups that a device mesh has made with torch's own."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    for group in groups:
        _set_pg_timeout(timeout, group)


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Return `scaler.state_dict()` with tensors where that would wait for the device."""
    scale, tracker = scaler._scale, scaler._growth_tracker  # made with the first loss that is scaled
    return {
        "scale": scaler._init_scale if scale is None else scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": scaler._init_growth_tracker if tracker is None else tracker,
    }


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers, to read and to replace."""
    return module._buffers


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a buffer belongs to the state."""
    return name not in module._non_persistent_buffers_set


def copy_metadata(state: Any, module: nn.Module) -> None:
    """Copy the versions of a module's state dict to a state. Modules read older states by them."""
    state._metadata = getattr(module.state_dict(), "_metadata", {})


def dump_gpu_memory(path: Path) -> bool:
    """Write what holds the GPU's memory, for https://pytorch.org/memory_viz. Returns whether that was possible."""
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception:  # it is for a message that is about another error
        return False
    return True


def fix_compiler(compiles: bool, deterministic: bool) -> None:
    """Make the compiler's graphs and kernels independent of where an attempt started and of how long kernels take."""
    if "torch._dynamo" in sys.modules:  # a task may compile functions, and parts in place
        # one graph a shape: torch would make one for any shape once it has seen two, and a resume may see others first
        torch._dynamo.config.automatic_dynamic_shapes = False
        # beyond torch's limit (8) shapes are not compiled; which ones would depend on where an attempt began
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1 << 16
    if deterministic and (compiles or "torch._inductor.config" in sys.modules):
        choose_kernels_without_timing()


def on_compile(begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Call `begin` when torch's compiler starts to compile something, and `end` when it has finished, even by an error.
    Returns a function that ends this."""
    from torch._dynamo.callback import callback_handler  # loaded where a rank trains: its optimizer needs it

    def begun(*_: Any) -> None:  # from 2.8 on it gets an argument
        begin()

    def ended(*_: Any) -> None:
        end()

    callback_handler.register_start_callback(begun)
    callback_handler.register_end_callback(ended)

    def remove() -> None:
        with contextlib.suppress(ValueError):  # `torch._dynamo.reset` has removed them
            callback_handler.remove_start_callback(begun)
            callback_handler.remove_end_callback(ended)

    return remove


def choose_kernels_without_timing() -> None:
    """Keep torch's compiler from choosing kernels by how long they take: the next process would choose others.

    torch's own switch for determinism covers this only in part. `dynamic_scale_rblock` tries sums in blocks of half the
    size, which is another order of adding; `shape_padding` tries matrices with zeros added (2.7.1: _inductor/runtime/
    triton_heuristics.py, fx_passes/pad_mm.py). From 2.9 on one switch covers all of that.
    """
    from torch._inductor import config as inductor  # not loaded where nothing is compiled

    for name, value in {"dynamic_scale_rblock": False, "shape_padding": False, "deterministic": True}.items():
        if hasattr(inductor, name):
            setattr(inductor, name, value)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Context manager in which an optimizer can be made without torch's compiler. Loading the compiler takes longer
    than all else here, and nothing is compiled.

    The optimizer's method is marked as torch marks it when the compiler is loaded (torch/_compile.py,
    `_disable_dynamo`). With a torch that does this differently, it has no effect.
    """
    method = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if method is None or hasattr(method, "__dynamo_disable"):
        yield
        return
    setattr(method, "__dynamo_disable", method)
    try:
        yield
    finally:
        delattr(method, "__dynamo_disable")
