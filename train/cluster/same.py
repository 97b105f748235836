"""That machines run the same: what each tells of itself, and in what two differ."""

from __future__ import annotations

import hashlib
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.record.store import Run


def code_digest() -> str:
    """A short digest of the package's Python files: names and contents, in order."""
    folder = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def hello(
    run: str,
    node: int,
    nproc: int,
    least: int,
    most: int,
    home: Path,
    same: Mapping[str, Any],
    chosen: Mapping[str, Any],
    has_begun: bool,
) -> dict[str, Any]:
    """What a node says of itself when it comes.

    Args:
        least: nodes without which nothing begins. most: nodes that there is room for.
        home: its run folder.
        same: what must be the same everywhere; under `config` the fields of the configuration.
        chosen: fields of the configuration that no user has set. All take those of the lowest node on which the run has
            begun before: what it has computed so far, it has computed with them.
        has_begun: whether an attempt has begun on it.
    """
    mine = {"python": platform.python_version(), "code": code_digest(), **same}
    return {
        "is": "hello", "run": run, "node": node, "nproc": nproc, "least": least, "most": most, "chosen": dict(chosen),
        "has_begun": has_begun, "host": socket.gethostname(), "home": str(home), "same": mine,
    }  # fmt: skip


def of_run(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of a run folder must be the same everywhere, and the fields of its configuration that no user has set.

    Raises:
        Refused, OSError, ValueError: the folder is not whole.
    """
    import tomllib

    from train import config as configuration
    from train.record import environment
    from train.record.manifest import sha256_of

    record = run.read()
    fields = _flat(tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8")))
    chosen = {name: fields[name] for name in record.get("chosen", ()) if name in fields}
    must = {
        "task": record.get("task_sha256") or record.get("task"),
        "data": sha256_of(run.folder / "data.json"),
        "init": sha256_of(run.folder / "init.safetensors"),
        "hashes": environment.hash_seed(environment.read(run.folder)),
        "config": {k: value for k, value in fields.items() if k not in configuration.LOCAL and k not in chosen},
    }
    return must, chosen


def _flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found.update(_flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value})
    return found


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
    """A node in words."""
    return f"node {hello['node']} ({hello['host']})"


def difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """In what a node that has come cannot run with node 0, in a line that names it; '' where it can.

    Args:
        first: what node 0 said. other: what the node has said.
    """
    who, zero = name_of(other), name_of(first)
    if other["run"] != first["run"]:
        return f"{who} comes with run {other['run']}, and {first['run']} meets here; give each run a port of its own"
    for key, flag in (("least", "--nnodes"), ("most", "--nnodes")):
        if other[key] != first[key]:
            return f"{who} was started with {flag} {_range(other)}, and {zero} with {_range(first)}"
    if not 0 <= other["node"] < first["most"]:
        return f"{who} is none of {first['most']} nodes; they are counted from 0"
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


def _range(hello: Mapping[str, Any]) -> str:
    return str(hello["most"]) if hello["least"] == hello["most"] else f"{hello['least']}:{hello['most']}"


def short(value: Any) -> str:
    """A value in few letters: of a digest its begin."""
    text = str(value or "none")
    return text[:12] if len(text) > 24 else text
