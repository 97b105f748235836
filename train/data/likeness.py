"""Whether two fingerprints are of the same data (data/fingerprint.py). Imports neither torch nor NumPy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_TOLERANCE = 1e-5
"""By how much sums over floating point numbers may differ, as a share of their norm: they are added up in another order
where there are more cores, or other ones."""


def alike(then: Any, now: Any) -> bool:
    """Whether two facts of fingerprints say the same."""
    if _has_sums(then) and _has_sums(now):
        if (then["of"], then["not numbers"], len(then["sums"])) != (now["of"], now["not numbers"], len(now["sums"])):
            return False
        room = _TOLERANCE * max(then["norm"], now["norm"])
        pairs = zip([*then["sums"], then["norm"]], [*now["sums"], now["norm"]], strict=True)
        return all(abs(a - b) <= room for a, b in pairs)
    return bool(then == now)


def _has_sums(fact: Any) -> bool:
    return isinstance(fact, dict) and "sums" in fact


def brief(path: Path) -> dict[str, Any] | str:
    """What of a fingerprint two machines have to compare, in few bytes: `digest` of all, `exact` of what must be equal,
    and the facts of which the last bits may differ under `sums`. '' where there is no such file.

    Raises:
        OSError, ValueError: it cannot be read, or is damaged.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return ""
    content = json.loads(text)
    facts = content.pop("facts", {})
    sums = {key: fact for key, fact in facts.items() if _has_sums(fact)}
    content["facts"] = {key: fact for key, fact in facts.items() if key not in sums}
    exact = _sha(json.dumps(content, sort_keys=True).encode())
    return {"digest": _sha(text), "exact": exact, "sums": sums}


def are_alike(mine: Any, its: Any) -> bool:
    """Whether two of `brief` are of the same data."""
    if not (isinstance(mine, dict) and isinstance(its, dict)):
        return bool(mine == its)
    if mine["exact"] != its["exact"] or mine["sums"].keys() != its["sums"].keys():
        return False
    return all(alike(fact, its["sums"][key]) for key, fact in mine["sums"].items())


def _sha(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
