"""Every way to spread a model, over NCCL where there are several GPUs: exact after a kill."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tests.gpu import in_rank
from tests.gpu.exact import ORDERED, compare, ordered_on_one, ranks_flags
from tests.gpu.harness import FAILED, UNCHECKED, Case, Row, Scale
from train.bench import collective

_WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.strategy": "ddp"},
    "fsdp": {"parallel.strategy": "fsdp", "parallel.wrap": "Block"},
    "hsdp": {"parallel.strategy": "hsdp", "parallel.wrap": "Block", "parallel.shard_size": 2},
    "ordered": ORDERED,
}


def part(scale: Scale) -> Iterator[Case]:
    """ddp, fsdp, hsdp, and ordered sums on as many ranks as there are GPUs; on one GPU, on two ranks that share it."""
    if scale.is_gpu and scale.gpus < 2:
        for name in ("ddp", "fsdp", "ordered"):
            what = f"{name}, 2 ranks on one GPU over NCCL"
            yield Case(what, _on_one_card, (scale, what, ranks_flags(scale) | _WAYS[name]))
        return
    ranks = scale.gpus if scale.is_gpu else 2
    flags = ranks_flags(scale)
    ways = dict(_WAYS)
    if not scale.is_gpu:  # `exact` has ddp and ordered sums, tests/train all of them
        ways.clear()
    elif ranks < 4:
        del ways["hsdp"]
        missing = f"it needs four GPUs, two that hold a model and two copies; here are {ranks}"
        yield Case("hsdp", Row, ("hsdp", missing, UNCHECKED))
    for name, own in ways.items():
        what = f"{name}, {ranks} ranks"
        yield Case(what, compare, (scale, "gpt", what, flags | own, ranks))
    yield Case(f"all-reduce, {ranks} ranks", _collective, (scale, ranks))
    if not scale.is_gpu:
        yield Case("everything over NCCL", Row, ("everything over NCCL", "it needs GPUs", UNCHECKED))
        return
    yield Case(f"ordered: 1 and {ranks} ranks", ordered_on_one, (scale, flags | ways["ordered"], ranks))


def _on_one_card(scale: Scale, what: str, flags: dict[str, Any]) -> Row:
    """NCCL promises nothing of two ranks on one GPU, which take each other for another machine's."""
    given = flags | {"parallel.timeout_minutes": 0.5}
    row = compare(scale, "gpt", what, given, 2, changes=(in_rank.OVER_NCCL,))
    is_of_nccl = row.verdict == FAILED and not row.goal  # it did not come to its end
    return dataclasses.replace(row, verdict=UNCHECKED, found=f"NCCL may refuse it: {row.found}") if is_of_nccl else row


def _collective(scale: Scale, ranks: int) -> Row:
    """`train bench collective`: its line of the largest tensor."""
    table = collective.bench(scale.folder, times=2 if scale.is_small else 10, ranks=ranks)
    last = [line for line in table.splitlines() if line.startswith("|")][-1]
    size, milliseconds, bus, copied, share = (float(cell) for cell in last.strip("|").split("|"))
    found = f"{size / 1024:.0f} MiB in {milliseconds:.2f} ms: {bus:.1f} GB/s a link, {share:.2f} of a plain copy"
    return Row(f"all-reduce, {ranks} ranks", found, figures={"bus_gb_per_s": bus, "copy_gb_per_s": copied})
