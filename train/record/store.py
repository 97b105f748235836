"""The run folder: its files, its state, its lock.

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
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from train import signals
from train.errors import Refused, nearest, shortened
from train.record import environment, heartbeat, plain, whole

CREATED, RUNNING, STOPPED, FAILED, FINISHED = "created", "running", "stopped", "failed", "finished"
POLITE, NOW, KEEPER, PLACED = "polite", "now", "keeper", "placed"
"""Requests to stop: save first; at once; save first, on the keeper's behalf, which will continue the run; the same on
behalf of the engine of a cluster, which has started the run elsewhere."""
WHO = {
    POLITE: "train stop",
    NOW: "train stop --now",
    KEEPER: "the keeper",
    PLACED: "its place is another machine's now",
}
"""What run.json's reason says of them."""
BY = {POLITE: signals.USER, NOW: signals.USER, KEEPER: signals.KEEPER, PLACED: signals.SIGNAL}
"""Who makes them: run.json's `stopped_by`."""
TWICE = "stopped at once (Ctrl-C twice)"
"""How the reason begins where a user did not wait for a foreground run to save."""
INTERRUPTED = "interrupted"
"""Effective only: recorded as running, but no process of the run is alive."""
QUEUED = "queued"
"""Effective only: the engine of a cluster that the run was handed to has not started it yet, or will again."""

_NOTING = 5.0
"""Seconds that a note waits for whoever changes the record just now: far more than any disk that lives takes."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_ESSENTIAL = {"state", "attempts", "step", "epoch", "world_size"}
"""Keys of run.json that are in it from the start."""
_PRIVATE = (environment.FILE,)
"""Files of a run folder that only its owner may read."""
_STEP = re.compile(r"step-(\d{8,})")


def now() -> str:
    """The time as run.json records it: ISO 8601, UTC."""
    return _stamp(time.time())


def seconds_of(stamp: Any) -> float | None:
    """A time as run.json has it, in seconds since the epoch; None: it is none, in a record that was damaged."""
    try:
        return datetime.datetime.fromisoformat(stamp).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _stamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def runs_folder(given: str | None) -> Path:
    """Where run folders live: --runs, else $TRAIN_RUNS, else ./runs.

    Raises:
        Refused: --runs was given as an empty text, or something else than a folder is there.
    """
    if given == "":
        raise Refused("--runs is empty; give a folder, or leave it out for ./runs")
    folder = Path(given or os.environ.get("TRAIN_RUNS") or "runs").absolute()
    if os.path.lexists(folder) and not folder.is_dir():
        raise Refused(f"{folder} is not a folder, so there are no runs in it; choose another with --runs")
    return folder


def check_name(name: str) -> str:
    """The name, if it can be a run's.

    Raises:
        Refused: it cannot; tmux and shells would stumble over it.
    """
    if not _NAME.fullmatch(name):
        raise Refused(
            f"{shortened(name, 64)!r} is not a legal run name: use up to 64 letters, digits, - and _, "
            "beginning with a letter or digit"
        )
    return name


def check_free(runs: Path, name: str) -> None:
    """Raises Refused if a run of this name exists or the runs folder cannot be written."""
    check_name(name)
    if os.path.lexists(runs / name):
        raise Refused(f"a run named {name} exists in {runs}; choose another --name, or: train resume {name}")
    folder = runs
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise Refused(f"{folder} is not a folder, so no run can be kept in {runs}; choose another with --runs")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Refused(f"cannot write in {folder}; choose another place with --runs, or change its owner or mode")


def fresh_name(runs: Path, stem: str) -> str:
    """A name nobody has in `runs`: the stem, the time, and a number if need be."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:40] or "run"
    name = first = f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while os.path.lexists(runs / name):
        number += 1
        name = f"{first}-{number}"
    return name


