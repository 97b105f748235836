"""Whether run.json says of clusters what it can mean. Who reads it relies on these, whoever has changed it by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_NODES = {"least", "most", "node", "rendezvous"}
_PLACE = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^:\s]+):[0-9]{1,5}")


def is_whole(record: Mapping[str, Any]) -> bool:
    """Whether `cluster` and `submitted` are of the kinds that they have to be."""
    cluster, submitted = record.get("cluster"), record.get("submitted")
    return (cluster is None or _is_cluster(cluster)) and (submitted is None or _is_submitted(submitted))


def _is_cluster(found: Any) -> bool:
    """A node's place among several, as runs/nodes.py has it; nothing: none."""
    if not isinstance(found, dict):
        return False
    if not found:
        return True
    if not _NODES <= found.keys() <= _NODES | {"wait_minutes"}:
        return False
    if not all(type(found[key]) is int for key in ("least", "most", "node")):
        return False
    wait = found.get("wait_minutes", 1)
    is_wait = type(wait) in (int, float) and 0 < wait < math.inf
    is_place = isinstance(found["rendezvous"], str) and _PLACE.fullmatch(found["rendezvous"]) is not None
    return is_wait and is_place and 1 <= found["least"] <= found["most"] and 0 <= found["node"] < found["most"]


def _is_submitted(submitted: Any) -> bool:
    """Whether what a record says of an engine that has the run is of the kinds that it has to be."""
    if not isinstance(submitted, dict) or not {"engine", "job"} <= submitted.keys():
        return False
    texts = [submitted["engine"], submitted["job"], *(submitted.get(key) for key in ("at", "handed"))]
    seen = submitted.get("seen", {})
    if not isinstance(seen, dict) or (seen and not {"state", "reason", "at"} <= seen.keys()):
        return False
    return all(text is None or isinstance(text, str) for text in (*texts, *seen.values()))
