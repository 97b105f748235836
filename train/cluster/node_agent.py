"""The agent of one node of a job. An engine of a cluster starts it on each node, in the foreground.

    python -P -m train.module_runner train.cluster.node_agent FOLDER/submission.json

The environment says which node this is and where all nodes meet, with the names of torchrun and Kubeflow Trainer:
PET_NNODES, PET_NODE_RANK (or SLURM_NODEID), PET_MASTER_ADDR, PET_MASTER_PORT. All nodes see the same disk. Node 0
keeps its run folders in $TRAIN_RUNS, node R in $TRAIN_RUNS/.nodes/R. The agent creates the run there or continues it:
the engine starts the same command again, whatever happened. On SIGTERM, SIGUSR1 and SIGUSR2 all nodes save and stop.

Exit codes: 0 finished, 2 refused, 3 failed, 75 stopped with a checkpoint, 1 interrupted (the other nodes never came,
the GPUs are gone, a disk does not answer). Any other code: the agent was killed, and the same command continues the
run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import screen
from ..errors import EXIT_FAILED, EXIT_FINISHED, EXIT_REFUSED, EXIT_STOPPED, Refused, may_pass
from ..launcher import agent, ranks_and_gpus, resumable
from ..launcher.launches import NewRun, Resume
from ..launcher.request import Launch
from ..nodes import address
from ..nodes.address import Place
from ..run import folders, owner, run_folder, states
from ..run.run_folder import Run
from ..signals import StopRequest, leave
from . import engine
from .jobs import merge_flags


def main(beside: Path, stop: StopRequest) -> int:
    """Start or continue a submitted run on this node. Returns the exit code.

    Args:
        beside: the folder of the submission.
    """
    run = None
    try:
        content = engine.read(beside)
        cluster = _cluster_of(content, os.environ)
        node = cluster.get("node", 0)
        runs = Path(os.environ.get("TRAIN_RUNS") or "runs").absolute()
        runs = folders.of_node(runs, node) if node else runs
        run = Run(runs / content["name"])
        if Path(content["cwd"]).is_dir():
            os.chdir(content["cwd"])
        runs.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + 60 * content["wait_minutes"]
        _wait_while(lambda: _unresolved(cluster), "check that its pod can start", stop, until)
        remedy = f"end its agent there, then: train resume {run.name}"
        _wait_while(lambda: _held_by_other(run, content), remedy, stop, until)
        if stop.asked:
            return EXIT_STOPPED
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            owner.trust(run.folder)
        launch = _launch(content, beside, run, cluster)
        if launch is None:
            screen.remark(f"{run.name} has finished already")
            return EXIT_FINISHED
        opened = launch.open(os.environ)
    except Exception as error:
        return _fail(beside, run, error)
    for line in opened.plan.warnings:
        screen.remark(f"warning: {line}")
    code = agent.keep(opened, stop)
    return 1 if code == EXIT_FAILED and opened.run.read()["state"] != states.FAILED else code


def _cluster_of(content: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return this node's place among the nodes, as nodes.Settings; {}: it is the only node.

    Raises:
        Refused: the engine has not set the variables.
    """

    def number(*names: str) -> int:
        text = next((environ[name] for name in names if name in environ), "not set")
        if not text.isdecimal():
            raise Refused(f"{names[0]} is {text or 'empty'}; Kubeflow Trainer, or the batch script, sets it")
        return int(text)

    nodes = number("PET_NNODES")
    if nodes != content["nodes"]:
        raise Refused(f"PET_NNODES is {nodes}, but {content['nodes']} nodes were submitted; submit the run again")
    if nodes == 1:
        return {}
    place = Place(environ.get("PET_MASTER_ADDR", ""), number("PET_MASTER_PORT"))
    node, wait = number("PET_NODE_RANK", "SLURM_NODEID"), content["wait_minutes"]
    return {"least": nodes, "most": nodes, "node": node, "rendezvous": str(place), "wait_minutes": wait}


