"""Checks of the user. Libraries need a user name, a home folder and folders for compiled code."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .. import caches
from .finding import Finding, ok, problem, warning
from .machine import Machine


def checks(machine: Machine) -> Iterator[Finding]:
    """Yield all checks of the user of this process."""
    environ, number = machine.environ, os.getuid()
    name, home, compiled = caches.user_name(environ), caches.home(environ), caches.inductor(environ)
    if name:
        yield ok("user name", f"{name} (uid {number})")
    else:
        yield warning("user name", f"uid {number} has no name; runs use uid{number}", "export USER=me LOGNAME=me")
    if home is None:
        given = environ.get("HOME")
        seen = f"{given} is not a folder" if given else "the user has none"
        yield warning("home folder", f"{seen}; runs use a private folder for caches", "export HOME=/a/folder/of/yours")
    elif not os.access(str(home), os.W_OK | os.X_OK):
        seen = f"{home} is not writable; runs use private folders for caches"
        yield warning("home folder", seen, "export HOME=/a/folder/of/yours")
    else:
        yield ok("home folder", str(home))
    yield _caches(machine, str(compiled or ""))


def _caches(machine: Machine, compiled: str) -> Finding:
    name, lacking = "cache folders", caches.lacking(machine.environ)
    if not lacking:
        return ok(name, f"compiled code goes to {compiled}")
    seen = f"{', '.join(lacking)}: the default folder is missing, not writable, or belongs to another user"
    if not caches.has_place():
        return problem(name, f"{seen}, and there is no place for private folders", "export TMPDIR=/a/folder/of/yours")
    return warning(name, f"{seen}; runs use private folders", f"export {lacking[0]}=/a/folder/of/yours")
