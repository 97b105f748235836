"""The run that meets at HOST:PORT: which it is, who is there and who is missing, and whether this machine would fit.

Node 0's agent answers one who asks and does not come (train/cluster/table.py); the run does not notice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import platform
import re
import shlex
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from train.cluster import same
from train.doctor import packages
from train.doctor.finding import Finding, not_applicable, ok, problem
from train.errors import shortened

_PATIENCE = 3.0
"""Seconds for an answer: an agent looks after its table many times a second."""
_LONGEST = 1 << 20
"""Bytes of an answer."""
_MOST_NODES = 1 << 16
"""Of a run that anybody has."""
_VERSION, _LONGEST_VERSION = re.compile(r"[0-9A-Za-z_.+-]+"), 64
_UNREADABLE = "train doctor  # on node 0's machine: what it says of its version here cannot be read"


def ask(address: str, port: int) -> dict[str, Any] | None:
    """What node 0 of a run says there; None: nobody answers as one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    text, until = b"", time.monotonic() + _PATIENCE
    with contextlib.suppress(OSError, ValueError, RecursionError), socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(_PATIENCE)
        one.connect((address, port))
        one.sendall(b'{"is": "who"}\n')
        while b"\n" not in text and len(text) < _LONGEST:
            one.settimeout(max(until - time.monotonic(), 0.001))  # of all of it: some say a letter a second
            more = one.recv(1 << 16)
            if not more:
                return None
            text += more
        answer = json.loads(text.partition(b"\n")[0])  # signs of life come after it
        return answer if _is_whole(answer) else None
    return None


def _is_whole(answer: Any) -> bool:
    """Whether it is what a node 0 of this release says."""
    if not isinstance(answer, dict) or answer.get("is") != "about":
        return False
    kinds = {"run": str, "least": int, "most": int, "running": bool, "same": dict, "nodes": list}
    if not _has(answer, kinds) or not 0 < answer["most"] <= _MOST_NODES:
        return False
    each = {"node": int, "host": str, "home": str, "nproc": int}
    return _has(answer["same"], {"config": dict}) and all(_has(one, each) for one in answer["nodes"])


def _has(one: Any, kinds: Mapping[str, type]) -> bool:
    return isinstance(one, dict) and all(isinstance(one.get(key), kind) for key, kind in kinds.items())


def checks(there: Mapping[str, Any], runs: Path, name: str | None) -> Iterator[Finding]:
    """All checks of a run that meets there.

    Args:
        there: what its node 0 says.
        runs: the folder where runs are kept here.
        name: the run here that is to come there; None: this machine's packages alone are looked at.
    """
    yield _who(there, name)
    yield from _programs(there)
    if name is not None and name == there["run"]:
        yield from _run(there, runs, name)


def _who(there: Mapping[str, Any], name: str | None) -> Finding:
    check, run = "run there", there["run"]
    if name is not None and name != run:
        seen = f"run {shortened(run)} meets there, not {name}; give each run a port of its own"
        return problem(check, seen, f"train resume {name} --nnodes {there['most']} --rendezvous HOST:29401")
    here = ", ".join(f"node {one['node']} ({one['host']}, ranks: {one['nproc']})" for one in there["nodes"])
    numbers = {one["node"] for one in there["nodes"]}
    missing = [str(node) for node in range(there["most"]) if node not in numbers]
    said = f"run {run} {'trains' if there['running'] else 'waits'}; of {there['most']} nodes there: {here or 'none'}"
    return ok(check, shortened(said) + (f"; missing: {shortened(', '.join(missing))}" if missing else ""))


def _programs(there: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether what is installed here is what node 0 runs."""
    theirs = there["same"]
    torch = packages.torch_of()
    root = shlex.quote(str(packages.ROOT))
    git = f"git -C {root} status; git -C {root} rev-parse HEAD  # the same on every machine"
    yield _same("code", same.code_digest(), theirs, git)
    if torch is None:
        yield not_applicable("same torch", "there is none here yet")
    else:
        mine = torch.build or torch.version
        version = _version(theirs.get("torch")).partition("+")[0]
        yield _same("torch", mine, theirs, f"pip install torch=={version}" if version else _UNREADABLE)
    if importlib.util.find_spec("torch") is None:
        yield not_applicable("same python", "this Python has no torch, so it is not the one that trains")
    else:
        version = _version(theirs.get("python"))
        remedy = f"make setup  # on both, with Python {version}" if version else _UNREADABLE
        yield _same("python", platform.python_version(), theirs, remedy)


def _version(said: Any) -> str:
    """A version as it may stand in a command that is to be pasted; '': what a stranger says is none."""
    return said if isinstance(said, str) and len(said) <= _LONGEST_VERSION and _VERSION.fullmatch(said) else ""


def _same(key: str, mine: Any, theirs: Mapping[str, Any], remedy: str) -> Finding:
    """Of one thing that must be the same."""
    what, its = same.WORDS[key], theirs.get(key)
    if mine == its:
        return ok(f"same {key}", f"{what}: {same.short(mine)}, as on node 0")
    return problem(f"same {key}", f"{what}: {same.short(mine)} here, {same.short(its)} on node 0", remedy)


def _run(there: Mapping[str, Any], runs: Path, name: str) -> Iterator[Finding]:
    """Whether the run of that name here is the one that meets there."""
    from train.errors import Refused
    from train.record import folders

    try:
        must, _ = same.of_run(folders.find(runs, name))
    except (Refused, OSError, ValueError) as error:
        yield problem("same config", str(error), "train ls")
        return
    anew = f"train rm {name}; train launch TASK --name {name} …  # as on node 0"
    mine, its = must.pop("config"), there["same"].get("config") or {}
    for key in must:
        yield _same(key, must[key], there["same"], anew)
    odd = [f"{key} is {mine.get(key)} here, {its.get(key)} on node 0" for key in sorted(mine.keys() | its.keys())
           if mine.get(key) != its.get(key)]  # fmt: skip
    if odd:
        yield problem("same config", "; ".join(odd), anew)
    else:
        yield ok("same config", f"{len(mine)} fields, as on node 0")
