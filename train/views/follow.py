"""Watching a run from outside: one bar, the evaluations as they come, the end. Imports no torch."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from train import screen
from train.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from train.format import figures
from train.launcher.control import how_to_go_on
from train.launcher.progress import View
from train.run import states
from train.run.record import Record
from train.run.run_folder import Run
from train.supervise.decide import CODES


def follow(run: Run) -> int:
    """Show a run until it ends. Returns the exit code that stands for its end; Ctrl-C ends the following only."""
    record = run.shown()
    view, waits = View(run, sys.stderr, show_log=bool(record.get("script"))), ""
    try:
        while record["state"] in (states.RUNNING, states.CREATED):
            view.update(record)
            if record.get("reason") and record["reason"] != waits:  # of a running one: it waits for other machines
                waits = record["reason"]
                view.say(waits)
            time.sleep(0.2)
            record = run.shown()
        deadline = time.monotonic() + 30
        while run.alive() and time.monotonic() < deadline:  # what follows may remove or resume it
            time.sleep(0.05)
        record = run.shown()
        view.update(record)
    except KeyboardInterrupt:
        return left_alone(run, view.close)
    view.close()
    return tell_end(run, record)


def left_alone(run: Run, close: Callable[[], None]) -> int:
    """What Ctrl-C does to one who follows: `close` ends the following. Returns its exit code; the run goes on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever types it twice means the same
    close()
    print(file=sys.stderr)  # behind the ^C that the terminal shows
    screen.say(f"{run.name} goes on; follow it again with: train logs {run.name} --follow")
    return EXIT_INTERRUPTED


def tell_end(run: Run, record: Record) -> int:
    """Say how a run ended. Returns the exit code that stands for it.

    Args:
        record: run.json with the effective state.
    """
    state, step = record["state"], record.get("step", 0)
    reason = f": {record['reason']}" if record.get("reason") else ""
    last = {
        states.FINISHED: f"{run.name} finished after {step} steps  {figures(record.get('metrics') or {})}".rstrip(),
        states.STOPPED: f"{run.name} {record['reason'] or 'stopped'}; {how_to_go_on(record)}",
        states.FAILED: f"{run.name} failed{reason}",
        states.INTERRUPTED: f"{run.name} was interrupted{reason}",
        states.COPY: f"{run.name} was interrupted{reason}",
    }.get(state, f"{run.name} is {state}")
    if not record.get("total_steps") and state == states.FINISHED:  # of a script, or where the steps are not seen
        last = f"{run.name} finished"
    if state == states.FAILED and record["attempts"]:
        for text in record["attempts"][-1].get("last_lines") or ():
            screen.say(f"  | {text}")
    screen.say(last)
    return EXIT_REFUSED if state == states.FAILED and record.get(states.REFUSED) else CODES.get(state, EXIT_FAILED)
