"""What a run's data are, in a few kilobytes, so that a resume over other data is noticed and can say what differs.

Of files it is their paths relative to the root and their sizes, never their times: data may be copied and moved as a
whole. Of what is in memory it is a digest; of floating point numbers a few sums that forgive the last bits, in which
one machine may differ from another. What is larger than SAMPLED bytes is looked at in places.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from train.data import likeness
from train.errors import Refused, may_pass

FORMAT = 1
FACTS, LISTING = "data.json", "data.files.gz"
"""In the run folder: the fingerprint; and every file with its size, in text, so that a difference has a name."""
LISTED = 200_000
"""Files up to which there is a LISTING (2 MB then). Of more, a difference is named by folder."""
SAMPLED = 1 << 26
_FOLDERS = 2000
_WHOLE = "the folder"
_OWN = 1 << 14
"""Bytes of a task's own fingerprint that are kept as they are; of a larger one a digest is."""
_BLOCKS = 256
_CHUNK = 1000
_FLOATS = (torch.float16, torch.float32, torch.float64)
_PERIODS = (65521, 65519)


@dataclass
class Files:
    """Files that samples are made of, in the order in which samples are."""

    root: Path
    paths: Sequence[str | Path]


@dataclass
class Fingerprint:
    """What the data of a run are."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Lengths, digests and sums by what they are of."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each file by its path relative to the root."""

    def add(self, of: str, files: Files) -> None:
        """Take in these files and the order in which they come."""
        names = _relative(files)
        new = {name: str(path) for name, path in zip(names, files.paths, strict=True) if name not in self.sizes}
        places = list(new.values())
        chunks = [places[start : start + _CHUNK] for start in range(0, len(places), _CHUNK)]
        began = time.perf_counter()
        sizes = [_sizes(chunk) for chunk in chunks[:1]]
        if time.perf_counter() - began < _CHUNK * 1e-4:  # threads would only be in each other's way
            sizes += map(_sizes, chunks[1:])
        else:  # on a network each look takes its time
            with ThreadPoolExecutor(16) as pool:
                sizes += pool.map(_sizes, chunks[1:])
        self.sizes.update(zip(new, itertools.chain.from_iterable(sizes), strict=True))
        self.facts[f"{of}: order of files"] = _sha("\n".join(names))

    def folders(self) -> dict[str, list[Any]]:
        """Files, bytes and a digest of each folder, of as deep ones as _FOLDERS allows."""
        depth = max((name.count("/") for name in self.sizes), default=0)
        while True:
            grouped: dict[str, list[str]] = {}
            for name in self.sizes:
                grouped.setdefault("/".join(name.split("/")[:-1][:depth]), []).append(name)
            if len(grouped) <= _FOLDERS or depth == 0:
                break
            depth -= 1
        return {
            folder or ".": [
                len(names), sum(self.sizes[name] for name in names),
                _sha("\n".join(f"{name}\t{self.sizes[name]}" for name in sorted(names)))[:16],
            ]
            for folder, names in sorted(grouped.items())
        }  # fmt: skip

    def files(self) -> dict[str, str | bytes]:
        """What to write into the run folder, by name."""
        content = {"format": FORMAT, "facts": self.facts, "folders": self.folders()}
        written: dict[str, str | bytes] = {FACTS: json.dumps(content, indent=1) + "\n"}
        if 0 < len(self.sizes) <= LISTED:
            text = "".join(f"{size}\t{name}\n" for name, size in self.sizes.items())
            written[LISTING] = gzip.compress(text.encode("utf-8", "surrogateescape"), mtime=0)
        return written


def of_sets(root: str, own: Any, train_set: Any, eval_set: Any) -> Fingerprint:
    """The fingerprint of these data sets.

    Args:
        root: data.root; '' without one.
        own: what the task's fingerprint() returns: Files, or anything JSON can hold; None without one.
    """
    found = Fingerprint()
    for name, dataset in (("training", train_set), ("evaluation", eval_set)):
        found.facts[f"{name} set: samples"] = 0 if dataset is None else len(dataset)
        if own is None and dataset is not None:
            _Look(found, root).at(f"{name} set", dataset)
    if isinstance(own, Files):
        found.add("data", own)
    elif own is not None:
        found.facts["fingerprint()"] = _kept(own)
    return found


