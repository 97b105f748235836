"""Records what made a run: versions, and the commit of the folder from which it was launched."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Sequence
from typing import Any

from .. import __version__, gpus


def facts(found: Sequence[gpus.Card] = ()) -> dict[str, Any]:
    """Return the fields of run.json that say what made a run.

    Args:
        found: The GPUs.
    """
    return {"versions": versions(found), "git_revision": git_revision()}


def versions(found: Sequence[gpus.Card] = ()) -> dict[str, str]:
    """Return the versions of everything that computes, for run.json.

    Args:
        found: The GPUs. Asking torch for a name would open a GPU in this process.
    """
    import torch

    return {
        "train": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # else a torch class, which needs torch to be unpickled
        "cuda": torch.version.cuda or "none",
        "gpu": found[0].name if found else "none",
    }


def git_revision() -> str | None:
    """Return the commit of the current folder, marked if files differ from it. None: the folder is in no checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10).strip() or None
    return None
