"""Tells a person that a run has ended: when, with which words, and to which address.

    python -P …/train/module_runner.py train.launcher.notices RUN_FOLDER

A process beside the agent sends the notice, so that the agent's end does not wait for a network. It notes in run.json
which end it has told of. The keeper starts that process again for an end of which no notice was sent, so each notice is
sent at least once. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import format, helper, programs, webhooks
from ..errors import Refused, one_line, shortened
from ..run import best, durable, environment, states
from ..run.record import Record
from ..run.run_folder import Run, now, seconds_of
from ..run.spec import read_spec
from ..screen import printable
from ..signals import AFTER, KEEPER
from ..webhooks import VARIABLE, Address, Answer, Message
from . import keeper_sign, resumable

STATION_FILE = Path("/run/trainstation/notify")
"""In the station: a copy of .secrets/notify of the checkout."""
AGAIN = (5.0, 30.0, 300.0)
"""Seconds before each further try."""
_LOCK = ".notice.lock"
"""File in the run folder, locked by the process that sends, so that there is one."""
_SETTLES = 30.0
"""Maximum seconds for which the sender waits for the end of the agent, which shows that the run is interrupted."""
_LONGEST = 600
"""Maximum number of characters of a notice: WeCom takes 2,048 bytes."""
_METRICS = 4
"""Maximum number of metrics in a notice."""


def _read(path: Path) -> str | None:
    """Return what a file has as an address; None: it does not exist, or another user's cannot be read."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return durable.read_bytes(path).decode(errors="replace")
    return None


def address(folder: Path | None, environ: Mapping[str, str]) -> Address | None:
    """Return the address that counts for a run: that of --notify, else of TRAIN_NOTIFY, else of the station.

    An empty one means that nothing is sent.

    Args:
        folder: The run folder; None: there is none.

    Raises:
        Refused: it is no address.
    """
    ways = (
        ("--notify", lambda: _read(folder / environment.NOTIFY) if folder is not None else None),
        (VARIABLE, lambda: environ.get(VARIABLE)),
        (".secrets/notify", lambda: _read(STATION_FILE)),
    )
    for source, read in ways:
        if (text := read()) is not None:
            return webhooks.parse(text.strip(), source) if text.strip() else None
    return None


def of_launch(
    given: str | None, environ: Mapping[str, str], *, before: Path | None = None
) -> tuple[dict[str, str | bytes], dict[str, Any]]:
    """Return the files and the fields of run.json that say where the notice of a run's end goes.

    Args:
        given: The text of --notify; None: it was not given.
        before: The folder of the run that is resumed or forked, whose --notify stays.

    Raises:
        Refused: the address is wrong.
    """
    text = given if given is not None or before is None else _read(before / environment.NOTIFY)
    if text is None:
        is_of_run = "TRAIN_RUN_DIR" in environ  # another run has launched it
        found = None if is_of_run else address(None, environ)
        return {}, {"notify": found.place if found else None}
    place = webhooks.parse(text.strip(), "--notify").place if text.strip() else None
    return {environment.NOTIFY: text}, {"notify": place}


def begin(run: Run) -> None:
    """Start the process that tells of a run's end, if anything is to be told. It outlives this one."""
    with contextlib.suppress(OSError, Refused):
        if run.read().get("notify"):
            helper.leave(helper.start("train.launcher.notices", str(run.path)))


def left_over(run: Run, record: Record) -> str:
    """Return the mark of an end of which no notice was or is being sent, for the keeper; '' if there is none, or if
    this process knows no address.

    Args:
        record: run.json with the effective state.
    """
    mark = due(record, keeper_lives=True)
    if not mark or durable.is_locked(run.folder / _LOCK) or not run.was_started_here(record):
        return ""  # a command may come from elsewhere
    try:
        return mark if address(run.folder, os.environ) is not None else ""
    except Refused:
        return mark  # the sender notes what is wrong


def due(record: Record, *, keeper_lives: bool) -> str:
    """Return a mark of the end that a person must be told of; '' if there is none.

    Args:
        record: run.json with the effective state.
        keeper_lives: Whether a keeper would resume the run.
    """
    cluster, state = record.get("cluster"), record["state"]
    if not record.get("notify") or (cluster and cluster["node"]):
        return ""
    is_back = keeper_lives and resumable.is_resumable(record) and resumable.keeper_may_start(record)
    rests = state == states.INTERRUPTED or states.rests_by_itself(record)
    if state == states.STOPPED and record["stopped_by"] == KEEPER:  # the next keeper resumes it
        return ""
    rests |= state == states.STOPPED and record["stopped_by"] == AFTER
    if state not in (states.FINISHED, states.FAILED) and (not rests or is_back):
        return ""
    mark = f"{state} {record.get('ended') or 'attempt {}'.format(len(record['attempts']))}"
    return mark if mark != record.get("noticed") else ""


