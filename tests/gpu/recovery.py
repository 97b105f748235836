"""What the death of a rank costs on the device, beside plain torchrun and torch.save.

A small GPT with AdamW on two GPUs, on one where there are no more. Ours is kept as the agent of `train launch` keeps
it, forked ranks and snapshots in memory, without tmux; the other as torch's tutorials have it: this file, as a script.
`python -m benchmarks.recovery` is the same on CPUs.

    python -m tests.gpu.recovery FOLDER_OF_THE_RUN RANKS        # be the agent
    torchrun … tests/gpu/recovery.py FOLDER STEPS FLAGS         # be a rank of the other
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SAVE_EVERY = 50
KILLED = 0.6
"""Of the steps, after which a rank is killed."""
SHARE = 0.25
"""Of plain torchrun's time to a new step, at most."""
PATIENCE = 25.0
"""Seconds without a new step after which plain torchrun hangs, which it does at about half of such restarts."""
GOAL = 2.0
"""Seconds to a new step."""


def part(scale: Any) -> Iterator[Any]:
    """One death of each kind."""
    from tests.gpu.harness import Case

    ranks = 2 if not scale.is_gpu or scale.gpus > 1 else 1
    yield Case(_what(ranks), 45, _rows, (scale, ranks))


def _what(ranks: int) -> str:
    return f"a rank of {ranks} is killed"


def _rows(scale: Any, ranks: int) -> Iterator[Any]:
    """One that is killed, beside one that nobody disturbs; and the other killed."""
    from benchmarks.recovery import live
    from tests.gpu.exact import reason
    from tests.gpu.harness import BELOW, FAILED, FIGURE, OK, Row, exact_flags, made
    from train.run import states

    steps, theirs = (800, 400) if scale.is_gpu else (200, 200)
    flags = exact_flags(scale, "gpt") | {"precision": "bf16", "steps": steps}
    del flags["checkpoint.every_steps"]  # memory alone has a state to go on from
    drawn = random.Random(0)
    whole, killed = (made(scale, "gpt", flags, ranks) for _ in range(2))
    undisturbed = Kept(whole, ranks)  # beside the other, which it slows down: its time does not count
    try:
        end = live(Kept(killed, ranks), [int(KILLED * steps)], drawn)
        undisturbed.process.wait(PATIENCE)
    finally:
        undisturbed.end()
    for record in (whole.read(), killed.read()):
        if record["state"] != states.FINISHED:
            yield Row(_what(ranks), f"{record['state']}: {reason(record)}", FAILED)
            return
    is_equal = end.digest == undisturbed.digest()
    if not end.recoveries:
        yield Row(_what(ranks), "it was over before memory had a state, and a rank could be killed", FAILED)
        return
    from_step = killed.read()["attempts"][-1]["from_step"]
    found = f"goes on after step {from_step}: {'equal' if is_equal else 'another digest'}"
    yield Row(_what(ranks), found, OK if is_equal and from_step else FAILED, "equal digests")
    yield Row("steps made twice", str(end.twice), FIGURE, "none", {"twice": end.twice})
    plain = Plain(scale.folder / "torchrun", theirs, flags, ranks)
    died = live(plain, [int(KILLED * theirs)], drawn, patience=PATIENCE)
    ours, other = end.recoveries[0], min(died.recoveries, default=None)
    beside = f"plain torchrun {other:.2f}, which makes {died.twice} steps twice" if other else _without(plain)
    found = f"{ours:.2f}; {beside}"
    verdict = FIGURE if not scale.is_gpu else OK if ours <= max(GOAL, SHARE * (other or 0.0)) else BELOW
    figures = {"seconds": ours, "torchrun_s": other, "torchrun_twice": died.twice}
    yield Row("seconds to a new step", found, verdict, f"{GOAL:g}, or {SHARE} of torchrun's", figures)


def _without(plain: Plain) -> str:
    """Why plain torchrun has no seconds to show."""
    if plain.step():
        return "plain torchrun hangs"
    lines = [line for line in (plain.folder / "log").read_text(errors="replace").splitlines() if line.strip()]
    return f"plain torchrun made no step: {' '.join(lines[-1:])}"[:300]


