"""The folder of a run: its files, its state, its lock.

`run.json` is the only record of a run's state; `lock` is flocked by every process of the run, through one open
file that they inherit from each other, so the run is alive exactly while the lock is held, whatever was killed.
Nothing here imports torch.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from train import signals
from train.errors import Refused
from train.run import durable, heartbeat, ownership, states
from train.run.record import Record, checked

NOTE_PATIENCE = 5.0
"""Seconds that `Run.note` waits for the lock of the record: far more than a working disk takes."""
_STEP = re.compile(r"step-(\d{8,})")


def now() -> str:
    """The time as run.json records it: ISO 8601, UTC."""
    return _stamp(time.time())


def seconds_of(stamp: Any) -> float | None:
    """A time of run.json in seconds since the epoch; None: it is missing, or no time."""
    try:
        return datetime.datetime.fromisoformat(stamp).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _stamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


class Lock:
    """The held lock of a run: one open file; processes that inherit `fd` hold it with us."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def release(self) -> None:
        """Close our copy; the lock is free once every process that inherited it has done so or died."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class Run:
    """One run folder.

    Args:
        folder: where it lies.
        fd: it, opened: then `folder` is a path for this process alone, which stays right where the folder is renamed.
    """

    def __init__(self, folder: Path, fd: int = -1) -> None:
        self.folder, self.fd, self._given = folder, fd, folder
        if fd >= 0:
            self.folder, self._real = Path(f"/proc/self/fd/{fd}"), os.path.realpath(folder)
            weakref.finalize(self, os.close, fd)

    def held(self) -> Run:
        """The same run with its folder open, for who must find it wherever it is moved. Raises OSError: it is gone."""
        return self if self.fd >= 0 else Run(self.folder, os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY))

    @property
    def path(self) -> Path:
        """Where it lies now, for people and other processes."""
        now = str(self.folder.readlink()).removesuffix(" (deleted)") if self.fd >= 0 else ""
        return Path(now) if now and now != self._real else self._given  # which may be a link to it

    @property
    def name(self) -> str:
        """The folder's name: a run may be renamed by renaming its folder."""
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

    def read(self) -> Record:
        """run.json.

        Raises:
            Refused: it is missing or damaged.
        """
        path = self.folder / "run.json"
        try:
            content = json.loads(durable.read_bytes(path))
            record = checked({"stopped_by": None, **content, "name": self.name})
        except OSError as error:
            raise Refused(f"cannot read {path}: {error.strerror}; is {self.folder} a run folder?") from None
        except (ValueError, TypeError, RecursionError) as error:
            why = f" ({error})" if type(error) is ValueError else ""
            raise Refused(f"{path} is damaged{why}; repair it or remove the run with: train rm {self.name}") from None
        if record["state"] == states.STOPPED and not record["stopped_by"]:
            record["stopped_by"] = signals.USER  # of an earlier release: the keeper leaves it alone
        return record

    def read_config(self) -> dict[str, Any]:
        """The fields of config.toml by their dotted names; {} where it is missing (a script) or cannot be read."""
        try:
            tree = tomllib.loads(durable.read_bytes(self.folder / "config.toml").decode())
        except (OSError, ValueError, RecursionError):
            return {}
        none = tree.pop("none", [])  # as config/fields.py lists fields that are none
        fields: dict[str, Any] = dict.fromkeys(map(str, none)) if isinstance(none, list) else {}
        for name, value in tree.items():
            fields |= {f"{name}.{inner}": one for inner, one in value.items()} if type(value) is dict else {name: value}
        return fields

    def used_config(self) -> dict[str, Any]:
        """`read_config` without the fields whose values say nothing of the run: functions of its task stand for them.

        Raises:
            Refused: run.json cannot be read.
        """
        unused = self.read().get("unused_fields") or ()
        return {name: value for name, value in self.read_config().items() if name not in unused}

    def update(self, change: Callable[[Record], None] | None = None, **values: Any) -> None:
        """Change run.json under a lock of the folder, so that agent and rank 0 never undo each other's change."""
        with self._record_locked(math.inf):
            self._change(change, values, is_durable=True)

    def note(self, change: Callable[[Record], None] | None = None, **values: Any) -> bool:
        """`update` that gives up, and returns False, where the lock is not free in time or the disk fails.

        For a process that must not wait: a stopped process may hold the lock forever.
        """
        try:
            with self._record_locked(NOTE_PATIENCE):
                self._change(change, values, is_durable=False)
        except (OSError, Refused):
            return False
        return True

    def _change(self, change: Callable[[Record], None] | None, values: dict[str, Any], is_durable: bool) -> None:
        record = self.read()
        record.update(cast(Record, values))
        if change:
            change(record)
        durable.write_atomically(self.folder / "run.json", json.dumps(record, indent=1) + "\n", is_durable)

    @contextlib.contextmanager
    def _record_locked(self, patience: float) -> Iterator[None]:
        """Hold the lock of the folder. Raises BlockingIOError where it is not free within `patience` seconds."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            durable.flock(folder, fcntl.LOCK_EX | (0 if patience == math.inf else fcntl.LOCK_NB), self.folder, patience)
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_UN)  # a loader worker forked by another thread holds this file too
            os.close(folder)

    def alive(self) -> bool:
        """Whether any process of the run lives, by the kernel's lock.

        Raises:
            Refused: there are no locks on that file system.
        """
        try:
            fd = os.open(self.folder / "lock", os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place would block
        except OSError:
            return False
        try:
            # shared: two observers do not see each other
            durable.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, self.folder)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def acquire(self, patience: float = 1.0) -> Lock | None:
        """Take the lock, or None if the run is alive. Observers hold it for microseconds: hence a little patience.

        Raises:
            Refused: there are no locks on that file system.
        """
        fd = os.open(self.folder / "lock", os.O_WRONLY | os.O_CREAT, 0o644)  # not for reading: data/loader.py
        try:
            durable.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, self.folder, patience)
        except (BlockingIOError, Refused) as error:
            os.close(fd)
            if isinstance(error, Refused):
                raise
            return None
        return Lock(fd)

    @contextlib.contextmanager
    def handing_over(self) -> Iterator[None]:
        """Let one process at a time hand the run to the engine of a cluster, whose answer may take a minute.

        Not `lock`, which belongs to the processes of the run. Raises Refused where another process is doing it.
        """
        try:
            fd = os.open(self.folder / "handing", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise Refused(f"cannot write in {self.folder}: {error.strerror}") from None
        try:
            durable.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, self.folder)
            yield
        except BlockingIOError:
            raise Refused(f"{self.name} is being handed over just now; wait, then: train show {self.name}") from None
        finally:
            os.close(fd)

    def read_effective(self) -> Record:
        """run.json with the effective state."""
        record = self.read()
        is_alive = record["state"] not in (states.RUNNING, states.CREATED) or self.alive()
        if not is_alive:
            record = self.read()  # it may have ended between the two looks
        return states.effective(record, is_alive, lambda: ownership.was_started_here(self.path, record))

    def state(self) -> str:
        """The effective state."""
        return self.read_effective()["state"]

    def ask_stop(self, wanted: str) -> None:
        """Ask a live run to stop. By a file: process ids mean nothing on the other side of a container's wall."""
        durable.write_atomically(self.folder / "stop", f"{wanted}\n", durable=False)

    def is_gone(self) -> bool:
        """Whether its folder was removed; not where that cannot be seen just now."""
        try:
            (self.folder / "run.json").stat()
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return False

    def stop_asked(self) -> str:
        """POLITE, NOW, FOR_KEEPER or PLACED; '' where no stop was asked for by file."""
        try:
            return durable.read_bytes(self.folder / "stop").decode(errors="replace").strip()
        except OSError:
            return ""

    def clear_stop(self) -> None:
        """Forget a request to stop. For the holder of the lock."""
        with contextlib.suppress(OSError):
            (self.folder / "stop").unlink()

    def begin_attempt(self, world_size: int, from_step: int | None = None, **values: Any) -> int:
        """Record that an attempt starts; returns its number, counted from 1. For the holder of the lock.

        Args:
            from_step: it continues after this one; by default after that of the newest checkpoint.
        """
        number = 0
        at = self.newest_checkpoint if from_step is None else from_step
        before = len(self.read()["attempts"])
        # a living run records its progress twice a second
        last_sign = heartbeat.last_sign(self.logs(before))  # of a script; a task has none
        last_written = _stamp(max((self.folder / "run.json").stat().st_mtime, last_sign))

        def change(record: Record) -> None:
            nonlocal number
            number, started = len(record["attempts"]) + 1, now()
            for left in self.folder.glob(".run.json.*"):  # by a kill inside write_atomically; others wait for us
                left.unlink()
            if record["attempts"] and record["attempts"][-1]["end"] is None:  # all its processes were killed
                record["attempts"][-1].update(
                    {"end": "died", "reason": "killed as a whole, or with its machine or container",
                     "ended": last_written, "to_step": self._reached(record)}
                )  # fmt: skip
            record["attempts"].append(
                {"number": number, "started": started, "ready": None, "ended": None, "end": None, "reason": "",
                 "world_size": world_size, "to_step": None, "host": socket.gethostname(),
                 # the steps of a script are its own
                 "from_step": None if record.get("script") else at}
            )  # fmt: skip
            record["started"] = record["started"] or started
            record.update({"state": states.RUNNING, "reason": "", "stopped_by": None, "ended": None})
            record.update({"metrics": {}, "weights_sha256": None})  # of an end that it goes on from
            record.update({"world_size": world_size, "host": socket.gethostname()})
            record.update(cast(Record, values))

        self.logs(before + 1).mkdir(parents=True, exist_ok=True)  # first: what fails and is tried again is one attempt
        self.update(change)
        heartbeat.clear(self.logs(number - 1))
        return number

    def note_ready(self, step: int, mark: str = "", edited: Sequence[str] = (), **values: Any) -> bool:
        """Record that the ranks of the last attempt train now, after this step; as `note`.

        Args:
            mark: of the attempt, the same on all machines, whose records number their attempts each for itself.
            edited: lines about files of the task that have changed since the launch.
        """

        def change(record: Record) -> None:
            *before, attempt = record["attempts"]
            attempt.update({"from_step": step, "ready": now(), "mark": mark})
            if edited:
                attempt["edited"] = [*edited]
            # another machine may have made a step of which the dead of this one could not write any more
            if before and before[-1]["ready"] and before[-1]["to_step"] is not None:
                before[-1]["to_step"] = max(before[-1]["to_step"], step)

        return self.note(change, step=step, **values)

    def end_attempt(
        self, end: str, why: str, state: str | None = None, last_lines: list[str] | None = None, **values: Any
    ) -> None:
        """Record why the attempt ended, and the run's state if that ends with it. For supervise/attempts.py alone.

        Args:
            end: finished, stopped, failed or died.
            last_lines: of the log of the rank that died first.
            values: other fields of run.json. The run's reason is the attempt's unless it is among them.
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
        """The last step that the last attempt made; None: it runs a script."""
        attempt = record["attempts"][-1]
        if attempt["from_step"] is None:
            return None
        if not attempt.get("ready"):  # it never came to training
            return int(attempt["from_step"])
        return max(int(record["step"]), heartbeat.reached(self.logs(attempt["number"])))

    def logs(self, attempt: int) -> Path:
        """Where the ranks of an attempt write their output, each into rankR.log."""
        return self.folder / "logs" / f"attempt-{attempt}"

    def since_saved(self, step: int) -> float:
        """Seconds since the checkpoint of this step was published, 0: since the run first started. Infinite where that
        is not known."""
        with contextlib.suppress(OSError, Refused):
            begun = self.checkpoint(step).stat().st_mtime if step else seconds_of(self.read()["started"])
            if begun is not None:
                return max(0.0, time.time() - begun)
        return math.inf

    def steps_saved(self) -> list[int]:
        """Steps of the published checkpoints, newest first. Whether one is whole is found out on loading."""
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
        """The folder of the checkpoint of that step."""
        return self.checkpoints / f"step-{step:08d}"
