"""The agent of one node where an engine of a cluster has placed it: in the foreground, for there is no tmux.

    python -P -m train.own train.runs.placed FOLDER/submission.json --runs DIR --node R --rendezvous HOST:PORT

It creates the run in DIR, or goes on with it, for the engine starts the same command again after whatever happened.
SIGTERM, SIGUSR1 and SIGUSR2 let all nodes save and stop. It exits with 0 finished, 2 refused, 3 failed, 75 stopped with
a checkpoint, 1 interrupted: the others never came, the GPUs are gone, what its folder or data lie on does not answer.
With anything else it was killed itself. In both cases the same command goes on where the newest checkpoint is.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from train import screen
from train.cluster import slurm
from train.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_REFUSED, EXIT_STOPPED, Refused, may_pass, one_line
from train.record import durable, environment, store
from train.record.store import Run
from train.runs import agent, control, gpus
from train.runs.apart import Told, call
from train.runs.launch import Order
from train.runs.opening import open_run
from train.signals import StopRequest

_STALE = 90.0
"""Seconds for which a network file system may show a record as it was before the run was handed over once more."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Carry out what was submitted, on this node, and exit as it ends."""
    given = _arguments(argv)
    stop = StopRequest()
    try:
        _carry_out(given, stop)
    except SystemExit as end:
        if given.tell is not None and end.code in (EXIT_REFUSED, EXIT_FAILED):
            with contextlib.suppress(OSError):
                durable.write_atomically(Path(given.tell), f"{end.code}\n")
        raise


