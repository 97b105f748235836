"""With `parallel.reduce ordered` any number of ranks, and a run that changes it, ends with the same bits."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.train.tiers import later
from tests.train.training import FLAGS
from train.data.plan import micro_batches_of_rank
from train.launcher import checks
from train.launcher.request import Request
from train.parallel.ordered import Node, cover, exchanges, halves
from train.parallel.overlap import flatten_as, view_as

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

ORDERED = {"parallel__reduce": "ordered", "micro_batch_size": 2, "clip_grad_norm": 0.5}
"""Eight micro batches a step, four in the short one."""


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_rank_ends_with_the_sum_that_one_rank_makes(micros: int, world: int) -> None:
    leaves = torch.randn(micros, generator=torch.Generator().manual_seed(micros)).tolist()

    def tree(node: Node) -> float:
        if node[1] - node[0] == 1:
            return float(leaves[node[0]])
        left, right = halves(node)
        return tree(left) + tree(right)

    mail: dict[tuple[int, int], deque[float]] = defaultdict(deque)

    def work(rank: int) -> Generator[None, None, float]:
        own = micro_batches_of_rank(rank, micros, world=world, is_ordered=True)
        held = {node: tree(node) for node in cover((0, micros), (own.start, own.stop))}
        # a rank adds by itself what is its own, and nothing else
        assert sorted(i for low, high in held for i in range(low, high)) == list(own)
        for exchange in exchanges(micros, world, rank):
            for node, peer in exchange.sends:
                mail[rank, peer].append(held[node])
            for node, peer in exchange.receives:
                while not mail[peer, rank]:
                    yield
                held[node] = mail[peer, rank].popleft()
            if exchange.node not in held:
                left, right = halves(exchange.node)
                held[exchange.node] = held[left] + held[right]
        return held[0, micros]

    working, ended = {rank: work(rank) for rank in range(world)}, {}
    for _ in range(50 * world):  # in turn: a rank that has to wait is asked again
        for rank, one in list(working.items()):
            try:
                next(one)
            except StopIteration as end:
                ended[rank] = end.value
                del working[rank]
    assert not working, "ranks wait for each other"
    assert not any(mail.values()), "a message that nobody takes"
    assert set(ended.values()) == {tree((0, micros))}


@pytest.fixture(scope="module")
def reference(engine: Any) -> tuple[Any, ...]:
    """How the test task ends in order, on one rank."""
    engine.run("ordered-1", 1, **ORDERED)
    return _figures(engine, "ordered-1")


def _figures(engine: Any, name: str) -> tuple[Any, ...]:
    record = engine.station.record(name)
    assert record["state"] == "finished", engine.said(name)
    return record["weights_sha256"], engine.lines(name), engine.station.samples(name)


def test_a_launch_names_the_values_that_depend_on_its_ranks(engine: Any) -> None:
    flags = {key: str(value) for key, value in FLAGS.items() if key not in ("micro_batch_size", "cpu_threads")}
    request = Request(str(engine.task), flags=flags | {"parallel.reduce": "ordered"})
    (line,) = [line for line in checks.prepare(request, ranks=3).warnings if "ordered" in line]
    assert "the same micro_batch_size 6, cpu_threads " in line and "launch it there: --micro_batch_size 6 --cpu" in line
    request.flags |= {"micro_batch_size": "4", "cpu_threads": "1"}
    assert not [line for line in checks.prepare(request, ranks=3).warnings if "ordered" in line]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_any_number_of_ranks_ends_with_the_same_bits(engine: Any, reference: Any, ranks: int) -> None:
    engine.run(f"ordered-{ranks}", ranks, **ORDERED)
    assert _figures(engine, f"ordered-{ranks}") == reference


def test_a_run_whose_ranks_change_half_way_and_die_ends_with_the_same_bits(engine: Any, reference: Any) -> None:
    engine.run("ordered-moving", 3, ["3 1 SIGTERM"], **ORDERED)
    engine.resume("ordered-moving", 1, ["2 0 SIGTERM"])
    assert engine.resume("ordered-moving", 4, ["3 2 SIGKILL"])["state"] == "interrupted"
    engine.resume("ordered-moving", 2)
    assert _figures(engine, "ordered-moving") == reference


@pytest.mark.parametrize(
    "flags",
    [
        {"task__batchnorm": "true", "micro_batch_size": 4},
        *later(
            {"task__counted": "true"},
            {"optim__name": "adamw", "optim__lr": 0.01, "precision": "bf16"},
            {"micro_batch_size": 3, "data__drop_last": "true"},
        ),
    ],
    ids=["batchnorm", "counted", "adamw-bf16", "six-micro-batches"],
)
def test_so_does_a_model_with_running_statistics_or_counts_or_another_precision(
    engine: Any, flags: dict[str, Any]
) -> None:
    name = "-".join(str(value).replace(".", "_") for value in flags.values())
    for ranks in (1, 3):
        engine.run(f"ordered-{name}-{ranks}", ranks, **ORDERED | flags)
    assert _figures(engine, f"ordered-{name}-3") == _figures(engine, f"ordered-{name}-1")


def test_it_is_the_same_training_but_for_rounding(steady: Any) -> None:
    steady.run("fast-2", 2, precision="fp64", micro_batch_size=2)
    steady.run("ordered-fp64", 2, precision="fp64", micro_batch_size=2, parallel__reduce="ordered")
    assert steady.losses("ordered-fp64") == pytest.approx(steady.losses("fast-2"), rel=1e-9, abs=1e-12)
    assert steady.station.record("ordered-fp64")["weights_sha256"] != steady.station.record("fast-2")["weights_sha256"]


@pytest.mark.parametrize("shape", [(5, 3, 2, 2), (5, 3, 1, 1), (4, 1, 3, 3), (7,), (2, 3)])
def test_sums_lie_in_memory_as_the_parameters_do(shape: tuple[int, ...]) -> None:
    """Fused kernels of optimizers refuse gradients of other strides."""
    like = torch.randn(shape)
    if len(shape) == 4:
        like = like.to(memory_format=torch.channels_last)
    flat = flatten_as(like, like)
    again = view_as(flat, like)
    assert torch.equal(again, like)
    assert all(size == 1 or one == two for size, one, two in zip(shape, again.stride(), like.stride(), strict=True))