def message(run: Run, record: Record) -> Message:
    """Return the notice of the run's end."""
    name, state = record["name"], record["state"]
    reason = str(record.get("reason") or "no reason is known").partition("; ")[0]  # what follows is a remedy
    steps = programs.of_record(record).reports_steps(record["attempts"]) and " step " not in reason
    at = f" at step {record['step']}" if steps else ""
    if state == states.FINISHED:
        began, ended = seconds_of(record.get("started")), seconds_of(record.get("ended"))
        after = f" after {format.duration(ended - began)}" if began and ended else ""
        parts = [f"{name} finished{after}", _result(run, record)]
    elif state == states.FAILED:
        parts = [f"{name} failed{at}", f"{reason}; look: train logs {name}"]
    else:
        what = reason if reason.startswith(state) else f"{state}{at}: {reason}"
        parts = [f"{name} was {what}, and is not started again; go on: train resume {name}"]
    text = shortened(printable(": ".join(filter(None, parts))), _LONGEST)
    return Message(text=text, run=name, state=state, step=record["step"], host=socket.gethostname())


def _result(run: Run, record: Record) -> str:
    """Return the metrics of the last evaluation, and the best one if that was earlier."""
    metrics = {**(record.get("last_figures") or {}), **(record.get("metrics") or {})}
    shown = [f"{name} {format.figure(value)}" for name, value in metrics.items() if value is not None][:_METRICS]
    aim, scores = best.scores_of(run, read_spec(run).best_by or "loss")
    top = next(iter(best.ranked(aim, scores)), None)
    if top is not None and top != max(scores):
        shown.append(f"best {aim.metric} {format.figure(scores[top])} at step {top}")
    return ", ".join(shown)


def deliver(run: Run, again: Sequence[float] = AGAIN) -> None:
    """Tell of the run's end, with further tries, and note in run.json what became of it.

    Args:
        again: Seconds before each further try.
    """
    record = _settled(run)
    mark = due(record, keeper_lives=keeper_sign.is_alive(run.path.parent))
    if not mark:
        return
    to: Address | None = None
    problem: str | None = f"{VARIABLE} is not set where the run ended; set it for the keeper too"
    try:
        if (to := address(run.folder, os.environ)) is not None:
            problem = _tried(run, record, to, again)
    except Exception as error:  # noted, else nobody would see it
        problem = one_line(error) or type(error).__name__
    if problem is not None:
        judged: dict[str, Any] = {"noticed": mark} if to is not None else {}  # else a keeper may know an address
        run.note(**judged, notice_problem=f"not sent ({now()}): {problem}" if problem else "")


def _tried(run: Run, record: Record, to: Address, again: Sequence[float]) -> str | None:
    """Send the notice. Returns why that is given up; '' if it was sent, None if the run was resumed meanwhile."""
    problem = ""
    told = message(run, record)
    for pause in (0.0, *again):
        time.sleep(pause)
        later = run.read()
        if later.get("ended") != record.get("ended") or len(later["attempts"]) != len(record["attempts"]):
            return None
        answer = webhooks.send(to, told, record.get("cwd") or "/")
        if answer.is_sent:
            return ""
        problem = answer.text
    return problem


def _settled(run: Run) -> Record:
    """Return the record with the effective state, once the agent has ended."""
    until = time.monotonic() + _SETTLES
    while (record := run.read_effective())["state"] in (states.CREATED, states.RUNNING) and time.monotonic() < until:
        time.sleep(0.1)
    return record


def of_shell() -> Address:
    """Return the address that counts for what this shell starts.

    Raises:
        Refused: there is none, or it is wrong.
    """
    if (found := address(None, os.environ)) is None:
        raise Refused(f"{VARIABLE} is not set, so nothing is sent; type: export {VARIABLE}=https://ntfy.sh/TOPIC")
    return found


def test(to: Address) -> Answer:
    """Send a test notice."""
    host = socket.gethostname()
    told = Message(text=f"a test notice of train from {host}", run="test", state=states.FINISHED, step=0, host=host)
    return webhooks.send(to, told, os.getcwd())


def main() -> None:
    """Tell of the end of the run in the folder given as argument."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, Refused):  # the folder is gone, or the disk fails
        run = Run(Path(sys.argv[1])).held()
        if durable.try_lock(run.folder / _LOCK, 0o600) is not None:
            deliver(run)


if __name__ == "__main__":
    main()
