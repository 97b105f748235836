"""Reads a task's source without running it: the config fields that it spells out, and names that nothing uses.

Covers the task's file and the modules that it imports. Imports no torch.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..tasks import ARGUMENTS, is_built_in
from . import imports

_NAMES = {"config", "cfg", "conf"}
"""Common names of a configuration."""
_HARMLESS = {
    "dataclass", "no_grad", "inference_mode", "enable_grad", "cache", "lru_cache", "wraps", "contextmanager", "compile",
    "script", "final", "total_ordering",
}  # fmt: skip
"""Decorators that only change the function they get. Any other decorator may keep the function and call it."""
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

    def __init__(self, task: bytes, modules: Callable[[], list[bytes]], name: str) -> None:
        """
        Args:
            modules: reads the modules; called once, on first use.
            name: The module name of the task's file, as in imports of it.
        """
        self._name, self._modules = name, modules
        self.task = _parse(task)

    @functools.cached_property
    def _others(self) -> list[ast.Module]:
        return [*map(_parse, self._modules())]

    @functools.cached_property
    def _spelt(self) -> _Spelt:
        nodes = [node for tree in (self.task, *self._others) for node in ast.walk(tree)]
        spelt = _Spelt(names={node.value for node in nodes if isinstance(node, ast.Constant)})
        ours = _NAMES | _parameters(nodes)
        followed = {id(node.value): node for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
                continue
            after = followed.get(id(node))
            if isinstance(node, ast.Attribute):
                spelt.names.add(node.attr)
                if after is not None:
                    spelt.pairs.add((node.attr, after.attr))
                else:
                    (spelt.groups if _last(node.value) in ours else spelt.alike).add(node.attr)
            spelt.hands_on |= after is None and _last(node) in ours
        return spelt

    def reads(self, field: str) -> bool:
        """Whether a field, GROUP.NAME, is spelt out somewhere, perhaps in a branch that a check does not run."""
        group, _, rest = field.partition(".")
        name, spelt = rest.partition(".")[0], self._spelt
        is_loose = group == "task" or group in spelt.alike  # settings = config.task
        return (group, name) in spelt.pairs or group in spelt.groups or (is_loose and name in spelt.names)

    def may_read(self, field: str) -> bool:
        """Whether a field may be read, as far as is known without running: `reads`, or any code gets the whole."""
        return self._spelt.hands_on or self.reads(field)

    def binds(self, name: str) -> bool:
        """Whether the task's file binds this name by a function, a class, an assignment or an import."""
        return any(name in _bound(node) for node in _statements(self.task.body))

    def defaults(self) -> dict[str, Any]:
        """Return the defaults that the file gives: in DEFAULTS, and in Settings as task.NAME; ... if computed."""
        found: dict[str, Any] = {}
        for node in _statements(self.task.body):
            pairs: list[tuple[Any, ast.expr | None]] = []
            if isinstance(node, ast.ClassDef) and node.name == "Settings":
                targets = ((one.target, one.value) for one in node.body if isinstance(one, ast.AnnAssign))
                pairs = [(ast.Constant(f"task.{_last(target)}"), value) for target, value in targets]
            elif "DEFAULTS" in _bound(node) and isinstance(getattr(node, "value", None), ast.Dict):
                pairs = [*zip(node.value.keys, node.value.values, strict=True)]  # type: ignore[attr-defined]
            for key, value in pairs:
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and value is not None:
                    found[key.value] = ...
                    with contextlib.suppress(ValueError):
                        found[key.value] = ast.literal_eval(value)
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
class _Spelt:
    """The attributes that a source reads."""

    names: set[Any]
    """All of them, and all constants: getattr(config.optim, "lr") names a field, too."""
    pairs: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    """Two in a row, as in config.optim.lr."""
    groups: set[str] = dataclasses.field(default_factory=set)
    """Those of a configuration that no other attribute follows, as in make(config.optim)."""
    alike: set[str] = dataclasses.field(default_factory=set)
    """Those of anything else that no other attribute follows."""
    hands_on: bool = False
    """Whether the configuration is used as a whole, as in make(config)."""


def of_task(file: Path, beside: Path) -> Source:
    """Return the source of a task's file and of the modules it imports, except installed packages."""
    return Source(file.read_bytes(), lambda: [] if is_built_in(file) else imports.sources(file, beside), file.stem)


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


def _last(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _parameters(nodes: list[ast.AST]) -> set[str]:
    """Return the names that the engine's functions give to the configuration."""
    places = {name: text.split(", ").index("config") for name, text in ARGUMENTS.items() if "config" in text}
    found = set[str]()
    for node in nodes:
        function: Any = node.value if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda) else node
        names = {node.name} if isinstance(node, ast.FunctionDef) else _bound(node)
        for name in names & places.keys() if isinstance(function, (ast.FunctionDef, ast.Lambda)) else ():
            found |= {one.arg for one in [*function.args.posonlyargs, *function.args.args][places[name] :][:1]}
    return found


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


def _bound(node: ast.AST) -> set[str]:
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
