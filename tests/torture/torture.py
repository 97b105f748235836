"""Kill runs in every way until nobody can doubt that it changes nothing. `make torture` runs this.

    python tests/torture/torture.py --kills 200 --stops 50 --points --seed 0 --to docs/reliability.md

Every run is compared with an undisturbed one of the same world size: weights_sha256, consumed sample ids, and step,
epoch, loss, learning rate and evaluations in metrics.jsonl must be equal. Ranks are real processes, started as by
`train run --spawn`; victims and instants are drawn at random from the seed; nothing is simulated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from train.engine import fault, manifest
from train.engine.prepare import Request, prepare
from train.runs import spawn, store
from train.runs.store import Run

STEPS = 72
FLAGS = {
    "steps": str(STEPS), "batch_size": "60", "micro_batch_size": "8", "checkpoint.every_steps": "5",
    "checkpoint.keep": "2", "eval.every_epochs": "0.5", "log.every_steps": "1", "log.samples": "true",
    "log.tensorboard": "false", "task.width": "8", "precision": "fp64", "cpu_threads": "1",
}  # fmt: skip
"""Three epochs of 24 steps with a short last batch, dropout and augmentation."""
PATIENCE = 180.0


class Failure(Exception):
    """A promise that was not kept."""


def make(runs: Path, name: str, ranks: int, workers: int, asynchronous: bool) -> Run:
    """A fresh run."""
    flags = FLAGS | {"data.workers": str(workers), "checkpoint.asynchronous": str(asynchronous).lower()}
    prepared = prepare(Request("digits", flags, ranks=ranks))
    return store.create(runs, name, prepared.files, prepared.record)


def attempt(run: Run, ranks: int, disturb: Any = None, fault_text: str = "") -> float:
    """One attempt with so many ranks; `disturb(processes)` may do what it likes to them. Returns its duration."""
    lock = run.acquire(patience=PATIENCE)
    if lock is None:
        raise Failure(f"{run.name}: the lock was never released")
    began = time.monotonic()
    number = run.begin_attempt(ranks)
    with tempfile.TemporaryDirectory(prefix="train-torture-") as meeting:
        processes = spawn.start_ranks(run, lock, ranks, number, meeting, {"TRAIN_FAULT": fault_text})
        lock.release()
        if disturb is not None:
            disturb(processes)
        first_death = None
        while any(process.is_alive() for process in processes):
            time.sleep(0.01)
            if first_death is None and any(process.exitcode not in (None, 0) for process in processes):
                first_death = time.monotonic()
            # what the agent does for a real run: peers that wait for the dead are ended
            if first_death is not None and time.monotonic() - first_death > 1:
                for process in processes:
                    process.kill()
            if time.monotonic() - began > PATIENCE:
                for process in processes:
                    process.kill()
                raise Failure(f"{run.name}: attempt {number} never ended\n{logs(run)}")
    state = run.read()["state"]
    run.end_attempt("died" if state == store.RUNNING else state, "")
    return time.monotonic() - began


def logs(run: Run) -> str:
    folder = run.logs(len(run.read()["attempts"]))
    return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))


def outcome(run: Run) -> dict[str, Any]:
    """What must not depend on how often a run was interrupted."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    keys = ("step", "epoch", "loss", "lr", "eval", "samples")
    samples: dict[int, list[int]] = {}
    for path in sorted(run.folder.glob("samples.rank*.log")):
        for line in path.read_text().splitlines():
            step, *ids = map(int, line.split())
            samples.setdefault(step, []).extend(ids)
    record = run.read()
    return {
        "state": record["state"], "sha": record["weights_sha256"], "metrics": record["metrics"],
        "lines": [{key: line[key] for key in keys if key in line} for line in lines],
        "samples": {step: sorted(ids) for step, ids in samples.items()},
    }  # fmt: skip


def compare(run: Run, wanted: dict[str, Any], exactly: bool = True) -> None:
    """Raise Failure where a finished run differs from the undisturbed one."""
    found = outcome(run)
    for key in ("state", "samples"):
        if found[key] != wanted[key]:
            raise Failure(f"{run.name}: {key} differ\n{logs(run)}")
    if exactly:
        for key in ("sha", "metrics", "lines"):
            if found[key] != wanted[key]:
                raise Failure(f"{run.name}: {key} differ: {found[key]!s:.300} instead of {wanted[key]!s:.300}")
        return
    for ours, theirs in zip(found["lines"], wanted["lines"], strict=True):
        for key in ours.keys() & {"loss", "lr"}:
            if abs(ours[key] - theirs[key]) > 1e-9 * max(1, abs(theirs[key])):
                raise Failure(f"{run.name}: {key} of step {ours['step']} is {ours[key]} instead of {theirs[key]}")


def saved(run: Run) -> int:
    """The newest step reported as saved."""
    return int(run.read().get("saved_step", 0))


def check_nothing_lost(run: Run, before: int) -> None:
    """A checkpoint once reported as saved must still be there, or a newer one, and whole."""
    found = manifest.newest_valid(run)
    step = found[0] if found else 0
    if step < before:
        raise Failure(f"{run.name}: the checkpoint of step {before} was reported as saved; the newest is {step}")


