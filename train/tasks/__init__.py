"""What is learned. A task is a Python file with plain functions; the built-in ones are the files of this folder.

    def model(config) -> nn.Module
    def datasets(config) -> (train, evaluation or None)     # map-style datasets
    def loss(model, batch) -> Tensor                        # mean over the batch, or (total, count);
                                                            # either with a dict of its parts beside it

and, optional, `metrics(model, batch) -> dict[str, Tensor]`, `predict(model, batch)` and `compute_metrics(predictions)`
(figures of a whole set), `inference_model(model)` (what evaluation and export take), `images(model, batch)` (pictures,
at evaluations), `collate(items)`, `on_device(batch)` (what becomes of a batch there before loss and metrics get it:
from bytes to floating point numbers, say), `optimizer(model, config)`, `fingerprint(config)` (anything JSON can hold
that changes when the data do; a resume compares it), a dataclass `Settings`, and `DEFAULTS`, a dict from field names
("optim.lr") to the values this task starts from.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import importlib.util
import inspect
import itertools
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import doing
from ..errors import Refused, described, nearest, one_line
from ..run import owner

_REQUIRED = {"model": "config", "datasets": "config", "loss": "model, batch"}
_OPTIONAL = {
    "metrics": "model, batch", "predict": "model, batch", "compute_metrics": "predictions", "inference_model": "model",
    "pretrained": "config", "adapt_state_dict": "state, model",
    "images": "model, batch", "collate": "items", "on_device": "batch", "optimizer": "model, config",
    "param_groups": "model, config", "schedule": "step, total_steps, config", "updates": "model, config",
    "order": "epoch, config", "weights": "config", "lengths": "config",
    "stateful": "model, config", "after_step": "model, step, stateful", "fingerprint": "config",
}  # fmt: skip
_ALSO = {"schedule": "step, total_steps, config, history"}
"""Maps a function to other arguments that it may take."""
ARGUMENTS = _REQUIRED | _OPTIONAL
"""Maps each function that the engine calls to its arguments."""
_SAMPLERS = ("order", "weights", "lengths")
_EXCLUDE = (
    ("updates", "loss"),
    ("updates", "optimizer"),
    ("updates", "param_groups"),
    ("optimizer", "param_groups"),
    *itertools.combinations(_SAMPLERS, 2),
)
"""Pairs of functions of which the first replaces the second."""
BUILT_IN = tuple(sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py")))


@dataclasses.dataclass(frozen=True)
class Task:
    """A loaded task. `file` is the path of the Python file, `sha256` its digest."""

    name: str
    file: Path
    sha256: str
    model: Callable[..., Any]
    datasets: Callable[..., Any]
    loss: Callable[..., Any] | None
    """None: it has updates."""
    metrics: Callable[..., Any] | None
    predict: Callable[..., Any] | None
    compute_metrics: Callable[..., Any] | None
    inference_model: Callable[..., Any] | None
    pretrained: Callable[..., Any] | None
    adapt_state_dict: Callable[..., Any] | None
    images: Callable[..., Any] | None
    collate: Callable[..., Any] | None
    on_device: Callable[..., Any] | None
    optimizer: Callable[..., Any] | None
    param_groups: Callable[..., Any] | None
    schedule: Callable[..., Any] | None
    updates: Callable[..., Any] | None
    order: Callable[..., Any] | None
    weights: Callable[..., Any] | None
    lengths: Callable[..., Any] | None
    stateful: Callable[..., Any] | None
    after_step: Callable[..., Any] | None
    fingerprint: Callable[..., Any] | None
    Settings: type | None
    DEFAULTS: dict[str, Any]

    @property
    def sampler(self) -> str:
        """The function that orders the samples of an epoch; '': none, they are shuffled."""
        return next((name for name in _SAMPLERS if getattr(self, name) is not None), "")

    def to_overfit(self) -> Task:
        """Return the task without the functions that `overfit` replaces: the order of samples, and the schedule."""
        return dataclasses.replace(self, order=None, weights=None, lengths=None, schedule=None)

    @property
    def is_built_in(self) -> bool:
        return is_built_in(self.file)

    @property
    def can_evaluate(self) -> bool:
        """Whether it has a loss or a metric to evaluate."""
        return self.loss is not None or self.metrics is not None or self.compute_metrics is not None


def is_built_in(file: Path) -> bool:
    """Whether this is the file of a built-in task."""
    return file.parent == Path(__file__).parent


def locate(name: str) -> Path:
    """Return the file of a task, by built-in name or path. Does not import it.

    Raises:
        Refused: there is no such task.
    """
    if name in BUILT_IN:
        return Path(__file__).parent / f"{name}.py"
    path = Path(name)
    if path.is_file():
        owner.check_program(path.absolute())
        return path.absolute()
    if path.is_dir():
        raise Refused(f"{name} is a folder; give a built-in task ({', '.join(BUILT_IN)}) or the path of a Python file")
    if name.endswith(".py") or "/" in name:
        raise Refused(
            f"there is no file {name}; give a built-in task ({', '.join(BUILT_IN)}) or the path of a Python file"
        )
    hint = nearest(name, BUILT_IN, otherwise="; give a file by its path, for example ./my_task.py")
    raise Refused(f"there is no task {name}{hint} (built in: {', '.join(BUILT_IN)})")


def data_root(given: str) -> Path:
    """Return the folder that a built-in task reads: data.root.

    Raises:
        Refused: none is given, or there is no such folder.
    """
    if not given:
        raise Refused("this task reads files: give their folder with --data.root")
    if not os.path.isdir(given):  # noqa: PTH112 # which takes a name of any length
        raise Refused(f"--data.root {given}: there is no such folder")
    return Path(given)


def load(
    name: str, *, file: Path | None = None, beside: Sequence[Path] = (), source: bytes | None = None,
    seen_as: Path | None = None,
) -> Task:  # fmt: skip
    """Import a task.

    Args:
        name: what the user called it.
        file: its file, if not the one of that name: the copy in a run folder.
        beside: folders and zip files whose modules it may import, the first first; default: its own folder.
        source: its text, if the file may be moved meanwhile.
        seen_as: the value of its `__file__`, if not its real path.

    Raises:
        Refused: there is no such task, it cannot be imported, it lacks a function, or a name is misspelt.
    """
    path = file or locate(name)
    places, source = [*map(str, beside or [path.parent])], path.read_bytes() if source is None else source
    if is_built_in(path):
        module: Any = importlib.import_module(f".{path.stem}", __name__)
    else:
        if sys.path[: len(places)] != places:  # they may be there already, behind what is installed
            sys.path[:0] = places
        module = _execute(path, source, seen_as or path)
    is_copy = file is not None  # it trains as it did, and can be changed no more
    nodes = ast.walk(ast.parse(source))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    functions = _functions(module, path, used, is_copy)
    if not is_copy:
        _check_spelling(module, path, used)
    defaults = getattr(module, "DEFAULTS", {})
    if not (isinstance(defaults, dict) and all(isinstance(name, str) for name in defaults)):
        raise Refused(f'DEFAULTS in {path} must be a dict from field names to values: {{"optim.lr": 0.1}}')
    settings = getattr(module, "Settings", None)
    if settings is not None and not (isinstance(settings, type) and dataclasses.is_dataclass(settings)):
        raise Refused(f"Settings in {path} must be a dataclass: put @dataclass above it")
    digest = hashlib.sha256(source).hexdigest()
    return Task(name=name, file=path, sha256=digest, Settings=settings, DEFAULTS=dict(defaults), **functions)


def _functions(module: Any, path: Path, used: set[str], is_copy: bool) -> dict[str, Any]:
    """Return the functions of a task by name; None for those that it does not have.

    Args:
        used: names that the file reads, because one of its helpers may have the name of a task function.

    Raises:
        Refused: a function is missing, or does not take the right arguments.
    """
    found = {name: getattr(module, name, None) for name in (*_REQUIRED, *_OPTIONAL)}
    for name, arguments in _OPTIONAL.items():
        forms = [arguments, *([_ALSO[name]] if name in _ALSO else [])]
        if found[name] is not None and not any(_takes(found[name], form) for form in forms):
            if not is_copy:
                what = f"does not take ({arguments})" if callable(found[name]) else "is no function"
                raise Refused(f"{name} in {path} {what}; define def {name}({arguments}), or give it another name")
            found[name] = None  # in a run of before it was a helper, or a value
    if found["optimizer"] is not None and "param_groups" in used:
        found["param_groups"] = None
    for one, other in (("predict", "compute_metrics"), ("compute_metrics", "predict")):
        if found[one] is not None and found[other] is None:
            if not is_copy and one not in used:
                raise Refused(
                    f"{path} has {one} but not {other}: compute_metrics(predictions) gets what predict(model, batch) "
                    "returns for a whole evaluation set; define both, or neither"
                )
            found[one] = None
    for one, other in _EXCLUDE:
        if found[one] is not None and found[other] is not None and not is_copy:
            why = "both order the samples" if one in _SAMPLERS else f"{one} replaces {other}"
            raise Refused(f"{path} has {one} and {other}, but {why}; leave out one of them")
    for name, arguments in _REQUIRED.items():
        if not (found["updates"] and name == "loss") and not callable(found[name]):
            hint = nearest(name, vars(module))
            raise Refused(f"{path} has no function {name}; a task needs def {name}({arguments}){hint}")
    return found


def _takes(function: Any, arguments: str) -> bool:
    """Whether a function can be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except TypeError:  # or it is no function
        return False
    except ValueError:  # of a function in C nothing is known
        return True
    return True


