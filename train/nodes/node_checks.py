"""Checks that all machines of a run train the same: what each node reports about itself, and how two nodes differ."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import strategies
from ..run import folders
from ..run.run_folder import Run
from ..run.spec import Spec

SHARED = ".shared"
"""File in node 0's run folder. A node that can read it there shares the folder; it holds the id of node 0's process."""


def code_digest() -> str:
    """Return a short digest of the names and contents of the package's Python files."""
    folder = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def hello(run: Run, spec: Spec, *, node: int, nproc: int, least: int, most: int) -> dict[str, Any]:
    """Return what a node reports about itself when it connects.

    Args:
        least: Minimum number of nodes.
        most: Maximum number of nodes.

    Returns:
        Among others `same`: values that must be equal on all nodes, with the config fields under `config`; and
        `chosen`: fields that no user has set, which all nodes take from node 0.

    Raises:
        Refused, OSError, ValueError: the run folder is incomplete.
    """
    from importlib.metadata import version

    from .. import config as configuration
    from ..checkpoint.manifest import sha256_of
    from ..run import environment

    fields = spec.config
    chosen = {name: fields[name] for name in spec.chosen if name in fields}
    must = {
        "torch": version("torch"),
        "python": platform.python_version(),
        "code": code_digest(),
        "task": spec.task_sha256 or spec.task,
        "data": sha256_of(run.folder / "data.json"),
        "init": sha256_of(run.folder / "init.safetensors"),
        "hashes": environment.hash_seed_of(environment.read(run.folder)),
        "config": {k: value for k, value in fields.items() if k not in configuration.LOCAL and k not in chosen},
    }
    return {
        "run": run.name, "node": node, "nproc": nproc, "least": least, "most": most, "chosen": chosen,
        "host": socket.gethostname(), "home": str(run.folder.resolve()), "same": must,
    }  # fmt: skip


WORDS = {
    "torch": "version of torch",
    "python": "version of Python",
    "code": "copy of train/",
    "task": "task file",
    "data": "dataset",
    "init": "--init file",
    "hashes": "PYTHONHASHSEED",
}
"""Maps keys of `same` to words for messages."""


def name_of(hello: Mapping[str, Any]) -> str:
    """Return a node as text."""
    return f"node {hello['node']} ({hello['host']})"


def difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return a line that says why a node cannot run with node 0; '' if it can.

    Args:
        first: The hello of node 0.
        other: The hello of the node.
    """
    who, zero = name_of(other), name_of(first)
    if other["run"] != first["run"]:
        return f"{who} starts run {other['run']}, but {first['run']} uses this port; give each run its own port"
    if (other["least"], other["most"]) != (first["least"], first["most"]):
        return f"{who} was started with --nnodes {_range(other)}, but {zero} with {_range(first)}; use the same"
    mine, its = dict(first["same"]), dict(other["same"])
    fields, its_fields = mine.pop("config"), its.pop("config")
    for key in mine.keys() | its.keys():
        if mine.get(key) != its.get(key):
            what = WORDS.get(key, key)
            return f"{who} has another {what} than {zero}: {short(its.get(key))} instead of {short(mine.get(key))}"
    for key in sorted(fields.keys() | its_fields.keys()):
        if fields.get(key) != its_fields.get(key):
            values = f"{key} is {its_fields.get(key)}, not {fields.get(key)}"
            way = "; set it with --precision on all machines" if key == "precision" else ""  # by default of the GPUs
            return f"{who} has another configuration than {zero}: {values}{way}"
    counts, share = (other["nproc"], first["nproc"]), fields.get("parallel.shard_size")
    # each has checked that `share` divides the ranks of any number of machines like itself
    if isinstance(share, int) and counts[0] != counts[1] and any(count % share for count in counts):
        return (
            f"{who} has --nproc {counts[0]} and {zero} {counts[1]}; with --parallel.shard_size {share} give all "
            f"machines the same number, or multiples of {share}"
        )
    return ""


def needs_shared_disk(hello: Mapping[str, Any]) -> bool:
    """Whether all nodes must see node 0's run folder, because the ranks of all write checkpoints into it."""
    return strategies.of(hello["same"]["config"].get("parallel.strategy")).needs_shared_disk


def sees_folder(folder: Path, id: str) -> bool:
    """Whether this node, which is not node 0, sees node 0's run folder beside its own.

    Args:
        folder: This node's run folder.
        id: The id that node 0 has written into its run folder.
    """
    if folder.parents[1].name != folders.NODES:
        return False
    zero = folders.of_node_0(folder)
    with contextlib.suppress(OSError):
        os.listdir(zero.parent)  # without it NFS may report the folder as missing for a minute
        return (zero / SHARED).read_text(encoding="utf-8") == id
    return False


def _range(hello: Mapping[str, Any]) -> str:
    return str(hello["most"]) if hello["least"] == hello["most"] else f"{hello['least']}:{hello['most']}"


def short(value: Any) -> str:
    """Return a short text of a value: the first 12 characters of a digest."""
    text = str(value or "none")
    return text[:12] if len(text) > 24 else text
