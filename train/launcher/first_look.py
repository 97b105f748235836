"""A first look at the evaluation: two micro batches of each evaluation set are evaluated before a run is created. They
are the first, and the last, which may be short.

A bug in `metrics`, `predict`, `compute_metrics` or `images` would otherwise show after an epoch. The look happens in a
fork, on the CPU, with the first weights, because what a forward changes (buffers, counters, generators) must not reach
the run. It leaves out what takes the same way through the task: the average of `ema.decay`, and other ranks.
"""

from __future__ import annotations

import bdb
import collections
import dataclasses
import os
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import causes
from ..build import determinism, objects
from ..config import Config
from ..data.aside import aside
from ..data.fetch import EVALUATION, passes
from ..data.plan import MicroBatch, Sharing, evaluation_micro_batches
from ..errors import Refused, TrainingFailed, nearest, one_line
from ..parallel import gather
from ..parallel.precision import cpu_precision
from ..parallel.torch_private import without_compiler
from ..parallel.world import World
from ..run.best import aim_of
from ..supervise import memory
from ..tasks import Task, where
from ..trainer.evaluate import evaluate
from ..trainer.predictions import ComputeMetricsFailed
from .request import scratch_run_dir

_PATIENCE = 10.0
"""Seconds that the look may take."""
_OF_PYTHON = (NameError, AttributeError, TypeError, LookupError)
"""Errors that the CPU does not cause, if the task's own file raises them."""
_OFF = "--eval.first false"
_MORE = "…"
"""Among the names of figures: there may be more."""


def warnings(
    task: Task, config: Config, *, model: nn.Module, eval_sets: Mapping[str, Any], ranks: int, device: torch.device,
    named: Mapping[str, str], way: str = f"fix it, or launch without this first look at the evaluation: {_OFF}",
) -> list[str]:  # fmt: skip
    """Evaluate the first and the last micro batch of each evaluation set. Returns what the user should know about it.

    Args:
        ranks: Number of ranks on all machines.
        named: Maps the fields whose metric the evaluations must give to their text.
        way: What to do about a problem, as the end of a refusal.
        device: That of the ranks. An error on a GPU's behalf may be the CPU's own, so it is a warning.

    Raises:
        Refused: an evaluation of the run would fail.
    """
    if not config.eval.first or not eval_sets:
        return []
    if torch.cuda.is_initialized():  # a fork cannot use it again
        return ["no first look at the evaluation: datasets() or model() has used a GPU"]

    def look() -> list[tuple[str, bool]]:
        try:
            known: set[str] = set()
            problems = [*_problems(task, config, model, eval_sets, ranks=ranks, device=device.type, known=known)]
            return problems or [*_unknown(task, config, named, known)]
        except Exception as error:  # what makes the look itself impossible; the run tells better
            return [(_said(task, error), False)]

    with scratch_run_dir():
        found, ended = aside(look, _PATIENCE)
    if found is None:
        return [f"the first look at the evaluation {ended}; to launch without it: {_OFF}"]
    for text, is_certain in found:
        if is_certain:
            raise Refused(f"{text}; {way}")
    return [f"a first look at the evaluation failed: {text}" for text, _ in found]


def _unknown(task: Task, config: Config, named: Mapping[str, str], known: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield the fields that name a metric which is not known, and whether a whole set gives no other names either."""
    for field, text in named.items():
        name = aim_of(text).metric
        if _MORE not in known and name.removeprefix("ema." if config.ema.decay is not None else "") not in known:
            there = nearest(name, known, otherwise=f"; there are: {', '.join(sorted(known))}")
            yield f"--{field} {text}: no evaluation gives {name}{there}", task.compute_metrics is None


def _problems(
    task: Task, config: Config, model: nn.Module, eval_sets: Mapping[str, Any], *, ranks: int, device: str,
    known: set[str],
) -> Iterator[tuple[str, bool]]:  # fmt: skip
    """Yield each problem in a line, and whether it would recur in the run. In a fork.

    Args:
        known: Gets the names of the figures.
    """
    memory.lower_than_agent(1000)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    threads = torch.get_num_threads()
    determinism.set_determinism(config)
    torch.set_num_threads(min(torch.get_num_threads(), threads))
    precision = cpu_precision(config)
    loader = objects.make_loader(  # as a rank does: before it connects
        task, config=config, precision=precision, train_set=None, eval_sets=eval_sets,
        workers=min(config.data.workers or 0, 1), left_out=lambda bad: None,
    )  # fmt: skip
    if ranks > 1:  # a task may use collectives
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = World(0, size=1, local_rank=0, device=precision.device)
    determinism.lay_out(model, config)
    with loader:
        for number, (name, plan) in enumerate(objects.evaluation_plans(config, eval_sets).items(), 1):
            micros = _ends(evaluation_micro_batches(plan, Sharing(), evaluation=number))
            one = dataclasses.replace(plan, limit=sum(len(micro.indices) for micro in micros))
            batches = loader.batches(iter(micros))
            try:
                with without_compiler(), gather.evaluating(ranks):
                    found = evaluate(
                        task, model, {name: one}, stream=batches, world=world, sharing=Sharing(), precision=precision,
                        show=lambda pictures: None,
                    )  # fmt: skip
                    known |= {*found[0]} if found is not None else set()
            except bdb.BdbQuit:  # a breakpoint, which has no terminal here
                known.add(_MORE)
            except (Exception, SystemExit) as error:
                of = "" if len(eval_sets) == 1 else f" (set {name or EVALUATION})"
                yield f"{_said(task, error)}{of}", _recurs(task, error, device)


def _ends(micros: Iterator[MicroBatch]) -> list[MicroBatch]:
    """Return the first and the last micro batch of a set, numbered as if they were the whole set."""
    first = next(micros)
    last = collections.deque(micros, maxlen=1)
    return [first, *(micro._replace(number=1) for micro in last)]


def _said(task: Task, error: BaseException) -> str:
    return (
        one_line(error)
        if isinstance(error, (Refused, TrainingFailed))
        else determinism.refusal(error) or where(error, task.file)
    )


def _recurs(task: Task, error: BaseException, device: str) -> bool:
    """Whether the error would recur in the run, on the run's device and with whole sets."""
    if isinstance(error, ComputeMetricsFailed) or passes(error) or causes.MEMORY.matches(str(error)):
        return False
    if device == "cpu" or isinstance(error, (TrainingFailed, Refused)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, _OF_PYTHON) and bool(frames) and frames[-1].filename == str(task.file)
