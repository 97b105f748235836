"""PYTHONHASHSEED: gives sets the same order in all processes of a run.

Python hashes strings with a random seed that each process draws at its start, and iterates over a set in the order of
the hashes. A task that numbers its vocabulary by a set (`enumerate(set(text.split()))`) would get another numbering on
each rank and after each resume. So every process that executes a run's code is started with PYTHONHASHSEED set. Imports
nothing of this package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

SEED = "PYTHONHASHSEED"


def with_seed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with PYTHONHASHSEED set: to 0 unless it is set already."""
    return {SEED: "0", **environ}


def restart_with_seed(arguments: Sequence[str]) -> None:
    """Execute this program again with PYTHONHASHSEED set, which Python reads only at its start.

    Does nothing under a debugger, which would lose the program.

    Args:
        arguments: Arguments of this program. If they differ from those of the process, as in a fork, nothing happens.
    """
    if SEED not in os.environ and sys.orig_argv[-len(arguments) :] == list(arguments) and sys.gettrace() is None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_seed(os.environ))
