"""Stands between torchrun's agent and one rank: lock, log file, parent's death, then the rank itself.

    python -P …/train/own.py train.runs.rank RUN_FOLDER ATTEMPT [-- SCRIPT ARGS…]

The agent hands over the run's lock as standard input (Python closes every other file of a child).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    folder, attempt, *rest = sys.argv[1:]
    rank = os.environ["RANK"]
    # before anything is imported that takes time: an orphan must not outlive its agent, not even while starting
    from train.record.store import Run
    from train.runs import memory
    from train.signals import die_with_parent

    memory.lower_than_agent()
    die_with_parent(int(os.environ["TRAIN_AGENT_PID"]))
    lock = os.dup(0)
    os.set_inheritable(lock, True)  # a script that starts processes of its own stays alive as a whole
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    log = Run(Path(folder)).logs(int(attempt)) / f"rank{rank}.log"
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["TRAIN_ATTEMPT"] = attempt
    if rest:
        os.execv(sys.executable, [sys.executable, "-u", *rest[1:]])
    sys.argv = ["train.runs.worker", folder]
    from train.runs import worker

    worker.main()


if __name__ == "__main__":
    main()
