"""The folder of a run: its files, its state, its lock.

`run.json` is the only record of a run's state. Every process of the run holds `lock` (flock) through one open file that
they inherit from each other. So the run is alive exactly while the lock is held, whatever was killed. Imports no torch.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import math
import os
import re
import socket
import time
import tomllib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ..errors import Refused
from . import durable, heartbeat, ownership, states
from .record import Attempt, Record, checked, other_format, shown

NOTE_PATIENCE = 5.0
"""Seconds `Run.note` waits for the lock of the record: far more than a working disk needs."""
_STEP = re.compile(r"step-(\d{8,})")


def now() -> str:
    """Return the current time in the form of run.json: ISO 8601, UTC."""
    return stamp(time.time())


def seconds_of(stamp: Any) -> float | None:
    """Return a time of run.json in seconds since the epoch; None: it is missing or no time."""
    try:
        return datetime.datetime.fromisoformat(stamp).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def stamp(seconds: float) -> str:
    """Return a time in seconds since the epoch in the form of run.json."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


class Lock:
    """The held lock of a run: one open file. Processes that inherit `fd` hold it too.

    `leases` are open files by which the run holds GPUs or cores (leases/devices.py), for as long as the lock.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.leases: list[int] = []

    def release(self) -> None:
        """Close this process's copies. The lock is free when every process that inherited it has done so or died."""
        self.drop_leases()
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def drop_leases(self) -> None:
        """Close this process's copies of the leases, and keep the lock."""
        for fd in self.leases:
            os.close(fd)
        self.leases = []


