"""Reads a task's source before it runs: which config fields it reads, and which of its functions are never used.

Covers the task's file and the modules that it imports. Imports no torch.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import tasks
from ..code import imports
from ..run.ownership import MODULES
from ..run.run_folder import Run
from ..run.spec import Spec
from ..tasks import ARGUMENTS, Task

_NAMES = {"config", "cfg", "conf"}
"""Common names of a configuration, for places where its name cannot be derived."""
_HARMLESS = {
    "dataclass", "no_grad", "inference_mode", "enable_grad", "cache", "lru_cache", "wraps", "contextmanager", "compile",
    "script", "final", "total_ordering",
}  # fmt: skip
"""Decorators that only change the function they get. Any other decorator may keep the function and call it."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_MEANT = {
    "training_step": "loss", "train_step": "loss", "compute_loss": "loss", "criterion": "loss", "loss_fn": "loss",
    "validation_step": "metrics", "test_step": "metrics", "eval_step": "metrics", "evaluate": "metrics",
    "validate": "metrics", "evaluation": "metrics", "configure_optimizers": "optimizer",
    "build_optimizer": "optimizer", "create_optimizer": "optimizer", "scheduler": "schedule", "lr_schedule": "schedule",
    "get_scheduler": "schedule", "lr_lambda": "schedule", "configure_scheduler": "schedule",
    "train_dataloader": "datasets", "val_dataloader": "datasets", "get_dataloaders": "datasets",
    "dataloaders": "datasets", "load_data": "datasets", "on_train_batch_end": "after_step", "on_step_end": "after_step",
    "on_batch_end": "after_step", "optimizer_step": "after_step", "callbacks": "after_step",
    "on_epoch_end": "after_step", "on_train_epoch_end": "after_step", "transform_batch": "on_device",
    "on_after_batch_transfer": "on_device", "freeze_parameters": "--freeze", "config": "DEFAULTS",
    "default_config": "DEFAULTS", "cfg": "DEFAULTS", "hparams": "DEFAULTS", "hyperparameters": "DEFAULTS",
    "params": "DEFAULTS", "args": "DEFAULTS",
}  # fmt: skip
"""Maps names that other trainers use to the names used here."""


