"""The process that copies a run to its mirror behind training, and what starts it again when it was killed.

    python -P …/train/module_runner.py train.mirror.process RUN_FOLDER

It has a separate session, so that it outlives the agent. It gets the lowest priority and no GPU. When the run has
ended and all is copied it ends. Ranks know nothing of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .. import helper, screen
from ..errors import Refused
from ..helper import Helper
from ..run import states as run_states
from ..run.run_folder import Run
from ..run.spec import Spec
from . import state as states
from .copying import Copier, Lost
from .remote import described

LOOK_EVERY = 1.0
"""Seconds between two looks for a new checkpoint."""
LONGEST_PAUSE = 300.0
"""Maximum seconds between two tries after an error, after pauses of 1, 2, 4, 8 … seconds."""
GIVE_UP = 3600.0
"""Seconds after the end of a run in which the process tries without success before it gives up."""
HANGS = 1800
"""Seconds without a sent byte after which the kernel ends the process: the network hangs."""
WAIT_AT_END = 600.0
"""Maximum seconds for which a finished run in the foreground or on a cluster waits for its mirror."""
_NICE = 19


def main() -> None:
    """Copy the run in the folder given as argument until it has ended."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    run = Run(Path(sys.argv[1])).held()
    held = states.lock(run)
    if held is None:
        return
    os.umask(0o077)  # the environment of a run is for its owner alone
    _be_quiet()
    keep_up(run)


def _be_quiet() -> None:
    import psutil

    os.nice(_NICE)
    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def keep_up(run: Run) -> None:
    """Copy a run until it has ended and all is copied. Tries again after errors."""
    url, pause, moved = url_of(run), 1.0, time.monotonic()
    copier: Copier | None = None

    def beat() -> None:
        nonlocal moved
        moved = time.monotonic()
        signal.alarm(HANGS)

    while url and url_of(run) == url and not run.is_gone():
        has_ended = _has_ended(run)
        seen = [*run.steps_saved()], has_ended
        if not has_ended:
            moved = time.monotonic()
        signal.alarm(HANGS)
        try:
            copier = copier or Copier(run, url, beat)
            copier.copy()
            copier.state.is_complete = has_ended
            states.write(run, copier.state)
        except Exception as error:
            if run.is_gone():
                return
            _note_error(run, url, error)
            if isinstance(error, Lost) or time.monotonic() - moved > GIVE_UP:
                return
            signal.alarm(0)
            until, mark = time.monotonic() + pause, states.mark(run)
            while time.monotonic() < until and states.mark(run) == mark:
                time.sleep(min(LOOK_EVERY, pause))
            pause, copier = min(2 * pause, LONGEST_PAUSE), None
            continue
        if has_ended:
            return
        pause = 1.0
        signal.alarm(0)
        mark = states.mark(run)
        while (*_seen(run), states.mark(run)) == (*seen, mark) and not run.is_gone() and url_of(run) == url:
            time.sleep(LOOK_EVERY)


def complete(run: Run) -> None:
    """Copy what is missing now, and take the mirror over. If a process copies the run already, make it try at once.

    Raises:
        Refused: it cannot be copied now.
    """
    held, url, begun = states.lock(run), url_of(run), time.time()
    if held is None:
        states.wake(run)
        while states.is_copying(run) and (state := states.read(run)).at < begun:
            if state.error_at > begun:
                raise Refused(f"{run.name} cannot be copied to {url}: {state.error}")
            time.sleep(0.2)
        return
    try:
        state = states.read(run)
        state.writer, state.is_lost = state.writer if not state.is_lost else "", False
        states.write(run, state)
        copier = Copier(run, url)
        copier.copy()
        copier.state.is_complete = _has_ended(run)
        states.write(run, copier.state)
    except Exception as error:
        _note_error(run, url, error)
        raise Refused(f"{run.name} cannot be copied to {url}: {described(error)}") from None
    finally:
        os.close(held)


def url_of(run: Run) -> str:
    """Return the URL of a run's mirror; '' for none."""
    found = run.read_config().get(states.FIELD)
    return found if isinstance(found, str) else ""


def _seen(run: Run) -> tuple[list[int], bool]:
    return run.steps_saved(), _has_ended(run)


def _has_ended(run: Run) -> bool:
    """Whether the run needs no more copies: its end is recorded, or nothing of it lives."""
    with contextlib.suppress(Refused):
        return run.read_effective()["state"] not in (run_states.CREATED, run_states.QUEUED, run_states.RUNNING)
    return False


def _note_error(run: Run, url: str, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        state, now = states.read(run), time.time()
        if state.url != url:
            state = states.State(id=state.id, writer=state.writer, inode=state.inode, url=url)
        state.error, state.error_at, state.is_lost = described(error), now, isinstance(error, Lost)
        state.error_since, state.copying = state.error_since or now, 0
        states.write(run, state)


def start(run: Run) -> subprocess.Popen[bytes]:
    """Start the process of a run. It outlives this one."""
    return helper.start("train.mirror.process", str(run.path))


def start_left_over(run: Run) -> bool:
    """Start the process of a run that has ended before its mirror was complete. Returns whether it was needed."""
    state = states.read(run)
    is_left = bool(state.url) and state.url == url_of(run) and not (state.is_complete or state.is_lost)
    if is_left and not states.is_copying(run):
        start(run)
        return True
    return False


class Mirror:
    """Keeps the process of a run alive while the run lives. Does nothing without `checkpoint.mirror`."""

    def __init__(self, run: Run, spec: Spec) -> None:
        self._run = run
        self._helper = Helper(self._start, pause=LOOK_EVERY, longest=LONGEST_PAUSE, delay=LOOK_EVERY)
        saves = spec.cluster is None or spec.cluster["node"] == 0  # the other nodes keep no checkpoints
        self.url = str(spec.config.get(states.FIELD) or "") if saves else ""

    def _start(self) -> subprocess.Popen[bytes] | None:
        is_needed = not (states.is_copying(self._run) or states.read(self._run).is_lost)
        return start(self._run) if is_needed else None

    def look(self, *, at_once: bool = False) -> None:
        """Start the process if it is needed. Called several times a second."""
        if self.url:
            with contextlib.suppress(OSError):
                self._helper.keep(at_once=at_once)

    def finish(self, *, waits: bool, is_asked: Callable[[], bool]) -> None:
        """Make sure, after the run's end, that the process is there, which continues by itself.

        Args:
            waits: Wait until all is copied, because this process is the last one of its job.
            is_asked: Returns whether to end the wait.
        """
        if not self.url:
            return
        self.look(at_once=True)
        if not waits:
            return
        begun, is_said, later = time.monotonic(), False, f"train mirror {self._run.name}"
        while self._is_busy() and time.monotonic() - begun < WAIT_AT_END and not is_asked():
            if not is_said and time.monotonic() - begun > 1:
                _say(f"copying the rest to {self.url}; Ctrl-C ends this wait")
                is_said = True
            time.sleep(0.1)
        if not states.read(self._run).is_complete:
            _say(f"the mirror of {self._run.name} is not complete; to copy the rest: {later}")

    def _is_busy(self) -> bool:
        return self._helper.is_alive or states.is_copying(self._run)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        screen.remark(text)


if __name__ == "__main__":
    main()
