"""The user: libraries ask for a name, a home and folders for what they compile."""

from __future__ import annotations

import os
from collections.abc import Iterator

from train import caches
from train.doctor.finding import Finding, ok, problem, warning
from train.doctor.machine import Machine


def checks(machine: Machine) -> Iterator[Finding]:
    """All checks of the user that this process runs as."""
    environ, number = machine.environ, os.getuid()
    name, home, compiled = caches.user_name(environ), caches.home(environ), caches.inductor(environ)
    if name:
        yield ok("user name", f"{name} (uid {number})")
    else:
        yield warning("user name", f"uid {number} has none; runs get the name uid{number}", "export USER=me LOGNAME=me")
    if home is None:
        given = environ.get("HOME")
        seen = f"{given} is no folder" if given else "there is none"
        yield warning("home folder", f"{seen}; runs get one for caches", "export HOME=/a/folder/of/yours")
    elif not os.access(str(home), os.W_OK | os.X_OK):
        seen = f"{home} cannot be written; runs get other folders for caches"
        yield warning("home folder", seen, "export HOME=/a/folder/of/yours")
    else:
        yield ok("home folder", str(home))
    yield _caches(machine, str(compiled or ""))


def _caches(machine: Machine, compiled: str) -> Finding:
    name, lacking = "cache folders", caches.lacking(machine.environ)
    if not lacking:
        return ok(name, f"compiled code goes to {compiled}")
    seen = f"{', '.join(lacking)}: the usual place is missing, cannot be written, or belongs to another user"
    if not caches.has_place():
        return problem(name, f"{seen}; nor is there a place for private ones", "export TMPDIR=/a/folder/of/yours")
    return warning(name, f"{seen}; runs get private ones", f"export {lacking[0]}=/a/folder/of/yours")
