"""`python -m benchmarks.listing`: what `train ls` of many runs costs the processor.

The runs are copies of one that was really trained; every tenth was killed, so its state is looked up. A listing of one
run beside them shows what the command itself costs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks import command

COUNTS = (1, 1000)
_TRAIN = (sys.executable, "-m", "train")


def bench(folder: Path, times: int) -> str:
    """Measure with this many listings for each row. Returns a table in Markdown."""
    rows = ["| runs | seconds of a processor, best | median |", "|---|---|---|"]
    one = trained(folder)
    for count in COUNTS:
        runs = copies(one, folder / f"runs-{count}", count)
        took = sorted(_cpu(runs) for _ in range(times))
        rows.append(f"| {count} | {took[0]:.3f} | {took[len(took) // 2]:.3f} |")
    return "\n".join(rows)


def trained(folder: Path) -> Path:
    """Return the folder of a run that was trained, in a folder of runs of its own."""
    flags = ("--name", "run-0", "--steps", "200", "--log.every_steps", "1", "--checkpoint.every_steps", "100")
    started = [*_TRAIN, "launch", "digits", *flags, "--follow", "--runs", str(folder / "one")]
    subprocess.run(started, check=True, capture_output=True)
    return folder / "one" / "run-0"


def copies(run: Path, runs: Path, count: int) -> Path:
    """Fill a folder with copies of a run, of which every tenth was killed. Return it."""
    for number in range(count):
        _copy(run, runs / f"run-{number}", is_killed=number % 10 == 9)
    return runs


def _copy(run: Path, target: Path, is_killed: bool) -> None:
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    record = json.loads((target / "run.json").read_text())
    (target / "checkpoints" / f"step-{record['step']:08d}").mkdir(parents=True)
    if is_killed:
        record |= {"state": "running", "ended": None}
        record["attempts"][-1] |= {"end": None, "ended": None}
        (target / "run.json").write_text(json.dumps(record, indent=1))


def _cpu(runs: Path) -> float:
    """Return the seconds of a processor that a listing takes."""
    pid = os.posix_spawn(
        _TRAIN[0], [*_TRAIN, "ls", "--runs", str(runs)], os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)],
    )  # fmt: skip
    _, status, used = os.wait4(pid, 0)
    assert status == 0, f"train ls ended with {status}"
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    command.run(bench, times=5)
