"""No two tests give one name to a run in a folder that they share: which of them fails would depend on their order."""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
STATION, ENGINE = "shared_station", "engine"
"""Fixtures whose runs lie in one folder for all tests of a worker. Others are made from them."""
REFUSED = "never"
"""Prefix of the names of runs that are refused: no folder is left."""


def made_from(fixture: str, modules: Iterable[ast.Module]) -> set[str]:
    """Return the fixtures of these files that hand on a fixture's folder, and itself."""
    found = {fixture}
    for function in (one for module in modules for one in module.body if isinstance(one, ast.FunctionDef)):
        is_fixture = any("fixture" in ast.unparse(one) for one in function.decorator_list)
        takes, gives = {one.arg for one in function.args.args}, ast.unparse(function.returns or ast.Name("None"))
        if is_fixture and found & takes and "tmp_path" not in takes and gives in ("Station", "Engine", "Any"):
            found.add(function.name)
    return found


def namers(module: ast.Module) -> dict[str, int]:
    """The helpers of a file that pass a parameter on as --name: their names, and the place of that parameter."""
    found = {}
    for function in (one for one in module.body if isinstance(one, ast.FunctionDef)):
        places = {one.arg: place for place, one in enumerate(function.args.args)}
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            for word, after in itertools.pairwise(call.args):
                if isinstance(word, ast.Constant) and word.value == "--name" and isinstance(after, ast.Name):
                    found |= {function.name: places[after.id]} if after.id in places else {}
    return found


def names(function: ast.FunctionDef, helpers: dict[str, int], engines: set[str]) -> Iterator[str]:
    """Yield the names that a test writes out, also for a helper.

    They are in engine.run("NAME"), engine.fork("OF", "NAME") and "--name", "NAME".
    """
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        words = [one.value if isinstance(one, ast.Constant) else None for one in call.args]
        match call.func:
            case ast.Attribute(value=ast.Name(id=engine), attr="run" | "fork" as attr) if engine in engines:
                found = words[:1] if attr == "run" else words[1:2]
            case ast.Name(id=helper) if helper in helpers:
                found = words[helpers[helper] : helpers[helper] + 1]
            case _:
                found = [after for word, after in itertools.pairwise(words) if word == "--name"]
        yield from (one for one in found if isinstance(one, str) and not one.startswith(REFUSED))


def test_a_shared_folder_has_one_run_of_each_name() -> None:
    users = defaultdict(set)
    common = ast.parse((FOLDER / "conftest.py").read_text())
    for file in sorted(FOLDER.rglob("test_*.py")):
        module = ast.parse(file.read_text())
        engines = made_from(ENGINE, (common, module))
        shared = made_from(STATION, (common, module)) | engines
        for function in module.body:
            if isinstance(function, ast.FunctionDef) and shared & {one.arg for one in function.args.args}:
                for name in names(function, namers(module), engines):
                    users[name].add(f"{file.relative_to(FOLDER)}: {function.name}")
    assert len(users) > 100
    assert not {name: tests for name, tests in users.items() if len(tests) > 1}
