"""Kill runs in every way until nobody can doubt that it changes nothing. `make torture` runs this.

    python tests/torture/torture.py --seed 0 --kills 208 --stops 64 --spread-kills 24 --launched-kills 40

Every run is compared with an undisturbed one of the same world size: weights_sha256, consumed sample ids, and step,
epoch, loss, learning rate and evaluations in metrics.jsonl must be equal. Processes and signals are real; victims and
instants are drawn from the seed. Prints the table of docs/reliability.md and exits with 1 on any mismatch.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.tasks import TASKS
from tests.torture import launched, spawned
from tests.torture.check import FLAGS, Failure, change, compare, logs, make, outcome
from train import faults
from train.launcher import tmux
from train.launcher.launches import NewRun
from train.proof.prove import EXACT, Wanted, prove
from train.run import states
from train.run.run_folder import Run

STEPS = 72
"""Three epochs."""
LONG = 480
"""Of launched runs: twenty epochs, so that training takes about as long as starting."""
Case = tuple[int, int, bool]
"""Ranks, loader workers, asynchronous saving."""
MANY = 3
"""Disturbances that one run takes; more are shared among several, that early and late steps are met alike."""


SPREAD = {
    "fsdp": (3, {"parallel.strategy": "fsdp", "parallel.wrap": "Conv2d,Linear"}),
    "hsdp": (4, {"parallel.strategy": "hsdp", "parallel.shard_size": "2"}),
    "ordered": (3, {"parallel.reduce": "ordered"}),
}
"""Ways to spread a model beside ddp: on how many ranks, and the flags."""
NO_DISK = {"checkpoint.every_steps": "none", "checkpoint.every_minutes": "0"}
"""One checkpoint, at the end."""
REMEMBERED = {
    "digits": ("digits", {}),
    "batchnorm": (
        str(TASKS / "learner.py"),
        {"task.batchnorm": "true", "task.samples": "1436", "task.width": "64"},
    ),
    "fsdp": ("digits", {"parallel.strategy": "fsdp"}),
}  # type: dict[str, tuple[str, dict[str, str]]]
"""Tasks whose runs are started again from memory, with their flags: without and with running statistics. No micro batch
of one sample, on 1 to 4 ranks: BatchNorm refuses it."""
FAULTS_OF_MEMORY = (
    "snapshot.begin@0:40",
    "snapshot.written@0:30",
    "snapshot.sealed@0:50",
    "update@0:150",
)
"""Where every attempt is killed."""
EVERY_RANK = (
    "start", "loaded", "step", "evaluate", "update", "save.staged", "save.begin", "save.written",
    "save.shards",
)  # fmt: skip
"""Points that all ranks pass; the others are rank 0's."""


class Table:
    """Rows as they are known, and what went wrong."""

    def __init__(self, out: int) -> None:
        self.out, self.hits, self.failures = out, 0, []  # type: tuple[int, int, list[str]]
        self.row("ranks", "workers", "saving", "what", "hits", "attempts", "mismatches")
        self.row(*["---"] * 7)

    def row(self, *cells: object) -> None:
        os.write(self.out, ("| " + " | ".join(map(str, cells)) + " |\n").encode())

    def judge(self, case: Case, what: str, runs: list[Run], hits: int, failures: list[str], note: str = "") -> None:
        """A row about these runs."""
        attempts = sum(len(run.read()["attempts"]) for run in runs)
        saving = "async" if case[2] else "sync"
        self.hits += hits
        self.failures += failures
        self.row(case[0], case[1], saving, what, f"{hits}{note}", attempts, len(failures))
        for failure in failures:  # at once: the rest takes an hour
            os.write(self.out, f"\n{failure}\n\n".encode())


