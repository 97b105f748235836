"""`python -m benchmarks.resume`: whether a resume late in a huge epoch costs more than one near its start.

The order of samples is a function, so a resume computes its position instead of reading up to it. Real ranks resume
real runs, over a dataset that is not stored, from checkpoints placed at 1 % and at 95 % of an epoch. The time is that
of a whole attempt of one step: reading and verifying the checkpoint, the first batch, the step, saving.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import command, virtual
from train import hash_seed
from train.build import objects
from train.build.optimizer import make_optimizer
from train.checkpoint.save import Saver
from train.checkpoint.state_dict import TrainState
from train.errors import EXIT_FINISHED
from train.launcher import checks
from train.launcher.request import Request
from train.parallel.precision import Precision
from train.parallel.world import World
from train.programs import TASK
from train.run import folders
from train.run.run_folder import Run
from train.run.spec import read_spec
from train.signals import StopRequest
from train.supervise.attempts import Supervisor
from train.supervise.decide import LaunchMode
from train.supervise.ranks import TaskRanks
from train.zygote.client import CHECKS, RANKS, Zygote, acquire

BATCH = 1000


def bench(folder: Path, samples: int, times: int = 5) -> str:
    """Measure in this folder. Returns a table in Markdown."""
    zygote = acquire(hash_seed.with_seed(os.environ), (*CHECKS, *RANKS))
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as name:
        places = [int(samples / BATCH * share) for share in (0.01, 0.95)]
        bases = [_placed(Path(name), samples, step) for step in places]
        took: list[list[float]] = [[] for _ in places]
        memory: list[list[float]] = [[] for _ in places]
        for count in range(times + 2):  # in turn, so that a slow moment meets both
            for place, base in enumerate(bases):
                run = Run(base.folder.with_name(f"{base.name}-{count}"))
                shutil.copytree(base.folder, run.folder)
                seconds, line = _resumed(run, zygote)
                shutil.rmtree(run.folder)
                if count > 1:  # the first wait for the zygote
                    took[place].append(seconds)
                    memory[place].append(line["memory"])
    lines = [
        "| resumed after step | samples in the epoch | s | ratio | memory of the rank |",
        "|---|---|---|---|---|",
    ]
    first = statistics.median(took[0])
    for step, seconds, peaks in zip(places, map(statistics.median, took), map(statistics.median, memory), strict=True):
        lines.append(f"| {step} | {samples:.0e} | {seconds:.2f} | {seconds / first:.2f} | {peaks / 1e6:.0f} MB |")
    return "\n".join(lines)


def _placed(runs: Path, samples: int, step: int) -> Run:
    """Make a run with a checkpoint of this step and one step left."""
    flags = {
        "steps": str(step + 1), "batch_size": str(BATCH), "task.samples": str(samples), "cpu_threads": "1",
        "log.tensorboard": "false", "log.every_steps": "1", "checkpoint.every_minutes": "0",
        "checkpoint.asynchronous": "false",
    }  # fmt: skip
    prepared = checks.prepare(Request(task=virtual.__file__, flags=flags))
    run = folders.create(runs, f"at-{step}", files=prepared.files, record=prepared.record)
    task = objects.task_of(run, read_spec(run))
    config = objects.config_of(run, task)
    model = objects.make_model(task, config)
    cpu = torch.device("cpu")
    state = TrainState(module=model, optimizer=make_optimizer(task, model, config), precision=Precision("fp32", cpu))
    Saver(run, World(0, size=1, local_rank=0, device=cpu), config=config, attempt=1, saved=lambda step: None).save(
        step, state, {}
    )
    return run


def _resumed(run: Run, zygote: Zygote) -> tuple[float, dict[str, Any]]:
    """Resume the run. Returns the seconds of the attempt, and the line of its step."""
    lock = run.acquire()
    assert lock is not None  # a fresh copy
    began = time.perf_counter()
    code = Supervisor(
        run=run,
        spec=read_spec(run),
        program=TASK,
        ranks=TaskRanks(run, read_spec(run), lock=lock, count=1, zygote=zygote),
        mode=LaunchMode.LAUNCHED,
        stop=StopRequest(()),
    ).keep()
    seconds = time.perf_counter() - began
    lock.release()
    if code != EXIT_FINISHED:
        raise RuntimeError((run.logs(1) / "rank0.log").read_text())
    return seconds, json.loads(run.metrics.read_text().splitlines()[-1])


if __name__ == "__main__":
    command.run(bench, samples=1_000_000_000, times=25)