class Source:
    """The source of a task and of the modules that it imports, read once."""

    def __init__(self, task: bytes, modules: Callable[[], list[bytes]], name: str, is_whole: bool = True) -> None:
        """
        Args:
            modules: reads the modules; called once, on first use.
            name: The module name of the task's file, as in imports of it.
            is_whole: Whether these are all modules that the task imports.
        """
        self._name, self._modules, self._is_whole = name, modules, is_whole
        self.task = _parse(task)

    @functools.cached_property
    def _others(self) -> list[ast.Module]:
        return [*map(_parse, self._modules())]

    @property
    def _all(self) -> list[ast.Module]:
        return [self.task, *self._others]

    def reads(self, field: str) -> bool:
        """Whether a field, GROUP.NAME, is read somewhere or may be read by unknown code, because the field's group or
        the whole configuration is passed to it."""
        group, _, rest = field.partition(".")
        read = self._read
        return (
            not self._is_whole or read.is_all or group in read.groups or (group, rest.partition(".")[0]) in read.pairs
        )

    def mentions(self, name: str) -> bool:
        """Whether an attribute of this name is read, or a string equals the name, anywhere."""
        nodes = (node for tree in self._all for node in ast.walk(tree))
        return any(
            (isinstance(node, ast.Attribute) and node.attr == name)
            or (isinstance(node, ast.Constant) and node.value == name)
            for node in nodes
        )

    def binds(self, name: str) -> bool:
        """Whether the task's file binds this name by a function, a class, an assignment or an import."""
        return any(name in _bound(node) for node in _statements(self.task.body))

    def defaults(self) -> dict[str, Any]:
        """Return the defaults that the file gives as plain values: in DEFAULTS, and in Settings as task.NAME."""
        found: dict[str, Any] = {}
        for node in _statements(self.task.body):
            pairs: list[tuple[Any, ast.expr | None]] = []
            if isinstance(node, ast.ClassDef) and node.name == "Settings":
                targets = ((one.target, one.value) for one in node.body if isinstance(one, ast.AnnAssign))
                pairs = [(ast.Constant(f"task.{_last(target)}"), value) for target, value in targets]
            elif "DEFAULTS" in _bound(node) and isinstance(getattr(node, "value", None), ast.Dict):
                pairs = [*zip(node.value.keys, node.value.values, strict=True)]  # type: ignore[attr-defined]
            for key, value in pairs:
                with contextlib.suppress(ValueError):
                    found[ast.literal_eval(key)] = ast.literal_eval(value)  # type: ignore[arg-type]
        return found

    def keys_of(self, name: str) -> set[Any]:
        """Return the constant keys of a dict literal in the task's file."""
        values = (node.value for node in _statements(self.task.body) if name in _bound(node) and hasattr(node, "value"))
        keys = (key for value in values if isinstance(value, ast.Dict) for key in value.keys)
        return {key.value for key in keys if isinstance(key, ast.Constant)}

    @functools.cached_property
    def _read(self) -> _Read:
        parents = {child: node for tree in self._all for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        known, ours, read = _Names(self._all), self._configurations(), _Read()
        for node, parent in parents.items():
            if isinstance(node, ast.Call) and any(_is_configuration(one, ours) for one in _arguments(node)):
                read.is_all |= not known.has(node.func)
            if not isinstance(node, ast.Attribute):
                continue
            if isinstance(node.value, ast.Attribute):
                read.pairs.add((node.value.attr, node.attr))
            if not _is_configuration(node.value, ours):
                if not isinstance(node.value, (ast.Name, ast.Attribute)) and not isinstance(parent, ast.Attribute):
                    read.groups.add(node.attr)  # make().optim
                continue
            read.is_all |= node.attr.startswith("__")
            if isinstance(parent, ast.Call) and (name := _named_by_getattr(parent, node)):
                read.pairs.add((node.attr, name))
            elif not isinstance(parent, ast.Attribute):
                read.groups.add(node.attr)
        return read

    def _configurations(self) -> set[str]:
        """Return names of variables and attributes that hold the configuration, as given by the engine or passed on."""
        nodes = [node for tree in self._all for node in ast.walk(tree)]
        functions, values = _functions(nodes), list(_assigned(nodes))
        found = set(_NAMES)
        for name, arguments in ARGUMENTS.items():
            if "config" in arguments:
                place = arguments.split(", ").index("config")
                found |= {names[place] for one in functions[name] if len(names := _parameters(one)) > place}
        while True:
            before = len(found)
            found |= {_last(target) for target, value in values if _is_configuration(value, found)} - {""}
            for call in (node for node in nodes if isinstance(node, ast.Call)):
                for one in functions.get(_last(call.func), ()):
                    found |= _handed_on(call, _parameters(one), found)
            if len(found) == before:
                return found

    def unused(self) -> dict[str, str]:
        """Return public functions, classes and dicts in capitals of the task's file that neither the task nor the
        engine uses, each with the engine's name for it, or ''."""
        own = {name: node for node in _statements(self.task.body) for name in _bound(node) if _is_candidate(name, node)}
        own = {name: node for name, node in own.items() if name not in (*ARGUMENTS, "Settings", "DEFAULTS")}
        if not own:
            return {}
        used, texts = _uses(self.task, own)
        for tree in self._others if own.keys() - used else ():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] == self._name:
                    used |= {alias.name for alias in node.names} | (set(own) if node.names[0].name == "*" else set())
                elif isinstance(node, ast.Attribute):
                    used.add(node.attr)
        said = " ".join(texts)
        return {
            name: _meant(name, node) for name, node in own.items()
            if name not in used and not re.search(rf"\b{re.escape(name)}\b", said)
        }  # fmt: skip


@dataclasses.dataclass
class _Read:
    """The parts of the configuration that are read."""

    pairs: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    """Pairs of a group and a name."""
    groups: set[str] = dataclasses.field(default_factory=set)
    """Groups that are passed on as a whole."""
    is_all: bool = False
    """Whether the whole configuration is passed to unknown code."""


