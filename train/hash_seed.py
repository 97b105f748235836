"""PYTHONHASHSEED: one order of sets in all processes of a run.

Python hashes strings with a number that each process draws at its start, and a set is walked in the order of hashes. A
task that numbers its vocabulary by it (`enumerate(set(text.split()))`) would have another one on each rank, and after
each resume. So what executes the code of a run is started with PYTHONHASHSEED set. Imports nothing of this package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

SEED = "PYTHONHASHSEED"


def with_seed(environ: Mapping[str, str]) -> dict[str, str]:
    """The same environment, with a number in it: 0 where it has none."""
    return {SEED: "0", **environ}


def restart_with_seed(arguments: Sequence[str]) -> None:
    """Execute this program anew with the number in its environment, which Python reads as it starts.

    Args:
        arguments: of this program. Where they are not those of the process, as in a fork, nothing happens; nor where a
            debugger looks on, which would lose it.
    """
    if SEED not in os.environ and sys.orig_argv[-len(arguments) :] == list(arguments) and sys.gettrace() is None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_seed(os.environ))
