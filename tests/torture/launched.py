"""Runs as `train launch` starts them, in tmux under their agent, killed and stopped at random instants."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from typing import Any

import psutil

from tests.torture.check import PATIENCE, Failure, logs
from tests.torture.spawned import steps_lost
from train.errors import Refused
from train.launcher.launches import Resume
from train.run import heartbeat, states
from train.run.run_folder import Run

STOPS = ("the agent", "one rank", "the whole group")


def resume(run: Run, fault: str = "") -> None:
    """`train resume`, if nobody else is at it; `fault` meets all processes of the run."""
    deadline = time.monotonic() + PATIENCE
    while run.alive():  # orphans of a killed agent end by themselves
        if time.monotonic() > deadline:
            raise Failure(f"{run.name}: its processes outlived their agent")
        time.sleep(0.02)
    if fault:
        os.environ["TRAIN_FAULT"] = fault
    try:
        Resume(runs=str(run.folder.parent), name=run.name).start()
    except Refused as error:
        raise Failure(f"{run.name} cannot be resumed: {error}\n{logs(run)}") from None
    finally:
        os.environ.pop("TRAIN_FAULT", None)


def wait_for_end(run: Run, several: int = 1) -> float:
    """Wait until no process of the run lives, for `several` attempts; seconds waited."""
    began = time.monotonic()
    while run.alive():
        if time.monotonic() - began > several * PATIENCE:
            raise Failure(f"{run.name} never ended\n{logs(run)}")
        time.sleep(0.02)
    return time.monotonic() - began


def _send(pids: list[int | None], number: signal.Signals) -> bool:
    hit = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(pid, number)  # type: ignore[arg-type]
            hit = True
    return hit


def _ranks(run: Run) -> list[int]:
    with contextlib.suppress(psutil.Error, KeyError, IndexError):
        pids = run.read()["pids"]["ranks"]
        return [pid for pid in pids if "train-rank" in " ".join(psutil.Process(pid).cmdline())]
    return []


def _wait(run: Run, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and run.alive():
        time.sleep(0.002)


def stopped(run: Run, duration: float, random_: random.Random, whom: str, stops: int) -> tuple[int, int]:
    """Stop a run politely at random instants. Returns stops that hit it, and the steps lost."""
    hit = lost = 0
    while run.read()["state"] != states.FINISHED:
        resume(run)
        asked = False
        if hit < stops:
            _wait(run, random_.uniform(0, duration))
            agent, ranks = run.read()["pids"].get("agent"), _ranks(run)
            number = random_.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2))
            chosen: dict[str, list[int | None]] = {
                "the agent": [agent],
                "one rank": [random_.choice(ranks)] if ranks else [],
                "the whole group": [agent, *ranks],
            }
            asked = run.alive() and _send(chosen[whom], number)
        wait_for_end(run)
        state = run.state()
        if state == states.STOPPED:
            hit += asked
            lost += steps_lost(run)
        elif state != states.FINISHED:
            raise Failure(f"{run.name} is {state} after a polite stop: {run.read()['reason']}\n{logs(run)}")
    return hit, lost


def under_fire(run: Run, random_: random.Random, everyone: bool, kills: int) -> tuple[int, int]:
    """Kill ranks while they train, and let the agent start them again from memory. Returns kills, and steps made twice.

    Args:
        everyone: all ranks at once; else one of them.
    """
    resume(run)
    hit, at = 0, -1
    attempt: dict[str, Any] | None
    while hit < kills and run.alive():
        attempt = next(iter(run.read()["attempts"][hit:]), None)
        made = heartbeat.reached(run.logs(hit + 1))
        is_training = attempt and attempt["ready"] and attempt["end"] is None
        if not is_training or made <= max(at, attempt["from_step"]):  # each must have brought it further
            time.sleep(0.002)
            continue
        _wait(run, random_.uniform(0, 0.5))
        ranks = _ranks(run)
        if not ranks:
            break
        _send(list(ranks) if everyone else [random_.choice(ranks)], signal.SIGKILL)
        hit, at = hit + 1, made
    wait_for_end(run)
    if run.state() != states.FINISHED:
        raise Failure(f"{run.name} is {run.state()}: {run.read()['reason']}\n{logs(run)}")
    return hit, twice(run)


def twice(run: Run) -> int:
    """Steps that a run has made more than once."""
    attempts = run.read()["attempts"]
    return sum(max(0, one["to_step"] - other["from_step"]) for one, other in itertools.pairwise(attempts))