def differences(folder: Path, now: Fingerprint) -> list[str]:
    """In what the data differ from those whose fingerprint lies in a run folder; the most telling first.

    Nothing is compared with a run that has none, from before there were any.

    Raises:
        Refused: the fingerprint is damaged.
    """
    path = folder / FACTS
    try:
        then = json.loads(path.read_text())
        if then["format"] != FORMAT:
            return []
        facts, folders = dict(then["facts"]), dict(then["folders"])
        names = _listing(folder / LISTING)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        raise Refused(f"{path} is damaged; put it back, or remove it to go on without looking at the data") from None
    said = _of_folders(folders, now.folders())
    if names is not None:
        whole = [line for line in said if line.startswith(_WHOLE)]
        said = whole + _of_files(names, now.sizes, folders)
    # what follows from other files needs no word
    for key in [
        key for key in facts if not said and key in now.facts and not likeness.alike(facts[key], now.facts[key])
    ]:
        of, _, what = key.partition(": ")
        if what == "samples":
            said.append(f"the {of} has {now.facts[key]} samples now and had {facts[key]}")
        elif what == "order of files":
            said.append(f"the files of the {of} come in another order: datasets() must sort them")
        elif key == "fingerprint()":
            said += _of_own(facts[key], now.facts[key])
        else:
            said.append(f"{what} of the {of}: not as it was")
    return said


def _listing(path: Path) -> dict[str, int] | None:
    if not path.exists():
        return None
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "surrogateescape")
    lines = (line.split("\t", 1) for line in text.split("\n") if line)
    return {name: int(size) for size, name in lines}


def _of_files(then: dict[str, int], now: dict[str, int], folders: dict[str, list[Any]]) -> list[str]:
    """Differences by file, apart from those of folders that are new or gone as a whole."""
    gone, new = [name for name in then if name not in now], [name for name in now if name not in then]
    waiting: dict[tuple[str, int], list[str]] = {}
    for name in new:
        waiting.setdefault((_last(name), now[name]), []).append(name)
    moved: dict[str, str] = {}
    for name in gone:
        places = waiting.get((_last(name), then[name]))
        if places:
            moved[name] = places.pop(0)
    arrived, left = set(moved.values()), {_folder(name) for name in now}
    said = [f"{name} is now {place}" for name, place in moved.items()]
    said += [f"{name} is gone" for name in gone if name not in moved and _folder(name) in left]
    said += [f"{name} is new" for name in new if name not in arrived and _folder(name) in folders]
    changed = [name for name, size in then.items() if now.get(name, size) != size]
    return said + [f"{name} has {now[name]} bytes and had {then[name]}" for name in changed]


def _of_folders(then: dict[str, list[Any]], now: dict[str, list[Any]]) -> list[str]:
    said = [f"{_WHOLE} {name} is new (files: {now[name][0]})" for name in now if name not in then]
    said += [f"{_WHOLE} {name} is gone (files: {then[name][0]})" for name in then if name not in now]
    for name in [name for name in then if name in now and then[name] != now[name]]:
        (had, bytes_then, _), (has, bytes_now, _) = then[name], now[name]
        if had != has:
            said.append(f"{name} has {has} files and had {had}")
        elif bytes_then != bytes_now:
            said.append(f"the files of {name} have {bytes_now} bytes and had {bytes_then}")
        else:
            said.append(f"{name} has other files")
    return said


