"""`train bench scaling`: what more ranks bring, by strategy, beside a hand-written loop with DistributedDataParallel.

Every rank has a batch of the same size (weak scaling). The speed-up compares samples per second with a bare loop on one
rank. The efficiency is the speed-up over the number of ranks. All ways with the same number of ranks take turns on the
same processes. Memory is that of processes which do nothing else. "not computing" is the share of a step by which it is
longer than a step without any exchange, on as many ranks at the same time.

DataParallel is one process over as many GPUs, with the batches of all ranks in one. A separate process measures it,
after the others. On a CPU it would only call the module, so it has no figures there.

Over several machines torchrun starts the ranks; the speed-up is then over one rank of the same job without exchange.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import resource
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..build.updates import Update
from ..config import Config, Parallel, strategies
from ..parallel.choose import make
from ..parallel.precision import Precision
from ..parallel.world import World
from .compare import Way, measure, ratio, torchruns

STEPS = 5
"""Number of steps per block."""
_BARE, _HAND, _ALONE, _DP = "a bare loop", "DDP by hand", "without exchange", "DataParallel"


@dataclass(frozen=True)
class Subject:
    """What is trained: a model and a rank's batch."""

    model: str
    batch: int
    shape: tuple[int, ...]
    """Shape of a sample."""

    def build(self) -> nn.Module:
        if self.model == "mlp":
            layers = [nn.Linear(self.shape[0], 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
            return nn.Sequential(*layers)
        import torchvision

        network: nn.Module = getattr(torchvision.models, self.model)(num_classes=10)
        return network

    def samples(self, device: torch.device, ranks: int = 1) -> tuple[Tensor, Tensor]:
        """Return the batches of this many ranks in one."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(ranks * self.batch, *self.shape, generator=generator)
        return inputs.to(device), torch.randint(10, (ranks * self.batch,), generator=generator).to(device)

    def precision(self, device: torch.device) -> Precision:
        return Precision("bf16" if device.type == "cuda" and self.model != "mlp" else "fp32", device)


SUBJECTS = {
    "mlp": Subject("mlp", 128, (512,)),
    "resnet18": Subject("resnet18", 16, (3, 64, 64)),
    "resnet50": Subject("resnet50", 64, (3, 224, 224)),
}


@dataclass(frozen=True)
class Row:
    """One way on a number of ranks."""

    way: str
    ranks: int
    samples_per_s: float
    speed_up: float
    efficiency: float
    not_computing: float | None
    """Share of a step; None if there is nothing to compare with."""
    by_hand: float
    """Seconds of a step over those of hand-written DDP: the median of the blocks' ratios."""
    memory: int | None
    """Peak bytes of the rank with most: of the process on a CPU, of tensors on a GPU. None under torchrun, where one
    process runs all ways in turn."""


def bench(folder: Path, times: int, name: str, chosen: list[str], ranks: list[int], as_json: bool) -> str:
    """Measure with this many blocks of each way. Returns a table in Markdown, or JSON.

    Args:
        name: one of SUBJECTS.
        chosen: strategies for several ranks; empty: those that need no further field.
        ranks: numbers of ranks; empty: 1, 2, 4, … up to the number of GPUs, or 1 and 2 on the CPU. Under torchrun:
            torchrun's.
    """
    gpus, rank_env, subject = torch.cuda.device_count(), torchruns(), SUBJECTS[name]
    local = rank_env.local_size if rank_env else 0
    usual = [one for one in strategies.of_several() if "shard_size" not in strategies.of(one).fields]
    wanted = [rank_env.size] if rank_env else sorted({1, *(ranks or _usual(gpus))})
    rows: list[Row] = []
    missing: list[str] = []
    for size in wanted:
        if gpus and (local or size) > gpus:
            missing.append(f"{size} ranks, for {gpus} GPU{'s are' if gpus > 1 else ' is'} here")
            continue
        ways, absent = _ways(subject, size, chosen or usual, local)
        missing += absent
        rows += _measured(folder, subject, size, ways, times, rows, has_dp=gpus > 0 and rank_env is None)
    cores = os.cpu_count() or 1
    if not gpus and max([local] if rank_env else wanted) > cores:
        missing.append(f"a speed-up on more than {cores} ranks, because they share {cores} cores")
    if not gpus:
        missing.append(f"{_DP}, because on a CPU it only calls the module")
    elif rank_env:
        missing.append(f"{_DP}, because it is one process and torchrun's ranks hold the GPUs")
    where = torch.cuda.get_device_name(0) if gpus else "the CPU, one thread a rank"
    if as_json:
        figures = {"model": name, "device": where, "rows": list(map(dataclasses.asdict, rows)), "missing": missing}
        return json.dumps(figures, indent=2)
    return _table(rows, f"{name}, {subject.batch} samples a rank and step, on {where}", missing)


def _usual(gpus: int) -> list[int]:
    return [2**n for n in range(gpus.bit_length())] if gpus else [1, 2]


def _ways(subject: Subject, size: int, chosen: list[str], local: int) -> tuple[dict[str, Way], list[str]]:
    """Return what can be measured on this many ranks (`local` of them on each machine, if there are several) and what
    cannot."""
    alone: Way = functools.partial(_by_hand, subject, True)
    if size == 1:
        return {_BARE: alone, "single": functools.partial(_by_strategy, subject, Parallel())}, []
    ways: dict[str, Way] = {_HAND: functools.partial(_by_hand, subject, False), _ALONE: alone}
    missing = []
    for name in chosen:
        parallel = Parallel(strategy=name)
        if "shard_size" in strategies.of(name).fields:
            groups = size // local if 0 < local < size else 2
            if size % groups:
                missing.append(f"{name} on {size} ranks, which do not make {groups} groups of one size")
                continue
            parallel = Parallel(strategy=name, shard_size=size // groups)
        ways[name] = functools.partial(_by_strategy, subject, parallel)
    return ways, missing


def _measured(
    folder: Path, subject: Subject, size: int, ways: dict[str, Way], times: int, before: list[Row], has_dp: bool
) -> list[Row]:
    """Return rows of the table. If `before` is empty, speed-ups are relative to the first one."""
    blocks = measure(folder, size, ways, STEPS, times)
    if has_dp and size > 1:
        ways = ways | {_DP: functools.partial(_by_data_parallel, subject, size)}
        blocks |= measure(folder, 1, {_DP: ways[_DP]}, STEPS, times)
    seconds = {name: statistics.median(each) / STEPS for name, each in blocks.items()}
    base = before[0].samples_per_s if before else subject.batch / seconds[_ALONE if size > 1 else _BARE]
    rows = []
    for name in ways:
        if name == _ALONE:
            continue
        rate = size * subject.batch / seconds[name]
        hand = ratio(blocks[name], blocks[_HAND if size > 1 else _BARE])[0]
        idle = 1 - 1 / ratio(blocks[name], blocks[_ALONE])[0] if size > 1 else None
        memory = None if torchruns() else _memory(folder, 1 if name == _DP else size, ways[name])
        rows.append(Row(
            way=name, ranks=size, samples_per_s=rate, speed_up=rate / base, efficiency=rate / base / size,
            not_computing=idle, by_hand=hand, memory=memory,
        ))  # fmt: skip
    return rows


def _memory(folder: Path, size: int, way: Way) -> int:
    """Return the peak bytes of the rank with most, in processes that do only this."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as place:
        measure(folder, size, {"": functools.partial(_noting, way, place)}, 1, 1)
        return max(int(file.read_text()) for file in Path(place).iterdir())


def _noting(way: Way, place: str, world: World) -> Callable[[], None]:
    step = way(world)

    def noted() -> None:
        step()
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if world.device.type == "cuda":
            peak = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
        Path(place, str(world.rank)).write_text(str(peak))

    return noted


def _by_hand(subject: Subject, alone: bool, world: World) -> Callable[[], None]:
    """Make the loop of torch's tutorials, with DDP or without any exchange."""
    return _loop(subject, world.device, (lambda model: model) if alone else DistributedDataParallel, 1)


def _by_data_parallel(subject: Subject, gpus: int, world: World) -> Callable[[], None]:
    """Make the same loop in one process over the first GPUs."""
    return _loop(subject, world.device, functools.partial(DataParallel, device_ids=list(range(gpus))), gpus)


def _loop(
    subject: Subject, device: torch.device, wrap: Callable[[nn.Module], nn.Module], ranks: int
) -> Callable[[], None]:
    torch.manual_seed(0)
    model, precision = subject.build().to(device), subject.precision(device)
    inputs, classes = subject.samples(device, ranks)
    call = wrap(model)
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
    return training_step(world, parallel, subject.build(), samples, precision)


def training_step(
    world: World,
    parallel: Parallel,
    network: nn.Module,
    samples: tuple[Tensor, Tensor],
    precision: Precision,
    micros: int = 1,
) -> Callable[[], None]:
    """Return a function that makes a step of SGD on this rank as the engine does: with stats and shared buffers.

    Args:
        samples: inputs and classes of every micro batch.
        micros: number of micro batches per rank and step.
    """
    spread = make(world, Config(parallel=parallel), precision)
    optimizer = torch.optim.SGD(spread.place(network).parameters(), lr=0.01)
    update = Update(
        name="",
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        optimizer=optimizer,
        every=1,
        what="the loss",
    )
    update.strategy = spread
    spread.start()
    return functools.partial(update.make_alone, samples, len(samples[1]), micros)


def _table(rows: list[Row], title: str, missing: list[str]) -> str:
    lines = [
        f"{title}:",
        "",
        "| ranks | strategy | samples/s | speed-up | efficiency | not computing | time / by hand | memory MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        idle = "" if row.not_computing is None else f"{100 * row.not_computing:.0f} %"
        memory = "" if row.memory is None else f"{row.memory / 1e6:.0f}"
        lines.append(
            f"| {row.ranks} | {row.way} | {row.samples_per_s:.0f} | {row.speed_up:.2f} | {100 * row.efficiency:.0f} % "
            f"| {idle} | {row.by_hand:.3f} | {memory} |"
        )
    if not torch.cuda.device_count():
        lines += [f"| {size} | {_DP} | needs GPUs | | | | | |" for size in sorted({row.ranks for row in rows} - {1})]
    return "\n".join([*lines, *(["", *(f"Not shown: {what}." for what in missing)] if missing else [])])
