"""The sum that `parallel.reduce ordered` makes on a rank, beside the tree added up by hand."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from train.config import Config, Parallel
from train.errors import TrainingFailed
from train.parallel.ordered import Node, Ordered, halves
from train.parallel.precision import Precision
from train.parallel.strategy import STEP_STATS
from train.parallel.world import World

pytestmark = pytest.mark.never_forgiven

UNUSED = {"never": (), "first": (0, 2, 4), "second": (1, 3, 6), "both": (0, 1, 5), "all": tuple(range(7))}
"""The micro batches in which one of the model's layers is not used."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.always, self.sometimes = nn.Linear(5, 3), nn.Parameter(torch.ones(3))

    def forward(self, samples: Tensor, uses_both: bool) -> Tensor:
        samples = self.norm(samples)
        value = self.always(samples).square().sum()
        if uses_both:  # with gradients of either zero: -0.0 + 0.0 is not -0.0
            value = value + (self.sometimes * torch.tensor([-0.0, 1.0, 0.0])).sum()
        return value


def make() -> Model:
    torch.manual_seed(3)
    return Model()


def loss(model: nn.Module, number: int, unused: tuple[int, ...]) -> Tensor:
    samples = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
    return model(samples, number not in unused)


def ordered() -> Ordered:
    world = World(0, size=1, local_rank=0, device=torch.device("cpu"))
    return Ordered(world, Config(parallel=Parallel(reduce="ordered")), Precision("fp32", world.device))


def bits(tensors: list[Tensor]) -> list[list[int]]:
    return [tensor.detach().contiguous().view(torch.int32).flatten().tolist() for tensor in tensors]


@pytest.mark.parametrize("unused", UNUSED.values(), ids=UNUSED.keys())
@pytest.mark.parametrize("micros", [1, 2, 3, 4, 6, 7])
def test_a_sum_is_that_of_the_tree_to_the_last_bit(micros: int, unused: tuple[int, ...]) -> None:
    leaves = []
    for number in range(micros):
        model = make()
        loss(model, number, unused).backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        leaves.append([*gradients, model.norm.running_mean, model.norm.running_var])

    def tree(node: Node) -> list[Tensor]:
        if node[1] - node[0] == 1:
            return leaves[node[0]]
        left, right = map(tree, halves(node))
        return [one + other for one, other in zip(left, right, strict=True)]

    spread, model = ordered(), make()
    spread.place(model)
    stats = torch.zeros(len(STEP_STATS))
    for _ in range(2):  # what a step leaves behind must not reach the next
        made = make().state_dict()
        model.load_state_dict(made)
        spread.begin(micros)
        for number in range(micros):
            is_last = number == micros - 1
            with spread.micro_batch(number, is_last):
                value = spread.compute(functools.partial(loss, number=number, unused=unused))
                spread.backward(value, 1.0, stats if is_last else None)
        spread.reduce(stats)
        *expected, mean, variance = tree((0, micros))
        assert bits([p.grad for p in model.parameters() if p.grad is not None]) == bits(expected)
        assert bits([model.norm.running_mean, model.norm.running_var]) == bits([mean / micros, variance / micros])
        spread.update(None)


def test_a_gradient_that_a_backward_makes_in_parts_is_refused() -> None:
    spread, layer = ordered(), nn.Linear(3, 3)
    spread.place(layer)
    samples = torch.ones(2, 3, requires_grad=True)
    for times in (1, 2):
        spread.begin(1)
        value = samples
        with spread.micro_batch(0, is_last=True):
            for _ in range(times):
                value = checkpoint(layer, value, use_reentrant=True)
            if times == 1:
                spread.backward(value.sum(), 1.0, None)
                continue
            with pytest.raises(TrainingFailed, match="use_reentrant=False"):
                spread.backward(value.sum(), 1.0, None)
