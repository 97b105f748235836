"""The weights that a new run starts with: those of a file, of another run or of the task, fitted to the run's model.

They are read at launch and kept in the run folder, so no resume, evaluation or export needs their source.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import Config
from ..errors import Refused, nearest, one_line
from ..run.best import AVERAGE
from ..tasks import Task
from .freeze import matches, patterns_of
from .objects import call

FILE = "init.safetensors"
"""Name of the file in the run folder with the weights that fit, by the names of the run's model."""
_INNER = ("state_dict", "model", "model_state_dict", "model_state", "module", "net", "network", "weights", "params")
"""Names under which programs save a model's state beside other things; the first one found is used."""
_WRAPPERS = re.compile(r"^(_orig_mod\.)?(module\.)?(_orig_mod\.)?")
"""Prefixes that torch.compile and DDP put before names."""
_SCALAR: Any = np.float64().__reduce__()[0]
_HARMLESS: list[Any] = [
    argparse.Namespace, np.dtype, (_SCALAR, "numpy.core.multiarray.scalar"), (_SCALAR, "numpy._core.multiarray.scalar"),
    *(type(np.dtype(code)) for code in "?bhilqBHILQefd"),
]  # fmt: skip
"""Classes other than tensors in old checkpoints that execute nothing."""
_NAMED = 6
"""Maximum number of names per kind that the table lists."""


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What happened to the weights of a source."""

    source: str
    """The file, run or function that the weights come from."""
    weights: dict[str, Tensor]
    """The weights that are loaded, by the names of the model."""
    new: list[str]
    """Names of the model that nothing was loaded into."""
    left_out: list[str]
    """Names of the source that are skipped or that the model does not have."""
    path: str = ""
    """Path of the file or checkpoint that was read; '' if the task made the weights."""

    def table(self) -> list[str]:
        """Return lines on what was loaded, left out, new and of another shape."""
        count = len(self.weights)
        numbers = sum(tensor.numel() for tensor in self.weights.values())
        of = count + len(self.new)
        lines = [f"weights of {self.source}: {count} of the model's {of} tensors loaded ({numbers:,} numbers)"]
        for title, names in (("left out", self.left_out), ("new", self.new)):
            if names:
                lines.append(f"  {title:12} {_listed(names)}")
        return lines

    def file(self) -> bytes:
        """Return the content of the file in the run folder."""
        from safetensors.torch import save

        return save({name: tensor.clone() for name, tensor in self.weights.items()})


def load(folder: Path, model: nn.Module) -> None:
    """Load the first weights in a run folder into a model.

    Raises:
        Refused: they are gone or damaged.
    """
    model.load_state_dict(read(folder / FILE, str(folder / FILE)), strict=False)


def fitted(task: Task, config: Config, model: nn.Module) -> Fitted | None:
    """Return the first weights of a new run by the names of its model; None: use those that model() made.

    Raises:
        Refused: they cannot be read, or do not fit as they are asked to.
    """
    if config.init:
        path, source = config.init, f"--init {config.init}"
        state = read(Path(path), source)
    elif task.pretrained is not None:
        source = f"pretrained in {task.file}"
        made = call(task, "pretrained()", task.pretrained, config)
        if made is None:
            return None
        path = str(made) if isinstance(made, (str, Path)) else ""
        state = read(Path(path), f"{source}, {path}") if path else _tensors_of(made, source)
    else:
        return None
    if task.adapt_state_dict is None:
        return dataclasses.replace(fit(model, state, config.init_skip, source), path=path)
    adapt = task.adapt_state_dict

    def adapted(state: dict[str, Tensor]) -> dict[str, Tensor]:
        made = call(task, "adapt_state_dict()", adapt, state, model)
        return _tensors_of(made, f"adapt_state_dict in {task.file}")

    return dataclasses.replace(fit(model, state, config.init_skip, source, adapted), path=path)


def read(path: Path, source: str) -> dict[str, Tensor]:
    """Return the tensors of a file or of a checkpoint's folder. A refusal begins with `source`.

    Args:
        path: CHECKPOINT@ema means the average of the weights in a checkpoint's folder.

    Raises:
        Refused: the file is damaged, holds no state of a model, or holds more than tensors.
    """
    folder = path if path.exists() else Path(str(path).removesuffix(f"@{AVERAGE}"))
    if folder.is_dir():
        from ..checkpoint import manifest as manifests
        from ..checkpoint.load import weights_in  # DCP is slow to import, and few runs begin with a checkpoint

        try:
            manifests.verify(folder)
            return weights_in(folder, is_averaged=folder != path)
        except ValueError as error:
            raise Refused(f"{source}: {error}") from None
    if not path.exists():
        raise Refused(f"{source}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with torch.serialization.safe_globals(_HARMLESS):
            made = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        if path.suffix == ".safetensors":
            why = one_line(error)[:200]
        elif unsafe:
            why = f"it holds {unsafe[1]}, which is code; save only its state: torch.save(model.state_dict(), FILE)"
        else:
            why = "it is neither a .safetensors file nor one of torch.save, or it is damaged"
        raise Refused(f"{source}: cannot be read: {why}") from None
    return _tensors_of(made, source)


def _tensors_of(made: Any, source: str) -> dict[str, Tensor]:
    """Return the state of a model, also if the file holds other things.

    Raises:
        Refused: there is none, or several.
    """
    if not isinstance(made, dict):
        raise Refused(f"{source}: is a {type(made).__name__} and no state dict")
    inner = {str(name): value for name, value in made.items() if isinstance(value, dict) and _has_tensors(value)}
    found = next((inner[name] for name in _INNER if name in inner), None)
    if found is None and len(inner) > 1:
        raise Refused(f"{source}: holds several state dicts ({', '.join(inner)}); save only the one you want")
    if found is None:
        found = made if _has_tensors(made) else next(iter(inner.values()), None)
    if found is None:
        raise Refused(f"{source}: holds no state dict, but {_listed(map(str, made))}")
    return {name: value.detach() for name, value in found.items() if isinstance(value, Tensor)}


def _has_tensors(state: dict[Any, Any]) -> bool:
    return any(isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items())


def fit(
    model: nn.Module, state: dict[str, Tensor], skip: str, source: str,
    adapt: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda state: state,
) -> Fitted:  # fmt: skip
    """Fit weights to a model without loading them.

    Args:
        skip: init_skip, the weights that are not loaded.
        adapt: changes the weights; names that it leaves out, or fills from the model, may be missing.

    Raises:
        Refused: something does not fit, or a pattern matches nothing.
    """
    own = model.state_dict()
    before = _unwrapped(state, own)
    state = adapt(dict(before))
    used, there = ({_place(tensor) for tensor in one.values()} for one in (state, before))
    # adapt may fill in the model's own
    kept = {name for name in own.keys() & state.keys() if _place(state[name]) in {_place(own[name])} - there}
    fits = state.keys() - kept
    left_out = [name for name, tensor in before.items() if name not in fits and _place(tensor) not in used]
    skipped = _skipped([*own, *state], skip)
    other = {name: (tuple(state[name].shape), tuple(own[name].shape)) for name in own.keys() & state.keys() - skipped}
    other = {name: shapes for name, shapes in sorted(other.items()) if shapes[0] != shapes[1]}
    loaded = {name: state[name] for name in own if name in fits and name not in other and name not in skipped}
    tied = {_place(own[name]) for name in loaded}
    new = [name for name in own if name not in loaded and name not in other and _place(own[name]) not in tied]
    unknown = [name for name in state if name not in own and name not in skipped]
    if not loaded:
        raise Refused(
            f"{source}: nothing in it fits the model: it has {_listed(state)}, the model {_listed(own)}; "
            "rename them in adapt_state_dict(state, model) of the task"
        )
    gone = {name for name in new if any(f".{one}".endswith(f".{name}") for one in left_out)}  # whatever it begins with
    missing = [name for name in new if name not in skipped | gone | kept]
    _check_whole(source, other, missing, unknown)
    out = [*left_out, *(name for name in state if name in skipped)]
    weights = {name: tensor.to(own[name].dtype).contiguous() for name, tensor in loaded.items()}
    return Fitted(source.removeprefix("--init "), weights, new, out)


def _check_whole(
    source: str, other: dict[str, tuple[Any, Any]], missing: list[str], unknown: list[str]
) -> None:  # fmt: skip
    """Refuse weights that do not fit, rather than guess. Raises Refused."""
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]  # older versions of torch had none
    if not (other or missing or unknown):
        return
    name = next(iter([*other, *missing, *unknown]))
    if other:
        what = f"{name} has shape {other[name][0]}, the model's {other[name][1]}"
    else:
        names, end = (missing, "missing in it") if missing else (unknown, "not in the model")
        what = f"{_listed(names)} {'is' if len(names) == 1 else 'are'} {end}"
    raise Refused(
        f"{source}: {what}; to skip it: --init_skip '{name.rpartition('.')[0] or name}', or to change it: "
        "adapt_state_dict(state, model) of the task"
    )


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins in memory; tied tensors share it."""
    return tensor.data_ptr(), tensor.numel()


def _unwrapped(state: dict[str, Tensor], own: Iterable[str]) -> dict[str, Tensor]:
    """Return the weights without the prefixes of DDP and torch.compile, unless more names fit the model with them."""
    bare = {_WRAPPERS.sub("", name): tensor for name, tensor in state.items()}
    return max(bare, state, key=lambda one: len(one.keys() & set(own)))


def _skipped(names: list[str], patterns: str) -> set[str]:
    """Return the names that patterns match, by the name itself or by a module that contains it.

    Raises:
        Refused: a pattern matches nothing.
    """
    found: set[str] = set()
    for pattern in patterns_of(patterns):
        matched = {name for name in names if matches(name, [pattern])}
        if not matched:
            raise Refused(
                f"--init_skip {pattern}: neither the file nor the model has such a name"
                + nearest(pattern, names, otherwise=f"; they have {_listed(names)}")
            )
        found |= matched
    return found


def _listed(names: Iterable[str]) -> str:
    """Return the first of some names, and how many more there are."""
    all_names = list(dict.fromkeys(names))
    return ", ".join(all_names[:_NAMED]) + (f" and {len(all_names) - _NAMED} more" if len(all_names) > _NAMED else "")
