"""`python -m benchmarks.start`: from the command to the second optimizer step of two ranks, beside plain torchrun.

torchrun starts a script of twenty lines with a perceptron under DistributedDataParallel. `train launch` starts a model
of the same size with everything that it does for a run. Then a rank is killed, and the run is stopped and resumed: how
long until a new step? Ours is measured cold, and warm with a process that has imported torch, as a keeper holds one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks import command, virtual
from train import hash_seed
from train.launcher.stopping import stop_and_wait
from train.run import heartbeat, states
from train.run.run_folder import Run
from train.scripts.health import family
from train.zygote import client as zygote

RANKS = 2
PATIENCE = 600.0
"""Seconds after which a start without a step counts as failed."""

SCRIPT = """
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (inputs, classes) in enumerate(loader, start=1):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), classes).backward()
    optimizer.step()
    if step == 2 and os.environ["RANK"] == "0":
        os.mkdir(sys.argv[1])
    if step > 2:
        time.sleep(600)  # until its end is measured
"""


class Took(NamedTuple):
    """Cost of reaching a step, of all processes together."""

    seconds: float
    """Seconds of wall clock."""
    cpu: float
    """Seconds of processors' time."""
    memory: float
    """MB that they hold then; shared pages count once (PSS)."""


PLAIN = "torchrun, bare DDP"
OURS = ("train launch", "a rank killed", "train resume")


def bench(folder: Path, times: int) -> str:
    """Measure this many starts of each, in turn. Returns a table in Markdown."""
    rows = [PLAIN, *(f"{row}, {how}" for how in ("cold", "warm") for row in OURS)]
    took: dict[str, list[Took]] = {row: [] for row in rows}
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as name, _held_warm() as held:
        place = Path(name)
        (place / "script.py").write_text(SCRIPT)
        for count in range(times):
            took[PLAIN].append(_torchrun(place, count))
            for how, environment in (("cold", {zygote.OFF: "off"}), ("warm", held)):
                ones = _train(place / how, f"run-{count}", os.environ | environment)
                for row, one in zip(OURS, ones, strict=True):
                    took[f"{row}, {how}"].append(one)
    lines = [
        "| way | until | s | least | CPU s | MB | s / torchrun | CPU / torchrun | MB / torchrun |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, ones in took.items():
        walls, cpus, sizes = zip(*ones, strict=True)
        ratio, busy, share = (
            statistics.median(mine[which] / its[which] for mine, its in zip(ones, took[PLAIN], strict=True))
            for which in range(3)
        )
        until = "second step" if row == PLAIN or row.startswith(OURS[0]) else "a new step"
        lines.append(
            f"| {row} | {until} | {statistics.median(walls):.2f} | {min(walls):.2f} | {statistics.median(cpus):.2f} "
            f"| {statistics.median(sizes):.0f} | {ratio:.2f} | {busy:.2f} | {share:.2f} |"
        )
    return "\n".join(lines)


@contextlib.contextmanager
def _held_warm() -> Iterator[dict[str, str]]:
    """Context manager with a process that has imported torch. Yields the variables with which it is found."""
    with tempfile.TemporaryDirectory(prefix="train-bench-") as name:  # of its own, and short: a socket lies in it
        environment = {"TMPDIR": name, zygote.OFF: "on"}
        environ = hash_seed.with_seed(os.environ | environment)
        process = zygote.start_lender(environ)
        assert process is not None
        try:
            zygote.acquire(environ, ()).close()  # once all is imported
            yield environment
        finally:
            process.kill()
            process.wait()


def _torchrun(place: Path, count: int) -> Took:
    mark = place / f"mark-{count}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, str(place / "script.py"), str(mark)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _until(mark.exists, lambda: process.poll() is None)
        return Took(time.perf_counter() - began, _cpu([process.pid]), _memory([process.pid]))
    finally:
        for one in family([process.pid]):
            one.kill()
        process.wait()


def _train(runs: Path, name: str, environment: dict[str, str]) -> list[Took]:
    """Measure a launch, a death and a resume."""
    run = Run(runs / name)
    fields = ["--steps", "1000000000", "--batch_size", "64", "--cpu_threads", "1", "--checkpoint.every_steps", "50"]
    took = []
    try:
        before, began = _ended(), time.perf_counter()
        _call(
            environment, "launch", virtual.__file__, "--name", name, "--nproc", str(RANKS), "--runs", str(runs), *fields
        )
        _until(lambda: _step(run, 1) >= 2, run.alive)
        took.append(Took(time.perf_counter() - began, _ended() - before + _cpu(_pids(run)), _memory(_pids(run))))

        _until(lambda: bool(run.steps_saved()) and len(_pids(run)) > RANKS + 1, run.alive)
        both = _pids(run)[:2]  # what they have started is counted with them
        reached, spent, began = _step(run, 1), _cpu(both), time.perf_counter()
        os.kill(_pids(run)[-1], signal.SIGKILL)
        _until(lambda: _step(run, 2) > reached, run.alive)
        took.append(Took(time.perf_counter() - began, _cpu(both) - spent, _memory(both)))

        _call(environment, "stop", name, "--runs", str(runs))
        reached, before, began = run.read()["step"], _ended(), time.perf_counter()
        _call(environment, "resume", name, "--runs", str(runs))
        _until(lambda: _step(run, 3) > reached, run.alive)
        took.append(Took(time.perf_counter() - began, _ended() - before + _cpu(_pids(run)), _memory(_pids(run))))
    finally:
        if (run.folder / "run.json").exists():
            stop_and_wait(run, states.NOW)
    return took


def _call(environment: dict[str, str], *arguments: str) -> None:
    command = [sys.executable, "-m", "train", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"train {' '.join(arguments)}: {done.stderr}")


def _step(run: Run, attempt: int) -> int:
    return heartbeat.reached(run.logs(attempt))


def _pids(run: Run) -> list[int]:
    """Return the process ids of the agent, the zygote and its ranks."""
    pids = run.read().get("pids") or {}
    ranks = pids.get("ranks", [])
    with contextlib.suppress(psutil.Error):
        return [pids["agent"], psutil.Process(ranks[0]).ppid(), *ranks] if ranks else []
    return []


def _until(reached: Callable[[], bool], lives: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        if time.monotonic() > deadline or not lives():
            raise RuntimeError("a start that is measured came to no step")
        time.sleep(0.01)


def _ended() -> float:
    """Return the CPU seconds of ended processes that this process started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu(pids: Iterable[int]) -> float:
    """Return the CPU seconds of these processes and all that they started."""
    seconds = 0.0
    for process in family(pids):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _memory(pids: Iterable[int]) -> float:
    """Return the MB of these processes and all that they started; shared pages count once."""
    size = 0
    for process in family(pids):
        with contextlib.suppress(psutil.Error):
            size += process.memory_full_info().pss
    return size / 1e6


if __name__ == "__main__":
    command.run(bench, times=5)
