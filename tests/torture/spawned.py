"""Ranks as `train run --spawn` starts them, killed and stopped at random instants: many in a minute."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.torture.check import PATIENCE, Failure, check_nothing_lost, logs, saved
from train import hash_seed, programs
from train.checkpoint import manifest
from train.run import outcome, states
from train.run.run_folder import Run
from train.run.spec import read_spec
from train.supervise import attempts, decide
from train.supervise.decide import Facts, LaunchMode
from train.supervise.ranks import TaskRanks
from train.zygote.client import CHECKS, RANKS, Zygote, acquire, lives


@dataclasses.dataclass
class Rank:
    """A rank as those see it who disturb it."""

    pid: int
    ranks: TaskRanks

    def is_alive(self) -> bool:
        return lives(self.pid)

    def kill(self, number: int = signal.SIGKILL) -> None:
        zygote().signal(self.pid, number)


Disturb = Callable[[list[Rank]], None]


@functools.cache
def zygote() -> Zygote:
    """What all ranks here are forked from."""
    return acquire(hash_seed.with_seed(os.environ), (*CHECKS, *RANKS))


def attempt(run: Run, ranks: int, disturb: Disturb | None = None, fault_text: str = "") -> float:
    """One attempt with so many ranks; `disturb(processes)` may do what it likes to them. Returns its duration."""
    lock = run.acquire(patience=PATIENCE)
    if lock is None:
        raise Failure(f"{run.name}: the lock was never released")
    began = time.monotonic()
    number, spec = run.begin_attempt(ranks, run.newest_checkpoint), read_spec(run)
    made = TaskRanks(
        run,
        spec,
        lock=lock,
        count=ranks,
        zygote=zygote(),
        environ={"TRAIN_FAULT": fault_text},
        is_foreground=True,
    )
    made.start(spec, number)
    lock.release()
    processes = [Rank(pid, made) for pid in made.pids]
    if disturb is not None:
        disturb(processes)
    first_death = None
    while not made.wait():
        if first_death is None and made.exits:
            first_death = time.monotonic()
        # what a supervisor does: peers that wait for the dead are ended
        if first_death is not None and time.monotonic() - first_death > 1:
            made.signal(signal.SIGKILL)
        if time.monotonic() - began > PATIENCE:
            where = stacks(processes)
            made.signal(signal.SIGKILL)
            raise Failure(f"{run.name}: attempt {number} never ended\n{logs(run)}\n{where}")
    facts = Facts(
        run.name,
        LaunchMode.FOREGROUND,
        programs.TASK,
        ranks=ranks,
        outcomes=outcome.read_all(run.logs(number)),
        exits=made.exits,
    )
    attempts.record_decision(run, number, decide.decide(facts))
    return time.monotonic() - began


def stacks(processes: list[Rank]) -> str:
    """Where the ranks and their loader workers are, by py-spy, down into the C library."""
    family: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            rank = psutil.Process(process.pid)
            family += [rank, *rank.children(recursive=True)]
    spy = str(Path(sys.executable).with_name("py-spy"))
    said = []
    for each in family:
        command = [spy, "dump", "--native", "--pid", str(each.pid)]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            said.append(done.stdout + done.stderr)
    return "\n".join(said)


def killed(run: Run, ranks: int, duration: float, random_: random.Random, kills: int) -> int:
    """Kill the run at random instants until it is finished, at most so often. Returns how many kills hit it alive."""
    hit = 0
    while run.read()["state"] != states.FINISHED:
        if run.read()["state"] == states.FAILED:
            raise Failure(f"{run.name} failed: {run.read()['reason']}\n{logs(run)}")
        everyone, victim = random_.random() < 0.5, random_.randrange(ranks)
        # a run that is killed early is killed again soon: so that the last steps are met as often as the first
        wait = random_.uniform(0, duration * random_.choice((0.3, 1.0)))

        def kill(processes: list[Rank], everyone: bool = everyone, victim: int = victim, wait: float = wait) -> None:
            nonlocal hit
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline and all(process.is_alive() for process in processes):
                time.sleep(0.001)
            chosen = processes if everyone else [processes[victim]]
            hit += any(process.is_alive() for process in chosen)
            for process in chosen:
                process.kill()

        before = saved(run)
        attempt(run, ranks, kill if hit < kills else None)
        check_nothing_lost(run, before)
    return hit


def stopped(run: Run, ranks: int, duration: float, random_: random.Random, stops: int) -> tuple[int, int]:
    """Stop the run politely at random instants, one rank or all of them. Returns stops that hit, and steps lost."""
    hit = lost = 0
    while run.read()["state"] != states.FINISHED:
        everyone, victim = random_.random() < 0.5, random_.randrange(ranks)
        number = random_.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2))
        wait = random_.uniform(0, 0.4 * duration)

        def ask(
            processes: list[Rank],
            everyone: bool = everyone,
            victim: int = victim,
            wait: float = wait,
            number: int = number,
        ) -> None:
            beats = [run.logs(len(run.read()["attempts"])) / f"rank{rank}.beat" for rank in range(ranks)]
            while not all(path.exists() for path in beats) and all(process.is_alive() for process in processes):
                time.sleep(0.001)  # from here on every rank listens
            time.sleep(wait)
            for process in processes if everyone else [processes[victim]]:
                process.kill(number)

        attempt(run, ranks, ask if hit < stops else None)
        record = run.read()
        if record["state"] == states.STOPPED:
            hit += 1
            lost += steps_lost(run)
        elif record["state"] != states.FINISHED:
            raise Failure(f"{run.name} is {record['state']} after a polite stop: {record['reason']}\n{logs(run)}")
    return hit, lost


def steps_lost(run: Run) -> int:
    """Steps that a stopped run has made and not saved: by its record, and by what its metrics say it made."""
    saved = manifest.newest_valid(run)[0]
    lines = run.metrics.read_text().splitlines() if run.metrics.exists() else []
    made = max([run.read()["step"], *(int(line.split('"step": ')[1].split(",")[0]) for line in lines)])
    return made - saved
