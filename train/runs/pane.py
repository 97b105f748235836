"""The first process inside tmux: becomes the agent, with the environment of who gave the order.

    python -P …/train/own.py train.runs.pane FOLDER_OF_THE_ORDER

A tmux server keeps the environment of its first client. What is read at a process's start (LD_LIBRARY_PATH, PYTHON…)
must be the caller's too, so the agent is a program of its own; this one imports next to nothing. Where a keeper holds a
process that has torch imported (runs/warm.py), or one was begun ahead (runs/ahead.py), the agent is forked by that, and
this one stays in its place in the terminal.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from train import own
from train.runs import ahead, warm


def main() -> None:
    """Carry the order that lies in the folder given as argument to the agent."""
    desk = sys.argv[1]
    content = json.loads((Path(desk) / "request.json").read_text(encoding="utf-8"))
    environ = content["env"] | {k: os.environ[k] for k in ("TMUX", "TMUX_PANE", "TERM") if k in os.environ}
    warm.enter(desk, environ, content["cwd"])
    ahead.enter(desk, content["ahead"], environ, content["cwd"])
    os.chdir(content["cwd"])
    os.execve(sys.executable, own.command("train.runs.cold", desk), environ)


if __name__ == "__main__":
    main()