def _check_spelling(module: Any, path: Path, used: set[str]) -> None:
    """Refuse a name that almost equals that of a missing task function, unless the file itself uses it.

    Raises:
        Refused: there is such a function, class or dict.
    """
    lacking = {name.lower(): name for name in (*_OPTIONAL, "Settings", "DEFAULTS") if not hasattr(module, name)}
    for name, value in vars(module).items():
        is_own = isinstance(value, dict) or getattr(value, "__module__", None) == module.__name__
        near = difflib.get_close_matches(name.lower(), lacking, 1, 0.8)
        if near and is_own and name not in used and not name.startswith("_"):
            raise Refused(f"{path}: nothing uses {name}; did you mean {lacking[near[0]]}? If not, call it _{name}")


def _execute(path: Path, source: bytes, seen_as: Path) -> Any:
    # importable under this name in the processes that the task's own code starts
    name = f"task_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Refused(f"{path} is not a Python file; give a built-in task or the path of a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if seen_as != path:
        module.__file__ = str(seen_as)
        lines = source.decode(errors="replace").splitlines(keepends=True)
        linecache.cache[str(seen_as)] = len(source), None, lines, str(seen_as)  # for inspect.getsource of a class
    try:
        # Not by the loader: byte code beside it may be of an older file of the same second and size, or a stranger's.
        with doing.now(f"the import of {path.name}"):
            exec(compile(source, path, "exec"), module.__dict__)
    except SyntaxError as error:
        raise Refused(f"{error.filename or path}, line {error.lineno or 1}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise Refused(where(error, path)) from None
    return module


def where(error: BaseException, path: Path) -> str:
    """Describe an exception of a user's file in one line, with the last line of that file that led to it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    what = described(error)
    trace = getattr(error, "trace", what)  # of a loader's process: torch sends it as the message of another error
    if trace is not what or "Original Traceback" in what:
        lines = [int(number) for number in re.findall(rf'File "{re.escape(str(path))}", line (\d+)', trace)]
    if "Original Traceback" in what:
        what = what.strip().splitlines()[-1]
    if hasattr(error, "sample"):  # see data/fetch.py
        what = f"{error.sample}: {what}"
    place = f"{path}, line {lines[-1]}: " if lines else f"{path}: "
    return one_line(f"{place}{what}")[:600]
