"""breakpoint() without a terminal: one line that says what to do, in place of a debugger that reads nothing.

A debugger of an editor, and one that PYTHONBREAKPOINT names, work everywhere.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .errors import TrainingFailed

_ours: list[Any] = [sys.__breakpointhook__]
"""The hooks that may be replaced. Another one belongs to a debugger."""
_why = ""
"""Why there is no terminal, and what to do."""


def skip() -> None:
    """Make breakpoint() do nothing in this process: it checks, and the run will stop there."""
    _set(lambda *_, **__: None)


def refuse(why: str) -> None:
    """Make breakpoint() raise TrainingFailed in this process.

    Args:
        why: Why there is no terminal, and what to do.
    """
    global _why  # noqa: PLW0603 - of this process
    _why = why

    def hook(*arguments: Any, **more: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*arguments, **more)
        caller = sys._getframe(1)
        raise TrainingFailed(f"breakpoint() in {caller.f_code.co_name}(), line {caller.f_lineno}: {why}")

    _set(hook)


def ended() -> str:
    """Return why a run ended when its debugger did: its user has quit, or it had no terminal."""
    return f"a debugger was called: {_why}" if _why else "the debugger was quit, or had no more input"


def _set(hook: Any) -> None:
    if sys.breakpointhook in _ours:
        sys.breakpointhook = hook
        _ours.append(hook)