class Torture:
    """The runs of one call."""

    def __init__(
        self, runs: Path, seed: int, table: Table, only: str = "", saving: tuple[bool, ...] = (False, True)
    ) -> None:
        self.runs, self.random, self.table, self.only = runs, random.Random(seed), table, only
        self.saving = saving
        self.wanted: dict[tuple[int, int], dict[str, Any]] = {}
        self.durations: dict[Case, float] = {}
        self._number = 0

    def fresh(self, case: Case, what: str, steps: int = STEPS) -> Run:
        self._number += 1
        return make(self.runs, f"{what}-{self._number}", *case, steps=steps)

    def base(self, case: Case) -> None:
        """How a run of this kind ends undisturbed, and in what time; the same for all of a world size."""
        run = self.fresh(case, "base")
        self.durations[case] = spawned.attempt(run, case[0])
        if run.read()["state"] != states.FINISHED:
            raise Failure(logs(run))
        compare(run, self.wanted.setdefault((case[0], STEPS), outcome(run)))

    def until(self, case: Case, what: str, count: int, act: Callable[[Run, int], tuple[int, int]], steps: int) -> None:
        """Disturb runs of this kind until `count` disturbances have hit."""
        if self.only not in what:
            return
        hits = lost = 0
        runs: list[Run] = []
        failures: list[str] = []
        while hits < count and len(failures) < 3:
            run = self.fresh(case, what.replace(":", "").replace(" ", "-"), steps)
            runs.append(run)
            try:
                more, less = act(run, min(MANY, count - hits))
                hits, lost = hits + more, lost + less
                if less:
                    raise Failure(f"{run.name}: {less} steps lost by polite stops")
                compare(run, self.wanted[case[0], steps])
            except Failure as failure:
                failures.append(str(failure))
        self.table.judge(case, what, runs, hits, failures, f", {lost} steps lost" if "stop" in what else "")

    def kills(self, cases: list[Case], count: int) -> None:
        share = -(-count // len(cases))
        for case in cases:
            self.until(
                case, "SIGKILL at random instants", share,
                lambda run, n, s=case: (spawned.killed(run, s[0], self.durations[s], self.random, n), 0), STEPS,
            )  # fmt: skip

    def stops(self, cases: list[Case], count: int) -> None:
        share = -(-count // len(cases))
        for case in cases:
            self.until(
                case, "polite stops", share,
                lambda run, n, s=case: spawned.stopped(run, s[0], self.durations[s], self.random, n), STEPS,
            )  # fmt: skip

    def once(self, case: Case, what: str, act: Callable[[Run], bool], first: int, exactly: bool = True) -> None:
        """One disturbance of one run, created for `first` ranks, that ends on those of the case."""
        if self.only not in what:
            return
        run = self.fresh((first, *case[1:]), "once")
        hits, failures = 0, []
        try:
            hits = int(act(run))
            compare(run, self.wanted[case[0], STEPS], exactly)
        except Failure as failure:
            failures.append(str(failure))
        self.table.judge(case, what, [run], hits, failures)

    def points(self, ranks: int) -> None:
        """A kill at each named point, of rank 0 and of another; then other world sizes, twice in one epoch."""
        for point, victim, asynchronous in itertools.product(faults.POINTS, (0, 1), self.saving):
            # the supervisor's, which is this process; of memory that an agent owns: see `remembered`
            if point in ("decided", "save.frozen") or point.startswith("snapshot"):  # nothing is frozen here
                continue
            if (victim and point not in EVERY_RANK) or (point == "save.staged" and not asynchronous):
                continue
            count = self.random.randint(1, 3) if point.startswith(("save", "prune", "step", "evaluate")) else 1

            def aimed(run: Run, text: str = f"{point}@{victim}:{count}") -> bool:
                spawned.attempt(run, ranks, None, text)
                # a run that is over is not changed by a kill: nothing hit it then
                died = bool(run.read()["state"] == states.RUNNING)
                while run.read()["state"] == states.RUNNING:
                    spawned.attempt(run, ranks)
                return died

            self.once((ranks, 0, asynchronous), f"SIGKILL of rank {victim} at {point}:{count}", aimed, ranks)
        # a death during the last save must not pass for an end
        for point, victim in itertools.product(("save.begin", "save.written", "save.shards", "save.renamed"), (0, 1)):
            if victim and point not in EVERY_RANK:
                continue
            text = f"{point}@{victim}:{-(-STEPS // 5)}"

            def last(run: Run, text: str = text) -> bool:
                spawned.attempt(run, ranks, None, text)
                died = bool(run.read()["state"] == states.RUNNING)
                while run.read()["state"] == states.RUNNING:
                    spawned.attempt(run, ranks)
                return died

            self.once((ranks, 0, True), f"SIGKILL of rank {victim} at the last {point}", last, ranks)
        for first, second, third in ((1, 3, 3), (3, 2, 2), (4, 1, 3), (2, 4, 1)):

            def resized(run: Run, sizes: tuple[int, ...] = (first, second, third)) -> bool:
                spawned.attempt(run, sizes[0], None, f"step@0:{self.random.randint(10, 30)}")
                spawned.attempt(run, sizes[1], None, f"step@0:{self.random.randint(2, 12)}")
                spawned.attempt(run, sizes[2])
                return True

            if (third, STEPS) in self.wanted:
                what = f"killed on {first}, then on {second}, finished on {third} ranks"
                self.once((third, 0, True), what, resized, first, exactly=False)

    def strategies(self, kills: int) -> None:
        """Other ways to spread a model: killed at random instants; and runs that move between them."""
        for what, (ranks, flags) in SPREAD.items():
            if self.only not in what:
                continue
            case, failures, hits, made = (ranks, 0, True), [], 0, []
            try:
                base = make(self.runs, f"{what}-base", *case, steps=STEPS, more=flags)
                duration, wanted = spawned.attempt(base, ranks), outcome(base)
                while hits < kills:
                    run = make(self.runs, f"{what}-{len(made)}", *case, steps=STEPS, more=flags)
                    made.append(run)
                    hits += spawned.killed(run, ranks, duration, self.random, min(MANY, kills - hits))
                    compare(run, wanted)
            except Failure as failure:
                failures.append(str(failure))
            self.table.judge(case, f"{what}: SIGKILL at random instants", made, hits, failures)
        moves = [("ddp", 2), ("fsdp", 3), ("ddp", 1), ("hsdp", 4), ("fsdp", 2), ("ddp", 3)]

        def moving(run: Run) -> bool:
            for place, (name, ranks) in enumerate(moves):
                share = "2" if name == "hsdp" else "none"
                change(run, ranks, {"parallel.strategy": name, "parallel.shard_size": share})
                is_last = place == len(moves) - 1
                spawned.attempt(run, ranks, None, "" if is_last else f"step@0:{self.random.randint(6, 9)}")
            return True

        if (3, STEPS) in self.wanted:
            self.once((3, 0, True), "killed on ddp, fsdp, one, hsdp, fsdp, finished on ddp", moving, 2, exactly=False)

    def launched(self, ranks: int, kills: int, stops: int) -> None:
        """The same to runs as users launch them, through tmux and the agent."""
        case = (ranks, 0, True)
        run = self.fresh(case, "launched-base", LONG)
        launched.resume(run)
        duration = launched.wait_for_end(run)
        self.wanted[ranks, LONG] = outcome(run)
        if run.read()["state"] != states.FINISHED:
            raise Failure(logs(run))
        self.proved(case, kills)
        for whom in launched.STOPS if stops else ():
            self.until(
                case, f"launched: polite stops to {whom}", -(-stops // len(launched.STOPS)),
                lambda run, n, w=whom: launched.stopped(run, duration, self.random, w, n), LONG,
            )  # fmt: skip
        subprocess.run(tmux.tmux(self.runs, "kill-server"), capture_output=True, check=False)

    def proved(self, case: Case, kills: int) -> None:
        """Runs that `train prove` breaks off: a rank, the agent, the tmux server or everything is killed, or it is
        stopped, also in saves."""
        what = "launched: train prove"
        hits, failures = 0, []
        while hits < kills and len(failures) < 3 and self.only in what:
            self._number += 1
            wanted = Wanted(
                launch=lambda folder, name, _: NewRun(
                    "digits", flags=FLAGS | {"steps": str(LONG)} | NO_DISK, runs=str(folder), name=name,
                    nproc=str(case[0]),
                ),
                updates=LONG // 4, kills=min(2 * MANY, kills - hits), seed=self.random.randrange(10**6),
            )  # fmt: skip
            found = prove(wanted, self.runs, f"torture-{self._number}")
            hits += len(found.breaks)
            if found.verdict != EXACT:
                failures.append(found.text())
        self.table.judge(case, what, [], hits, failures)

    def remembered(self, ranks: int, kills: int) -> None:
        """Ranks killed while they train, and started again from memory: there is nothing for them on the disk."""
        case = (ranks, 0, True)
        for kind in REMEMBERED:
            has_part = kind in SPREAD
            if has_part and ranks == 1:
                continue
            base = self._remembered(kind, case)
            launched.resume(base)
            launched.wait_for_end(base)
            wanted = outcome(base)
            if wanted["state"] != states.FINISHED:
                raise Failure(logs(base))
            for everyone in (False, True) if ranks > 1 else (True,):
                whom = "all ranks" if everyone else "a rank"
                self._burn(kind, case, f"SIGKILL of {whom}", wanted, kills, everyone)
            # where each has a part of the state, a death in every first copy leaves none that is whole
            for text in () if has_part else FAULTS_OF_MEMORY:
                self._burn(kind, case, text, wanted, 1, everyone=True)
        subprocess.run(tmux.tmux(self.runs, "kill-server"), capture_output=True, check=False)

    def _burn(self, kind: str, case: Case, how: str, wanted: dict[str, Any], kills: int, everyone: bool) -> None:
        """A row: kills at random instants, or a fault that meets every attempt."""
        what = f"{kind}, from memory: {how}"
        if self.only not in what:
            return
        hits, again, failures, made = 0, 0, [], []
        while hits < kills and len(failures) < 3:
            run = self._remembered(kind, case)
            made.append(run)
            try:
                if how.startswith("SIGKILL"):
                    launched.under_fire(run, self.random, everyone, min(MANY, kills - hits))
                else:
                    launched.resume(run, how)
                    launched.wait_for_end(run, several=5)
                compare(run, wanted)
                again += launched.twice(run)
            except Failure as failure:
                failures.append(str(failure))
            hits += max(1, len(run.read()["attempts"]) - 1)
        self.table.judge(case, what, made, hits, failures, f", {again} steps repeated")

    def _remembered(self, kind: str, case: Case) -> Run:
        self._number += 1
        task, flags = REMEMBERED[kind]
        return make(self.runs, f"remembered-{self._number}", *case, steps=LONG, more=flags | NO_DISK, task=task)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=208, help="SIGKILLs at random instants over the whole matrix")
    parser.add_argument("--stops", type=int, default=64, help="polite stops at random instants over the matrix")
    parser.add_argument("--spread-kills", type=int, default=24, help="SIGKILLs for each of fsdp, hsdp and ordered")
    parser.add_argument("--launched-kills", type=int, default=40, help="SIGKILLs of launched runs: rank, agent, tmux")
    parser.add_argument("--launched-stops", type=int, default=150, help="stops of launched runs: agent, rank, all")
    parser.add_argument("--memory-kills", type=int, default=9, help="SIGKILLs a row of runs that go on from memory")
    parser.add_argument(
        "--points", action=argparse.BooleanOptionalAction, default=True, help="a kill at every named point; world sizes"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows with this text, to look into one again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--saving", choices=["sync", "async"], nargs="+", default=["sync", "async"])
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    logging.getLogger("train").setLevel(logging.ERROR)
    os.environ["OMP_NUM_THREADS"] = "1"
    began = time.monotonic()
    table = Table(os.dup(1))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the ranks' own words are in their logs
    with tempfile.TemporaryDirectory(prefix="train-torture-runs-") as temporary:
        saving = tuple(word == "async" for word in options.saving)
        torture = Torture((options.runs or Path(temporary)).absolute(), options.seed, table, options.only, saving)
        cases = list(itertools.product(options.ranks, options.workers, saving))
        try:
            for case in cases:
                torture.base(case)
            if options.kills:
                torture.kills(cases, options.kills)
            if options.stops:
                torture.stops(cases, options.stops)
            if options.points:
                torture.points(3 if 3 in options.ranks else options.ranks[-1])
            if options.spread_kills:
                torture.strategies(options.spread_kills)
            if options.launched_kills or options.launched_stops:
                torture.launched(2, options.launched_kills, options.launched_stops)
            for ranks in (1, 2, 3) if options.memory_kills else ():
                if ranks in options.ranks:
                    torture.remembered(ranks, options.memory_kills)
        except Exception:  # in an undisturbed run: there is nothing to compare with
            table.failures.append(traceback.format_exc())
            os.write(table.out, f"\n{table.failures[-1]}\n".encode())
    minutes = (time.monotonic() - began) / 60
    os.write(table.out, f"\n{table.hits} hits, {len(table.failures)} mismatches, {minutes:.0f} minutes\n".encode())
    return 1 if table.failures else 0


if __name__ == "__main__":
    sys.exit(main())