@dataclasses.dataclass
class _Names:
    """Names of functions and classes whose code is in these files."""

    trees: list[ast.Module]

    def __post_init__(self) -> None:
        nodes = [node for tree in self.trees for node in ast.walk(tree)]
        self._names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        self._names -= {"__init__"}  # may be that of a foreign class, called by super()
        for node in nodes:
            if isinstance(node, ast.ClassDef) and any(getattr(one, "name", "") == "__init__" for one in node.body):
                self._names.add(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                self._names |= {target.id for target in node.targets if isinstance(target, ast.Name)}

    def has(self, function: ast.expr) -> bool:
        """Whether a called function is one of them."""
        return _last(function) in self._names


def of_task(file: Path, beside: Path) -> Source:
    """Return the source of a task's file and of the modules it imports, except installed packages."""
    is_built_in = file.parent == Path(tasks.__file__).parent
    return Source(file.read_bytes(), lambda: [] if is_built_in else imports.sources(file, beside), file.stem)


def of_run(run: Run, task: Task, spec: Spec) -> Source:
    """Return the source of a run's copy of its task and of its modules."""
    kept = run.folder / MODULES

    def modules() -> list[bytes]:
        if not kept.is_file():
            return []
        with zipfile.ZipFile(kept) as packed:
            return [packed.read(name) for name in packed.namelist() if name.endswith(".py")]

    has_copies = kept.is_file() or not spec.task_imports
    is_whole = has_copies and not any(path.endswith(".py") for path in spec.task_watched)
    return Source(task.file.read_bytes(), modules, task.file.stem, is_whole)


def kept(task: Task, given: Path, data: str) -> tuple[dict[str, str | bytes], dict[str, Any]]:
    """Return the files and the fields of run.json with which a new run keeps the code of its task.

    Call it when the task has built everything, because it looks at the modules that this process has loaded.

    Args:
        given: The file that the user named. Modules are found beside it.
        data: The folder of the datasets, from which nothing is kept.
    """
    source = None if task.is_built_in else given.absolute()
    needed = imports.Needed({}, {}) if source is None else imports.read(task.file, source.parent, data)
    record = {
        "task": task.name if source is None else "task.py",
        "task_source": str(source) if source else None,
        "task_sha256": task.sha256,
        **needed.record(),
    }
    return ({} if source is None else {"task.py": task.file.read_bytes(), **needed.files()}), record


def unused_warning(source: Source, file: Path) -> list[str]:
    """Return a line that names the unused parts of a task's file; [] if there are none."""
    found = source.unused()
    if not found:
        return []
    named = ", ".join(f"{name} ({meant} here)" if meant else name for name, meant in found.items())
    way = "rename it as in docs/tasks.md, or begin its name with _"
    return [f"{file}: neither the task nor the engine uses {named}; {way}"]


def _parse(text: bytes) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the import will report it
        return ast.Module([], [])


def _functions(nodes: list[ast.AST]) -> dict[str, list[_Function]]:
    """Return all functions by name; for a class its __init__."""
    found: dict[str, list[_Function]] = defaultdict(list)
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name].append(node)
        elif isinstance(node, ast.ClassDef):
            made = (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
            found[node.name] += made
    for target, value in _assigned(nodes):
        if isinstance(value, ast.Lambda):
            found[_last(target)].append(value)
    return found


def _assigned(nodes: list[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield pairs of a target and the value assigned to it."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield node.target, node.value


def _last(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_configuration(node: ast.AST, ours: set[str]) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute)) and _last(node) in ours


def _arguments(call: ast.Call) -> list[ast.expr]:
    plain = (one.value if isinstance(one, ast.Starred) else one for one in call.args)
    return [*plain, *(one.value for one in call.keywords)]


def _named_by_getattr(call: ast.Call, group: ast.expr) -> str:
    """Return the name in getattr(config.optim, "lr"); '' for any other call."""
    if _last(call.func) == "getattr" and len(call.args) > 1 and call.args[0] is group:
        name = call.args[1]
        return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
    return ""


def _parameters(function: _Function) -> list[str]:
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _handed_on(call: ast.Call, parameters: list[str], ours: set[str]) -> set[str]:
    """Return the names of the parameters that get the configuration in a call."""
    found = {name for name, value in zip(parameters, call.args, strict=False) if _is_configuration(value, ours)}
    return found | {one.arg for one in call.keywords if one.arg is not None and _is_configuration(one.value, ours)}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those inside if, try and with, except `if __name__ == "__main__"`."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
            continue
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            inner += [one for handler in getattr(node, "handlers", []) for one in handler.body]
            yield from _statements(inner)


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a module binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def _is_candidate(name: str, node: ast.stmt) -> bool:
    """Whether the writer of a module may expect this name to be used from outside."""
    if name.startswith("_"):
        return False
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        decorators = (one.func if isinstance(one, ast.Call) else one for one in node.decorator_list)
        return all(_last(one) in _HARMLESS for one in decorators)
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    is_dict = isinstance(value, ast.Dict) or (isinstance(value, ast.Call) and _last(value.func) == "dict")
    return is_dict and name.isupper()


def _uses(tree: ast.Module, own: dict[str, ast.stmt]) -> tuple[set[str], list[str]]:
    """Return the names that a file reads outside of their own definitions, and its strings except docstrings."""
    used: set[str] = set()
    texts: list[str] = []
    inside = {id(inner): name for name, node in own.items() for inner in ast.walk(node)}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    finds_subclasses = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store) and inside.get(id(node)) != node.id:
            used.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            texts.append(node.value)
        elif isinstance(node, (ast.Attribute, ast.FunctionDef)):
            name = node.attr if isinstance(node, ast.Attribute) else node.name
            finds_subclasses |= name in ("__subclasses__", "__init_subclass__")
    if finds_subclasses:
        used |= {name for name, node in own.items() if isinstance(node, ast.ClassDef) and node.bases}
    return used, texts


def _meant(name: str, node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef):
        words = ("config", "settings", "args", "arguments", "params", "hparams", "hyperparameters", "options")
        return "Settings" if name.lower().endswith(words) else ""
    return _MEANT.get(name.lower(), "")