def _last(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _folder(name: str) -> str:
    return name.rpartition("/")[0] or "."


def _kept(own: Any) -> Any:
    """A task's own fingerprint as it is kept: as it is while it is small, else a digest of each part."""
    try:
        text = json.dumps(own, sort_keys=True)
    except TypeError:  # numbers and words as keys of one dict have no order; as JSON has them, all are words
        own = json.loads(json.dumps(own))
        text = json.dumps(own, sort_keys=True)
    if len(text) <= _OWN:
        return {"value": json.loads(text)}
    if isinstance(own, dict) and len(own) <= _FOLDERS:
        return {"parts": {str(key): _sha(json.dumps(value, sort_keys=True))[:32] for key, value in own.items()}}
    return {"sha256": _sha(text)}


def _of_own(then: Any, now: Any) -> list[str]:
    before, after = (kept.get("value", kept.get("parts")) for kept in (then, now))
    if isinstance(before, dict) and isinstance(after, dict) and then.keys() == now.keys():
        keys = [key for key in before | after if before.get(key) != after.get(key) or (key in before) != (key in after)]
        if "parts" in then:
            return [f"fingerprint() gives another {key!r}" for key in keys]
        return [f"fingerprint() gives {_short(after, key)} for {key!r} and gave {_short(before, key)}" for key in keys]
    if "value" in then and "value" in now:
        return [f"fingerprint() gives {_cut(after)} and gave {_cut(before)}"]
    return ["fingerprint() gives something else"]


def _short(values: dict[str, Any], key: str) -> str:
    return _cut(values[key]) if key in values else "nothing"


def _cut(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"


class _Look:
    """Looks for what a data set is made of where data sets have it, without asking for samples."""

    def __init__(self, found: Fingerprint, root: str) -> None:
        self.found, self.root = found, root
        self.seen: set[int] = set()

    def at(self, of: str, dataset: Any, depth: int = 0) -> None:
        """Take in a data set and those that it is made of."""
        if id(dataset) in self.seen or depth > 8:
            return
        self.seen.add(id(dataset))
        if not isinstance(dataset, Dataset) and isinstance(dataset, (list, tuple, np.ndarray, torch.Tensor)):
            self._value(of, "content", dataset, dataset)
            return
        for name, value in getattr(dataset, "__dict__", {}).items():
            if isinstance(value, Dataset):
                self.at(f"{of}.{name}" if depth or name != "dataset" else of, value, depth + 1)
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Dataset):
                for number, part in enumerate(value):
                    self.at(f"{of}.{name}[{number}]", part, depth + 1)
            elif id(value) not in self.seen:
                self.seen.add(id(value))
                self._value(of, name, value, dataset)

    def _value(self, of: str, name: str, value: Any, dataset: Any) -> None:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            self._note(f"{of}: {name}", _of_array(value))
        elif isinstance(value, (list, tuple)) and value:
            paths = _paths(value)
            if paths is not None:
                self.found.add(of if name == "samples" else f"{of}.{name}", Files(self._root_of(dataset), paths))
                rest = [item[1:] for item in value] if isinstance(value[0], (list, tuple)) else []
                if rest and rest[0]:
                    self._note(f"{of}: what belongs to the files in {name}", _of_list(rest, self.root))
            elif all(isinstance(part, (torch.Tensor, np.ndarray)) for part in value[:64]) and len(value) <= 64:
                for number, part in enumerate(value):
                    self._note(f"{of}: {name}[{number}]", _of_array(part))
            elif name in ("classes", "indices") or len(value) == len(dataset):
                self._note(f"{of}: {name}", _of_list(value, self.root))

    def _root_of(self, dataset: Any) -> Path:
        return Path(self.root or str(getattr(dataset, "root", "")))

    def _note(self, key: str, fact: Any) -> None:
        if fact is not None:
            self.found.facts[key] = fact


def _paths(values: Sequence[Any]) -> list[str | Path] | None:
    """The files that these values are, or begin with as in (file, class); None if they are something else."""

    def of(value: Any) -> Any:
        return value[0] if isinstance(value, (list, tuple)) and value else value

    for value in (of(values[0]), of(values[-1])):
        if not isinstance(value, (str, Path)) or not os.path.isfile(value):  # noqa: PTH113 - pathlib
            return None  # raises where a text is too long for a name
    found = [of(value) for value in values]
    return found if all(isinstance(value, (str, Path)) for value in found) else None


def _relative(files: Files) -> list[str]:
    """Paths relative to the root; to the folder they share, where one of them lies elsewhere."""
    # not pathlib's: it takes four times as long, which a million files make felt
    paths = [os.path.abspath(path) for path in files.paths]  # noqa: PTH100
    base = str(files.root.absolute()) if str(files.root) not in ("", ".") else ""
    if not base or not all(path.startswith(base.rstrip("/") + "/") for path in paths):
        base = os.path.commonpath([_folder(path) for path in paths])
    return [path[len(base.rstrip("/")) + 1 :] for path in paths]


def _sizes(paths: list[str]) -> list[int]:
    sizes = []
    for path in paths:
        try:
            sizes.append(os.stat(path).st_size)  # noqa: PTH116, as above
        except OSError as error:
            if may_pass(error):  # it is not the file's
                raise
            sizes.append(-1)
    return sizes


def _of_list(values: Sequence[Any], root: str) -> Any:
    """A digest of numbers, texts, arrays and what is nested of them; None of anything else."""
    if type(values[0]) is int:
        with contextlib.suppress(ValueError):  # numbers and lists of them, mixed
            numbers = np.asarray(values)
            if numbers.dtype.kind == "i":
                return _of_array(numbers)
    digest = hashlib.sha256(f"{len(values)}".encode())
    step = max(len(values) // 100_000, 1)
    for value in values if isinstance(values[0], (int, str)) else values[::step]:
        text = _text(value, root)
        if text is None:
            return None
        digest.update(text.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()[:32]


def _text(value: Any, root: str) -> str | None:
    if isinstance(value, float):
        return f"{value:.5g}"
    if value is None or isinstance(value, (bool, int, np.integer, np.bool_)):
        return str(value)
    if isinstance(value, (str, bytes, Path)):
        text = value.hex() if isinstance(value, bytes) else str(value)
        return text.removeprefix(root.rstrip("/") + "/") if root else text
    if isinstance(value, (list, tuple)):
        parts = [_text(part, root) for part in value]
        return None if None in parts else f"({','.join(map(str, parts))})"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        fact = _of_array(value)
        # of many small arrays in a list the numbers of each would be too much to keep
        return fact if isinstance(fact, str) else fact and f"{fact['of']} {fact['norm']:.3g}"
    return None


def _of_array(value: Any) -> Any:
    """A digest; of floating point numbers {"of", "sums", "norm", "not numbers"}; None of what is no plain array."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device.type != "cpu":
            return None
        of = str(value.dtype).removeprefix("torch.")
        value = value.detach()
        try:
            # NumPy has neither bfloat16 nor floats of 8 bits
            is_known = value.dtype in _FLOATS or not value.is_floating_point()
            array = (value.resolve_conj().resolve_neg() if is_known else value.float()).numpy()
        except (TypeError, RuntimeError):  # nor what is packed or quantized
            return None
    else:
        array, of = value, str(value.dtype)
    if array.dtype.hasobject:
        return None
    of = f"{of} {'x'.join(map(str, array.shape))}"
    parts = list(_parts(array))
    if array.dtype.kind in "fc":
        return {"of": of, **_sums(parts)}
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part).tobytes())
    return f"{of} {digest.hexdigest()[:32]}"


def _parts(array: Any) -> Iterator[Any]:
    """All of an array, flat; of a large one _BLOCKS pieces spread over it."""
    if array.nbytes <= SAMPLED:
        yield array.reshape(-1)
        return
    rows = array.reshape(-1) if array.flags.c_contiguous else array
    width = max(SAMPLED // 4 // _BLOCKS // max(array.nbytes // len(rows), 1), 1)
    for start in np.linspace(0, max(len(rows) - width, 0), _BLOCKS).astype(np.int64).tolist():
        yield rows[start : start + width].reshape(-1)


def _sums(parts: list[Any]) -> dict[str, Any]:
    """Sums with weights of mean 0 that repeat after two different lengths, so that no two places are alike in both."""
    flat = np.concatenate([part.view(part.real.dtype) if part.dtype.kind == "c" else part for part in parts])
    numbers = np.isfinite(flat)
    values = np.where(numbers, flat, 0).astype(np.float64)
    sums = []
    for period in _PERIODS:
        weights = np.random.default_rng(period).uniform(-1, 1, period)
        whole = len(values) // period * period
        total = (values[:whole].reshape(-1, period) @ weights).sum() + values[whole:] @ weights[: len(values) - whole]
        sums.append(float(total))
    return {"sums": sums, "norm": float(np.linalg.norm(values)), "not numbers": int((~numbers).sum())}


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
