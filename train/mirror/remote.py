"""A folder anywhere that fsspec reaches: opens a URL, lists, reads, writes and removes files, checks whose it is."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import Refused, one_line
from . import local

OWNER = "owner.json"
"""Names the run that writes to a folder, and the process of which run folder may write."""
_PIECE = 4 << 20
"""Bytes that are read and sent at once."""
_REPLACED_WHOLE = 64 << 20
"""Maximum size of a file that is written under another name first: a reader never sees half of it."""
_CHECK_SECONDS = 30.0
"""Maximum seconds for the check of a URL at a launch."""
_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "sftp": "paramiko",
    "ssh": "paramiko", "hf": "huggingface_hub", "smb": "smbprotocol", "oci": "ocifs", "webdav": "webdav4",
}  # fmt: skip
"""Maps protocols to the package that fsspec needs for them."""
_ERRORS = (Exception,)
"""What a remote file system raises: each library has errors of its own."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """Who writes to a folder."""

    run: str
    """Id of the run. Copies of a run folder have the same one."""
    writer: str
    """Id of the run folder that may write."""
    place: str
    """Machine and path of that run folder, for people."""


class Remote:
    """A folder of a file system of fsspec. Errors are those of the system's library."""

    def __init__(self, url: str, beat: Callable[[], None] = lambda: None) -> None:
        """Open a URL. Connects only if the protocol needs a connection.

        Args:
            beat: called after each piece that was sent or received.

        Raises:
            Refused: the protocol is unknown, or a package is missing.
        """
        import fsspec

        self.url, self._beat = url, beat
        protocol = url.partition("://")[0] if "://" in url else "file"
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            package = _PACKAGES.get(protocol)
            way = f"pip install {package}" if package else one_line(error)
            raise Refused(f"{protocol}:// needs a package that is not installed here: {way}") from None
        except ValueError:
            known = "s3://, gs://, az://, hf://, sftp://, or the path of a folder"
            raise Refused(f"{url}: there is no protocol {protocol}://; use {known}") from None
        # a client of its own: fsspec would hand out one again whose connection is lost
        self._fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        self._root = str(root).rstrip("/")
        self._is_local = bool(getattr(self._fs, "local_file", False))

    def names(self) -> dict[str, int]:
        """Return every file below the folder with its size; {} if there is no folder."""
        if self._is_local:
            return local.sizes(Path(self._root))
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._root) + 1
        return {path[start:]: int(info.get("size") or 0) for path, info in found.items() if len(path) > start}

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        return b"".join(self.pieces(name))

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file of any size."""
        self._fs.invalidate_cache()
        path = f"{self._root}/{name}"
        with local.opened(Path(self._root), name) if self._is_local else self._fs.open(path, "rb") as file:
            while piece := file.read(_PIECE):
                self._beat()
                yield piece

    def write(self, name: str, source: BinaryIO, size: int) -> str:
        """Copy an open file of about this size. Returns the SHA-256 of what was sent."""
        folder, _, last = name.rpartition("/")
        path = f"{self._root}/{name}"
        first = path if size > _REPLACED_WHOLE else f"{self._root}/{folder}{'/' if folder else ''}.partial-{last}"
        digest = hashlib.sha256()
        with self._new(first) as file:
            while piece := source.read(_PIECE):
                digest.update(piece)
                file.write(piece)
                self._beat()
        self._beat()
        if first != path:
            self._fs.mv(first, path)
        return digest.hexdigest()

    def _new(self, path: str) -> Any:
        try:
            return self._fs.open(path, "wb")
        except FileNotFoundError:  # only file systems with folders
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self._fs.open(path, "wb")

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, in this order. A file that is gone already is no error."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name}")
            self._beat()

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder, where the file system has folders."""
        with contextlib.suppress(*_ERRORS):
            self._fs.rmdir(f"{self._root}/{name}")

    def owner(self) -> Owner | None:
        """Return who writes to the folder; None: no run.

        Raises:
            Refused: the folder holds files of something else.
        """
        try:
            return Owner(**json.loads(self.read(OWNER)))
        except FileNotFoundError:
            if other := next((name for name in self.names() if not name.startswith(".")), ""):
                raise Refused(f"{self.url} holds other files ({other}); give a folder of its own") from None
            return None
        except (ValueError, TypeError):
            raise Refused(f"{self.url} holds a damaged {OWNER}; give another folder") from None

    def claim(self, owner: Owner) -> None:
        """Write down who writes to the folder."""
        import io

        content = json.dumps(dataclasses.asdict(owner), indent=1).encode() + b"\n"
        self.write(OWNER, io.BytesIO(content), len(content))


def check(url: str, run_id: str) -> None:
    """Check that a run can write to a URL.

    Args:
        run_id: Id of the run; '' for a new one.

    Raises:
        Refused: it cannot be reached or written, or another run writes to it.
    """
    problems: list[str] = []

    def look() -> None:
        import io

        try:
            remote = Remote(url)
            owner = remote.owner()
            if owner is not None and owner.run != run_id:
                way = "give this run another URL, or --checkpoint.mirror '' for none"
                raise Refused(f"{url} is the mirror of another run ({owner.place}); {way}")
            remote.write(".check", io.BytesIO(b"train"), 5)
            remote.remove([".check"])
        except Refused as error:
            problems.append(str(error))
        except _ERRORS as error:
            problems.append(f"{url} cannot be written: {described(error)}; check the address and the credentials")
        else:
            problems.append("")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_CHECK_SECONDS)
    if not problems:
        problems.append(f"{url} does not answer within {_CHECK_SECONDS:.0f} s; check the network, or leave it out")
    if problems[0]:
        raise Refused(f"--checkpoint.mirror: {problems[0]}")


def described(error: BaseException) -> str:
    """Return an error of a remote file system as one line."""
    if isinstance(error, Refused):
        return str(error)
    text = one_line(error)
    kind = type(error).__name__
    return f"{kind}: {text}"[:300] if text else kind
