"""A node in a pod: from what Kubeflow Trainer puts into its environment to the node's agent.

    python -m train.runs.pod /submission/submission.json

All pods of a run see the same volume: node 0 keeps its run folders in $TRAIN_RUNS, node R in $TRAIN_RUNS/.nodes/R. Then
this process becomes the agent (runs/placed.py), so that SIGTERM reaches it, and its exit code is the pod's. Imports no
torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from train import hashing, own, screen
from train.cluster import address
from train.cluster.address import Place
from train.cluster.submission import runs_of
from train.errors import EXIT_REFUSED, EXIT_STOPPED, Refused, may_pass

_AGAIN = 1
"""What Kubernetes starts a pod again after, some times."""


def main() -> None:
    """Become the agent of this node."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _leave)
    try:
        command = command_of(Path(sys.argv[1]), os.environ)
    except Refused as error:
        screen.say(f"train: {error}")
        sys.exit(_AGAIN if may_pass(error) else EXIT_REFUSED)
    except TimeoutError as error:
        screen.say(f"train: {error}")
        sys.exit(_AGAIN)
    os.execve(sys.executable, own.command("train.runs.placed", *command), hashing.fixed(os.environ))


def _leave(number: int, frame: object) -> None:
    """Asked to stop before anything has begun: what is saved is saved."""
    os._exit(EXIT_STOPPED)


def command_of(submission: Path, environ: Mapping[str, str]) -> list[str]:
    """The agent's arguments, once it can begin.

    Raises:
        Refused: this is no pod of a TrainJob.
        TimeoutError: node 0 has not come.
    """
    content = json.loads(submission.read_text(encoding="utf-8"))
    nodes, node = _number(environ, "PET_NNODES"), _number(environ, "PET_NODE_RANK")
    if nodes != content["nodes"]:
        raise Refused(f"PET_NNODES is {nodes}, and {content['nodes']} nodes were submitted; submit it anew")
    runs = runs_of(Path(environ.get("TRAIN_RUNS") or "runs"), node)
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"{runs}: {error.strerror}; the claim for runs must let user {os.getuid()} write") from None
    command = [str(submission), "--runs", str(runs), "--node", str(node)]
    if nodes > 1:
        place = Place(environ.get("PET_MASTER_ADDR", ""), _number(environ, "PET_MASTER_PORT"))
        _wait_for_name(place, content["wait_minutes"])
        command += ["--rendezvous", str(place)]
    return command


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        said = environ.get(name, "not set")
        raise Refused(f"{name} is {said}; Kubeflow Trainer sets it in the pods of a TrainJob") from None


def _wait_for_name(place: Place, minutes: float) -> None:
    """The cluster knows node 0's name once its pod has an address, and pods start in any order."""
    until, said = time.monotonic() + 60 * minutes, False
    while True:
        try:
            address.resolve(place)
            return
        except Refused:
            if time.monotonic() > until:
                words = f"node 0's name {place.host} does not resolve after {minutes:g} minutes"
                raise TimeoutError(f"{words}; has its pod found a place? kubectl get pods") from None
        if not said:
            _say(f"waiting for node 0's name {place.host}, which does not resolve yet")
        said = True
        time.sleep(0.5)


def _say(text: str) -> None:
    screen.say(f"train: {text}")


if __name__ == "__main__":
    main()
