"""`train bench scaling`: what more ranks bring, by strategy, beside DistributedDataParallel as one writes it by hand.

Every rank has a batch of the same size (weak scaling). A speed-up is that of the samples a second over those of a bare
loop on one rank, an efficiency its share of the number of ranks. All ways of as many ranks are timed in turn on the
same processes; memory is that of processes which do nothing else. "not computing" is the share of a step by which it
is longer than one without any exchange, of as many ranks at the same time.

Over several machines (`--nnodes`, on each of them) the rows of node 0 alone come first, then those of all ranks
together; node 0 says what is measured, and all show the same table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import resource
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from train.bench.meeting import Meeting
from train.bench.stepping import stepping
from train.bench.turns import Blocks, Way, measure, ratio
from train.config import Parallel
from train.errors import Refused
from train.parallel.precision import Precision
from train.parallel.world import World

STEPS = 5
"""Steps a block."""
_BARE, _HAND, _ALONE = "a bare loop", "DDP by hand", "without exchange"


@dataclass(frozen=True)
class Subject:
    """What is trained: a model, and the batch of a rank."""

    model: str
    batch: int
    shape: tuple[int, ...]
    """Of a sample."""

    def build(self) -> nn.Module:
        if self.model == "mlp":
            layers = [nn.Linear(self.shape[0], 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
            return nn.Sequential(*layers)
        import torchvision

        network: nn.Module = getattr(torchvision.models, self.model)(num_classes=10)
        return network

    def samples(self, device: torch.device) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.batch, *self.shape, generator=generator)
        return inputs.to(device), torch.randint(10, (self.batch,), generator=generator).to(device)

    def precision(self, device: torch.device) -> Precision:
        return Precision("bf16" if device.type == "cuda" and self.model != "mlp" else "fp32", device)


SUBJECTS = {
    "mlp": Subject("mlp", 128, (512,)),
    "resnet18": Subject("resnet18", 16, (3, 64, 64)),
    "resnet50": Subject("resnet50", 64, (3, 224, 224)),
}


@dataclass(frozen=True)
class Row:
    """One way on so many ranks."""

    way: str
    ranks: int
    samples_per_s: float
    speed_up: float
    efficiency: float
    not_computing: float | None
    """Share of a step; None where it has nothing to compare with."""
    by_hand: float | None
    """Seconds of a step over those of DDP by hand: the median of the blocks' ratios."""
    memory: int
    """Bytes at the peak: of the process on a CPU, of tensors on a GPU; of the rank on node 0 that has most."""
    machines: int = 1


@dataclass(frozen=True)
class Ranks:
    """Those that measure at a time."""

    local: int
    """On this machine."""
    meeting: Meeting | None = None
    """With as many on each of the other machines."""

    @property
    def machines(self) -> int:
        return self.meeting.nodes if self.meeting is not None else 1

    @property
    def size(self) -> int:
        return self.local * self.machines

    def measure(self, folder: Path, ways: dict[str, Way], steps: int, times: int) -> Blocks:
        together = self.meeting.begin() if self.meeting is not None else None
        return measure(folder, self.local, ways, steps, times, together)


