"""python -m tests.cuda.each_task FOLDER TASK[,FIELD=VALUE…]…: train each task a little, and print how each ended.

All in one process, which imports torch once.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from tests.gpu.harness import Scale, train_here
from train.launcher import checks
from train.launcher.request import Request
from train.run import folders

FLAGS = {
    "device": "cuda", "steps": "2", "log.tensorboard": "false", "data.workers": "0", "checkpoint.every_minutes": "0",
    "eval.limit_batches": "1",
}  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    for number, word in enumerate(sys.argv[2:]):
        task, *fields = word.split(",")
        try:
            flags = FLAGS | dict(field.split("=", 1) for field in fields)
            prepared = checks.prepare(Request(task, flags, ranks=1))
            train_here(
                folders.create(Scale("cuda", True, 1, folder).folder, f"run{number}", prepared.files, prepared.record)
            )
            print(f"ended {Path(task).stem}: finished", flush=True)
        except Exception as error:
            traceback.print_exc()
            print(f"ended {Path(task).stem}: {str(error).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
