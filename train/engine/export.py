"""Exports the weights of a run, and evaluates a checkpoint without training."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from train.checkpoint.load import load
from train.checkpoint.state import weights
from train.config import Config
from train.data.fetch import Bad, fetcher
from train.data.loader import Loader
from train.data.plan import MicroBatch, evaluation_micro_batches
from train.data.sharing import Sharing
from train.data.to_device import prepared
from train.engine import arithmetic, build
from train.engine.evaluate import evaluate
from train.errors import Refused, TrainingFailed, one_line
from train.parallel.precision import ON_GPU_ALONE, Precision
from train.parallel.world import NoGPU, World, pick_device, take_device
from train.record import manifest as manifests
from train.record.durable import check_target, published
from train.record.store import Run
from train.tasks import Task, where

log = logging.getLogger("train")

SUFFIXES = (".safetensors", ".pt", ".onnx")


def load_trained(run: Run, step: int | None = None) -> tuple[Task, Config, nn.Module, int]:
    """The task, configuration and trained model of a run, from its newest whole checkpoint or that of a step.

    Raises:
        Refused: there is no such checkpoint, or it is damaged.
    """
    task = build.task_of(run)
    config = build.config_of(run, task)
    if step is not None:
        if step not in run.steps_saved():
            saved = ", ".join(map(str, sorted(run.steps_saved()))) or "none"
            raise Refused(f"{run.name} has no checkpoint of step {step}; there are: {saved}")
        try:
            manifests.verify(run.checkpoint(step))
        except ValueError as error:
            raise Refused(f"the checkpoint of step {step} is damaged: {error}") from None
    else:
        found = manifests.newest_valid(run)
        for line in found[2] if found else []:
            log.warning("warning: %s", line)
        if not found or not found[1]:
            raise Refused(f"{run.name} has no usable checkpoint yet; see: train show {run.name}")
        step = found[0]
    precision = Precision(_precision_on(torch.device("cpu"), config), torch.device("cpu"))
    model = build.make_model(task, config, precision.weights)
    try:
        load(run.checkpoint(step), model)
    except ValueError as error:
        differs = build.data_differs(run, task, config, *build.make_datasets(task, config))
        why = f"; the data differ from those that {run.name} began with: {differs}; put them back" if differs else ""
        raise Refused(f"{error}{why}") from None
    return task, config, model, step


def _precision_on(device: torch.device, config: Config) -> str:
    """The precision to compute with on a device: fp32 on a CPU for those that only GPUs have."""
    return "fp32" if device.type == "cpu" and config.precision in ON_GPU_ALONE else config.precision


def export(run: Run, target: Path, step: int | None = None) -> int:
    """Write the weights of a run to a .safetensors, .pt or .onnx file, whole or not at all. Returns their step.

    Raises:
        Refused: the target cannot be written, or the model cannot be exported.
    """
    check_target(target, SUFFIXES)
    task, config, model, step = load_trained(run, step)
    with published(target) as partial:
        if target.suffix == ".onnx":
            _to_onnx(task, config, model, partial)
        else:
            # copies: tied weights share memory, which safetensors refuses to write
            state = {name: tensor.clone() for name, tensor in weights(model).items()}
            if target.suffix == ".safetensors":
                from safetensors.torch import save_file

                save_file(state, partial, metadata={"run": run.name, "step": str(step)})
                _sort_metadata(partial)
            else:
                torch.save(state, partial)
    return step


def _sort_metadata(file: Path) -> None:
    """Sort the metadata of a file, so that equal weights give equal files: safetensors writes it in random order.

    A file begins with the length of its header in 8 bytes, little-endian, and the header, in JSON padded by spaces.
    """
    with file.open("r+b") as written:
        size = int.from_bytes(written.read(8), "little")
        head = json.loads(written.read(size))
        head["__metadata__"] = dict(sorted(head["__metadata__"].items()))
        text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        if len(text) == size:
            written.seek(8)
            written.write(text)


@contextlib.contextmanager
def _refusing(task: Task) -> Iterator[None]:
    """Turns what the task's own code raises into a refusal, with the line that `train launch` would print.

    Raises:
        Refused: the task's code raised, or returned something wrong.
    """
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        has_reason = isinstance(error, TrainingFailed)
        raise Refused(error if has_reason else arithmetic.refusal(error) or where(error, task.file)) from error


def _to_onnx(task: Task, config: Config, model: nn.Module, target: Path) -> None:
    """Export with the inputs that the task's own loss gives the model on one sample; the batch may vary."""
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise Refused(
            "export to .onnx needs the packages onnx and onnxscript; pip install 'trainstation[onnx]'"
        ) from None
    calls = _calls(task, config, model)
    if not calls or not all(isinstance(argument, torch.Tensor) for argument in calls[0]):
        raise Refused("export to .onnx needs a model that is called with tensors alone; export .safetensors instead")
    names = [f"input{index}" for index in range(len(calls[0]))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model, calls[0], str(target), input_names=names, output_names=["output"],
                dynamic_axes={name: {0: "batch"} for name in [*names, "output"]}, dynamo=False,
            )  # fmt: skip
    except Exception as error:
        raise Refused(f"the model cannot be exported to .onnx: {one_line(error)[:300]}") from None


