"""`python -m benchmarks.lengths`: how many more tokens per second a task trains whose `lengths` group its samples.

A small transformer trains two epochs on sequences as long as sentences are (benchmarks/sentences.py), on one rank, in
random order and grouped, in turn. `collate` pads each micro batch to its longest sequence. What counts are the tokens
without padding, in the second epoch.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import command

TASKS = {
    "random order": "from benchmarks.sentences import *\n",
    "lengths": """from benchmarks.sentences import *

def lengths(config):
    return [len(sentence) for sentence in datasets(config)[0].sentences]
""",
}


def bench(folder: Path, samples: int, batch: int, times: int) -> str:
    """Measure in this folder. Returns a table in Markdown."""
    speeds: dict[str, list[float]] = {name: [] for name in TASKS}
    for turn in range(times):
        for name, text in TASKS.items():
            task = folder / f"{name.partition(' ')[0]}.py"
            task.write_text(text)
            speeds[name].append(_tokens_per_second(folder, task, f"{task.stem}{turn}", samples, batch))
    first = speeds["random order"]
    lines = ["| order | tokens/s | ratio | quartiles |", "|---|---|---|---|"]
    for name, found in speeds.items():
        ratios = [one / other for one, other in zip(found, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if times > 1 else 3 * ratios
        lines.append(f"| {name} | {statistics.median(found):.0f} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    return "\n".join(lines)


def _tokens_per_second(folder: Path, task: Path, name: str, samples: int, batch: int) -> float:
    """Train two epochs. Returns the speed of the second one."""
    flags = {
        "runs": folder / "runs", "name": name, "epochs": 2, "task.samples": samples, "batch_size": batch,
        "log.every_steps": -(-samples // batch), "cpu_threads": 1,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-m", "train", "run", task, *(f"--{flag}={value}" for flag, value in flags.items())],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["counted_per_s"])


if __name__ == "__main__":
    command.run(bench, samples=2000, batch=32, times=7)
