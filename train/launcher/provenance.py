"""What a run was made with: versions, and the commit of the folder that it was launched in."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Sequence

import train
from train import gpus


def versions(found: Sequence[gpus.Card] = ()) -> dict[str, str]:
    """What computes: recorded with the run.

    Args:
        found: the GPUs; asking torch for a name would open one in this process.
    """
    import torch

    return {
        "train": train.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a class of its own, which would bring torch wherever this is unpickled
        "cuda": torch.version.cuda or "none",
        "gpu": found[0].name if found else "none",
    }


def git_revision() -> str | None:
    """The commit of the current folder, and whether files differ from it; None: it is in no checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10).strip() or None
    return None