class Kept:
    """A run of ours, by an agent of its own."""

    def __init__(self, run: Any, ranks: int) -> None:
        self.run, self._ranks = run, ranks
        command = [sys.executable, "-m", "tests.gpu.recovery", str(run.folder), str(ranks)]
        with (run.folder / "agent.log").open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def step(self) -> int:
        from benchmarks.recovery import last_line

        line = last_line(self.run.metrics)
        return int(json.loads(line)["step"]) if line else 0

    def ranks(self) -> list[int]:
        """Once memory has a state, too: without one, a fast card would be killed for nothing that could be kept."""
        pids = self.run.read()["pids"].get("ranks", [])
        return list(pids) if len(pids) == self._ranks and self._kept() else []

    def _kept(self) -> int:
        """The newest step in the memory of its agent; 0: none, or there is no agent."""
        from train.checkpoint import buffers

        step = 0
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
                if "memfd:train-snapshot-" in str(entry.readlink()):
                    fd = os.open(entry, os.O_RDONLY)
                    head = buffers._head(fd)
                    os.close(fd)
                    step = max(step, head.step if head else 0)
        return step

    def lives(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        _end(self.process)  # its ranks end with it

    def digest(self) -> str:
        return self.run.read().get("weights_sha256") or ""

    def twice(self) -> int:
        from benchmarks.recovery import made_twice

        return made_twice(self.run.read())


class Plain:
    """torchrun and torch.save."""

    def __init__(self, folder: Path, steps: int, flags: dict[str, Any], ranks: int) -> None:
        folder.mkdir()
        self.folder, self._ranks = folder, ranks
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "9", "--nproc-per-node",
            str(ranks), __file__, str(folder.absolute()), str(steps), json.dumps(flags),
        ]  # fmt: skip
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def step(self) -> int:
        from benchmarks.recovery import last_line

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
        for pid in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _end(self.process)

    def digest(self) -> str:
        return ""

    def twice(self) -> int:
        file = self.folder / "steps.log"
        steps = file.read_text().split() if file.exists() else []
        return len(steps) - len(set(steps))


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def keep(folder: Path, ranks: int) -> int:
    """Be the agent of a run, as launcher/agent.py is inside tmux."""

    from train import hashing
    from train.run.run_folder import Run
    from train.signals import StopRequest
    from train.supervise.attempts import Supervisor
    from train.supervise.decide import LaunchMode
    from train.supervise.forks import CHECKS, RANKS, acquire
    from train.supervise.ranks import Ranks

    run, stop = Run(folder), StopRequest()
    zygote = acquire(hashing.fixed(os.environ), (*CHECKS, *RANKS))
    lock = run.acquire(patience=30.0)
    assert lock is not None
    return Supervisor(run, Ranks(run, lock, ranks, zygote), LaunchMode.LAUNCHED, stop).keep()


def train(folder: Path, steps: int, flags: dict[str, Any]) -> None:
    """Be a rank of plain torchrun: DDP, a DistributedSampler, torch.save every so many steps."""
    import types

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    from tests.gpu import bare
    from tests.gpu.tasks import gpt

    rank, is_gpu = int(os.environ["LOCAL_RANK"]), flags["device"] == "cuda"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    bare.set_arithmetic(flags, flags["precision"], device)
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo")
    torch.manual_seed(0)
    own = {name.removeprefix("task."): value for name, value in flags.items() if name.startswith("task.")}
    config, saved = types.SimpleNamespace(task=gpt.Settings(**own)), folder / "snapshot.pt"
    data, model = gpt.datasets(config)[0], gpt.model(config).to(device)
    sampler: Any = DistributedSampler(data, seed=0)
    loader = DataLoader(data, flags["batch_size"] // dist.get_world_size(), sampler=sampler, drop_last=True)
    optimizer, done = torch.optim.AdamW(model.parameters(), fused=is_gpu), 0
    if saved.exists():
        state = torch.load(saved, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    spread = DistributedDataParallel(model, device_ids=[rank] if is_gpu else None)
    with (folder / "steps.log").open("a", buffering=1) as log:
        while done < steps:
            sampler.set_epoch(done // len(loader))
            for batch in loader:
                optimizer.zero_grad()
                with bare.autocast(flags["precision"], device):
                    found = gpt.loss(spread, [tensor.to(device) for tensor in batch])
                found.backward()
                optimizer.step()
                done += 1
                if rank == 0:
                    found.item()  # a step counts when it is made, not when the device was asked for it
                    log.write(f"{done}\n")
                    if done % SAVE_EVERY == 0:
                        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
                        torch.save(state, folder / "snapshot.tmp")
                        (folder / "snapshot.tmp").replace(saved)
                if done == steps:
                    break
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 3:
        train(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        sys.exit(keep(Path(sys.argv[1]), int(sys.argv[2])))
