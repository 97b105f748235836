"""The agent, begun before anybody knows what it is to do: it imports while `train launch` still reads its arguments.

    python -P …/train/own.py train.runs.ahead FOLDER PARENT SOCKET

What the first process inside tmux becomes where no keeper holds a warm one (runs/warm.py), and by the same road, but
for one fork: what has imported gets the pane's files and is the agent. A fork of it would write into memory that both
have, which takes a tenth of a second until the ranks begin. Only what was begun alike serves: an agent that would have
other variables, limits, control group or namespaces than the process that was begun ahead starts cold, and this one is
ended. The launch ends it through its parent, which lives until the order is taken, and imports nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train import hashing, own
from train.runs import warm
from train.signals import end_with_parent, outlive_parent

_DOOR = "ahead"
_PATIENCE = 60.0
"""Seconds within which it must have imported what it begins with."""
_begun: list[Ahead] = []
"""The one that waits for an order, if there is one."""


@dataclasses.dataclass
class Ahead:
    """A process that waits for its order."""

    desk: Path
    """The folder that the order is to lie in."""
    process: subprocess.Popen[bytes]
    digest: str
    """What it was begun with: warm.digest."""

    def end(self) -> None:
        """End it, if it has not done so: nobody wants an agent, or there is one, which outlives this."""
        self.process.kill()
        self.process.wait()

    def told(self) -> dict[str, Any]:
        """What the process inside tmux has to know of it. Plain, to be written as JSON."""
        return {"pid": self.process.pid, "digest": self.digest}


@contextlib.contextmanager
def begun() -> Iterator[None]:
    """Hold such a process for the first order that is given meanwhile; not where a warm one is to be had."""
    environ = hashing.fixed(os.environ)
    path = None if environ.get(warm.OFF) == "off" else warm.socket_of(environ)
    one = None
    if path is None or not path.exists():
        with contextlib.suppress(OSError):  # no room for it: who gives the order says so, or needs none
            one = _begin(environ)
            _begun.append(one)
    try:
        yield
    finally:
        if one is not None and one in _begun:
            _begun.remove(one)
            one.end()
            shutil.rmtree(one.desk, ignore_errors=True)


def _begin(environ: dict[str, str]) -> Ahead:
    desk = Path(tempfile.mkdtemp(prefix="train-launch-"))
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(desk / _DOOR))
            door.listen(1)
            command = own.command("train.runs.ahead", str(desk), str(os.getpid()), str(door.fileno()), warm.ROOM)
            process = subprocess.Popen(
                command, env=environ, pass_fds=[door.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
    except OSError:
        shutil.rmtree(desk, ignore_errors=True)
        raise
    return Ahead(desk, process, warm.digest(environ))


def take() -> Ahead | None:
    """The process that waits, for the order that is given now: the caller's to end, and its folder to remove."""
    return _begun.pop() if _begun else None


def enter(desk: str, told: dict[str, Any] | None, environ: dict[str, str], cwd: str) -> None:
    """Let the agent of this order be forked by the process that was begun ahead for it, and end with it. Returns where
    there is none that is alike.

    Args:
        told: what Ahead.told gives.
        environ: the environment that the agent gets.
    """
    if told is None:
        return
    if told["digest"] == warm.digest(environ):
        warm.ask(Path(desk) / _DOOR, desk, environ, cwd, _PATIENCE)
    with contextlib.suppress(OSError):  # it would only be in the way of one that starts cold
        if desk.encode() in Path(f"/proc/{told['pid']}/cmdline").read_bytes().split(b"\0"):
            os.kill(told["pid"], signal.SIGKILL)


def main() -> None:
    """Import what an agent begins with; then be the one that is asked for."""
    end_with_parent(int(sys.argv[2]))
    door = socket.socket(fileno=int(sys.argv[3]))
    let_go = _held(door)
    from train.runs import cold, preload

    agent = cold.load()
    preload.load(preload.CHECKS)

    def begin(_: str, desk: str) -> None:
        outlive_parent()
        os.close(let_go)
        sys.argv = [str(agent.__file__), desk]
        try:
            agent.main()
        finally:
            atexit._run_exitfuncs()  # libraries that the agent imports take away their temporary folders

    with door:
        line, _ = door.accept()
        with line, contextlib.suppress(OSError, ValueError):
            warm.serve(line, door, begin, fork=lambda: 0)
    os._exit(0)


def _held(door: socket.socket) -> int:
    """Go on in a fork, which ends with this process. Returns what the fork closes to let it go."""
    this, (ended, let_go) = os.getpid(), os.pipe()
    if os.fork() != 0:
        door.close()  # who comes when the fork has ended finds nobody
        os.close(let_go)
        os.read(ended, 1)
        os._exit(0)
    end_with_parent(this)
    os.close(ended)
    return let_go


if __name__ == "__main__":
    main()
