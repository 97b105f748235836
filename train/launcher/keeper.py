"""`train keeper`: resumes interrupted runs when it starts and while it lives; saves and stops all runs on SIGTERM.

While it lives it holds a zygote that has imported torch. Launches and resumes borrow it and so start faster
(zygote/client.py). Several keepers and users are safe side by side: a run belongs to the process that takes its lock
first. Imports no torch.
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

from .. import hash_seed, programs, screen
from ..errors import EXIT_FINISHED, Refused, one_line
from ..helper import Helper
from ..run import folders, ownership, run_folder, states
from ..run.record import Record
from ..run.run_folder import Run
from ..scripts.command import BEGINS_ANEW
from ..zygote import client as zygote
from . import keeper_sign, mirrored, notices, resumable, stopping, tmux
from .launches import Resume

LOOK_EVERY = 2.0
"""Seconds between two looks at the runs."""
LONGEST_WAIT = 300.0
"""Maximum seconds between two tries to resume a refused run, after pauses of 2, 4, 8 … seconds. A run is refused, for
example, if its data are missing."""

LEND_AGAIN = 30.0
"""Seconds between two starts of the zygote that launches borrow."""

_at_once = threading.Semaphore(8)
"""Limits how many runs are handled at the same time."""


def _lend() -> subprocess.Popen[bytes] | None:
    """Start the zygote that launches borrow. It ends when packages change, for example."""
    return None if os.environ.get(zygote.OFF) == "off" else zygote.start_lender(hash_seed.with_seed(os.environ))


class _Care:
    """The thread that handles one run, and when to try the run again."""

    def __init__(self) -> None:
        self.thread = threading.Thread()
        self.again_at, self.pause = 0.0, LOOK_EVERY
        self.is_mirrored = False
        """Whether this keeper has looked after the run's mirror. The agent of a live run does that."""
        self.told = ""
        """The end of which this keeper has told, once: on a full disk run.json cannot say that."""

    def put_off(self) -> None:
        self.again_at = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, LONGEST_WAIT)


class _Log:
    """Prints a line about a run, unless it equals the last line about that run."""

    def __init__(self) -> None:
        self._last: dict[Path, str] = {}

    def __call__(self, run: Run, text: str) -> None:
        if self._last.get(run.folder) != text:
            self._last[run.folder] = text
            screen.say(f"{run_folder.now()} {run.name}: {text}")


def keep(runs: Path, once: bool) -> int:
    """Keep the runs alive until SIGTERM or SIGINT, then save and stop those of this station. Returns an exit code.

    With `once`: resume the interrupted runs and return.
    """
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    tell = _Log()
    if ownership.station_id(make=True) is None:
        problem = "no run is resumed, because the state folder of this user cannot be read or written"
        screen.say(f"{run_folder.now()} warning: {problem}; set TRAIN_STATE to another folder")
    if not once:
        screen.say(f"{run_folder.now()} keeping the runs in {runs}")
    sign_of_life = (lambda: keeper_sign.touch(runs)) if not once else (lambda: None)
    # one thread per run: a run whose dataset hangs during its check must not delay the others
    cares: dict[Path, _Care] = {}
    lender = Helper(_lend, pause=LEND_AGAIN, longest=LEND_AGAIN)
    while not ended.is_set():
        sign_of_life()
        for run in folders.every_here(runs):
            care = cares.setdefault(run.folder, _Care())
            if time.monotonic() >= care.again_at and not care.thread.is_alive():
                care.thread = threading.Thread(target=_look_after, args=(run, tell, ended, care), daemon=True)
                care.thread.start()
                care.thread.join(0.1)  # most runs need nothing
                sign_of_life()  # many runs that need something take long
        if once:
            break
        try:
            lender.keep()
        except OSError as error:  # the machine is busy
            screen.say(f"{run_folder.now()} runs start slower for now, without a warm start: {one_line(error)}")
        ended.wait(LOOK_EVERY)
    _join([care.thread for care in cares.values()], sign_of_life)
    if not once or ended.is_set():
        _stop_all(runs, tell, sign_of_life)
    lender.end(zygote.ENDING)
    if not once:
        keeper_sign.remove(runs)
    return EXIT_FINISHED


def _join(threads: Iterable[threading.Thread], sign_of_life: Callable[[], None]) -> None:
    for thread in threads:
        while thread.is_alive():
            thread.join(LOOK_EVERY)
            sign_of_life()


def _look_after(run: Run, tell: _Log, ended: threading.Event, care: _Care) -> None:
    """Resume a run if necessary. A problem with one run does not affect the others."""
    try:
        with _at_once:
            record = _resume_if_interrupted(run, tell, ended)
            if (mark := notices.left_over(run, record)) and mark != care.told:
                care.told = mark
                notices.begin(run)
                tell(run, "sending the notice of its end")
            if not care.is_mirrored and mirrored.complete_left_over(run, run.read()):
                tell(run, "copying what its mirror lacks")
        care.is_mirrored = True
        care.pause = LOOK_EVERY
    except tmux.Cancelled:
        tell(run, "not resumed, because the keeper is stopping; the next keeper resumes it")
    except Refused as error:
        care.put_off()
        tell(run, f"cannot be resumed: {error}")
    except Exception as error:
        care.put_off()
        tell(run, f"cannot be kept: {one_line(error) or type(error).__name__}")


def _resume_if_interrupted(run: Run, tell: _Log, ended: threading.Event) -> Record:
    """Resume a run if it does not rest. Returns the record from before."""
    record = run.read_effective()
    # for a moment between its creation and its first attempt a run has no process
    is_stillborn = record["state"] == states.CREATED and not run.alive() and not resumable.is_kept_elsewhere(record)
    is_stillborn &= time.time() - (run.folder / "run.json").stat().st_mtime > 30
    is_wanted = (run.was_started_here(record) or None) if is_stillborn else resumable.is_resumable(record)
    program = programs.of_record(record)
    if is_wanted is None:
        tell(run, f"left alone, because it counts as a copy; to continue it: train resume {run.name}")
    elif is_wanted and not resumable.keeper_may_start(record):
        why = f"it is a {program.name} whose restart {BEGINS_ANEW}"
        if record.get("max_restarts") == 0:
            why = f"it is a {program.name} with --max-restarts 0"
        tell(run, f"left alone, because {why}; to start it again: train resume {run.name}")
        return record
    if ended.is_set() or not is_wanted:
        return record
    launch = Resume(runs=str(run.folder.parent), name=run.name, by_keeper=True, queue=None)
    for line in launch.start(ended.is_set):
        tell(run, f"warning: {line}")
    now = record
    with contextlib.suppress(Refused):
        now = run.read()
    count = now.get("kept") or {"step": now["step"], "times": 1}  # written by the agent that has opened the run
    times = f" for the {count['times']}th time" if count["times"] > 1 else ""
    after = f" after step {count['step']}" if program.reports_steps(now["attempts"]) else ""
    tell(run, f"resumed{after}{times}")
    return record


def _stop_all(runs: Path, tell: _Log, sign_of_life: Callable[[], None]) -> None:
    """Stop all running runs of this station at once, and wait until they have saved."""
    own, here = ownership.station_id(), socket.gethostname()

    def stop(run: Run) -> None:
        try:
            record = run.read()
            if not run.alive() or resumable.is_kept_elsewhere(record):
                return
            # a record without a station comes from a user without a key
            station = record.get(ownership.STATION)
            if station != own if station else record.get("host") != here:
                tell(run, f"left alone, because it belongs to another station ({record.get('host')})")
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