def killed(run: Run, ranks: int, duration: float, random_: random.Random, kills: int) -> int:
    """Kill the run `kills` times at random instants, then let it finish. Returns how many kills hit it alive."""
    hit = 0
    while run.read()["state"] != store.FINISHED:
        if run.read()["state"] == store.FAILED:
            raise Failure(f"{run.name} failed: {run.read()['reason']}\n{logs(run)}")
        everyone = random_.random() < 0.5
        victim = random_.randrange(ranks)
        wait = random_.uniform(0, 0.8 * duration)

        def kill(processes: list[Any], everyone: bool = everyone, victim: int = victim, wait: float = wait) -> None:
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
    """Stop the run politely at random instants, to one rank or to all. Returns stops that hit, and steps lost."""
    hit = lost = 0
    while run.read()["state"] != store.FINISHED:
        everyone, victim = random_.random() < 0.5, random_.randrange(ranks)
        number = random_.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
        wait = random_.uniform(0, 0.4 * duration)

        def ask(
            processes: list[Any],
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
                if process.is_alive():
                    os.kill(process.pid, number)

        attempt(run, ranks, ask if hit < stops else None)
        record = run.read()
        if record["state"] == store.STOPPED:
            hit += 1
            found = manifest.newest_valid(run)
            lost += record["step"] - (found[0] if found else 0)
        elif record["state"] != store.FINISHED:
            raise Failure(f"{run.name} is {record['state']} after a polite stop: {record['reason']}\n{logs(run)}")
    return hit, lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=208, help="SIGKILLs at random instants over the whole matrix")
    parser.add_argument("--stops", type=int, default=50, help="polite stops at random instants")
    parser.add_argument("--points", action="store_true", help="a kill at every named point of a run, on each rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    logging.getLogger("train").setLevel(logging.ERROR)
    os.environ["OMP_NUM_THREADS"] = "1"
    random_ = random.Random(options.seed)
    null = os.open(os.devnull, os.O_WRONLY)
    out = os.dup(1)
    os.dup2(null, 2)  # the ranks' own words are in their logs
    spawn.warm_up()
    rows: list[list[object]] = []
    failures: list[str] = []

    def note(*row: object) -> None:
        rows.append(list(row))
        os.write(out, ("| " + " | ".join(map(str, row)) + " |\n").encode())

    with tempfile.TemporaryDirectory(prefix="train-torture-runs-") as temporary:
        runs = options.runs or Path(temporary)
        matrix = list(itertools.product(options.ranks, options.workers, (False, True)))
        wanted: dict[int, dict[str, Any]] = {}
        durations: dict[tuple[int, int, bool], float] = {}
        note("ranks", "workers", "saving", "what", "hits", "attempts", "mismatches")
        note(*["---"] * 7)

        def judge(run: Run, seat: tuple[int, int, bool], what: str, action: Any, exactly: bool = True) -> None:
            hits: Any = "-"
            problem = ""
            try:
                hits = action()
                compare(run, wanted[seat[0]], exactly)
            except Failure as failure:
                problem = str(failure)
                failures.append(problem)
            saving = "async" if seat[2] else "sync"
            note(seat[0], seat[1], saving, what, hits, len(run.read()["attempts"]), 1 if problem else 0)

        for ranks, workers, asynchronous in matrix:
            run = make(runs, f"base-{ranks}-{workers}-{int(asynchronous)}", ranks, workers, asynchronous)
            durations[ranks, workers, asynchronous] = attempt(run, ranks)
            if ranks not in wanted:
                wanted[ranks] = outcome(run)
                if wanted[ranks]["state"] != store.FINISHED:
                    os.write(out, logs(run).encode())
                    return 1
            compare(run, wanted[ranks])
        share = -(-options.kills // len(matrix))
        for seat in matrix if options.kills else []:
            run = make(runs, "kill-{}-{}-{}".format(*map(int, seat)), *seat)
            judge(
                run,
                seat,
                "SIGKILL at random instants",
                lambda r=run, s=seat: killed(r, s[0], durations[s], random_, share),
            )
        share = -(-options.stops // len(matrix))
        for seat in matrix if options.stops else []:
            run = make(runs, "stop-{}-{}-{}".format(*map(int, seat)), *seat)

            def stop(run: Run = run, seat: tuple[int, int, bool] = seat) -> str:
                hits, lost = stopped(run, seat[0], durations[seat], random_, share)
                if lost:
                    raise Failure(f"{run.name}: {lost} steps lost by polite stops")
                return f"{hits}, {lost} steps lost"

            judge(run, seat, "polite stops", stop)
        for point in fault.POINTS if options.points else []:
            for victim in (0, 1):
                seat = (3, 0, True)
                count = random_.randint(1, 3) if point.startswith(("save", "prune", "step", "evaluate")) else 1
                run = make(runs, f"point-{point.replace('.', '-')}-{victim}", *seat)

                def aimed(run: Run = run, point: str = point, victim: int = victim, count: int = count) -> int:
                    attempt(run, 3, None, f"{point}@{victim}:{count}")
                    # some points are rank 0's alone; the kill of a run that is over changes nothing
                    died = run.read()["state"] == store.RUNNING
                    while run.read()["state"] == store.RUNNING:
                        attempt(run, 3)
                    return int(died)

                judge(run, seat, f"SIGKILL of rank {victim} at {point}:{count}", aimed)
        if options.points:
            for first, second in ((1, 3), (3, 2), (4, 1), (2, 4)):
                seat = (second, 0, True)
                run = make(runs, f"elastic-{first}-{second}", first, 0, True)

                def resized(run: Run = run, first: int = first, second: int = second) -> int:
                    attempt(run, first, None, f"step@0:{random_.randint(10, 60)}")
                    attempt(run, second)
                    return 1

                if first in wanted and second in wanted:
                    judge(run, seat, f"killed on {first} ranks, resumed on {second}", resized, exactly=False)
    hits = sum(int(str(row[4]).split(",")[0]) for row in rows[2:] if str(row[4])[0].isdigit())
    os.write(out, f"\n{hits} hits, {len(failures)} mismatches\n".encode())
    for failure in failures:
        os.write(out, f"\n{failure}\n".encode())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
