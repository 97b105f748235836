"""The fingerprint of a run's data in a small file. With it a resume over other data is noticed, and the difference is
named.

For files we record their paths relative to the root, their sizes and their order, but not times, so data may be copied
and moved as a whole. For what is in memory we record a digest of the bytes, or of pieces of large arrays. A task's
`fingerprint(config)` replaces both.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..errors import Refused, may_pass
from .hidden import is_below_hidden

FACTS = "data.json"
"""Name of the file in the run folder."""
LISTED = 200_000
"""Maximum number of files that are listed with their sizes, so that a difference can be named. Of more files only a
digest is recorded."""
_SAMPLED, _PIECES = 1 << 26, 256
"""Bytes above which only pieces of an array are read, and the number of pieces."""
_ITEMS = 100_000
"""Maximum number of items of a list that are read."""
_SHOWN = 200
"""Maximum number of characters of a value of `fingerprint(config)`; of a longer one a digest is recorded."""
_CHUNK = 1000
_OWN = "fingerprint(): "
"""Prefix of the facts that a task's fingerprint() returns."""


def of_sets(root: str, own: Any, *, train_set: Any, eval_sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of these datasets, as it is written into the run folder.

    Args:
        root: data.root; '' without one.
        own: what the task's fingerprint() returns, anything JSON can hold; None without one.
    """
    facts: dict[str, Any] = {}
    files: dict[str, int] = {}
    named = {f"evaluation set {name}".rstrip(): dataset for name, dataset in (eval_sets or {"": None}).items()}
    for of, dataset in {"training set": train_set, **named}.items():
        facts[f"{of}: samples"] = 0 if dataset is None else len(dataset)
        if own is None and dataset is not None:
            _look(facts, files, of, dataset, root, set())
    parts = json.loads(json.dumps(own))  # all keys are texts then
    for key, value in (parts if isinstance(parts, dict) else {"": parts}).items() if own is not None else ():
        text = json.dumps(value, sort_keys=True)
        facts[f"{_OWN}{key}"] = text if len(text) <= _SHOWN else sha256_of(text)
    listed = files if len(files) <= LISTED else sha256_of(json.dumps(files, sort_keys=True))
    return {"facts": facts, "files": listed}


def recorded(folder: Path) -> dict[str, Any] | None:
    """Return the fingerprint in a run folder; None if there is none.

    Raises:
        Refused: the file is damaged.
    """
    path = folder / FACTS
    try:
        found = json.loads(path.read_text())
        return {"facts": dict(found["facts"]), "files": found["files"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise Refused(f"{path} is damaged; put it back, or remove it to resume without comparing the data") from None


def hidden_in(then: dict[str, Any]) -> list[str]:
    """Return the hidden files of a fingerprint, which a user's own reader took."""
    own = [key.removeprefix(_OWN) for key in then["facts"] if key.startswith(_OWN)]
    files = then["files"] if isinstance(then["files"], dict) else ()
    return [name for name in [*files, *own] if is_below_hidden(name)]


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences between the data of two fingerprints, the most telling first."""
    before, after = then["files"], now["files"]
    if isinstance(before, dict) and isinstance(after, dict):
        missing = [name for name in before if name not in after]
        differences_found = [f"{name} is gone" for name in missing]
        differences_found += [f"{name} is new" for name in after if name not in before]
        changed = [name for name, size in before.items() if after.get(name, size) != size]
        differences_found += [f"{name} has {after[name]} bytes and had {before[name]}" for name in changed]
    else:
        differences_found = ["the files have other names or sizes"] if before != after else []
    for key in {} if differences_found else then["facts"] | now["facts"]:  # what follows from other files needs no word
        had, has = (facts.get(key, "nothing") for facts in (then["facts"], now["facts"]))
        of, what = key.split(": ", 1)
        if had == has or ("nothing" in (had, has) and of != "fingerprint()" and what != "samples"):
            continue
        if of == "fingerprint()":
            differences_found.append(f"fingerprint() gives {has}{f' for {what!r}' if what else ''} and gave {had}")
        elif what == "samples" and "nothing" in (had, has):
            differences_found.append(f"the {of} is {'gone' if has == 'nothing' else 'new'}")
        elif what == "samples":
            differences_found.append(f"the {of} has {has} samples now and had {had}")
        elif what == "order of files":
            differences_found.append(f"the files of the {of} come in another order: datasets() must sort them")
        else:
            differences_found.append(f"{what} of the {of} has changed")
    return differences_found


def _look(
    facts: dict[str, Any], files: dict[str, int], of: str, dataset: Any, root: str, seen: set[int]
) -> None:  # fmt: skip
    """Record what a dataset, and those it is made of, hold as attributes. Asks for no sample."""
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    is_value = isinstance(dataset, (list, tuple, np.ndarray, torch.Tensor))
    for name, value in ({"content": dataset} if is_value else getattr(dataset, "__dict__", {})).items():
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        first = value[0] if is_list else value
        if isinstance(first, Dataset):
            for number, part in enumerate(value if is_list else [value]):
                _look(facts, files, f"{of}.{name}{f'[{number}]' if is_list else ''}", part, root, seen)
            continue
        plain = value if isinstance(first, (torch.Tensor, np.ndarray)) else None
        if is_list and (paths := _paths(value)):
            names = _relative(root or str(getattr(dataset, "root", "")), paths)
            files.update(zip(names, _sizes(paths), strict=True))
            facts[f"{of}.{name}: order of files"] = sha256_of("\n".join(names))
            plain = [item[1:] for item in value if isinstance(item, (list, tuple))]
        elif is_list and (name in ("classes", "indices") or len(value) == len(dataset)):
            plain = value
        digest = hashlib.sha256()
        if plain is not None and _feed(digest, plain, root):
            facts[f"{of}: {name}"] = digest.hexdigest()[:32]


def _paths(values: Sequence[Any]) -> list[str] | None:
    """Return the files that these values are, or begin with as in (file, class); None if they are something else."""
    found = [value[0] if isinstance(value, (list, tuple)) and value else value for value in values]
    for value in (found[0], found[-1]):
        if not isinstance(value, (str, Path)) or not os.path.isfile(value):  # noqa: PTH113 - pathlib
            return None  # raises where a text is too long for a name
    if not all(isinstance(value, (str, Path)) for value in found):
        return None
    return [os.path.abspath(value) for value in found]  # noqa: PTH100 - a quarter of the time, of a million files


def _relative(root: str, paths: list[str]) -> list[str]:
    """Return paths relative to the root, or to their common folder if one lies elsewhere."""
    base = os.path.abspath(root).rstrip("/") if root else ""  # noqa: PTH100
    if not base or not all(path.startswith(f"{base}/") for path in paths):
        base = os.path.commonpath([path.rpartition("/")[0] or "/" for path in paths]).rstrip("/")
    return [path[len(base) + 1 :] for path in paths]


def _sizes(paths: list[str]) -> Iterator[int]:
    """Yield the bytes of each file. Many threads look, because each look over a network takes time."""

    def look(start: int) -> list[int]:
        return [_size(path) for path in paths[start : start + _CHUNK]]

    with ThreadPoolExecutor(16) as pool:
        for sizes in pool.map(look, range(0, len(paths), _CHUNK)):
            yield from sizes


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError as error:
        if may_pass(error):  # it is not the file's
            raise
        return -1


def _feed(digest: Any, value: Any, root: str) -> bool:
    """Add numbers, texts, arrays and lists of them to a digest. Returns False if there is anything else among them."""
    if isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} items\0".encode())
        return all(_feed(digest, item, root) for item in value[:: max(len(value) // _ITEMS, 1)])
    if isinstance(value, (torch.Tensor, np.ndarray)):
        array = _array(value)
        if array is None:
            return False
        digest.update(f"{value.dtype} {tuple(value.shape)}\0".encode())
        for piece in _pieces(array):
            digest.update(piece.tobytes())
        return True
    if isinstance(value, (str, Path)):
        value = str(value).removeprefix(root.rstrip("/") + "/") if root else str(value)
    if value is None or isinstance(value, (str, bytes, bool, int, float, np.generic)):
        digest.update(f"{value!r}\0".encode("utf-8", "surrogateescape"))
        return True
    return False


def _array(value: Any) -> Any:
    """Return an array of the values or of their bytes; None for values on a device and for Python objects."""
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else value
    if value.layout != torch.strided or value.device.type != "cpu":
        return None
    try:
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy()  # NumPy has not all types
    except (TypeError, RuntimeError):  # packed or quantized
        return None


def _pieces(array: Any) -> Iterator[Any]:
    """Yield the whole array, or _PIECES pieces spread over a large one."""
    rows = array.reshape(-1) if array.flags.c_contiguous else array
    if rows.nbytes <= _SAMPLED:
        yield rows
        return
    width = max(_SAMPLED // 4 // _PIECES // max(rows.nbytes // len(rows), 1), 1)
    for start in np.linspace(0, max(len(rows) - width, 0), _PIECES).astype(np.int64).tolist():
        yield rows[start : start + width]


def sha256_of(text: str) -> str:
    """Return the SHA-256 of a text, which may name a file that is not UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
