"""Exports the weights of a run as .safetensors, .pt or .onnx."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..build import objects
from ..build.freeze import frozen_names
from ..checkpoint.registered import state_dict
from ..checkpoint.state_dict import weights
from ..config import Config
from ..data.fetch import EVALUATION, TRAINING
from ..errors import Refused, one_line
from ..parallel.precision import cpu_precision
from ..run.best import AVERAGE
from ..run.durable import published
from ..run.run_folder import Run
from ..run.spec import Spec
from ..tasks import Task
from .load import load_trained

MODEL, TRAINED = "model", "trained"
"""Which weights to export, besides AVERAGE: those of the model, or only those of them that are not frozen."""


def export(run: Run, spec: Spec, target: Path, *, step: int | None = None, which: str = MODEL) -> int:
    """Write the weights of a run to a .safetensors, .pt or .onnx file, whole or not at all. Returns their step.

    Args:
        which: MODEL, AVERAGE or TRAINED.

    Raises:
        Refused: the target cannot be written, or the model cannot be exported.
    """
    if which not in (MODEL, AVERAGE, TRAINED):
        raise Refused(f"--weights {which}: give {MODEL}, {AVERAGE} or {TRAINED}")
    task, config, model, step, averaged = load_trained(run, spec, step)
    if which == AVERAGE and not averaged:
        raise Refused(f"{run.name} keeps no average of its weights; to get one, launch a run with --ema.decay 0.999")
    if which == AVERAGE:
        model.load_state_dict(averaged, strict=False)
    frozen = frozen_names(model, config.freeze) if which == TRAINED else set[str]()
    if which == TRAINED and not frozen:
        raise Refused(f"--weights trained: {run.name} trains all of its weights; leave it out")
    # inference_model may merge what was trained into other weights
    inference = objects.inference_model(task, model) if which != TRAINED else model
    with published(target) as partial:
        if target.suffix == ".onnx":
            _to_onnx(task, config, model, inference, partial)
        else:
            _write({name: one for name, one in weights(inference).items() if name not in frozen}, partial, run, step)
    return step


def export_registered(run: Run, target: Path, *, step: int | None, name: str) -> int:
    """Write the weights of a module that a session has registered to a .safetensors or .pt file. Returns their step.

    Raises:
        Refused: there is no such module, or the target cannot be written.
    """
    if target.suffix == ".onnx":
        raise Refused(f"{run.name} runs a script, whose model is not known here; give --to a .safetensors or .pt file")
    step, state = state_dict(run, name, step)
    with published(target) as partial:
        _write(state, partial, run, step)
    return step


def _write(state: dict[str, Tensor], partial: Path, run: Run, step: int) -> None:
    # copies: tied weights share memory, which safetensors refuses to write
    state = {name: tensor.clone() for name, tensor in state.items()}
    if partial.suffix == ".safetensors":
        from safetensors.torch import save_file

        # one key: safetensors writes several in random order, and equal weights are to be equal files
        save_file(state, partial, metadata={"checkpoint": f"{run.name}/{run.checkpoint(step).name}"})
    else:
        torch.save(state, partial)
        with zipfile.ZipFile(partial, "a") as file:
            file.comment = f"{run.name}/{run.checkpoint(step).name}".encode()


def _to_onnx(task: Task, config: Config, model: nn.Module, inference: nn.Module, target: Path) -> None:
    """Export with the inputs that the task's own functions give the model on two samples; the batch may vary."""
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise Refused(
            "export to .onnx needs the packages onnx and onnxscript; pip install 'trainstation[onnx]'"
        ) from None
    calls = _calls(task, config, model, inference)
    if not calls or not all(isinstance(argument, torch.Tensor) for argument in calls[0]):
        raise Refused("export to .onnx needs a model that takes only tensors; export .safetensors instead")
    names = [f"input{index}" for index in range(len(calls[0]))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                inference, calls[0], str(target), input_names=names, output_names=["output"],
                dynamic_axes={name: {0: "batch"} for name in [*names, "output"]}, dynamo=False,
            )  # fmt: skip
    except Exception as error:
        raise Refused(f"the model cannot be exported to .onnx: {one_line(error)[:300]}") from None


def _calls(task: Task, config: Config, model: nn.Module, inference: nn.Module) -> list[tuple[Any, ...]]:
    """Return the arguments with which the task's functions call the inference model on two samples."""
    train_set, eval_sets = objects.make_datasets(task, config)
    name, dataset = next(((name or EVALUATION, each) for name, each in eval_sets.items()), (TRAINING, train_set))
    calls: list[tuple[Any, ...]] = []
    hook = inference.register_forward_pre_hook(lambda _, arguments: calls.append(arguments))
    model.eval()
    inference.eval()
    with objects.refusing(task), torch.no_grad():
        batch = objects.first_samples(
            task, config, precision=cpu_precision(config), dataset=dataset, count=min(2, len(dataset)), name=name
        )
        for function, of in ((task.loss, model), (task.metrics, inference), (task.predict, inference)):
            if function is not None and not calls:
                function(of, batch)
    hook.remove()
    return calls
