"""Checks scripts, which run where they are, and finds which of their files have changed. Imports no torch."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from ..code import imports
from ..errors import Refused
from ..run import log_limit, owner
from ..run.owner import TrustedRun
from ..run.spec import read_spec, spec_of
from . import command
from .command import BEGINS_ANEW, SAY_HOW

_OF_FORK = ("script", "script_module", "on_restart", "figures", "cwd", "session")
"""Fields of run.json that a fork takes from the forked run."""


def check(
    script: str, *, module: str = "", arguments: list[str], on_restart: str | None, flags: dict[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Check a new script and its limits. Returns fields of run.json, and warnings.

    Args:
        script: Path of the script; '': `module` says what to start.
        module: Dotted name of a module.
        on_restart: Text of --on-restart; None: not given.

    Raises:
        Refused: the file cannot be read, or a field is not for scripts.
    """
    record = check_now(script, module=module, arguments=arguments, on_restart=on_restart, flags=flags)
    path = Path(record["script"])
    files = imports.of_script(path)
    sources = [path, *(Path(name) for name in files if name.endswith(".py"))]
    record |= {"script_files": files, "expects_session": any(map(opens_session, sources))}
    warnings = _ports_in_use(sources)
    if on_restart is None and not record["expects_session"]:
        warnings.append(f"a restart of {path.name} {BEGINS_ANEW}; {SAY_HOW}")
    return record, warnings


def check_now(
    script: str, *, module: str, arguments: list[str], on_restart: str | None, flags: dict[str, str]
) -> dict[str, Any]:
    """Check what can be checked without a process for it. Returns fields of run.json; arguments as in `check`.

    Raises:
        Refused: the file cannot be read, an argument is broken, or a field is not for scripts.
    """
    watch = watch_flags(flags)
    command.check_arguments(arguments)
    words = None if on_restart is None else command.split(on_restart)
    path = find_module(module) if module else Path(script).absolute()
    check_readable(path, "--module" if module else "--script")
    return {
        "watch": watch, "script": str(path), "script_module": module, "script_arguments": arguments,
        "on_restart": words, "cwd": os.getcwd(),
    }  # fmt: skip


def check_again(run: TrustedRun, flags: dict[str, str], on_restart: str | None) -> tuple[dict[str, Any], list[str]]:
    """Check a script that is started again. Returns fields of run.json, and a warning for each file that has changed.

    Args:
        on_restart: New arguments for restarts, as one text; None: they stay.

    Raises:
        Refused: the file cannot be read any more, or a field is not for scripts.
    """
    watch, spec = watch_flags(flags), read_spec(run)
    path = find_module(spec.script_module) if spec.script_module else Path(spec.script)
    check_readable(path, f"{run.name} runs", "; put it back")
    record: dict[str, Any] = {"watch": dict(spec.watch) | watch}
    if on_restart is not None:
        record["on_restart"] = command.split(on_restart)
    return record, command.edited(spec, run.name)


def check_fork(
    own: TrustedRun, step: int, *, arguments: list[str], on_restart: str | None, flags: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Path], list[str]]:
    """Check a new run that continues from a checkpoint of a session's run. Returns fields of run.json, what is copied
    into the run folder, and warnings.

    Args:
        step: Step of the checkpoint; 0: the new run starts at the beginning.
        arguments: They replace the arguments of the same name, or are added.
        on_restart: As in `check_again`.

    Raises:
        Refused: the checkpoint is damaged, the script cannot be read any more, or a field is not for scripts.
    """
    from ..checkpoint import manifest as manifests

    changes, warnings = check_again(own, flags, on_restart)
    command.check_arguments(arguments)
    found, run = own.read(), own.by_path()
    record, spec = dict[str, Any](found), spec_of(found, {})
    made = {name: record[name] for name in _OF_FORK if name in record} | changes | {
        "script_arguments": command.merged(spec.script_arguments, arguments),
        "script_files": imports.of_script(Path(spec.script)), "step": step,
        "forked_from": spec.forked_at(run.name, step),
    }  # fmt: skip
    if not step:
        return made, {}, warnings
    manifest, folder = manifests.verified(run, step), run.checkpoint(step)
    if arguments:
        names = ", ".join(manifest.get("session", {}).get("registered", ())) or "its state"
        warnings.append(f"{names}: loaded from the checkpoint, so new arguments do not change it")
    copies = {f"checkpoints/{folder.name}": folder}
    if run.metrics.exists():  # the session cuts it to the checkpoint
        copies[run.metrics.name] = run.metrics
    return made | {"epoch": manifest["epoch"]}, copies, warnings


def find_module(name: str) -> Path:
    """Return the file that `python -m NAME` executes, without importing anything.

    Raises:
        Refused: there is no such module, or it cannot be executed.
    """
    here = [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd()]
    places: list[str] | None = [*here, *filter(None, sys.path)]
    spec, full = None, ""
    for part in name.split("."):
        full = f"{full}.{part}".lstrip(".")
        spec = _found(full, places) if part.isidentifier() and places is not None else None
        if spec is None:
            raise Refused(f"--module {name}: there is no module {full} here; give a name as for python -m, or --script")
        places = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
    if places is not None:
        spec = _found(f"{full}.__main__", places)
        if spec is None:
            raise Refused(f"--module {name}: a package without __main__.py; give one of its modules: {name}.MODULE")
    if spec is None or not (spec.origin or "").endswith(".py"):
        raise Refused(f"--module {name}: no Python source; give a module that is written in Python")
    return Path(str(spec.origin)).absolute()


def _found(full: str, places: list[str] | None) -> ModuleSpec | None:
    """Return where Python would find a module in these folders."""
    for finder in sys.meta_path:
        search = getattr(finder, "find_spec", None)
        if search is not None and (found := search(full, places)) is not None:
            return found
    return None


def opens_session(file: Path) -> bool:
    """Whether the source of a script opens a session."""
    text = command.source(file)
    imports_it = re.search(rb"^\s*(import\s(.*,)?|from\s)\s*trainstation\b", text, re.MULTILINE)
    return imports_it is not None and re.search(rb"\bsession\(", text) is not None


def _ports_in_use(files: Iterable[Path]) -> list[str]:
    """Return a warning if these files set MASTER_PORT to a port that is in use on this machine."""
    for file, port in command.ports_set(files):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            used = f"{file.name} sets MASTER_PORT to {port}, which is in use on this machine"
            return [f"{used}; leave MASTER_PORT out there: the launcher sets a free one"]
    return []


def check_readable(path: Path, what: str, remedy: str = "") -> None:
    """Raise Refused if a script is gone, unreadable or must not be run. `what` precedes its path in the message."""
    try:
        path.open("rb").close()
    except OSError as error:
        if not remedy and not path.exists():
            raise Refused(f"there is no file {path}; give the path of your script: --script FILE") from None
        reason = error.strerror if path.exists() else "there is no such file"
        raise Refused(f"{what} {path}: {reason}{remedy}") from None
    owner.check_program(path)


def watch_flags(flags: dict[str, str]) -> dict[str, Any]:
    """Return the limits of a script's run from `--watch.NAME VALUE` and `--log.max MB`.

    Raises:
        Refused: another field, or a wrong value.
    """
    from .. import config

    for name in flags:
        if not name.startswith("watch.") and name != log_limit.FIELD:
            raise Refused(f"--{name} is for tasks, not for scripts; put arguments of the script after --")
    return {name.removeprefix("watch."): value for name, value in config.check_flags(flags).items()}