def _calls(task: Task, config: Config, model: nn.Module) -> list[tuple[Any, ...]]:
    """The arguments with which the task's loss calls the model, on two samples."""
    import numpy as np

    train_set, eval_set = build.make_datasets(task, config)
    dataset = eval_set if eval_set is not None else train_set
    dtype = torch.float64 if config.precision == "fp64" else None
    calls: list[tuple[Any, ...]] = []
    hook = model.register_forward_pre_hook(lambda _, arguments: calls.append(arguments))
    model.eval()
    with _refusing(task), torch.no_grad():
        micro = MicroBatch(0, 0, np.arange(min(2, len(dataset))), config.seed, dataset is eval_set)
        batch = fetcher(dataset, task.collate)(micro)
        batch = prepared(batch, config.seed, torch.device("cpu"), dtype, False, task.on_device)
        task.loss(model, batch)
    hook.remove()
    return calls


def _warn(bad: Sequence[Bad]) -> None:
    for one in bad:
        log.warning("warning: left out: %s: %s", one, one.reason)


def evaluate_run(run: Run, step: int | None, workers: int | None = None) -> tuple[int, int, dict[str, float]]:
    """Evaluate a checkpoint of a run in this process. Returns its step, the number of samples and the figures.

    Raises:
        Refused: the task has no evaluation set or fails on it, or there is no usable checkpoint.
    """
    task, config, model, step = load_trained(run, step)
    arithmetic.fix(config)
    device = _device_of(run, config)
    name = _precision_on(device, config)
    if name != config.precision:
        log.warning("warning: a CPU has no %s: evaluated in %s", config.precision, name)
    precision = Precision(name, device)
    train_set, eval_set = build.make_datasets(task, config)
    if eval_set is None:
        raise Refused(f"the task of {run.name} has no evaluation set: its datasets() returns None for it")
    differs = build.data_differs(run, task, config, train_set, eval_set)
    if differs:
        log.warning("warning: the data differ from those that %s was trained with: %s", run.name, differs)
    plan = build.evaluation_plan(config, len(eval_set))
    world = World(0, 1, 0, device)
    workers = (config.data.workers or 0) if workers is None else workers
    skipped = _warn if config.data.leaves_out else None
    loader = Loader(
        None, eval_set, task.collate, workers, device, precision.inputs, skipped, config.channels_last,
        task.on_device, task.datasets,
    )  # fmt: skip
    with loader, _refusing(task):
        take_device(device)
        stream = loader.batches(evaluation_micro_batches(plan, Sharing()))
        model = arithmetic.lay_out(model, config).to(device)
        arithmetic.compile_as_asked(model, config)
        evaluated = evaluate(task, model, plan, world, precision, stream)
    assert evaluated is not None
    figures, samples = evaluated
    return step, samples, figures


def _device_of(run: Run, config: Config) -> torch.device:
    """The device to evaluate on: that of training, or the CPU where there is no GPU."""
    try:
        return pick_device(config, 1, 0)
    except NoGPU:
        log.warning("warning: %s was trained on a GPU, and torch sees none here: evaluated on the CPU", run.name)
        return torch.device("cpu")
