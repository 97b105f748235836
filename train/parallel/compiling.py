"""Compiles the model, or its blocks, with torch.compile (`--compile`), and notices when something is compiled."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from ..config import Config
from ..errors import TrainingFailed
from ..run.heartbeat import Heart
from .torch_private import on_compile
from .wrap_units import wrapped


def compile_as_asked(model: nn.Module, config: Config) -> None:
    """Replace the forward of the model, or of each of its blocks, by a compiled one. Names of parameters stay the same.

    Call it before `recompute` and before fsdp wraps the model: their code then runs outside of the graphs. Nothing is
    compiled before the first call.

    Raises:
        Refused: the model has no blocks.
    """
    if config.compile:
        for part in wrapped(model, config) if config.compile == "blocks" else [model]:
            part.forward = Compiled(part.forward)


class Compiled:
    """The forward of a module, compiled for each shape. A copy of the module gets its own one."""

    def __init__(self, forward: Any) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        # the module is an argument, so that blocks of one class share their graphs: a bound method would be a constant
        parts = (forward.__func__, forward.__self__) if isinstance(forward, types.MethodType) else (forward,)
        self._compiled = functools.partial(torch.compile(_call, dynamic=False), *parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> Any:
        return Compiled, (self._forward,)


def _call(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a forward. torch.compile skips functions in torch's own files, such as the forward of nn.Sequential, unless
    another function calls them."""
    return forward(*args, **kwargs)


class Compiling:
    """Shows the agent that this rank compiles, which may take minutes, and whether anything was compiled."""

    def __init__(self, heart: Heart) -> None:
        self._heart, self._has_compiled = heart, False
        self.close = on_compile(self._begin, heart.end_compiling)

    def _begin(self) -> None:
        self._has_compiled = True
        self._heart.begin_compiling()

    def check(self, config: Config) -> None:
        """Check that `--compile` had an effect. Call it after the first step of a run.

        Raises:
            TrainingFailed: nothing was compiled.
        """
        if config.compile and not self._has_compiled:
            what = "any block of the model" if config.compile == "blocks" else "model(…)"
            raise TrainingFailed(
                f"--compile {str(config.compile).lower()} compiled nothing, because the loss does not call {what}; let "
                "it do so, compile in place what it calls, or start a new run with --compile false"
            )
