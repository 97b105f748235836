"""Every way to spread a model, over NCCL where there are several GPUs: exact after a kill, and how fast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from tests.gpu import dp
from tests.gpu.exact import STEPS, compare
from tests.gpu.harness import FAILED, FIGURE, OK, UNCHECKED, Case, Row, Scale, exact_flags, passing, train_forked
from train.bench import collective
from train.run import states

MOST = 4
"""GPUs of this part, however many there are: dp takes all that it sees."""


def part(scale: Scale) -> Iterator[Case]:
    """ddp, fsdp, hsdp, ordered sums and dp on as many ranks as there are GPUs: four at most are given to this part."""
    if scale.is_gpu and scale.gpus < 2:
        what = "ddp, fsdp, hsdp, ordered sums over NCCL; dp"
        yield Case(what, 0, Row, (what, "they need two GPUs or more; here is one", UNCHECKED))
        return
    ranks = min(scale.gpus, MOST) if scale.is_gpu else 2
    flags = exact_flags(scale, "gpt") | {"steps": STEPS, "precision": "bf16", "micro_batch_size": 1, "batch_size": 4}
    ways: dict[str, dict[str, Any]] = {
        "ddp": {"parallel.strategy": "ddp"},
        "fsdp": {"parallel.strategy": "fsdp", "parallel.wrap": "Block"},
        "hsdp": {"parallel.strategy": "hsdp", "parallel.wrap": "Block", "parallel.shard_size": 2},
        "ordered": {"parallel.reduce": "ordered"},
    }
    if not scale.is_gpu:  # tests/train has all of them on CPUs
        ways = {"ddp": ways["ddp"]}
    elif ranks < 4:
        del ways["hsdp"]
        missing = f"it needs four GPUs, two that hold a model and two copies; here are {ranks}"
        yield Case("hsdp", 0, Row, ("hsdp", missing, UNCHECKED))
    for name, own in ways.items():
        what = f"{name}, {ranks} ranks"
        yield Case(what, 20, compare, (scale, "gpt", what, flags | own, ranks))
    yield Case(f"all-reduce, {ranks} ranks", 20, _collective, (scale, ranks))
    if not scale.is_gpu:
        yield Case("everything over NCCL; dp", 0, Row, ("everything over NCCL; dp", "it needs GPUs", UNCHECKED))
        return
    yield Case(_ordered(ranks), 16, _ordered_on_one, (scale, flags | ways["ordered"], ranks))
    yield Case(f"scaling on {ranks} GPUs", 60, _scaling, (scale, ranks))
    yield Case(dp.what(scale.gpus), 10, dp.types, (scale.gpus,))


def _collective(scale: Scale, ranks: int) -> Row:
    """`train bench collective`: its line of the largest tensor."""
    table = collective.bench(scale.folder, times=2 if scale.is_small else 10, ranks=ranks)
    last = [line for line in table.splitlines() if line.startswith("|")][-1]
    size, milliseconds, bus, copied, share = (float(cell) for cell in last.strip("|").split("|"))
    found = f"{size / 1024:.0f} MiB in {milliseconds:.2f} ms: {bus:.1f} GB/s a link, {share:.2f} of a plain copy"
    return Row(f"all-reduce, {ranks} ranks", found, figures={"bus_gb_per_s": bus, "copy_gb_per_s": copied})


def _ordered_on_one(scale: Scale, flags: dict[str, Any], ranks: int) -> Row:
    kinds = {torch.cuda.get_device_name(index) for index in range(ranks)}
    if len(kinds) > 1:
        return Row(
            _ordered(ranks), f"cards of one kind compute alike; here are {' and '.join(sorted(kinds))}", UNCHECKED
        )
    digests = []
    for count in (1, ranks):
        with passing(scale, "gpt", flags, count) as run:
            digests.append(train_forked(run, count).get("weights_sha256"))
    is_equal = digests[0] is not None and digests[0] == digests[1]
    return Row(_ordered(ranks), "equal" if is_equal else str(digests), OK if is_equal else FAILED, "equal digests")


def _ordered(ranks: int) -> str:
    return f"ordered: 1 and {ranks} ranks"


def _scaling(scale: Scale, ranks: int) -> Row:
    """Samples a second of the full GPT on all ranks over those on one, with a batch of the same size a rank."""
    rates = {}
    for count, strategy in ((1, "single"), (ranks, "ddp"), (1, "dp")):
        flags = scale.flags("gpt") | {"precision": "bf16", "steps": 40, "log.every_steps": 20}
        whole = ranks if strategy == "dp" else count
        flags |= {"batch_size": flags["batch_size"] * whole, "parallel.strategy": strategy}
        with passing(scale, "gpt", flags, count) as run:
            record = train_forked(run, count)
            if record["state"] != states.FINISHED:
                return Row("scaling", f"{strategy}: {record['reason']}"[:300], FAILED)
            last = run.metrics.read_text(encoding="utf-8").splitlines()[-1]  # of the second half: all is ready by then
            rates[strategy] = json.loads(last)["samples_per_s"]
    found = ", ".join(f"{name} {rate / rates['single']:.2f} times one" for name, rate in rates.items())
    return Row(f"scaling on {ranks} GPUs", found, FIGURE, figures=rates)
