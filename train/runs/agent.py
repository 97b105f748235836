"""The process inside tmux: reads the order, opens the run, tells who waits for it, and keeps its ranks alive.

    python -P …/train/own.py train.runs.agent FOLDER_OF_THE_ORDER

Started by runs/pane.py through runs/cold.py, with the environment of who gave the order, or forked by runs/warm.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import sys
import termios
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.errors import EXIT_FAILED, EXIT_REFUSED, Refused, one_line
from train.record import durable, environment, folders, store
from train.record.store import Lock, Run
from train.runs import preload, supervise, title
from train.runs.apart import Told, call
from train.runs.follow import View
from train.runs.launch import Order
from train.runs.nodes import Nodes, settings_of
from train.runs.opening import Opened, open_run
from train.runs.processes import Processes
from train.runs.processes.children import Children
from train.runs.processes.elastic import Elastic
from train.runs.supervise import Supervisor
from train.runs.verdict import Road
from train.signals import KEEPER, USER, StopRequest


def main() -> None:
    """Carry out the order that lies in the folder given as argument."""
    desk = Path(sys.argv[1])
    title.show(sys.executable, "-m", "train.runs.agent", str(desk))  # a fork has the name of what forked it
    content = json.loads((desk / "request.json").read_text(encoding="utf-8"))
    _never_wait_for_terminal()
    stop = StopRequest()
    signal.signal(signal.SIGHUP, _leave)  # until the run is there, when opening.py lets the terminal go
    order = Order(**content["order"])
    fail = functools.partial(_fail, desk)

    def apart(check: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
        return call(check, fail, meanwhile)

    try:
        opened = open_run(order, environment.keep(content["env"]), apart)
    except Told:
        raise
    except BaseException as error:
        sys.exit(fail(error))
    if not _answer(desk, {"warnings": opened.warnings}):
        _undo(order, opened.run, opened.lock)
        sys.exit(EXIT_REFUSED)
    sys.exit(keep(opened, stop))


def _never_wait_for_terminal() -> None:
    """Ctrl-S, typed by who is attached, would stop what is written there, and this process with it, for ever."""
    with contextlib.suppress(termios.error):
        modes = termios.tcgetattr(2)
        modes[0] &= ~termios.IXON
        termios.tcsetattr(2, termios.TCSANOW, modes)


def _leave(number: int, frame: object) -> None:
    """The session was ended before there was a run. By an exit, for imported libraries have temporary folders, which
    another signal is not to keep them from taking away."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _fail(desk: Path, error: BaseException) -> int:
    """Tell who waits why the order cannot be carried out. Returns an exit code."""
    if isinstance(error, Refused):
        _answer(desk, {"refused": str(error)})
        return EXIT_REFUSED
    said = f"unexpected {type(error).__name__}: {error}"
    if isinstance(error, OSError):
        said = f"{error.strerror or error}: {error.filename}; look at its owner and mode"
    _answer(desk, {"refused": one_line(said)})
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
    return 1


def _answer(desk: Path, answer: dict[str, Any]) -> bool:
    """Report to the caller. False if the order has been withdrawn; a caller who was killed has not done so."""
    try:
        durable.write_atomically(desk / "answer.json", json.dumps(answer), durable=False)
    except OSError:
        return False
    return True


def _undo(order: Order, run: Run, lock: Lock) -> None:
    """Clear away a run whose launch was withdrawn; rest one whose resume was."""
    if order.kind == "resume":
        by = KEEPER if order.by_keeper else USER
        supervise.rest(run, store.STOPPED, "stopped (its resume was interrupted)", by)
    lock.release()
    if order.kind != "resume":
        folders.remove(run)


def keep(opened: Opened, stop: StopRequest) -> int:
    """Keep the run alive until it ends, shown on the terminal as long as there is one. Returns the exit code."""
    run = opened.run
    view = View(run, sys.stderr, show_log=bool(run.read().get("script")))

    def show() -> None:
        with contextlib.suppress(OSError, ValueError, Refused):  # the terminal may be gone, or the disk
            view.update(run.read())

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            view.say(text)

    try:
        settings = settings_of(run.read())
        nodes = Nodes(run, opened.ranks, settings, opened.listening) if settings is not None else None
        processes = _processes(run, opened.lock, opened.ranks, nodes)
        code = Supervisor(run, processes, Road.LAUNCHED, stop, show, say, nodes).keep()
    except (OSError, Refused) as error:  # its disk fails or its folder is gone
        say(f"{run.name} cannot go on: {one_line(error)}")
        return EXIT_FAILED
    with contextlib.suppress(OSError):
        view.close()
    return code


def _processes(run: Run, lock: Lock, ranks: int, nodes: Nodes | None) -> Processes:
    """Forks of this process; a script is started by torchrun, unmodified. So is a task where something that was
    imported (a sitecustomize, say) has left threads or a GPU behind, which a fork would be without."""
    if run.read().get("script") or not preload.is_clean():
        if nodes is not None:
            raise Refused("something that is imported here has left threads or a GPU behind; see train doctor")
        return Elastic(run, lock, ranks)
    return Children(run, lock, ranks, nodes)


if __name__ == "__main__":
    main()