def sync_folder(folder: Path) -> None:
    """fsync of a folder: makes names that were created or renamed in it durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Replace a file as a whole: a reader sees the old text or the new one, a crash leaves one of them."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if path.name in _PRIVATE else 0o666)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    if durable:
        sync_folder(path.parent)


def _flock(fd: int, how: int, path: Path) -> None:
    """flock(2).

    Raises:
        BlockingIOError: another holds it.
        Refused: there are no locks on that file system.
    """
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        raise
    except OSError as error:
        raise Refused(
            f"{path} cannot be locked ({error.strerror}), so its file system takes no runs; choose another place with "
            "--runs, and see: train doctor --only 'file locks' --runs DIR"
        ) from None


class Lock:
    """The held lock of a run: one open file; processes that inherit `fd` hold it with us."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def free(self) -> None:
        """Unlock it for all who hold it, in whatever process: nobody of them will touch the run."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def release(self) -> None:
        """Close our copy; the lock is free once every process that inherited it has done so or died."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class Run:
    """One run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        """The folder's name: a run may be renamed by renaming its folder."""
        return self.folder.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def read(self) -> dict[str, Any]:
        """run.json.

        Raises:
            Refused: it is missing or damaged.
        """
        path = self.folder / "run.json"
        try:
            record = json.loads(plain.read(path))
        except OSError as error:
            raise Refused(f"cannot read {path}: {error.strerror}; is {self.folder} a run folder?") from None
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not record.keys() >= _ESSENTIAL or not whole.is_whole(record):
            raise Refused(f"{path} is damaged; repair it or remove the run with: train rm {self.name}")
        return record | {"name": self.name, "stopped_by": _stopped_by(record)}

    def update(self, change: Callable[[dict[str, Any]], None] | None = None, **values: Any) -> None:
        """Change run.json under a lock of the folder, so that agent and rank 0 never undo each other's change."""
        with self._changing(math.inf):
            self._change(change, values, durable=True)

    def note(self, change: Callable[[dict[str, Any]], None] | None = None, **values: Any) -> bool:
        """`update` of what is not worth dying for, nor waiting: a process that stands still may hold the lock for ever,
        and whoever notes here is to find that out. Whether it was taken."""
        try:
            with self._changing(_NOTING):
                self._change(change, values, durable=False)
        except (OSError, Refused):
            return False
        return True

    def _change(self, change: Callable[[dict[str, Any]], None] | None, values: dict[str, Any], durable: bool) -> None:
        record = self.read()
        record.update(values)
        if change:
            change(record)
        write_atomically(self.folder / "run.json", json.dumps(record, indent=1) + "\n", durable)

    @contextlib.contextmanager
    def _changing(self, patience: float) -> Iterator[None]:
        """Hold the lock of the folder. Raises BlockingIOError where it is not to be had for `patience` seconds."""
        folder, deadline = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + patience
        try:
            while True:
                try:
                    _flock(folder, fcntl.LOCK_EX | (0 if patience == math.inf else fcntl.LOCK_NB), self.folder)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                time.sleep(0.01)
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
            fd = os.open(self.folder / "lock", os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place keeps nobody waiting
        except OSError:
            return False
        try:
            # shared: two observers do not see each other
            _flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, self.folder)
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
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + patience
        while True:
            try:
                _flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, self.folder)
                return Lock(fd)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(fd)
                    return None
                time.sleep(0.01)
            except Refused:
                os.close(fd)
                raise

    def shown(self) -> dict[str, Any]:
        """run.json with the effective state."""
        record = self.read()
        if record.get("state") in (RUNNING, CREATED) and not self.alive():
            record = self.read()  # it may have ended between the two looks
            # one that was being resumed is recorded as created for a moment
            if record.get("state") == RUNNING or (record.get("state") == CREATED and record["attempts"]):
                record["state"] = INTERRUPTED
                record["reason"] = record.get("reason") or "its processes died; train resume continues it"
        return record

    def state(self) -> str:
        """The effective state."""
        return str(self.shown().get("state"))

    def ask_stop(self, wanted: str) -> None:
        """Ask a live run to stop. By a file: process ids mean nothing on the other side of a container's wall."""
        write_atomically(self.folder / "stop", f"{wanted}\n", durable=False)

    def stop_asked(self) -> str:
        """POLITE, NOW, KEEPER or PLACED, or '' when nobody asked by file."""
        try:
            return (self.folder / "stop").read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def clear_stop(self) -> None:
        """Forget a request to stop. For the holder of the lock."""
        with contextlib.suppress(OSError):
            (self.folder / "stop").unlink()

    def stop(self, wanted: str) -> None:
        """Ask until the run is not alive any more: a run that is just starting may overlook the first request."""
        while self.alive():
            if self.stop_asked() not in (wanted, NOW):
                self.ask_stop(wanted)
            time.sleep(0.05)
        self.clear_stop()

    def begin_attempt(self, world_size: int, from_step: int | None = None, **values: Any) -> int:
        """Record that an attempt starts; returns its number, counted from 1. For the holder of the lock.

        Args:
            from_step: it continues after this one; by default after that of the newest checkpoint.
        """
        number = 0
        at = next(iter(self.steps_saved()), 0) if from_step is None else from_step
        # a living run writes down its progress twice a second
        before = len(self.read()["attempts"])
        last_sign = heartbeat.last_sign(self.logs(before))  # of a script; a task has none
        last_written = _stamp(max((self.folder / "run.json").stat().st_mtime, last_sign))

        def change(record: dict[str, Any]) -> None:
            nonlocal number
            number, started = len(record["attempts"]) + 1, now()
            for left in self.folder.glob(".run.json.*"):  # by a kill inside write_atomically; others wait for us
                left.unlink()
            if record["attempts"] and record["attempts"][-1]["end"] is None:  # nobody lived to say it
                record["attempts"][-1].update(
                    end="died", reason="killed as a whole, or with its machine or container",
                    ended=last_written, to_step=self._reached(record),
                )  # fmt: skip
            record["attempts"].append(
                {"number": number, "started": started, "ready": None, "ended": None, "end": None, "reason": "",
                 "world_size": world_size, "to_step": None, "host": socket.gethostname(),
                 # the steps of a script are its own
                 "from_step": None if record.get("script") else at}
            )  # fmt: skip
            record["started"] = record["started"] or started
            record.update(state=RUNNING, reason="", stopped_by=None, ended=None)
            record.update(world_size=world_size, host=socket.gethostname())
            record.update(values)

        self.logs(before + 1).mkdir(parents=True, exist_ok=True)  # first: what fails and is tried again is one attempt
        self.update(change)
        self._forget_beats(number - 1)
        return number

    def note_ready(self, step: int, mark: str = "", **values: Any) -> bool:
        """Record that the ranks of the last attempt train now, after this step; as `note`.

        Args:
            mark: of the attempt, the same on all machines, whose records number their attempts each for itself.
        """

        def change(record: dict[str, Any]) -> None:
            *before, attempt = record["attempts"]
            attempt.update(from_step=step, ready=now(), mark=mark)
            # another machine may have made a step of which the dead of this one could not write any more
            if before and before[-1]["ready"] and before[-1]["to_step"] is not None:
                before[-1]["to_step"] = max(before[-1]["to_step"], step)

        return self.note(change, step=step, **values)

    def end_attempt(
        self, end: str, why: str, state: str | None = None, last_lines: list[str] | None = None, **values: Any
    ) -> None:
        """Record why the attempt ended, and the run's state if that ends with it. For runs/supervise.py alone.

        Args:
            end: finished, stopped, failed or died.
            last_lines: of the log of the rank that died first.
            values: what else run.json is to have. The run's reason is the attempt's unless there is one among them.
        """
        number = 0

        def change(record: dict[str, Any]) -> None:
            nonlocal number
            number = len(record["attempts"])
            if state is not None:
                record.update(state=state, reason=why, ended=now())
            record.update(pids={}, **values)
            if record["attempts"]:
                record["attempts"][-1].update(ended=now(), end=end, reason=why, to_step=self._reached(record))
                if last_lines:
                    record["attempts"][-1]["last_lines"] = last_lines

        self.update(change)
        self._forget_beats(number)

    def _reached(self, record: dict[str, Any]) -> int | None:
        """The last step that the last attempt made; None: it runs a script."""
        attempt = record["attempts"][-1]
        if attempt["from_step"] is None:
            return None
        if not attempt.get("ready"):  # it never came to training
            return int(attempt["from_step"])
        return max(int(record["step"]), heartbeat.reached(self.logs(attempt["number"])))

    def _forget_beats(self, attempt: int) -> None:
        for path in self.logs(attempt).glob("rank*.beat"):
            with contextlib.suppress(OSError):
                path.unlink()

    def logs(self, attempt: int) -> Path:
        """Where the ranks of an attempt write their output, each into rankR.log."""
        return self.folder / "logs" / f"attempt-{attempt}"

    def since_saved(self, step: int) -> float:
        """Seconds since the checkpoint of this step was published, 0: since the run first started. Infinite where that
        is not known."""
        with contextlib.suppress(OSError, Refused):
            begun = self.checkpoint(step).stat().st_mtime if step else seconds_of(self.read()["started"])
            return max(0.0, time.time() - begun) if begun is not None else math.inf
        return math.inf

    def steps_saved(self) -> list[int]:
        """Steps of the published checkpoints, newest first. Whether one is whole is found out on loading."""
        try:
            names = os.listdir(self.checkpoints)
        except OSError:
            return []
        return sorted((int(m[1]) for name in names if (m := _STEP.fullmatch(name))), reverse=True)

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of that step."""
        return self.checkpoints / f"step-{step:08d}"


def create(runs: Path, name: str, files: dict[str, str | bytes], record: dict[str, Any]) -> Run:
    """Make a run folder as a whole: it appears with all its files or not at all.

    Raises:
        Refused: the name is taken or the folder cannot be written.
    """
    check_free(runs, name)
    staging = runs / f".creating-{name}-{os.getpid()}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        for folder in ("logs", "checkpoints"):
            (staging / folder).mkdir()
        for file, content in files.items():
            fd = os.open(staging / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if file in _PRIVATE else 0o666)
            with os.fdopen(fd, "wb") as opened:
                opened.write(content.encode() if isinstance(content, str) else content)
        with (staging / "lock").open("w") as lock:  # while nothing is there yet
            _flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, runs)
        base: dict[str, Any] = {
            "name": name, "state": CREATED, "reason": "", "world_size": None, "attempts": [], "step": 0, "epoch": 0,
            "total_steps": None, "tmux_session": None, "pids": {}, "host": socket.gethostname(), "versions": {},
            "git_revision": None, "created": now(), "started": None, "ended": None, "weights_sha256": None,
            "metrics": {}, "stopped_by": None,
        }  # fmt: skip
        write_atomically(staging / "run.json", json.dumps(base | record, indent=1) + "\n")
        if os.path.lexists(runs / name):
            raise Refused(f"a run named {name} exists in {runs}; choose another --name, or: train resume {name}")
        staging.rename(runs / name)
        sync_folder(runs)
    except OSError as error:
        raise Refused(f"cannot create {runs / name}: {error.strerror}; choose another place with --runs") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Run(runs / name)


def fill(run: Run, files: dict[str, str | bytes], record: dict[str, Any]) -> None:
    """Complete the folder of a run that was made before it could be checked as a whole. For the holder of its lock.

    run.json comes last: a folder that is not complete is filled anew.
    """
    for file, content in files.items():
        path = run.folder / file
        if isinstance(content, str):
            write_atomically(path, content)
        else:
            path.write_bytes(content)
    run.update(**record)


def _stopped_by(record: dict[str, Any]) -> str | None:
    """Who asked for the stop of a stopped run. One that an earlier release stopped has it in its reason alone."""
    if record["state"] != STOPPED or record.get("stopped_by"):
        return record.get("stopped_by")
    reason = record.get("reason") or ""
    if reason.startswith(TWICE):
        return signals.CTRL_C
    if WHO[POLITE] in reason:
        return signals.USER
    return signals.KEEPER if WHO[KEEPER] in reason else signals.SIGNAL


def find(runs: Path, name: str) -> Run:
    """The run of that name.

    Raises:
        Refused: there is none.
    """
    if not name:
        raise Refused("the run's name is empty; train ls lists the runs")
    run = Run(runs / name)
    if name in (".", "..") or "/" in name or not _exists(run):
        names = [other.name for other in every(runs)]
        hint = nearest(name, names, "; train ls lists the runs" if names else "; there are no runs yet")
        raise Refused(f"there is no run {shortened(name, 80)} in {runs}{hint}")
    return run


def _exists(run: Run) -> bool:
    try:
        return (run.folder / "run.json").exists()
    except OSError:  # a name longer than any file's
        return False


def every(runs: Path) -> Iterator[Run]:
    """All runs, the oldest first. What vanishes meanwhile, or may not be looked into, is left out."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(runs):
            folder = runs / name
            with contextlib.suppress(OSError):
                if not name.startswith(".") and (folder / "run.json").exists():
                    found.append((_locked_at(folder), name, folder))
    yield from (Run(folder) for _, _, folder in sorted(found))


def _locked_at(folder: Path) -> float:
    """When the lock of a run was made; 0.0: there is none."""
    try:
        return (folder / "lock").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def remove(run: Run) -> None:
    """Delete a run folder that is not alive.

    Raises:
        Refused: the run is alive, or the folder cannot be removed.
    """
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is running; first: train stop {run.name}")
    try:
        bury(run)
    finally:
        lock.release()


def bury(run: Run) -> None:
    """Delete a run folder. For the holder of its lock.

    Raises:
        Refused: it cannot be removed.
    """
    try:
        grave = run.folder.with_name(f".removing-{run.name}-{os.getpid()}")
        run.folder.rename(grave)
        shutil.rmtree(grave.resolve())  # the run may have been moved to another disk, and a link have its name
        if grave.is_symlink():
            grave.unlink()
    except OSError as error:
        raise Refused(f"cannot remove {run.folder}: {error.strerror}") from None
