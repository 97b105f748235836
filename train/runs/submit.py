"""What a run that is handed to an engine is made of: checked here as far as this machine can, done where it is started.

A file that --init names in a cluster is found there, too. A login node has no GPU and other cores: what follows from
the machine (device, threads, data) is found where it trains.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import torch

from train.cluster.engines import engine
from train.cluster.submission import CONFIG, FILE, TASK, Submission, to_json
from train.errors import Refused
from train.runs.admit import check_micro_batches, check_ranks
from train.runs.request import Request, resolve


def prepare(submission: Submission) -> None:
    """Check the request from its task to its batches, and fill in `files` and `record`.

    Raises:
        Refused: it cannot be run as asked for.
    """
    asked = submission
    task, config = resolve(Request(asked.task, asked.flags, asked.config_file, asked.init))
    ranks = asked.nodes * asked.nproc
    device = torch.device("cuda" if asked.gpus_per_node else "cpu")
    check_ranks(config, asked.nproc, range(asked.nodes, asked.nodes + 1), device)
    check_micro_batches(config, ranks)
    if asked.init is not None and not engine(asked.engine).FAR and not Path(asked.init).is_file():
        raise Refused(f"--init {asked.init}: there is no such file")
    files: dict[str, str | bytes] = {}
    if not task.is_built_in:
        files[TASK] = task.file.read_bytes()
    if asked.config_file is not None:
        files[CONFIG] = Path(asked.config_file).read_bytes()
    content = {
        "id": secrets.token_hex(8),
        "name": asked.name,
        "task": asked.task if task.is_built_in else str(task.file),
        "task_copy": None if task.is_built_in else TASK,
        "flags": asked.flags,
        "config_file": CONFIG if asked.config_file is not None else None,
        "init": str(Path(asked.init).absolute()) if asked.init else None,
        "cwd": os.getcwd(),
        "nodes": asked.nodes,
        "nproc": asked.nproc,
        "wait_minutes": asked.wait_minutes,
        "max_restarts": asked.max_restarts,
    }
    files[FILE] = to_json(content)
    asked.files = files
    asked.record = {"task": task.name if task.is_built_in else TASK, "world_size": ranks, "nproc": asked.nproc}
    asked.record["submission"] = content["id"]
