"""The file that a command writes for its user: checked before the work, there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from train.errors import Refused, one_line
from train.record.durable import sync_folder


def check(target: Path, suffixes: Sequence[str]) -> None:
    """Refuse what cannot become a file.

    Raises:
        Refused: the suffix is unknown, the folder is missing, or the file is one.
    """
    if target.suffix not in suffixes:
        raise Refused(f"--to {target}: must end in {', '.join(suffixes[:-1])} or {suffixes[-1]}")
    if not target.absolute().parent.is_dir():
        raise Refused(f"--to {target}: there is no folder {target.parent}; make it first")
    if target.is_dir():
        raise Refused(f"--to {target}: is a folder; give a file")


@contextlib.contextmanager
def published(target: Path) -> Iterator[Path]:
    """A file beside the target to write to; it takes the target's place, on the disk, where nothing is raised.

    Raises:
        Refused: it cannot be written.
    """
    partial = target.with_name(f".{target.stem}.partial{target.suffix}")
    try:
        partial.touch()  # libraries have errors of their own for a file that cannot be written
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(target)
        sync_folder(target.absolute().parent)
    except OSError as error:
        raise Refused(f"--to {target}: cannot be written: {error.strerror or one_line(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
