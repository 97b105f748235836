"""Starts the tmux session of a run: `train launch` and `train resume` until the agent has taken over.

Imports no torch. The agent inside tmux (launcher/agent.py) checks the request and answers through a private folder, so
a refusal reaches the caller and leaves nothing behind. A file in that folder passes the environment, because a tmux
server hands out that of its first client, and every user can read a process's arguments.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import doing, module_runner, screen
from ..errors import Refused
from ..run import durable, environment, folders, run_folder
from ..run.record import Record
from ..run.run_folder import Run

if TYPE_CHECKING:
    from .request import Launch

CALLER, NOTES = "caller", "doing"
"""Files in the folder of the request: one that the caller keeps locked while it waits, and the agent's notes."""
_AGENT = "train.launcher.agent"
_TRIES = 50
"""Maximum number of tries to start a session, ten per second."""
_LAST_WORDS = 5.0
"""Seconds an agent gets to answer after its session has ended."""
_PATIENCE = 20.0
"""Seconds a process gets to exit when its session is ended: it may be in the middle of its imports."""


class Cancelled(Refused):
    """The caller has withdrawn the launch request."""


def tmux(runs: Path, *arguments: str) -> list[str]:
    """Return a tmux command for the server of this runs folder. It ignores ~/.tmux.conf, which could end sessions."""
    if shutil.which("tmux") is None:
        raise Refused("tmux is not installed; as root: apt-get install tmux (or train without it: train run)")
    socket = "train-" + hashlib.sha256(os.fsencode(runs.resolve())).hexdigest()[:12]
    return ["tmux", "-f", os.devnull, "-L", socket, *arguments]


def session_of(name: str) -> str:
    """Return the name of a run's tmux session. tmux takes no dots, so a dot becomes a comma, which no run name has.

    That keeps lr-0.1 and lr-0_1 apart. A folder renamed by hand may have other characters that tmux does not take.
    """
    return "train-" + "".join(c if c.isalnum() or c in "-_" else "," if c == "." else "_" for c in name)


def _has_session(runs: Path, session: str) -> bool:
    done = subprocess.run(tmux(runs, "has-session", "-t", f"={session}"), capture_output=True, check=False)
    return done.returncode == 0


def new_session(runs: Path, session: str, command: list[str], is_leaving: Callable[[], bool] = lambda: False) -> str:
    """Start a command in a new session. Returns tmux's error message, or ''.

    Args:
        is_leaving: returns whether an existing session of this name is about to end; then this waits for its end.
    """
    for _ in range(_TRIES):
        done = subprocess.run(
            tmux(runs, "new-session", "-d", "-s", session, "-x", "160", "-y", "48", "--", *command),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return ""
        message = " ".join(done.stderr.split())
        # a server whose last session has just ended still accepts calls, then exits
        is_over = any(word in message for word in ("server exited", "lost server", "no server running"))
        if not (is_over or ("duplicate session" in message and is_leaving())):
            break
        time.sleep(0.1)
    return message


def checking(runs: Path) -> dict[str, str]:
    """Map the names of runs whose launch is still being checked to when that began, as ISO 8601.

    Nothing of such a run is on disk: it has only a session, whose process has not answered its caller yet.
    """
    if shutil.which("tmux") is None:
        return {}
    found = {}
    command = tmux(runs, "list-panes", "-a", "-F", "#{pane_pid} #{session_created} #{session_name}")
    for line in subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines():
        pid, began, session = line.split(" ", 2)
        name = session.removeprefix("train-").replace(",", ".")
        with contextlib.suppress(OSError, ValueError):
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="surrogateescape").split("\0")
            folder = Path(words[words.index(_AGENT) + 1])
            if (folder / CALLER).exists() and not os.path.lexists(runs / name):
                found[name] = run_folder.stamp(int(began))
    return found


def being_checked(name: str) -> Refused:
    """Return the refusal of a command for a run whose launch is still being checked."""
    return Refused(f"the launch of {name} is still being checked; wait for it, or end it: train stop {name}")


def end_check(runs: Path, name: str) -> bool:
    """End the launch of a run that is still being checked. Returns whether there was one."""
    is_there = name in checking(runs)
    if is_there:
        _end_session(runs, session_of(name))
    return is_there


def _end_session(runs: Path, session: str) -> None:
    """End a session and wait for its process, which removes what imported libraries have created."""
    target = f"={session}:"
    asked = tmux(runs, "display-message", "-p", "-t", target, "#{pane_pid}")
    pid = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    held = -1
    with contextlib.suppress(OSError, ValueError):
        held = os.pidfd_open(int(pid))
    subprocess.run(tmux(runs, "kill-session", "-t", f"={session}"), capture_output=True, check=False)
    if held >= 0:
        select.select([held], [], [], _PATIENCE)
        os.close(held)


