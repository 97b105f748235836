"""`train keeper`: brings interrupted runs back, at its start and for as long as it lives; saves all on SIGTERM.

While it lives it holds a zygote that has torch imported, for launches and resumes to borrow, so that they begin at once
(supervise/zygote.py).
Safe beside other keepers and beside users: whoever takes a run's lock first has it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from train import hash_seed, screen
from train.errors import EXIT_FINISHED, Refused, one_line
from train.launcher import resumable, stopping, tmux
from train.launcher.request import LaunchRequest
from train.run import folders, owner, ownership, run_folder, states
from train.run.run_folder import Run
from train.supervise import zygote

LOOK_EVERY = 2.0
"""Seconds between two looks at the runs."""
LONGEST_WAIT = 300.0
"""A run that is refused, for example because its data is not there, is tried again after 2, 4, 8 … seconds, at most
after so many."""

LEND_AGAIN = 30.0
"""Seconds between two starts of the zygote that launches borrow."""

_at_once = threading.Semaphore(8)
"""So many runs are looked after at the same time."""


class _Lender:
    """Holds the zygote that launches borrow; one that has ended (packages have changed) is started again."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._at = -LEND_AGAIN

    def keep(self) -> None:
        if os.environ.get(zygote.OFF) == "off" or time.monotonic() - self._at < LEND_AGAIN:
            return
        if self._process is None or self._process.poll() is not None:
            self._at = time.monotonic()
            try:
                self._process = zygote.start_lender(hash_seed.with_seed(os.environ))
            except OSError as error:  # the machine is busy: runs start cold meanwhile
                screen.say(f"{run_folder.now()} no warm start: {one_line(error)}")

    def end(self) -> None:
        if self._process is not None:
            zygote.end(self._process)


class _Care:
    """What is done for one run, and when it may be tried again."""

    def __init__(self) -> None:
        self.thread = threading.Thread()
        self.again_at, self.pause = 0.0, LOOK_EVERY

    def put_off(self) -> None:
        self.again_at = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, LONGEST_WAIT)


class _Log:
    """Says each thing about a run once, and again only when it has changed."""

    def __init__(self) -> None:
        self._last: dict[Path, str] = {}

    def __call__(self, run: Run, text: str) -> None:
        if self._last.get(run.folder) != text:
            self._last[run.folder] = text
            screen.say(f"{run_folder.now()} {run.name}: {text}")


def touch_sign_of_life() -> None:
    """Give the keeper's sign of life, where the state folder can be written."""
    with contextlib.suppress(OSError):
        ownership.state_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        (ownership.state_folder() / "keeper").touch(mode=0o600)


def remove_sign_of_life() -> None:
    """Remove the sign of life of a keeper that ends as it was asked to."""
    with contextlib.suppress(OSError):
        (ownership.state_folder() / "keeper").unlink()


def last_seen() -> float | None:
    """When a keeper of this user gave its last sign of life, in seconds since the epoch; None: none runs."""
    with contextlib.suppress(OSError):
        return (ownership.state_folder() / "keeper").stat().st_mtime
    return None


def keep(runs: Path, once: bool) -> int:
    """Look after the runs until SIGTERM or SIGINT, then stop and save those of this station. Returns an exit code.

    With `once`: resume what was interrupted and return.
    """
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    tell = _Log()
    if ownership.station_id(make=True) is None:
        problem = "the state folder of this user cannot be read or written, so no run is resumed"
        screen.say(f"{run_folder.now()} warning: {problem}; TRAIN_STATE names another")
    if not once:
        screen.say(f"{run_folder.now()} keeping the runs in {runs}")
    sign_of_life = touch_sign_of_life if not once else (lambda: None)
    # each in a thread of its own: a run whose data set hangs while it is checked delays no other
    cares: dict[Path, _Care] = {}
    held = _Lender()
    while not ended.is_set():
        sign_of_life()
        for run in folders.every_here(runs):
            care = cares.setdefault(run.folder, _Care())
            if time.monotonic() >= care.again_at and not care.thread.is_alive():
                care.thread = threading.Thread(target=_look_after, args=(run, tell, ended, care), daemon=True)
                care.thread.start()
                care.thread.join(0.1)  # most need nothing
                sign_of_life()  # many that do need something take long
        if once:
            break
        held.keep()
        ended.wait(LOOK_EVERY)
    _join([care.thread for care in cares.values()], sign_of_life)
    if not once or ended.is_set():
        _stop_all(runs, tell, sign_of_life)
    held.end()
    if not once:
        remove_sign_of_life()
    return EXIT_FINISHED


