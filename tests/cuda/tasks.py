"""Tasks on the GPU of the stand-in, many in one process; see each_task.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cuda import standin

ROOT = Path(__file__).parents[2]
_WAITS = re.compile(r"sync (stream|device)|copy .* sync|bad-|after-fork")
"""Calls that make the host wait, or that the driver refuses. An event may be waited for: that of an earlier step."""


def word(task: Path | str, flags: dict[str, Any]) -> str:
    return ",".join([str(task), *(f"{name}={value}" for name, value in flags.items())])


def trained(folder: Path, *words: str, watch: bool = False, **options: Any) -> list[tuple[str, list[str]]]:
    """Train tasks. Returns for each how it ended, and the calls of its watched steps that wait.

    Args:
        options: of standin.environment.
    """
    log = folder / "calls"
    environment = os.environ | standin.environment(log=log, **options) | {"EACH_TASK_WATCH": str(int(watch))}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch looks once in a process, at the first product
    command = [sys.executable, "-m", "tests.cuda.each_task", str(folder), *words]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False
    )
    ended = re.findall(r"^ended \d+: (.*)$", done.stdout, re.MULTILINE)
    assert len(ended) == len(words), done.stdout + done.stderr
    parts = re.split(r"^\d+ task \d+\n", log.read_text(), flags=re.MULTILINE)[1:]
    return [(end, _waits(part)) for end, part in zip(ended, parts, strict=True)]


def _waits(part: str) -> list[str]:
    steps = re.findall(r"steps begin\n(.*?)^\d+ steps end", part, re.MULTILINE | re.DOTALL)
    return [line for step in steps for line in step.splitlines() if _WAITS.search(line)]
