"""That all machines of a run train the same: what each tells of itself, and in what two differ."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.config import SPREAD
from train.run import folders
from train.run.run_folder import Run

SHARED = ".shared"
"""The file by which other nodes see that node 0's run folder is theirs, too: it holds what node 0 says of itself."""


def code_digest() -> str:
    """A short digest of the package's Python files: names and contents, in order."""
    folder = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def hello(run: Run, node: int, nproc: int, least: int, most: int) -> dict[str, Any]:
    """What a node says of itself when it comes.

    Args:
        least: nodes without which nothing begins. most: nodes that there is room for.

    Returns:
        Among others `same`: what must be the same everywhere, with the configuration's fields under `config`; and
        `chosen`: fields that no user has set, which all take over from node 0.

    Raises:
        Refused, OSError, ValueError: the run folder is not whole.
    """
    from importlib.metadata import version

    from train import config as configuration
    from train.checkpoint.manifest import sha256_of
    from train.run import environment

    record = run.read()
    fields = run.read_config()
    chosen = {name: fields[name] for name in record.get("chosen", ()) if name in fields}
    must = {
        "torch": version("torch"),
        "python": platform.python_version(),
        "code": code_digest(),
        "task": record.get("task_sha256") or record.get("task"),
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
    "data": "data set",
    "init": "--init file",
    "hashes": "PYTHONHASHSEED",
}
"""What must be the same, in words."""


def name_of(hello: Mapping[str, Any]) -> str:
    """A node as text."""
    return f"node {hello['node']} ({hello['host']})"


def difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """In what a node that has come cannot run with node 0, in a line that names it; '' where it can.

    Args:
        first: the hello of node 0. other: that of the node.
    """
    who, zero = name_of(other), name_of(first)
    if other["run"] != first["run"]:
        return f"{who} comes with run {other['run']}, and {first['run']} meets here; give each run a port of its own"
    if (other["least"], other["most"]) != (first["least"], first["most"]):
        return f"{who} was started with --nnodes {_range(other)}, and {zero} with {_range(first)}"
    mine, its = dict(first["same"]), dict(other["same"])
    fields, its_fields = mine.pop("config"), its.pop("config")
    for key in mine.keys() | its.keys():
        if mine.get(key) != its.get(key):
            what = WORDS.get(key, key)
            return f"{who} has another {what} than {zero}: {short(its.get(key))} instead of {short(mine.get(key))}"
    for key in sorted(fields.keys() | its_fields.keys()):
        if fields.get(key) != its_fields.get(key):
            return f"{who} has another configuration than {zero}: {key} is {its_fields.get(key)}, not {fields.get(key)}"
    counts, share = (other["nproc"], first["nproc"]), fields.get("parallel.shard_size")
    # each has checked that `share` divides what any number of machines like itself have
    if isinstance(share, int) and counts[0] != counts[1] and any(count % share for count in counts):
        return (
            f"{who} has --nproc {counts[0]} and {zero} {counts[1]}: with --parallel.shard_size {share} give all "
            f"machines the same, or each a multiple of {share}"
        )
    return ""


def is_spread(hello: Mapping[str, Any]) -> bool:
    """Whether the state is divided among the ranks, which then need one folder for checkpoints."""
    return hello["same"]["config"].get("parallel.strategy") in SPREAD


def sees_folder(folder: Path, id: str) -> bool:
    """Whether a node but node 0 sees node 0's run folder beside its own.

    Args:
        folder: this node's run folder.
        id: what node 0 has written there.
    """
    if folder.parents[1].name != folders.NODES:
        return False
    zero = folders.of_node_0(folder)
    with contextlib.suppress(OSError):
        os.listdir(zero.parent)  # else NFS may say for a minute that it is not there
        return (zero / SHARED).read_text(encoding="utf-8") == id
    return False


def _range(hello: Mapping[str, Any]) -> str:
    return str(hello["most"]) if hello["least"] == hello["most"] else f"{hello['least']}:{hello['most']}"


def short(value: Any) -> str:
    """A value in few letters: of a digest its begin."""
    text = str(value or "none")
    return text[:12] if len(text) > 24 else text
