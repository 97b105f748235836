"""A trained model in another program, such as a notebook, and its predictions for a data set.

The run's code is executed in that program. Afterwards its folder, generators, modules and places to import from are as
they were before.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..build import objects
from ..build.determinism import lay_out
from ..build.loss import kind_of
from ..code import copies, imports
from ..config import Config
from ..data.fetch import fetcher
from ..data.order import seed_of
from ..data.plan import MicroBatch
from ..data.seeding import owned, seed_compute
from ..data.to_device import prepared
from ..errors import Refused, one_line
from ..parallel.precision import Precision, precision_on
from ..parallel.world import World
from ..run import folders
from ..run.best import AVERAGE
from ..run.owner import TrustedRun
from ..run.run_folder import Run
from ..run.spec import Spec, read_spec
from ..tasks import Task
from .load import load_trained
from .predictions import Predictions

_visiting = threading.RLock()
"""Held while a run's code is executed: it may change the whole process."""
_RUN_DIR = "TRAIN_RUN_DIR"


def model_of(run: TrustedRun, step: int | None, *, device: str, weights: str) -> nn.Module:
    """Return the trained model of a run on a device, in eval mode.

    Args:
        step: of the checkpoint; None: the newest.
        weights: `model` or '', or `ema` for the average of the weights.

    Raises:
        Refused: there is no such checkpoint, average or device.
    """
    place, spec = _device(device), read_spec(run)
    if weights not in ("", "model", AVERAGE):
        raise Refused(f"weights={weights!r}: give 'model', or 'ema' for the average that ema.decay keeps")
    with visited(run, spec, place):
        task, config, model = _trained(run, spec, step, weights)
        return _ready(task, config, model, place)


def _trained(run: Run, spec: Spec, step: int | None, weights: str) -> tuple[Task, Config, nn.Module]:
    """Return the task, the configuration and the model with these weights, as in `model_of`."""
    task, config, model, _, averaged = load_trained(run, spec, step)
    if weights == AVERAGE and not averaged:
        raise Refused(
            f"{run.name} keeps no average of its weights; to get one, launch a run with ema={{'decay': 0.999}}"
        )
    if weights == AVERAGE:
        model.load_state_dict(averaged, strict=False)
    return task, config, model


def predictions(
    run: TrustedRun, step: int | None, dataset: Any, *, device: str, weights: str, batch_size: int | None
) -> Any:
    """Return the predictions for every sample of a data set, joined, on the CPU.

    Without `predict` in the task these are what the model returns for a batch, or for the first part of a batch that is
    a tuple or list.

    Raises:
        Refused: the data set has no samples, or the task or the model fails on it.
    """
    place, spec = _device(device), read_spec(run)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise Refused(f"predict() takes a data set with len() and [index], got {kind_of(dataset)}")
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise Refused(f"batch_size={batch_size!r}: give a number of samples, at least 1")
    if not len(dataset):
        raise Refused("the data set has no samples to predict")
    with visited(run, spec, place):
        task, config, model = _trained(run, spec, step, weights)
        size = batch_size or config.micro_batch_size
        assert isinstance(size, int)
        inference = _ready(task, config, model, place)
        with objects.refusing(task, "predict()"), torch.no_grad():
            return _pass(task, config, inference, dataset, device=place, size=size)


def _ready(task: Task, config: Config, model: nn.Module, device: torch.device) -> nn.Module:
    return objects.inference_model(task, lay_out(model, config).to(device)).eval()


def _device(text: str) -> torch.device:
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise Refused(f"device={text!r} cannot be used ({one_line(error)[:100]}); give 'cpu' or 'cuda'") from None


def _pass(
    task: Task, config: Config, model: nn.Module, dataset: Any, *, device: torch.device, size: int
) -> Any:  # fmt: skip
    """Compute the whole data set in its order."""
    what = "" if task.predict is not None else "the model"
    made = Predictions(task, World(0, size=1, local_rank=0, device=device), what)
    precision = Precision(precision_on(device, config), device)
    fetch, own = fetcher(dataset, task.collate), owned(model, task.predict)
    for number, begin in enumerate(range(0, len(dataset), size)):
        indices = np.arange(begin, min(begin + size, len(dataset)))
        seed = seed_of(config.seed, "predict", number)
        batch = prepared(
            fetch(MicroBatch(step=0, number=number, indices=indices, seed=seed)), seed, device=device,
            dtype=precision.inputs, channels_last=config.channels_last, on_device=task.on_device,
        )  # fmt: skip
        seed_compute(seed, device, own=own)
        with precision.autocast():
            if task.predict is not None:
                found = task.predict(model, batch)
            else:
                found = model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        # a tensor alone has no name, like a list
        made.add(number, found if isinstance(found, (dict, list)) else {"": found}, len(indices))
    made.collect()
    whole = made.joined()
    return whole.get("", whole)


@contextlib.contextmanager
def visited(run: TrustedRun, spec: Spec, device: torch.device) -> Iterator[None]:
    """Context manager in which this process may execute the code of a run. Restores the process on exit."""
    seeded = [device] if device.type == "cuda" else []
    own = copies.tops(run)
    with _visiting, torch.random.fork_rng(devices=seeded):
        generators = random.getstate(), np.random.get_state()
        before = os.getcwd(), os.environ.get(_RUN_DIR), [*sys.path], [*sys.meta_path]
        hidden = _taken(own)  # the user's own, or another run's
        try:
            folders.enter(spec.cwd)
            yield
        finally:
            _taken(own)
            sys.modules.update(hidden)
            cwd, run_dir, sys.path[:], sys.meta_path[:] = before
            os.chdir(cwd)
            os.environ.pop(_RUN_DIR, None)
            if run_dir is not None:
                os.environ[_RUN_DIR] = run_dir
            random.setstate(generators[0])
            np.random.set_state(generators[1])


def _taken(tops: set[str]) -> dict[str, Any]:
    """Remove these modules, and those inside them, from the imported ones. Returns them."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if imports.top(name) in tops}