@dataclass
class Found:
    """What has been measured."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    """What cannot be shown, and why."""


def bench(
    folder: Path, times: int, name: str, strategies: list[Any], ranks: list[int], as_json: bool, to: Path | None,
    cluster: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """Measure with so many blocks of each way. Returns a table in Markdown, or JSON; draws speed-ups into `to`.

    Args:
        name: of SUBJECTS.
        strategies: of dp, ddp, fsdp, hsdp; none: dp, ddp and fsdp, as far as they can be.
        ranks: numbers of ranks; none: 1, 2, 4, … up to the number of GPUs, or 1 and 2 on the CPU. Over several machines
            the ranks of each: one number; none: the GPUs, or 1.
        to: a file that record/target.py has checked.
        cluster: over several machines, the arguments of Meeting.

    Raises:
        Refused: the picture cannot be written; the other machines do not come, or have other GPUs.
    """
    if cluster is None:
        return _shown(_here(folder, times, SUBJECTS[name], strategies, ranks), SUBJECTS[name], as_json, to)
    meeting = Meeting(**cluster)
    machines = meeting.everybody({"gpus": torch.cuda.device_count(), "host": socket.gethostname()})
    local = ranks[0] if ranks else max(min(machine["gpus"] for machine in machines), 1)
    asked = json.loads(meeting.share("asked", json.dumps([name, strategies, local, times])))
    name, strategies, local, times = asked
    gpus = [machine["gpus"] for machine in machines]
    if any(0 < count < local for count in gpus) or (any(gpus) and not all(gpus)):
        raise Refused(
            f"{local} ranks on each node, which have {', '.join(map(str, gpus))} GPUs; use --nproc {min(gpus) or 1}"
        )
    found = _here(folder, times, SUBJECTS[name], strategies, [local]) if meeting.node == 0 else Found()
    _add(found, folder, times, SUBJECTS[name], strategies, Ranks(local, meeting))
    if len({machine["host"] for machine in machines}) < len(machines):
        found.missing.append("what a network between machines costs, for some of the nodes are one machine")
    shown = _shown(found, SUBJECTS[name], as_json, to) if meeting.node == 0 else None
    text = meeting.share("shown", shown)
    meeting.close()
    return text


def _here(folder: Path, times: int, subject: Subject, strategies: list[Any], ranks: list[int]) -> Found:
    """What this machine alone can do."""
    gpus = torch.cuda.device_count()
    wanted = ranks or ([2**n for n in range(gpus.bit_length())] if gpus else [1, 2])
    found = Found()
    for size in sorted({1, *wanted}):
        if gpus and size > gpus:
            found.missing.append(f"{size} ranks, for {gpus} GPU{'s are' if gpus > 1 else ' is'} here")
        else:
            _add(found, folder, times, subject, strategies, Ranks(size))
    return found


def _add(found: Found, folder: Path, times: int, subject: Subject, strategies: list[Any], ranks: Ranks) -> None:
    ways, absent = _ways(subject, ranks, strategies or ["dp", "ddp", "fsdp"], torch.cuda.device_count())
    found.missing += absent
    found.rows += _measured(folder, subject, ranks, ways, times, found.rows)


def _shown(found: Found, subject: Subject, as_json: bool, to: Path | None) -> str:
    gpus = torch.cuda.device_count()
    rows, missing, name = found.rows, list(found.missing), subject.model
    cores = os.cpu_count() or 1
    if not gpus and max(row.ranks // row.machines for row in rows) > cores:
        missing.append(f"a speed-up on more than {cores} ranks, for they share so many cores")
    if to is not None:
        _draw(rows, f"{name}, {_where(gpus)}", to)
    if as_json:
        told = {"model": name, "device": _where(gpus), "rows": list(map(dataclasses.asdict, rows)), "missing": missing}
        return json.dumps(told, indent=2)
    return _table(rows, f"{name}, {subject.batch} samples a rank and step, on {_where(gpus)}", missing)


def _where(gpus: int) -> str:
    return torch.cuda.get_device_name(0) if gpus else "the CPU, one thread a rank"


def _ways(subject: Subject, ranks: Ranks, strategies: list[Any], gpus: int) -> tuple[dict[str, Way], list[str]]:
    """What can be measured on so many ranks, and what cannot. dp is not among it: it is one process."""
    size = ranks.size
    if size == 1:
        return {_BARE: functools.partial(_by_hand, subject, True), "single": _ours(subject, Parallel())}, []
    ways: dict[str, Way] = {_HAND: functools.partial(_by_hand, subject, False)}
    ways[_ALONE] = functools.partial(_by_hand, subject, True)
    missing = []
    for strategy in strategies:
        if strategy == "hsdp" and ranks.machines == 1 and size % 2:
            missing.append(f"hsdp on {size} ranks, which are no two groups of one size")
        elif strategy == "hsdp":
            share = size // 2 if ranks.machines == 1 else ranks.local
            ways[strategy] = _ours(subject, Parallel(strategy="hsdp", shard_size=share))
        elif strategy == "dp":
            if not gpus and ranks.machines == 1:
                missing.append(f"dp (nn.DataParallel) on {size}, for no GPU is here")
        else:
            ways[strategy] = _ours(subject, Parallel(strategy=strategy))
    if "dp" in strategies and gpus and ranks.machines == 1:
        larger = dataclasses.replace(subject, batch=subject.batch * size)
        ways["dp"] = _ours(larger, Parallel(strategy="dp"))
    return ways, missing


def _ours(subject: Subject, parallel: Parallel) -> Way:
    return functools.partial(_by_strategy, subject, parallel)


def _measured(
    folder: Path, subject: Subject, ranks: Ranks, ways: dict[str, Way], times: int, before: list[Row]
) -> list[Row]:
    size = ranks.size
    alone = {name: way for name, way in ways.items() if name == "dp"}
    blocks = ranks.measure(folder, {name: way for name, way in ways.items() if name != "dp"}, STEPS, times)
    if alone:
        with _seen(size):
            blocks |= Ranks(1).measure(folder, alone, STEPS, times)
    base = before[0].samples_per_s if before else 0.0
    rows = []
    for name in ways:
        if name == _ALONE:
            continue
        seconds = statistics.median(blocks[name]) / STEPS
        rate = size * subject.batch / seconds
        base = base or rate
        hand = ratio(blocks[name], blocks[_HAND if size > 1 else _BARE])[0] if name != "dp" else None
        idle = 1 - 1 / ratio(blocks[name], blocks[_ALONE])[0] if size > 1 and name != "dp" else None
        memory = _memory(folder, Ranks(1) if name == "dp" else ranks, ways[name], ranks.local)
        rows.append(Row(name, size, rate, rate / base, rate / base / size, idle, hand, memory, ranks.machines))
    return rows


@contextlib.contextmanager
def _seen(gpus: int) -> Iterator[None]:
    """The first so many GPUs are all that a process started here sees: nn.DataParallel takes every one."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = before.split(",")[:gpus] if before else map(str, range(gpus))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen)
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _memory(folder: Path, ranks: Ranks, way: Way, gpus: int) -> int:
    """The peak of the rank that has most, in bytes, of processes that do this alone."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as place, _seen(gpus):
        ranks.measure(folder, {"": functools.partial(_noting, way, place)}, 1, 1)
        return max(int(file.read_text()) for file in Path(place).iterdir())


def _noting(way: Way, place: str, world: World) -> Callable[[], None]:
    step = way(world)

    def noted() -> None:
        step()
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if world.device.type == "cuda":
            peak = max(torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count()))
        Path(place, str(world.rank)).write_text(str(peak))

    return noted


def _by_hand(subject: Subject, alone: bool, world: World) -> Callable[[], None]:
    """The loop of the tutorials, with DDP, or without any exchange."""
    torch.manual_seed(0)
    model, precision = subject.build().to(world.device), subject.precision(world.device)
    inputs, classes = subject.samples(world.device)
    call: nn.Module = model if alone else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        with precision.autocast():
            loss = cross_entropy(call(inputs), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _by_strategy(subject: Subject, parallel: Parallel, world: World) -> Callable[[], None]:
    torch.manual_seed(0)
    samples, precision = subject.samples(world.device), subject.precision(world.device)
    return stepping(world, parallel, subject.build(), samples, precision)


def _table(rows: list[Row], title: str, missing: list[str]) -> str:
    lines = [
        f"{title}:",
        "",
        "| ranks | strategy | samples/s | speed-up | efficiency | not computing | time / by hand | memory MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        idle = "" if row.not_computing is None else f"{100 * row.not_computing:.0f} %"
        hand = "" if row.by_hand is None else f"{row.by_hand:.3f}"
        ranks = f"{row.ranks} on {row.machines} machines" if row.machines > 1 else row.ranks
        lines.append(
            f"| {ranks} | {row.way} | {row.samples_per_s:.0f} | {row.speed_up:.2f} | {100 * row.efficiency:.0f} % "
            f"| {idle} | {hand} | {row.memory / 1e6:.0f} |"
        )
    return "\n".join([*lines, *(["", *(f"Not shown: {what}." for what in missing)] if missing else [])])


def _draw(rows: list[Row], title: str, to: Path) -> None:
    """Speed-ups over the number of ranks, beside the ideal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from train.record.target import published

    sizes = sorted({row.ranks for row in rows})
    figure, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
    axes.plot(sizes, sizes, color="grey", linestyle="--", label="ideal")
    for way in dict.fromkeys(row.way for row in rows if row.ranks > 1):
        found = [(row.ranks, row.speed_up) for row in rows if row.way == way or (row.ranks == 1 and row.way == _BARE)]
        axes.plot(*zip(*found, strict=True), marker="o", label=way)
    axes.set(title=title, xlabel="ranks", ylabel="speed-up", xticks=sizes)
    axes.grid(alpha=0.3)
    axes.legend()
    with published(to) as partial:
        figure.savefig(partial, dpi=120)
    plt.close(figure)
