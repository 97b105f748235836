"""The agent, the process inside tmux: reads the launch, opens the run, answers the caller, runs the ranks.

    python -P …/train/module_runner.py train.launcher.agent FOLDER_OF_THE_REQUEST [entered]

Imports no torch: forks of the zygote (zygote/client.py) do the work that needs torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import sys
import termios
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import doing, module_runner
from ..errors import EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, Refused, one_line
from ..run import durable
from ..signals import WAY, StopRequest, leave

if TYPE_CHECKING:
    from .request import OpenedRun

_OF_PANE = ("TMUX", "TMUX_PANE", "TERM")
"""Variables that belong to the terminal."""


def main() -> None:
    """Carry out the launch request in the folder given as argument."""
    folder = Path(sys.argv[1])
    content = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    os.chdir(content["cwd"])
    if len(sys.argv) == 2:
        _take_environment(content["env"])
    (folder / "request.json").unlink(missing_ok=True)  # it holds secrets, which must not stay if the launch is killed
    _never_wait_for_terminal()
    from . import giving_way, launches, notices, tmux

    stop = StopRequest()
    signal.signal(signal.SIGHUP, _leave)  # until the run exists; then create_run.py ignores the terminal's end
    launch = launches.from_json(content["launch"])
    caller = _Caller(folder, tmux.CALLER)
    try:
        doing.note_in(os.open(folder / tmux.NOTES, os.O_WRONLY))
        opened = launch.open(content["env"])
        if opened.spec.cluster is None:  # other machines know it by its path
            opened.run = opened.run.held()
    except SystemExit:
        why = f"the launch of {launch.name} was ended while it was being checked; nothing was created"
        _answer(folder, {"refused": why})
        caller.answered()
        raise
    except BaseException as error:
        _answer(folder, {"refused": error_line(error)})
        caller.answered()
        sys.exit(EXIT_REFUSED if isinstance(error, Refused) else 1)
    if not _answer(folder, {"warnings": opened.plan.warnings}):
        launch.undo(opened.run, opened.lock)
        sys.exit(EXIT_REFUSED)
    caller.answered()
    while True:
        if opened.held.is_queued:
            from .waiting import wait  # late: few runs wait

            ready = wait(opened, launch.after, stop, _say)
            if ready is None:
                leave(EXIT_STOPPED)
            opened = ready
        code, why, is_way = keep(opened, stop), stop.reason, stop.by == WAY
        if not (stop.forget() and giving_way.queue_again(opened.run, opened.held, why)):
            if is_way:  # it has finished, or failed, in that moment
                notices.begin(opened.run)
            leave(code)
        launch.after = []
        opened.lock.drop_leases()


class _Caller:
    """Watches the caller, which holds a lock in the folder of the request while it waits.

    If it ends before the run exists, this process ends too. Once the run exists, it continues without its caller.
    """

    def __init__(self, folder: Path, lock: str) -> None:
        self._folder, self._lock = folder, lock
        self._is_answered, self._is_gone = threading.Event(), threading.Event()
        threading.Thread(target=self._wait, daemon=True, name="caller").start()

    def _wait(self) -> None:
        with contextlib.suppress(OSError):
            with (self._folder / self._lock).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)  # waits
            self._is_gone.set()
            os.kill(os.getpid(), signal.SIGHUP)  # ignored once the run exists
            self._clean()

    def answered(self) -> None:
        """Note that there is an answer: a caller that is gone does not remove its folder."""
        self._is_answered.set()
        self._clean()

    def _clean(self) -> None:
        if self._is_answered.is_set() and self._is_gone.is_set():
            shutil.rmtree(self._folder, ignore_errors=True)


def _take_environment(environ: dict[str, str]) -> None:
    """Restart this process with the environment of the caller: a tmux server hands out that of its first client.

    Restarting also covers variables that are read when a process starts. It happens once, because Python may add
    variables by itself.
    """
    environ = environ | {name: os.environ[name] for name in _OF_PANE if name in os.environ}
    if dict(os.environ) != environ:
        os.execve(sys.executable, module_runner.command("train.launcher.agent", sys.argv[1], "entered"), environ)


def _never_wait_for_terminal() -> None:
    """Switch off Ctrl-S: typed in the attached terminal, it would block output, and this process with it, for ever."""
    with contextlib.suppress(termios.error):
        modes = termios.tcgetattr(2)
        modes[0] &= ~termios.IXON
        termios.tcsetattr(2, termios.TCSANOW, modes)


def _leave(number: int, frame: object) -> None:
    """Exit: the session was ended before the run existed."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def error_line(error: BaseException) -> str:
    """Return why a request cannot be carried out. The traceback of an unexpected error goes to the terminal."""
    from ..zygote.client import described

    if isinstance(error, Refused):
        return str(error)
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
    return described(error)


def _answer(folder: Path, answer: dict[str, Any]) -> bool:
    """Answer the caller. Returns False if the caller has withdrawn the request (a killed caller has not)."""
    try:
        durable.write_atomically(folder / "answer.json", json.dumps(answer), durable=False)
    except OSError:
        return False
    return True


def _say(text: str) -> None:
    """Print a line on the terminal, if there still is one."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")


def keep(opened: OpenedRun, stop: StopRequest) -> int:
    """Run the ranks until the run ends, and show its progress on the terminal. Returns the exit code."""
    from .. import programs
    from ..nodes.multi_node import MultiNodeSupervisor
    from ..nodes.nodes import Nodes, Settings
    from ..supervise.attempts import Supervisor
    from ..supervise.decide import LaunchMode
    from . import notices, tmux
    from .giving_way import GivingWay
    from .live_view import LiveView

    run, spec, place = opened.run, opened.spec, opened.run.path
    program = programs.of(spec)
    view, way = LiveView(run, sys.stderr, show_log=program.shows_log), GivingWay(run, opened.held, stop)

    def show() -> None:
        nonlocal place
        with contextlib.suppress(OSError, ValueError, Refused):  # the terminal may be gone, or the disk
            way.look()
            now = run.read()
            if run.path != place and tmux.note_move(run, now, place):
                place = run.path
            view.update(now)

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            view.say(text)

    try:
        count, nodes = opened.plan.ranks, None
        if spec.cluster is not None:
            nodes = Nodes(run, spec, nproc=count, settings=Settings(**spec.cluster), listening=opened.listening)
        ranks = program.ranks(run, spec=spec, lock=opened.lock, count=count, zygote=opened.zygote, nodes=nodes, say=say)
        keeps = Supervisor if nodes is None else functools.partial(MultiNodeSupervisor, nodes=nodes)
        code = keeps(
            run=run, spec=spec, program=program, ranks=ranks, mode=LaunchMode.LAUNCHED, stop=stop, show=show, say=say
        ).keep()
    except (OSError, Refused) as error:  # the disk fails or the run folder is gone
        say(f"{run.name} cannot continue: {one_line(error)}")
        return EXIT_FAILED
    if stop.by != WAY:
        notices.begin(run)
    opened.zygote.close()
    with contextlib.suppress(OSError):
        view.close()
    return code


if __name__ == "__main__":
    main()