def start(launch: Launch, cancelled: Callable[[], bool] = lambda: False) -> list[str]:
    """Start the session and wait until the agent has recorded the run, or until `cancelled`. Returns warnings.

    Raises:
        Refused: tmux is missing, the agent refuses the request, or it was cancelled. Nothing is left behind.
    """
    runs, session = Path(launch.runs), session_of(launch.name)
    tmux(runs)  # refuses before there is anything to remove
    environment.check_names(launch.keep_env, os.environ)
    folder = Path(tempfile.mkdtemp(prefix="train-launch-"))
    began = done = False
    held: list[int] = []
    try:
        held.append(os.open(folder / NOTES, os.O_RDWR | os.O_CREAT, 0o600))
        held += filter(None, [durable.try_lock(folder / CALLER, 0o600)])  # the kernel unlocks it when this process ends
        environ, differences = launch.environ()
        content = {"launch": launch.to_json(), "env": environ, "cwd": os.getcwd()}
        request = folder / "request.json"
        request.touch(mode=0o600)
        request.write_text(json.dumps(content), encoding="utf-8")
        began = not _has_session(runs, session)  # set before: Ctrl-C may come while tmux starts it
        command = module_runner.command(_AGENT, str(folder))
        message = new_session(runs, session, command, launch.has_ended)
        began = not message
        if message:
            if "duplicate session" in message:
                if launch.name in checking(runs):
                    raise being_checked(launch.name)
                raise Refused(f"the tmux session {session} exists already; see whether {launch.name} runs: train ls")
            raise Refused(f"tmux cannot start a session: {message}")
        waiting = doing.Waiting(launch.name, held[0], screen.remark)
        answer = _wait(folder, runs, session, cancelled, waiting.look)
        if "refused" in answer:
            raise Refused(answer["refused"])
        done = True
        return [*differences, *answer.get("warnings", [])]
    finally:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a second Ctrl-C waits for this
        try:
            if began and not done:  # leave a session of that name that something else has started
                _end_session(runs, session)
                folder = _withdraw(folder, launch)
            shutil.rmtree(folder, ignore_errors=True)
            for fd in held:
                os.close(fd)
            from ..zygote import client  # late: a listing needs none

            client.end_early()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _withdraw(folder: Path, launch: Launch) -> Path:
    """Withdraw the request, for example after Ctrl-C. Returns the new path of the folder.

    An agent that cannot answer any more undoes its work itself. If it has answered already, this undoes the launch.
    """
    folder = folder.rename(folder.with_name(folder.name + "-withdrawn"))  # from here on no answer can be written
    answer = folder / "answer.json"
    if answer.exists() and "refused" not in json.loads(answer.read_text(encoding="utf-8")):
        launch.stop()
    return folder


def _wait(
    folder: Path, runs: Path, session: str, cancelled: Callable[[], bool], look: Callable[[], None]
) -> dict[str, Any]:
    answer, checked, gone_at = folder / "answer.json", time.monotonic(), math.inf
    while not answer.exists():
        time.sleep(0.02)
        look()
        if cancelled():
            raise Cancelled("cancelled before the run started")
        if time.monotonic() - gone_at > _LAST_WORDS:
            raise Refused("the agent died before the run started; see why with train run and the same arguments")
        if time.monotonic() - checked > 0.5 and gone_at == math.inf:
            checked = time.monotonic()
            gone_at = math.inf if _has_session(runs, session) else checked
    return dict(json.loads(answer.read_text(encoding="utf-8")))


def note_move(run: Run, record: Record, before: Path) -> bool:
    """Record that a run was moved: it still counts as started here, and its session gets its new name.

    Returns whether the move is recorded.
    """
    changes: dict[str, Any] = {}
    session = session_of(run.name)
    with contextlib.suppress(Refused):
        if run.was_started_here(record, before):
            changes = run.signature(record)
        is_beside = before.parent.resolve() == run.path.parent.resolve()
        # the session of a run that has ended may belong to another run now
        if (old := record.get("tmux_session")) not in (None, session) and is_beside and run.alive():
            command = tmux(before.parent, "rename-session", "-t", f"={old}", session)
            if not subprocess.run(command, capture_output=True, check=False).returncode:
                changes["tmux_session"] = session
        return not changes or run.note(**changes)
    return False


def attach(run: Run) -> None:
    """Replace this process by the run's terminal.

    Raises:
        Refused: the run has no terminal, or this process has none.
    """
    run = Run(folders.of_this_machine(run.folder.parent, run.name) / run.name)
    record = run.read_effective()
    session = record.get("tmux_session")
    if not session or not run.alive() or not _has_session(run.folder.parent, session):
        raise Refused(f"{run.name} has no terminal now ({record['state']}); see its output: train logs {run.name}")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Refused(f"train attach needs a terminal; over ssh use ssh -t, or: train logs {run.name} --follow")
    environ = {key: value for key, value in os.environ.items() if key != "TMUX"}
    command = tmux(run.folder.parent, "attach-session", "-t", f"={session}")
    os.execvpe(command[0], command, environ)
