"""Copies what a run has saved to its mirror: its files, then the files of a checkpoint, then their manifest.

So a manifest in the mirror never names a file that is not there, whenever the process is killed. Old checkpoints are
removed after. The layout in the mirror is that of the run folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..checkpoint.manifest import MANIFEST, read_manifest
from ..errors import Refused
from ..run import durable
from ..run.run_folder import Run
from . import state as states
from .remote import Owner, Remote
from .state import State

_LEFT_OUT = ("stop", "lock", "handing", "wandb", "checkpoints", states.FILE)
"""Names in a run folder that belong to its processes or its machine, or that are copied in an order of their own."""
_NOTE_EVERY = 1.0
"""Seconds between two notes in mirror.json of how much of a checkpoint is copied."""


class Lost(Refused):
    """Another folder of the same run writes to the mirror."""


class Copier:
    """Copies one run to one URL.

    Args:
        beat: called after each piece that was sent.

    Raises:
        Refused: the URL cannot be opened, or another run writes to it.
        Lost: another folder of this run writes to it.
        Exception: what the remote file system raises.
    """

    def __init__(self, run: Run, url: str, beat: Callable[[], None] = lambda: None) -> None:
        self._run, self._beat, self._noted = run, beat, 0.0
        self.remote, self.state = Remote(url, self._sent), states.read(run)
        if self.state.url != url:
            self.state = State(id=self.state.id, writer=self.state.writer, inode=self.state.inode, url=url)
        self.state.is_complete, self.state.copying = False, 0
        self._claim()
        self._there = self._manifests()

    def _claim(self) -> None:
        """Check that the mirror is this run's, or make it so."""
        state, inode = self.state, self._run.folder.stat().st_ino
        owner = self.remote.owner()
        if owner is not None and owner.run != state.id:
            raise Refused(f"it is the mirror of another run ({owner.place})")
        is_own = state.writer and state.inode == inode
        if is_own and owner is not None:
            if owner.writer == state.writer:
                return
            self._lose(owner)
        # a new run, or a folder that was fetched or copied, which only its user can resume: it takes the mirror over
        state.id, state.writer, state.inode = state.id or secrets.token_hex(8), secrets.token_hex(8), inode
        state.files, state.step, state.is_lost = {}, 0, False
        states.write(self._run, state, is_durable=True)
        self.remote.claim(Owner(state.id, state.writer, f"{socket.gethostname()}:{self._run.path}"))

    def _lose(self, owner: Owner) -> None:
        self.state.is_lost = True
        ways = f"to take it back: train mirror {self._run.name}; or give this run another --checkpoint.mirror"
        raise Lost(f"{owner.place} continues this run and has taken the mirror over; {ways}")

    def _manifests(self) -> dict[int, bytes]:
        """Return the manifests in the mirror by step."""
        names = [name for name in self.remote.names() if name.endswith(f"/{MANIFEST}")]
        found = {step_of(name): self.remote.read(name) for name in names}
        self.state.step = max(found, default=0)
        return {step: text for step, text in found.items() if step}

    def copy(self) -> None:
        """Copy all that is not in the mirror yet. Raises as the class."""
        owner = self.remote.owner()
        if owner is None:
            raise OSError(f"{self.remote.url} was emptied by something else")
        if owner.writer != self.state.writer:
            self._lose(owner)
        damaged = ""
        while True:
            steps = self._run.steps_saved()
            if max(self._there, default=0) > max(steps, default=0):
                ahead = f"the mirror has step {max(self._there)}, and this run only step {max(steps, default=0)}"
                way = f"train fetch {self.remote.url} --name NEW fetches it"
                raise Refused(f"{ahead}; nothing is copied until the run has passed it; {way}")
            self._copy_files()
            for step in steps:  # the newest first
                try:
                    if self._copy_checkpoint(step):
                        break  # meanwhile there may be a newer one
                except ValueError as error:
                    damaged = damaged or f"step {step} is damaged on this disk: {error}"
            else:
                break
        self._remove_old(set(steps))
        if damaged:
            raise Refused(damaged)
        self.state.error, self.state.error_since, self.state.at = "", 0.0, time.time()
        states.write(self._run, self.state)

    def _copy_files(self) -> None:
        for name, path in files_of(self._run.folder):
            try:
                with durable.open_regular(path) as file:
                    found = os.fstat(file.fileno())
                    mark = [found.st_size, found.st_mtime_ns]
                    if self.state.files.get(name) != mark:
                        self.remote.write(name, file, found.st_size)
                        self.state.files[name] = mark
                        states.write(self._run, self.state)
            except FileNotFoundError:
                if path.exists():  # of the remote system
                    raise

    def _copy_checkpoint(self, step: int) -> bool:
        """Copy a checkpoint, unless it is there or is gone here. Returns whether it was copied.

        All its files are opened first: it may be removed here meanwhile.

        Raises:
            ValueError: it is damaged here.
        """
        folder, state = self._run.checkpoint(step), self.state
        with contextlib.ExitStack() as opened:
            try:
                text = durable.read_bytes(folder / MANIFEST)
                if self._there.get(step) == text:
                    return False
                files = read_manifest(folder)["files"]
                sources = {name: opened.enter_context(durable.open_regular(folder / name)) for name in files}
                manifest = opened.enter_context(durable.open_regular(folder / MANIFEST))
            except FileNotFoundError:
                return False
            there = f"checkpoints/{folder.name}"
            state.copying, state.done, state.total = step, 0, sum(entry["size"] for entry in files.values())
            states.write(self._run, state)
            if self._there.pop(step, None):
                self.remote.remove([f"{there}/{MANIFEST}"])
            for name, source in sources.items():
                begun = state.done
                if self.remote.write(f"{there}/{name}", source, files[name]["size"]) != files[name]["sha256"]:
                    raise ValueError(f"{name} was changed after it was written")
                state.done = begun + files[name]["size"]
                os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # training needs the page cache
            self.remote.write(f"{there}/{MANIFEST}", manifest, len(text))
        self._there[step] = text
        state.step, state.copying = max(self._there), 0
        states.write(self._run, state)
        return True

    def _remove_old(self, stay: set[int]) -> None:
        """Remove the checkpoints that the run does not keep, and parts of copies that were interrupted."""
        if not stay:
            return
        names = [name for name in self.remote.names() if step_of(name) not in {0, *stay}]
        if names:
            self.remote.remove(sorted(names, key=lambda name: not name.endswith(f"/{MANIFEST}")))
            for step in {step_of(name) for name in names}:
                self.remote.remove_folder(f"checkpoints/{self._run.checkpoint(step).name}")
                self._there.pop(step, None)

    def _sent(self) -> None:
        self._beat()
        if self.state.copying and time.monotonic() > self._noted + _NOTE_EVERY:
            self._noted = time.monotonic()
            states.write(self._run, self.state)


def step_of(name: str) -> int:
    """Return the step of the checkpoint to which a file in a mirror belongs; 0: to none."""
    folder, _, rest = name.removeprefix("checkpoints/").partition("/")
    digits = folder.removeprefix("step-")
    return int(digits) if rest and name.startswith("checkpoints/step-") and digits.isdecimal() else 0


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a run folder that are copied beside the checkpoints, each with its name there."""
    for place, folders, names in os.walk(folder):
        inside = Path(place).relative_to(folder)
        out = _LEFT_OUT if inside == Path() else ()
        folders[:] = [name for name in folders if name not in out and not name.startswith(".")]
        for name in sorted(names):
            path = Path(place) / name
            with contextlib.suppress(OSError):
                is_wanted = name not in out and not name.startswith(".") and not name.endswith(".beat")
                if is_wanted and stat.S_ISREG(path.lstat().st_mode):
                    yield str(inside / name), path
