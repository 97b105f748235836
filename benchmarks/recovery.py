"""`python -m benchmarks.recovery`: what the death of a rank costs, beside plain torchrun and torch.save.

Two ranks train the same model on the same machine, in turn: as a task of `train launch`, as a script in a session
(in_session.py), and as torch's tutorials do it (bare.py). One of them, drawn at random, gets SIGKILL. The table shows
the seconds until restarted ranks end a step that was never made before, how many steps were made twice, and whether the
weights at the end are those of an uninterrupted run. With `--every S` a rank is killed every S seconds, and the whole
time counts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks import bare, command, in_session, perceptron
from train.launcher import tmux
from train.launcher.launches import NewRun, NewScript
from train.launcher.stopping import stop_and_wait
from train.run import run_folder, states
from train.zygote.client import lives

RANKS, SAVE_EVERY = 2, 50
PATIENCE = 120.0
"""Seconds without a new step after which a way is given up."""


class Way(Protocol):
    """A living run of one kind."""

    def step(self) -> int:
        """Return the last step that was made; 0: none."""

    def ranks(self) -> list[int]:
        """Return the process ids of its ranks, once all live."""

    def lives(self) -> bool: ...

    def end(self) -> None:
        """End the run and leave nothing behind."""

    def digest(self) -> str:
        """Return the digest of the weights; '' if the run has not finished."""

    def twice(self) -> int:
        """Return how many steps it has made twice."""


class Launched:
    """A task of `train launch`."""

    def __init__(self, runs: Path, name: str, steps: int) -> None:
        self.start(runs, name, steps)
        self.run = run_folder.Run(runs / name)

    def start(self, runs: Path, name: str, steps: int) -> None:
        flags = {
            "steps": str(steps), "batch_size": str(bare.BATCH), "cpu_threads": "1", "device": "cpu",
            "checkpoint.every_steps": str(SAVE_EVERY), "log.every_steps": "1", "log.tensorboard": "false",
        }  # fmt: skip
        NewRun(perceptron.__file__, flags=flags, runs=str(runs), name=name, nproc=str(RANKS), max_restarts=100).start()

    def step(self) -> int:
        line = last_line(self.run.metrics)
        return int(json.loads(line)["step"]) if line else 0

    def ranks(self) -> list[int]:
        pids = self.run.read()["pids"].get("ranks", [])
        return list(pids) if len(pids) == RANKS else []

    def lives(self) -> bool:
        return self.run.alive()

    def end(self) -> None:
        stop_and_wait(self.run, states.NOW)
        subprocess.run(tmux.tmux(self.run.folder.parent, "kill-server"), capture_output=True, check=False)

    def digest(self) -> str:
        return self.run.read()["weights_sha256"] or ""

    def twice(self) -> int:
        return made_twice(self.run.read())


class InSession(Launched):
    """A script in a session, as `train launch --script` starts it."""

    def start(self, runs: Path, name: str, steps: int) -> None:
        arguments = [str(steps), str(SAVE_EVERY), "cpu"]
        NewScript(
            in_session.__file__, arguments=arguments, runs=str(runs), name=name, nproc=str(RANKS), max_restarts=100
        ).start()


class Bare:
    """torchrun and torch.save."""

    def __init__(self, runs: Path, name: str, steps: int, ranks: int = RANKS, device: str = "cpu") -> None:
        self.folder, self._ranks = runs / name, ranks
        self.folder.mkdir()
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--max-restarts",
            "100",
            "--nproc-per-node",
            str(ranks),
            bare.__file__,
            str(self.folder),
            str(steps),
            str(SAVE_EVERY),
            device,
        ]
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def step(self) -> int:
        return int(last_line(self.folder / "steps.log") or 0)

    def ranks(self) -> list[int]:
        import psutil

        with contextlib.suppress(psutil.Error):
            pids = [child.pid for child in psutil.Process(self.process.pid).children()]
            return pids if len(pids) == self._ranks else []
        return []

    def lives(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        for pid in self.ranks():  # in sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def digest(self) -> str:
        path = self.folder / "digest"
        return path.read_text() if path.exists() else ""

    def twice(self) -> int:
        steps = (self.folder / "steps.log").read_text().split() if self.step() else []
        return len(steps) - len(set(steps))


WAYS: dict[str, Callable[[Path, str, int], Way]] = {
    "a task": Launched,
    "a script in a session": InSession,
    f"torchrun, torch.save every {SAVE_EVERY} steps": Bare,
}


@dataclass
class Found:
    """The result of one run."""

    recoveries: list[float]
    """Seconds from each kill until restarted ranks ended a step that was never made before."""
    hangs: int
    seconds: float
    """From the first step to the end."""
    twice: int
    digest: str
    kills: int = 0


def bench(folder: Path, steps: int, times: int, every: float | None, seed: int = 0) -> str:
    """Measure in this folder. Returns a table in Markdown.

    Args:
        times: runs of each way, one kill each.
        every: kill a rank every so many seconds instead, for as long as the run lives.
    """
    random_ = random.Random(seed)
    lines = [
        "| way | kills | s to a new step: least | median | most | hung | repeated | time / undisturbed | digest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as name:
        calm = {
            way: live(make(Path(name), f"calm-{n}", steps), [], random_) for n, (way, make) in enumerate(WAYS.items())
        }
        found: dict[str, list[Found]] = {way: [] for way in WAYS}
        for count in range(times):  # in turn, so that a slow moment meets both
            at = steps * random_.uniform(0.2, 0.8)
            for n, (way, make) in enumerate(WAYS.items()):
                run = make(Path(name), f"run-{n}-{count}", steps)
                found[way].append(live(run, [int(at)], random_, every))
        lines += [_row(way, runs, calm[way]) for way, runs in found.items()]
    return "\n".join(lines)


def _row(way: str, runs: list[Found], calm: Found) -> str:
    took = [seconds for run in runs for seconds in run.recoveries]
    figures = f"{min(took):.2f} | {statistics.median(took):.2f} | {max(took):.2f}" if took else "- | - | -"
    hung, equal = sum(run.hangs for run in runs), sum(run.digest == calm.digest for run in runs)
    done = [run.seconds / calm.seconds for run in runs if run.digest]
    ratio = f"{statistics.median(done):.2f}" if done else "-"
    twice = sum(run.twice for run in runs)
    kills = sum(run.kills for run in runs)
    return f"| {way} | {kills} | {figures} | {hung} | {twice} | {ratio} | {equal} of {len(runs)} equal |"


def live(
    run: Way, at: list[int], random_: random.Random, every: float | None = None, patience: float = PATIENCE
) -> Found:
    """Watch a run to its end, and kill one of its ranks after each of these steps, or every so many seconds."""
    found, at = Found([], 0, 0.0, 0, ""), list(at)
    try:
        began = changed = next_at = time.monotonic()
        killed, old, highest = 0.0, list[int](), 0
        while run.lives():
            now, step = time.monotonic(), run.step()
            if step > highest:
                if not highest:
                    began = next_at = now
                if killed and not old:
                    found.recoveries.append(now - killed)
                    killed, next_at = 0.0, now
                highest, changed = step, now
            # those who outlive a rank may end the step that it died in, which is no recovery
            old = old if any(map(lives, old)) else []
            is_due = highest and not killed and (now - next_at > every if every else bool(at) and highest >= at[0])
            if is_due and (ranks := _kill(run, random_)):
                killed, old, changed = time.monotonic(), ranks, time.monotonic()
                found.kills += 1
                del at[:1]
            if now - changed > (patience if highest else max(patience, PATIENCE)):  # its start is another matter
                found.hangs += 1
                break
            time.sleep(0.01)
        found.seconds = time.monotonic() - began
    finally:
        run.end()
    found.twice, found.digest = run.twice(), run.digest()
    return found


def made_twice(record: Mapping[str, Any]) -> int:
    """Return how many steps of a run were made twice."""
    return sum(max(0, a["to_step"] - b["from_step"]) for a, b in itertools.pairwise(record["attempts"]))


def last_line(path: Path) -> str:
    """Return the last whole line of a file; '' if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")
    except OSError:
        return ""
    return lines[-2].decode() if len(lines) > 1 else ""


def _kill(run: Way, random_: random.Random) -> list[int]:
    """Kill one of the ranks. Returns the ranks that lived; []: none was hit."""
    ranks = run.ranks()
    if not ranks:
        return []
    with contextlib.suppress(ProcessLookupError):
        os.kill(random_.choice(ranks), signal.SIGKILL)
        return ranks
    return []


if __name__ == "__main__":
    command.run(bench, steps=1000, times=5, every=0.0)
