"""One order of sets for all processes of a run.

Python hashes strings with a number that each process draws at its start, and a set is walked in the order of hashes. A
task that numbers its words by it (`enumerate(set(text.split()))`) would have another vocabulary on each rank of a
torchrun, and after each resume. So whatever executes the code of a run is started with one number: that of its
PYTHONHASHSEED. Imports nothing heavy, and nothing of this package.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

SEED = "PYTHONHASHSEED"
_USUAL = "0"
_DEBUGGER = 0
"""Its place among the tools that watch a process (sys.monitoring, Python 3.12)."""


def given(environ: Mapping[str, str]) -> str | None:
    """The number that an environment gives; None: it gives none, or asks for one at random."""
    text = environ.get(SEED, "")
    return text if text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) < 2**32 else None


def fixed(environ: Mapping[str, str], recorded: str | None = None) -> dict[str, str]:
    """The same environment, with a number in it.

    Args:
        recorded: that of the run, if it has one already.
    """
    return {**environ, SEED: recorded or given(environ) or _USUAL}


def begin_again(recorded: str | None, arguments: Sequence[str]) -> None:
    """Execute this program anew, under the same process id, unless it has such a number already.

    The number is read when an interpreter starts, and never again. A debugger would lose its process: where one looks
    on, nothing happens.

    Args:
        arguments: of this program. Of a process that was forked they are not those that it was executed with, and it
            goes on as it is.
    """
    environ = fixed(os.environ, recorded)
    is_this = bool(arguments) and sys.orig_argv[-len(arguments) :] == list(arguments)
    if environ[SEED] == os.environ.get(SEED) or not is_this or not sys.executable or _is_watched():
        return
    if sys.flags.ignore_environment:  # python -E
        return
    with contextlib.suppress(OSError):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def _is_watched() -> bool:
    tools = getattr(sys, "monitoring", None)
    return sys.gettrace() is not None or (tools is not None and tools.get_tool(_DEBUGGER) is not None)
