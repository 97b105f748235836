"""python -m tests.cuda.each_task FOLDER WORD…: train tasks a little on the stand-in's GPU, and print how each ended.

A word is TASK[,FIELD=VALUE…]. All are trained in this process, which imports torch once. With EACH_TASK_WATCH=1 a wait
for the device that torch knows of is an error in some steps of each (WATCHED). All waits in these steps are in the log
of the driver, between the lines "PID steps begin" and "PID steps end".
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.gpu.harness import train_here
from train.launcher import checks
from train.launcher.request import Request
from train.run import folders
from train.trainer.train import Loop

FLAGS = {
    "device": "cuda", "log.tensorboard": "false", "data.workers": "0", "checkpoint.every_minutes": "0",
    "checkpoint.asynchronous": "false",
}  # fmt: skip
WATCHED = range(3, 6)
"""In the first two steps of an attempt the program waits on purpose: to see whether a forward changes the model."""
_step = Loop.step


def main() -> None:
    folder = Path(sys.argv[1])
    for number, word in enumerate(sys.argv[2:]):
        task, *fields = word.split(",")
        note(f"task {number}")
        try:
            prepared = checks.prepare(
                Request(task, flags=FLAGS | dict(field.split("=", 1) for field in fields)), ranks=1
            )
            run = folders.create(folder, f"run{number}", files=prepared.files, record=prepared.record)
            with mock.patch.object(Loop, "step", watched_step):
                train_here(run)
            end = "finished"
        except Exception as error:
            traceback.print_exc()
            end = str(error).splitlines()[0]
        print(f"\nended {number}: {end}", flush=True)


def watched_step(loop: Any) -> None:
    """Make a step of training; in the place of Loop.step."""
    if loop.done + 1 not in WATCHED or os.environ.get("EACH_TASK_WATCH") != "1":
        _step(loop)
        return
    note("steps begin")
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(loop)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        note("steps end")


def note(text: str) -> None:
    """Write a line into the log of the driver."""
    with Path(os.environ["STANDIN_LOG"]).open("a") as log:
        log.write(f"{os.getpid()} {text}\n")


if __name__ == "__main__":
    main()