def _wait_while(in_the_way: Callable[[], str], remedy: str, stop: StopRequest, until: float) -> None:
    """Wait until nothing blocks the start any more, or a stop is asked for.

    Args:
        in_the_way: returns what blocks the start; '': nothing.
        remedy: what the user can do, for the message.
        until: when to give up, by time.monotonic().

    Raises:
        Refused: the start is still blocked at `until`.
    """
    is_announced = False
    while not stop.asked and (what := in_the_way()):
        if time.monotonic() > until:
            raise Refused(f"{what}; {remedy}", passes=True)
        if not is_announced:
            screen.remark(f"waiting: {what}")
        is_announced = True
        time.sleep(0.5)


def _unresolved(cluster: dict[str, Any]) -> str:
    """Return that node 0's name has no address yet, or ''. A pod has one once it runs, and pods start in any order."""
    if cluster:
        place = address.parse(cluster["rendezvous"])
        try:
            address.resolve(place)
        except Refused:
            return f"node 0's name {place.host} does not resolve yet"
    return ""


def _held_by_other(run: Run, content: dict[str, Any]) -> str:
    """Return that an agent of an earlier start still has the run of this node, or ''.

    That agent may be ending. Or the engine cannot reach its machine and has given it up, but the machine is alive and
    sees the folder. A file in the folder then asks the agent to stop.

    Raises:
        Refused: the run belongs to another submission.
    """
    if not (run.folder / "run.json").exists():
        return ""
    record = run.read()
    if record.get("submission") != content["id"]:
        raise Refused(f"{run.folder} is another submission's run; submit under another --name, or remove it first")
    lock = run.acquire()
    if lock is None:
        if not run.stop_asked():
            run.ask_stop(states.PLACED)
        return f"{record.get('host') or 'another machine'} still has {run.name}"
    if run.stop_asked() == states.PLACED:  # the other agent was killed and never read it
        run.clear_stop()
    lock.release()
    return ""


def _launch(content: dict[str, Any], beside: Path, run: Run, cluster: dict[str, Any]) -> Launch | None:
    """Return what this node has to do; None: the run has finished."""
    record = run.read_effective() if (run.folder / "run.json").exists() else None
    common: dict[str, Any] = {
        "runs": str(run.folder.parent), "name": run.name, "nproc": str(content["nproc"]), "cluster": cluster,
        "max_restarts": content["max_restarts"], "visible": os.environ.get(ranks_and_gpus.VISIBLE),
    }  # fmt: skip
    if record is not None and record["total_steps"] is not None:  # an agent has checked the request already
        if resumable.nothing_left(record, content["changes"]):
            return None
        return Resume(flags=content["changes"], **common)
    files = [str(beside / file) if file else None for file in (content["config_file"], content["task_copy"])]
    flags = merge_flags(content["flags"], content["changes"])
    return NewRun(
        content["task"], flags=flags, config_file=files[0],
        copy=files[1], queued=record is not None, submission=content["id"], **common,
    )  # fmt: skip


def _fail(beside: Path, run: Run | None, error: BaseException) -> int:
    """Write why this node cannot start to places where its user will look. Returns an exit code."""
    message = agent.error_line(error)
    code = EXIT_REFUSED if isinstance(error, Refused) and not may_pass(error) else 1
    screen.remark(message)
    if code == EXIT_REFUSED:
        with contextlib.suppress(OSError):  # in a pod this is a ConfigMap, which is read-only
            (beside / "refused").write_text(f"{message}\n", encoding="utf-8")
    with contextlib.suppress(OSError, Refused):
        if run is not None and run.read().get("submission") == engine.read(beside)["id"]:
            is_for_good = not may_pass(error) and run.read()["total_steps"] is None
            values: dict[str, Any] = {"state": states.FAILED} if is_for_good else {}
            run.note(**values, reason=message, ended=run_folder.now())
    return code


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]).absolute().parent, StopRequest()))
