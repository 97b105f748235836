"""The manifest of a checkpoint: what belongs to the checkpoint, and how damage is found.

The manifest lists every file with its size and SHA-256 and carries a digest of itself. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..run import durable
from ..run.record import other_format
from ..run.run_folder import Run

MANIFEST = "manifest.json"
FROZEN_PARTIAL = ".frozen-"
"""Prefix of a file of frozen weights that is being written."""
_FROZEN = re.compile(r"frozen-[0-9a-f]{16}\.safetensors")
PARTIAL = ".partial-"
"""Prefix of folders that are being written or removed."""
DAMAGED = ".damaged-"
"""Prefix of a checkpoint whose bytes are not those that were written. It is removed with the next save."""
UNREADABLE = ".unreadable-"
"""Prefix of a checkpoint that the disk could not read, and perhaps can later. It is kept."""


_PIECE = 1 << 20
"""Bytes that are read and hashed at once."""


class Unreadable(ValueError):
    """The system cannot read a checkpoint, which may be whole."""


class FrozenDamaged(Unreadable):
    """The file of frozen weights that a checkpoint refers to is damaged or missing; what it holds may be found again.

    Attributes:
        entry: the file's size and SHA-256.
    """

    def __init__(self, text: str, entry: dict[str, Any]) -> None:
        super().__init__(text)
        self.entry = entry


Mend = Callable[[dict[str, Any]], bool]
"""Writes the file of frozen weights of this entry again. Returns whether it could."""


def frozen_name(entry: dict[str, Any]) -> str:
    """Return the name in the run folder of the file of frozen weights of this entry."""
    return f"frozen-{entry['sha256'][:16]}.safetensors"


def frozen_files(run: Run) -> list[str]:
    """Return the names of a run's files of frozen weights; most runs have none."""
    return sorted(filter(_FROZEN.fullmatch, os.listdir(run.folder)))