def _join(threads: Iterable[threading.Thread], sign_of_life: Callable[[], None]) -> None:
    for thread in threads:
        while thread.is_alive():
            thread.join(LOOK_EVERY)
            sign_of_life()


def _look_after(run: Run, tell: _Log, ended: threading.Event, care: _Care) -> None:
    """Resume a run if it needs it. Nothing that is wrong with one run concerns the others."""
    try:
        with _at_once:
            _resume_if_interrupted(run, tell, ended)
        care.pause = LOOK_EVERY
    except tmux.Cancelled:
        tell(run, "not resumed, for the keeper is stopping; the next one resumes it")
    except Refused as error:
        care.put_off()
        tell(run, f"cannot be resumed: {error}")
    except Exception as error:
        care.put_off()
        tell(run, f"cannot be looked after: {one_line(error) or type(error).__name__}")


def _resume_if_interrupted(run: Run, tell: _Log, ended: threading.Event) -> None:
    record = run.read()
    # between its creation and its first attempt a run has no process for a moment
    is_stillborn = record["state"] == states.CREATED and not run.alive() and not resumable.is_kept_elsewhere(record)
    is_stillborn &= time.time() - (run.folder / "run.json").stat().st_mtime > 30
    is_wanted = (
        (ownership.was_started_here(run.folder, record) or None) if is_stillborn else resumable.is_resumable(run)
    )
    if is_wanted is None:
        tell(run, f"left alone, for it is not known as started here; to go on with it: train resume {run.name}")
    if ended.is_set() or not is_wanted:
        return
    owner.opened(run)
    launch = LaunchRequest(kind="resume", runs=str(run.folder.parent), name=run.name, by_keeper=True)
    for line in tmux.start(launch, ended.is_set):
        tell(run, f"warning: {line}")
    with contextlib.suppress(Refused):
        record = run.read()
    count = record.get("kept") or {"step": record["step"], "times": 1}  # by the process that has opened it
    times = f" for the {count['times']}th time" if count["times"] > 1 else ""
    tell(run, f"resumed{times}" if record.get("script") else f"resumed after step {count['step']}{times}")


def _stop_all(runs: Path, tell: _Log, sign_of_life: Callable[[], None]) -> None:
    """Stop the live runs of this station, all at once, and wait until they have saved."""
    own, here = ownership.station_id(), socket.gethostname()

    def stop(run: Run) -> None:
        try:
            record = run.read()
            if not run.alive() or resumable.is_kept_elsewhere(record):
                return
            # a record without a station is of a user without a key, or of an earlier release
            station = record.get(ownership.STATION)
            if station != own if station else record.get("host") != here:
                tell(run, f"is of another station ({record.get('host')}); left alone")
                return
            stopping.ask_to_stop(run, states.FOR_KEEPER)
            record = run.read_effective()
            tell(run, f"{record['state']}: {record['reason']}" if record["reason"] else record["state"])
        except Exception as error:
            tell(run, f"cannot be stopped: {one_line(error) or type(error).__name__}")

    waiting = [threading.Thread(target=stop, args=(run,)) for run in folders.every_here(runs)]
    for thread in waiting:
        thread.start()
    _join(waiting, sign_of_life)