class Run:
    """One run folder.

    Args:
        folder: Path of the run folder.
        fd: An open descriptor of the folder. Then `folder` is a path through it, only for this process, which stays
            valid when the folder is renamed.
    """

    def __init__(self, folder: Path, fd: int = -1) -> None:
        self.folder, self.fd, self._given = folder, fd, folder
        if fd >= 0:
            self.folder, self._real = Path(f"/proc/self/fd/{fd}"), os.path.realpath(folder)
            weakref.finalize(self, os.close, fd)

    def held(self) -> Run:
        """Return the same run with its folder open, so that moving it does no harm. Raises OSError if it is gone."""
        return self if self.fd >= 0 else Run(self.folder, os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY))

    def by_path(self) -> Run:
        """Return the same run by its current path, as other processes and machines know it."""
        return Run(self.path)

    @property
    def path(self) -> Path:
        """The current path of the folder, for people and other processes."""
        now = str(self.folder.readlink()).removesuffix(" (deleted)") if self.fd >= 0 else ""
        return Path(now) if now and now != self._real else self._given  # the given path may be a link

    @property
    def name(self) -> str:
        """Name of the folder: renaming the folder renames the run."""
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def images(self) -> Path:
        return self.folder / "images"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def read(self, of_any_format: bool = False) -> Record:
        """Read run.json.

        Args:
            of_any_format: Whether to return what can be shown of a run of another format, in the state OTHER_FORMAT.
                Only for what neither executes nor changes the run.

        Raises:
            Refused: it is missing or damaged, or another version of train has written it.
        """
        try:
            content = {**json.loads(durable.read_bytes(self.folder / "run.json")), "name": self.name}
            if why := other_format(content, self.name):
                if not of_any_format:
                    raise Refused(f"{why}, or remove it: train rm {self.name}")
                return shown(content, states.OTHER_FORMAT, why)
            return checked(content)
        except OSError as error:
            problem = f"cannot read {self.path / 'run.json'} ({error.strerror})"
            raise Refused(f"{problem}; check that {self.path} is a run folder") from None
        except (ValueError, TypeError, RecursionError) as error:
            why = f" ({error})" if type(error) is ValueError else ""
            problem = f"{self.path / 'run.json'} is damaged{why}"
            raise Refused(f"{problem}; repair it, or remove the run: train rm {self.name}") from None

    def read_config(self) -> dict[str, Any]:
        """Return the fields of config.toml by their dotted names; {} if it is missing (a script) or unreadable."""
        try:
            tree = tomllib.loads(durable.read_bytes(self.folder / "config.toml").decode())
        except (OSError, ValueError, RecursionError):
            return {}
        none = tree.pop("none", [])  # the fields that are none; see config/fields.py
        fields: dict[str, Any] = dict.fromkeys(map(str, none)) if isinstance(none, list) else {}
        for name, value in tree.items():
            fields |= {f"{name}.{inner}": one for inner, one in value.items()} if type(value) is dict else {name: value}
        return fields

    def update(self, change: Callable[[Record], None] | None = None, **values: Any) -> None:
        """Change run.json while holding a lock on the folder, so that agent and rank 0 never lose a change."""
        with self._record_locked(math.inf):
            self._change(change, values, is_durable=True)

    def note(self, change: Callable[[Record], None] | None = None, **values: Any) -> bool:
        """Do `update`, but give up and return False if the lock is not free in time or the disk fails.

        For a process that must not wait: a suspended process may hold the lock for ever.
        """
        try:
            with self._record_locked(NOTE_PATIENCE):
                self._change(change, values, is_durable=False)
        except (OSError, Refused):
            return False
        return True

    def note_not_exact(self, reason: str) -> bool:
        """Add a reason why the run is not exact. Returns whether it is new, as far as run.json could be read."""
        added: list[str] = []

        def add(record: Record) -> None:
            known = record.get("not_exact") or []
            if reason not in known:
                record["not_exact"] = [*known, reason]
                added.append(reason)

        return not self.note(add) or bool(added)

    def _change(self, change: Callable[[Record], None] | None, values: dict[str, Any], is_durable: bool) -> None:
        record = self.read()
        record.update(cast(Record, values))
        if change:
            change(record)
        durable.write_atomically(self.folder / "run.json", json.dumps(record, indent=1) + "\n", is_durable)

    @contextlib.contextmanager
    def _record_locked(self, patience: float) -> Iterator[None]:
        """Hold the lock on the folder. Raises BlockingIOError if it is not free within `patience` seconds."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            durable.flock(
                folder, fcntl.LOCK_EX | (0 if patience == math.inf else fcntl.LOCK_NB), self.folder, patience=patience
            )
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_UN)  # a data worker forked by another thread holds this file too
            os.close(folder)

    def alive(self) -> bool:
        """Whether any process of the run is alive, by the kernel's lock.

        Raises:
            Refused: the file system has no locks.
        """
        return durable.is_locked(self.folder / "lock")

    def acquire(self, patience: float = 1.0) -> Lock | None:
        """Take the lock. Returns None if the run is alive. Waits a little, because observers hold it for microseconds.

        Raises:
            Refused: the file system has no locks.
        """
        fd = durable.try_lock(self.folder / "lock", patience=patience)
        return None if fd is None else Lock(fd)

    @contextlib.contextmanager
    def handing_over(self) -> Iterator[None]:
        """Context manager that lets one process at a time submit the run to a cluster, which may take a minute.

        Does not use `lock`, which belongs to the processes of the run. Raises Refused if another process submits it.
        """
        try:
            fd = os.open(self.folder / "handing", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise Refused(f"cannot write in {self.path}: {error.strerror}") from None
        try:
            durable.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, self.folder)
            yield
        except BlockingIOError:
            raise Refused(f"{self.name} is just being submitted; wait, then: train show {self.name}") from None
        finally:
            os.close(fd)

    def read_effective(self, of_any_format: bool = False) -> Record:
        """Read run.json with the effective state, and the owner if that is another user. Errors as in `read`."""
        record = self.read(of_any_format)
        is_open = states.gives_way(record) or record["state"] in (states.RUNNING, states.CREATED, states.QUEUED)
        is_alive = not is_open or self.alive()
        if not is_alive:
            record = self.read(of_any_format)  # the run may have ended between the two looks
        return states.effective(
            record, is_alive, was_started_here=lambda: self.was_started_here(record),
            other_user=ownership.other_user(self.folder),
        )  # fmt: skip

    def was_started_here(self, record: Record, before: Path | None = None) -> bool:
        """Whether this station has started the run, and what a resume executes is unchanged.

        Args:
            before: Path of the folder until now; None: it has not moved.
        """
        return ownership.was_started_here(before or self.path, record, self.folder)

    def signature(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of run.json that say that this station has started the run, as record and files are now."""
        return ownership.sign(self.path, record, self.folder)

    def state(self) -> str:
        """Return the effective state."""
        return self.read_effective()["state"]

    def stands(self) -> str:
        """Return how a run stands whose lock another process holds: queued, else running."""
        return states.QUEUED if self.state() == states.QUEUED else states.RUNNING

    def ask_stop(self, wanted: str) -> None:
        """Ask a running run to stop, by a file: that also works from outside a container, where process ids differ."""
        durable.write_atomically(self.folder / "stop", f"{wanted}\n", durable=False)

    def is_gone(self) -> bool:
        """Whether the folder was removed. False if that cannot be determined now."""
        try:
            (self.folder / "run.json").stat()
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return False

    def stop_asked(self) -> str:
        """Return one of the requests of states.py; '' if no stop was requested by file."""
        try:
            return durable.read_bytes(self.folder / "stop").decode(errors="replace").strip()
        except OSError:
            return ""

    def clear_stop(self) -> None:
        """Remove a stop request. The caller must hold the lock."""
        with contextlib.suppress(OSError):
            (self.folder / "stop").unlink()

    def attempts(self) -> list[Attempt]:
        """Return the attempts so far, as run.json has them now.

        Raises:
            Refused: run.json cannot be read.
        """
        return self.read()["attempts"]

    def begin_attempt(self, world_size: int, from_step: int | None, **values: Any) -> int:
        """Record that an attempt starts. Returns its number, counted from 1. The caller must hold the lock.

        Args:
            from_step: The step after which it continues; None: unknown.
        """
        number = 0
        before = len(self.read()["attempts"])
        # a running task records its progress twice a second
        last_sign = heartbeat.last_sign(self.logs(before))  # only a script has one
        last_written = stamp(max((self.folder / "run.json").stat().st_mtime, last_sign))

        def change(record: Record) -> None:
            nonlocal number
            number, started = len(record["attempts"]) + 1, now()
            for left in self.folder.glob(".run.json.*"):  # left by a kill inside write_atomically
                left.unlink()
            if record["attempts"] and record["attempts"][-1]["end"] is None:  # all its processes were killed
                record["attempts"][-1].update(
                    {"end": "died", "reason": "all its processes were killed, or its machine or container ended",
                     "ended": last_written, "to_step": self._reached(record)}
                )  # fmt: skip
            record["attempts"].append(
                {"number": number, "started": started, "ready": None, "ended": None, "end": None, "reason": "",
                 "world_size": world_size, "from_step": from_step, "to_step": None, "host": socket.gethostname()}
            )  # fmt: skip
            record["started"] = record["started"] or started
            record.update({"state": states.RUNNING, "reason": "", "stopped_by": None, "ended": None})
            record.update({"metrics": {}, "weights_sha256": None})  # from the end before
            record.pop("unmet", None)
            record.update({"world_size": world_size, "host": socket.gethostname()})
            record.update(cast(Record, values))

        self.logs(before + 1).mkdir(parents=True, exist_ok=True)  # first: if it fails, a retry is the same attempt
        self.update(change)
        heartbeat.clear(self.logs(number - 1))
        return number

    def note_ready(self, step: int, mark: str = "", edited: Sequence[str] = (), **values: Any) -> bool:
        """Record, as `note`, that the ranks of the last attempt now train, starting after this step.

        Args:
            mark: Id of the attempt on all machines, whose attempt numbers may differ.
            edited: Lines about files of the task that have changed since the launch.
        """

        def change(record: Record) -> None:
            *before, attempt = record["attempts"]
            attempt.update({"from_step": step, "ready": now(), "mark": mark})
            if edited:
                attempt["edited"] = [*edited]
            # another machine may have made a step that this machine's dead ranks could not record
            if before and before[-1]["ready"] and before[-1]["to_step"] is not None:
                before[-1]["to_step"] = max(before[-1]["to_step"], step)

        return self.note(change, step=step, **values)

    def end_attempt(
        self, end: str, why: str, *, state: str | None = None, last_lines: list[str] | None = None, **values: Any
    ) -> None:
        """Record why the attempt ended, and the run's state if the run ends with it. Only for supervise/attempts.py.

        Args:
            end: finished, stopped, failed or died.
            last_lines: Last lines of the log of the rank that died first.
            values: Other fields of run.json. Without `reason` among them, the run gets the attempt's reason.
        """
        number = 0

        def change(record: Record) -> None:
            nonlocal number
            number, ended = len(record["attempts"]), now()
            if state is not None:
                record.update({"state": state, "reason": why, "ended": ended})
            record.update(cast(Record, {"pids": {}, **values}))
            if record["attempts"]:
                reached = self._reached(record)
                record["attempts"][-1].update({"ended": ended, "end": end, "reason": why, "to_step": reached})
                if last_lines:
                    record["attempts"][-1]["last_lines"] = last_lines

        self.update(change)
        heartbeat.clear(self.logs(number))

    def _reached(self, record: Record) -> int | None:
        """Return the last step of the last attempt; None: unknown."""
        attempt = record["attempts"][-1]
        if attempt["from_step"] is None:
            return None
        if not attempt.get("ready"):  # it never started to train
            return int(attempt["from_step"])
        return max(int(record["step"]), heartbeat.reached(self.logs(attempt["number"])))

    def logs(self, attempt: int) -> Path:
        """Return the folder in which the ranks of an attempt write their output, each into rankR.log."""
        return self.folder / "logs" / f"attempt-{attempt}"

    def since_saved(self, step: int) -> float:
        """Return the seconds since the checkpoint of this step was published; for step 0 since the run's first start.

        Infinite if unknown.
        """
        with contextlib.suppress(OSError, Refused):
            begun = self.checkpoint(step).stat().st_mtime if step else seconds_of(self.read()["started"])
            if begun is not None:
                return max(0.0, time.time() - begun)
        return math.inf

    def steps_saved(self) -> list[int]:
        """Return the steps of the published checkpoints, newest first. Only loading shows whether they are intact."""
        try:
            names = os.listdir(self.checkpoints)
        except OSError:
            return []
        return sorted((int(m[1]) for name in names if (m := _STEP.fullmatch(name))), reverse=True)

    @property
    def newest_checkpoint(self) -> int:
        """The step of the newest published checkpoint; 0: there is none."""
        return next(iter(self.steps_saved()), 0)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint of that step."""
        return self.checkpoints / f"step-{step:08d}"