def _carry_out(given: argparse.Namespace, stop: StopRequest) -> NoReturn:
    beside = Path(given.submission).absolute().parent
    content = json.loads((beside / Path(given.submission).name).read_text(encoding="utf-8"))
    if Path(content["cwd"]).is_dir():
        os.chdir(content["cwd"])
    runs = Path(given.runs).absolute()
    fail = functools.partial(_fail, runs / content["name"], given.node)

    def apart(check: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
        return call(check, fail, meanwhile)

    try:
        # whose run that is, its record is not for this one to write in
        other, code = of_another_job(Run(beside), stop), EXIT_FINISHED  # nothing is wrong: the run has its job
        if not other:
            other, code = of_another(Run(runs / content["name"]), content), EXIT_REFUSED
        if other:
            screen.say(f"train: node {given.node}: {other}")
            sys.exit(code)
        left = succeed(Run(runs / content["name"]), content["wait_minutes"], stop, given.node)
        if left:
            sys.exit(left)
        order = order_of(content, beside, runs, given.node, given.rendezvous)
        if order is None:
            screen.say(f"train: {content['name']} has finished already")
            sys.exit(EXIT_FINISHED)
        opened = open_run(order, environment.keep(os.environ), apart)
    except Told:
        raise
    except Exception as error:
        sys.exit(fail(error))
    for line in opened.warnings:
        screen.say(f"train: warning: {line}")
    code = agent.keep(opened, stop)
    if code == EXIT_FAILED and opened.run.read()["state"] != store.FAILED:
        code = 1
    sys.exit(code)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m train.runs.placed", allow_abbrev=False)
    parser.add_argument("submission", metavar="SUBMISSION.json")
    parser.add_argument("--runs", required=True, metavar="DIR", help="where this node alone keeps its run folder")
    parser.add_argument("--node", type=int, default=0, metavar="R", help="which node this is, from 0")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where several nodes meet: an address of node 0")
    parser.add_argument("--tell", metavar="FILE", help="where to write the exit code if no new start can change it")
    return parser.parse_args(argv)


def of_another_job(run: Run, stop: StopRequest) -> str:
    """Why this job must leave the run alone; '' if it need not.

    Where the answer about a job was lost, the run may have got a second one. Each would take the other for the one
    before it, and drive it out: so that on record has the run.

    Args:
        run: of node 0, or the folder of a submission that no record lies beside.
    """
    until = time.monotonic() + _STALE
    while (run.folder / "run.json").exists() and (job := slurm.another_job(run)):
        if stop.asked or time.monotonic() > until:
            return f"{run.folder} is the run of job {job}, and this is another one; to go on with it: train resume"
        time.sleep(0.5)
    return ""


def of_another(run: Run, content: dict[str, Any]) -> str:
    """Why this submission must not go on with the run that lies under its name; '' if it may.

    Where folders outlive what was known of them elsewhere, a name can come again, for another run.
    """
    if not (run.folder / "run.json").exists() or run.read().get("submission") == content.get("id"):
        return ""
    return f"{run.folder} has a run of an earlier submission; submit under another --name, or remove that folder first"


def succeed(run: Run, minutes: float, stop: StopRequest, node: int) -> int:
    """Wait until no agent of an earlier start has the run of this node.

    It may be ending, or a network file system may not know yet that it is gone (NFS: for 90 s). Or its machine lives,
    and the engine has given it up, for it cannot reach it, while the folder is seen there: by that it is told.

    Returns:
        0: it is this agent's now. Else the exit code: of a stop asked for meanwhile, or of none that left in time.
    """
    until, is_told = time.monotonic() + 60 * minutes, False
    while (run.folder / "run.json").exists():
        lock = run.acquire()
        if lock is not None:
            if run.stop_asked() == store.PLACED:  # it was killed, and has not heard of it
                run.clear_stop()
            lock.release()
            break
        if stop.asked:
            return EXIT_STOPPED
        where = run.read().get("host") or "another machine"
        if time.monotonic() > until:
            screen.say(
                f"train: node {node}: gave up after {minutes:g} minutes of waiting for {where}, which has {run.name} "
                f"still; end its agent there, then: train resume {run.name}"
            )  # fmt: skip
            return 1
        if not run.stop_asked():
            run.ask_stop(store.PLACED)
        if not is_told:
            is_told = True
            screen.say(f"train: node {node}: {where} has {run.name} still; waiting for its end")
    return 0


def order_of(content: dict[str, Any], beside: Path, runs: Path, node: int, rendezvous: str | None) -> Order | None:
    """What this node is to do; None: nothing is left.

    Args:
        content: of the submission. beside: the folder that it lies in.

    Raises:
        Refused: the run cannot go on.
    """
    name, run = content["name"], Run(runs / content["name"])
    record = run.read() if (run.folder / "run.json").exists() else None
    cluster: dict[str, Any] = {}
    if content["nodes"] > 1:
        if rendezvous is None:
            raise Refused(f"{content['nodes']} nodes need --rendezvous HOST:PORT too")
        cluster = {"least": content["nodes"], "most": content["nodes"], "node": node, "rendezvous": rendezvous}
        cluster["wait_minutes"] = content["wait_minutes"]
    order = Order(
        kind="new", runs=str(runs), name=name, nproc=str(content["nproc"]), cluster=cluster,
        max_restarts=content["max_restarts"], visible=os.environ.get(gpus.VISIBLE), queued=record is not None,
        submission=content.get("id"),
    )  # fmt: skip
    if record is None or record["total_steps"] is None:  # nobody has come so far as to check it
        order.request = {key: content[key] for key in ("task", "flags", "init")}
        for key, file in (("config_file", content["config_file"]), ("copy", content["task_copy"])):
            order.request[key] = str(beside / file) if file else None
        return order
    changes = content.get("changes", {})
    if control.nothing_left(run, changes, None):
        return None
    order.kind, order.flags = "resume", changes
    return order


def _fail(folder: Path, node: int, error: BaseException) -> int:
    """Say why this node cannot begin, where its user will look. Returns an exit code."""
    if isinstance(error, Refused):
        said, code = str(error), 1 if may_pass(error) else EXIT_REFUSED
    else:
        said, code = one_line(f"unexpected {type(error).__name__}: {error}"), 1
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    screen.say(f"train: node {node}: {said}")
    run = Run(folder)
    with contextlib.suppress(OSError, Refused):
        is_for_good = not may_pass(error) and run.read()["total_steps"] is None
        values: dict[str, Any] = {"state": store.FAILED} if is_for_good else {}
        run.note(**values, reason=said, ended=store.now())
    return code


if __name__ == "__main__":
    main()
