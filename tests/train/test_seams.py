"""Between rooms at most three arguments go by position, so that a reader of a call sees what each of them is."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import pytest

import train

MOST = 3
ROOT = Path(train.__file__).parent.parent


def room(module: str) -> str:
    """Return the folder below train/ in which a module lies; '' for the files directly in train/."""
    parts = module.split(".")
    return parts[1] if len(parts) > 2 or (ROOT / "train" / parts[-1]).is_dir() else ""


def imported(tree: ast.AST, package: str) -> dict[str, Any]:
    """Map the names that a file imports from this package, in functions too, to what they stand for."""
    names: dict[str, Any] = {}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level):
        base = resolve_name("." * node.level + (node.module or ""), package)
        for alias in node.names:
            above = importlib.import_module(base)
            if not hasattr(above, alias.name):
                with suppress(ModuleNotFoundError):  # a type that only a type checker imports
                    importlib.import_module(f"{base}.{alias.name}")
            names[alias.asname or alias.name] = getattr(above, alias.name, None)
    return names


def calls_between_rooms() -> Iterator[tuple[str, Any]]:
    """Yield each function or class that another room calls, with the place of the call. Methods are not seen."""
    for file in sorted((ROOT / "train").rglob("*.py")):
        tree = ast.parse(file.read_text())
        package = ".".join(file.relative_to(ROOT).parent.parts)
        names = imported(tree, package)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            match call.func:
                case ast.Name(name):
                    called = names.get(name)
                case ast.Attribute(ast.Name(module), name) if inspect.ismodule(names.get(module)):
                    called = getattr(names[module], name)
                case _:
                    continue
            home = getattr(called, "__module__", "") if inspect.isfunction(called) or inspect.isclass(called) else ""
            if home.startswith("train.") and room(home) != room(f"{package}.{file.stem}"):
                yield f"{file.relative_to(ROOT)}:{call.lineno}", called


def test_between_rooms_at_most_three_arguments_go_by_position() -> None:
    pytest.importorskip("transformers", reason="no room in the image; all files are imported here")
    seen, wide = set(), {}
    for place, called in calls_between_rooms():
        seen.add(called)
        if not (inspect.isclass(called) and issubclass(called, (tuple, BaseException))):  # cannot be keyword-only
            parameters = inspect.signature(called).parameters.values()
            if sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters) > MOST:
                wide[f"{called.__module__}.{called.__qualname__}"] = place
    assert len(seen) > 300 and not wide, f"make the later parameters keyword-only: {wide}"
