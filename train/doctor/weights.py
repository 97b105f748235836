"""Checkpoints of other programs that lie here: names that begin with `module.` fit no model but a wrapped one."""

from __future__ import annotations

import json
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from train.doctor.finding import Finding, warning

_WRAPPED = ("module.", "_orig_mod.")
_MOST_FILES = 20
_LONGEST_HEADER = 64 * 2**20


def checks(folder: Path) -> Iterator[Finding]:
    """Of the files of weights in a folder."""
    found = [path for suffix in ("safetensors", "pt", "pth") for path in sorted(folder.glob(f"*.{suffix}"))]
    for path in found[:_MOST_FILES]:
        names = names_in(path)
        wrapped = [name for name in names if name.startswith(_WRAPPED)]
        if wrapped:
            seen = f"{len(wrapped)} of {len(names)} names in {path.name} begin with {wrapped[0].split('.')[0]}."
            yield warning(
                "weights",
                f"{seen}, as a wrapped model saves them; --init takes that off",
                f"train launch TASK --init {path.name}",
            )


def names_in(path: Path) -> list[str]:
    """The names of the tensors in a file, or of what could be one; nothing in it is executed. [] for any other file."""
    try:
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                length = struct.unpack("<Q", file.read(8))[0]
                if length > _LONGEST_HEADER:
                    return []
                header = json.loads(file.read(length).decode())
            return [name for name in header if name != "__metadata__"]
        with zipfile.ZipFile(str(path)) as archive:
            inner = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            pickled = archive.read(inner)
        strings = [argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)]
        return [text for text in strings if text.endswith((".weight", ".bias")) or text.startswith(_WRAPPED)]
    except (OSError, ValueError, KeyError, StopIteration, struct.error, zipfile.BadZipFile):
        return []