def manifest_text(content: dict[str, Any]) -> str:
    """Return the text of a manifest. There is only one text for a content, so that any changed byte in the file
    shows."""
    body = {key: value for key, value in content.items() if key != "digest"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps(body | {"digest": digest}, indent=1, sort_keys=True) + "\n"


def file_digest(path: Path, beat: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return size and SHA-256 of a file, as the manifest lists them.

    Args:
        beat: called after each piece of the file.
    """
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            beat()
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file of any size; '' if there is no file."""
    return str(file_digest(path)["sha256"]) if path.is_file() else ""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Raises:
        ValueError: the manifest is missing or damaged; the message says how.
        Unreadable: the system cannot read it.
        Refused: it has another format.
    """
    path = folder / MANIFEST
    try:
        text = durable.read_bytes(path)
        content = json.loads(text)
        if text != manifest_text(content).encode():
            raise ValueError(f"{MANIFEST} was changed after it was written")
        if why := other_format(content, folder):
            raise Refused(why)
        return dict(content)
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise Unreadable(f"{MANIFEST} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{MANIFEST} is damaged") from None


Files = dict[str, dict[str, Any]]
"""Maps the name of a file to its size and SHA-256."""
CheckFiles = Callable[[Path, Files], dict[str, ValueError]]
"""Returns an error for each of these files in a folder that is not whole."""


def check_files(folder: Path, files: Files, beat: Callable[[], None] = lambda: None) -> dict[str, ValueError]:
    """Check that these files have every byte as written. Returns the errors by file.

    Args:
        beat: called after each piece of a file.
    """
    found: dict[str, ValueError] = {}
    for name, written in files.items():
        path = folder / name
        try:
            if path.stat().st_size != written["size"]:
                found[name] = ValueError(f"{name} has {path.stat().st_size} bytes instead of {written['size']}")
            elif file_digest(path, beat) != written:
                found[name] = ValueError(f"{name} was changed after it was written")
        except OSError as error:
            found[name] = Unreadable(f"{name} cannot be read: {error.strerror}")
    return found


def files_below(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, and of empty folders, relative to it. A library's checkpoint may
    have subfolders.

    Raises:
        OSError: the system cannot read the folder.
    """
    found = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            inner = files_below(Path(entry.path))
            found += [f"{entry.name}/{name}" for name in inner] or [entry.name]
        else:
            found.append(entry.name)
    return found


def verify(folder: Path, check: CheckFiles = check_files) -> dict[str, Any]:
    """Verify a checkpoint: exactly its files are there, with every byte as written. Returns the manifest.

    Args:
        check: checks the bytes of the files.

    Raises:
        ValueError: the checkpoint is damaged; the message names the file.
        FrozenDamaged: only the file of frozen weights is damaged.
        Unreadable: the system cannot read it.
        Refused: a newer version of this package wrote it.
    """
    manifest = read_manifest(folder)
    try:
        present = set(files_below(folder)) - {MANIFEST}
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from None
    for name in sorted(manifest["files"].keys() - present):
        raise ValueError(f"{name} is missing")
    for name in sorted(present - manifest["files"].keys()):
        raise ValueError(f"{name} does not belong to it")
    frozen = manifest.get("frozen")
    beside = {f"../../{frozen_name(frozen)}": frozen} if frozen else {}
    errors = check(folder, manifest["files"] | beside)
    for name in manifest["files"]:
        if name in errors:
            raise errors[name]
    for name, entry in beside.items():
        if name in errors:
            raise FrozenDamaged(str(errors[name]).replace("../../", ""), entry)
    return manifest


def _mended(folder: Path, check: CheckFiles, mend: Mend | None) -> dict[str, Any]:
    """Verify a checkpoint as `verify` does, after its file of frozen weights is written again if it is damaged."""
    try:
        return verify(folder, check)
    except FrozenDamaged as error:
        if mend is None or not mend(error.entry):
            raise
    return verify(folder, check)


def verified(run: Run, step: int, mend: Mend | None = None) -> dict[str, Any]:
    """Verify a run's checkpoint of this step. Returns its manifest. Raises Refused if it is not whole.

    Args:
        mend: as for `newest_valid`.
    """
    folder = run.checkpoint(step)
    try:
        return _mended(folder, check_files, mend)
    except ValueError as error:
        why = f"is damaged: {error}" if folder.exists() else "was removed, as --checkpoint.keep says; choose another"
        raise Refused(f"the checkpoint of step {step} {why}") from None


def newest_valid(
    run: Run, *, sets_aside: bool = False, check: CheckFiles = check_files, mend: Mend | None = None
) -> tuple[int, dict[str, Any], list[str]]:
    """Return step and manifest of the newest whole checkpoint, or 0 and {}, and a line for each newer one that is not
    whole.

    Args:
        sets_aside: set those aside. Only for the holder of the run's lock.
        check: checks the bytes of files.
        mend: writes a damaged file of frozen weights again; None: only a rank does.

    Raises:
        Refused: none is whole and the system cannot read one of them, or one has another format.
            Starting from step 0 would throw away what may be there.
    """
    newest: tuple[int, dict[str, Any]] = 0, {}
    unused: dict[int, str] = {}
    unread: dict[int, Unreadable] = {}
    for step in run.steps_saved():
        folder = run.checkpoint(step)
        try:
            newest = step, _mended(folder, check, mend)
            break
        except Unreadable as error:
            unread[step] = error
            unused[step] = f"checkpoint {folder.name} is not used: {error}"
        except ValueError as error:
            unused[step] = f"checkpoint {folder.name} is damaged and not used: {error}"
    if unread and not newest[1]:
        step, first = next(iter(unread.items()))
        way = f"check the disk, owner and mode of {run.checkpoints}"
        if isinstance(first, FrozenDamaged):
            name = frozen_name(first.entry)
            way = f"its initial weights do not make {name} again; put a copy of that file back into {run.folder}"
        raise Refused(f"{unused[step]}, and there is no older one; {way}") from first
    for step in unused if sets_aside else ():
        set_aside(run, step, UNREADABLE if step in unread else DAMAGED)
    return *newest, list(unused.values())


def left_over(run: Run) -> list[str]:
    """Return the names of the folders that interrupted saves and prunes left in the folder of checkpoints, and of
    damaged checkpoints. A live run is writing some of them."""
    with contextlib.suppress(FileNotFoundError):
        return [name for name in os.listdir(run.checkpoints) if name.startswith((PARTIAL, DAMAGED))]
    return []


def clean(run: Run) -> None:
    """Remove what interrupted saves and prunes left behind. Only for the holder of the run's lock."""
    for name in left_over(run):
        shutil.rmtree(run.checkpoints / name, ignore_errors=True)
    for path in run.folder.glob(f"{FROZEN_PARTIAL}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def set_aside(run: Run, step: int, prefix: str = DAMAGED) -> None:
    """Rename a checkpoint, so that another one can be written at the same step."""
    folder = run.checkpoint(step)
    target = run.checkpoints / f"{prefix}{folder.name}"
    shutil.rmtree(target, ignore_errors=True)
    folder.rename(target)
