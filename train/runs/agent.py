"""The process inside tmux: reads the order, opens the run, tells who waits for it, and keeps its ranks alive."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from train.errors import EXIT_FAILED, Refused, one_line
from train.record import environment, store
from train.record.store import Lock, Run
from train.runs import supervise
from train.runs.follow import View
from train.runs.launch import Order
from train.runs.opening import open_run
from train.runs.processes.elastic import Elastic
from train.runs.supervise import Supervisor
from train.runs.verdict import Road
from train.signals import KEEPER, SIGNAL, StopRequest


def main() -> None:
    """Carry out the order that lies in the folder given as argument."""
    desk = Path(sys.argv[1])
    content = json.loads((desk / "request.json").read_text(encoding="utf-8"))
    if "--ready" not in sys.argv:
        environ = content["env"] | {k: os.environ[k] for k in ("TMUX", "TMUX_PANE", "TERM") if k in os.environ}
        os.chdir(content["cwd"])
        # anew, so that what is read at a process's start (LD_LIBRARY_PATH, PYTHON…) is the caller's too
        os.execve(sys.executable, [sys.executable, "-m", "train.runs.agent", str(desk), "--ready"], environ)
    stop = StopRequest()
    order = Order(**content["order"])
    try:
        run, lock, ranks, warnings = open_run(order, environment.keep(content["env"]))
    except Refused as error:
        _answer(desk, {"refused": str(error)})
        sys.exit(2)
    except OSError as error:
        _answer(desk, {"refused": one_line(f"{error.strerror or error}: {error.filename}; look at its owner and mode")})
        raise
    except BaseException as error:
        _answer(desk, {"refused": one_line(f"unexpected {type(error).__name__}: {error}")})
        raise
    if not _answer(desk, {"warnings": warnings}):
        _undo(order, run, lock)
        sys.exit(2)
    sys.exit(_keep(run, lock, ranks, stop))


def _answer(desk: Path, answer: dict[str, Any]) -> bool:
    """Report to the caller. False if the order has been withdrawn; a caller who was killed has not done so."""
    try:
        store.write_atomically(desk / "answer.json", json.dumps(answer), durable=False)
    except OSError:
        return False
    return True


def _undo(order: Order, run: Run, lock: Lock) -> None:
    """Clear away a run whose launch was withdrawn; rest one whose resume was."""
    if order.kind == "resume":
        by = KEEPER if order.by_keeper else SIGNAL
        supervise.rest(run, store.STOPPED, "stopped (its resume was interrupted)", by)
    lock.release()
    if order.kind != "resume":
        store.remove(run)


def _keep(run: Run, lock: Lock, ranks: int, stop: StopRequest) -> int:
    """Keep the run alive until it ends, shown on the terminal as long as there is one. Returns the exit code."""
    view = View(run, sys.stderr, show_log=bool(run.read().get("script")))

    def show() -> None:
        with contextlib.suppress(OSError, ValueError, Refused):  # the terminal may be gone, or the disk
            view.update(run.read())

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            view.say(text)

    try:
        code = Supervisor(run, Elastic(run, lock, ranks), Road.LAUNCHED, stop, show, say).keep()
    except (OSError, Refused) as error:  # its disk fails or its folder is gone
        say(f"{run.name} cannot go on: {one_line(error)}")
        return EXIT_FAILED
    with contextlib.suppress(OSError):
        view.close()
    return code


if __name__ == "__main__":
    main()
