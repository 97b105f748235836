"""`parallel.reduce ordered`: gradients of micro batches are added in one order, whatever the number of ranks.

Sums of floating-point numbers depend on their order, so a run on three ranks ends with other bits than one on two. Here
the order is that of a binary tree over the micro batches of a step: the tree over [low, high) adds the one over its
first half to the one over its second half. A rank computes neighbouring micro batches, adds up the subtrees that are
its own, and exchanges the sums of larger ones with the ranks that hold their siblings. a + b has the same bits on both
sides, so every rank ends with the same sum, and any number of ranks with the same bits as one.

Where the ranks are a power of two, each holds exactly one subtree, and the exchange is an all-reduce by recursive
doubling (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005).

Floating-point buffers (BatchNorm's running statistics) follow the same order: each micro batch begins with those of the
step before, and they become the mean of what the micro batches make of them. Other buffers are the first one's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.data.sharing import share
from train.parallel.strategy import Spread

Node = tuple[int, int]
"""A subtree: the first of its micro batches, and the one after its last."""


def halves(node: Node) -> tuple[Node, Node]:
    """The subtrees that a node adds."""
    low, high = node
    middle = low + (high - low + 1) // 2
    return (low, middle), (middle, high)


def cover(node: Node, own: Node) -> list[Node]:
    """The largest subtrees of `node` that lie within the micro batches `own`, in their order."""
    low, high = max(node[0], own[0]), min(node[1], own[1])
    if low >= high:
        return []
    if (low, high) == node:
        return [node]
    left, right = halves(node)
    return cover(left, own) + cover(right, own)


@dataclass(frozen=True)
class Exchange:
    """What a rank does for the sum of one node that it does not hold alone."""

    node: Node
    sends: tuple[tuple[Node, int], ...]
    """Subtrees whose sums go to other ranks."""
    receives: tuple[tuple[Node, int], ...]


@functools.lru_cache(maxsize=64)
def exchanges(micros: int, world: int, rank: int) -> tuple[Exchange, ...]:
    """What a rank exchanges with others until it holds the sum over all micro batches of a step, in this order.

    After it each rank that computes a micro batch of a node holds the node's sum; of the root, every rank does.
    """
    shares = [_span(share(other, micros, world, True)) for other in range(world)]
    found: list[Exchange] = []

    def holders(node: Node) -> list[int]:
        return [r for r, (low, high) in enumerate(shares) if max(low, node[0]) < min(high, node[1])]

    def visit(node: Node) -> None:
        owners = holders(node)
        if len(owners) == 1:
            return  # its sum is made by that rank alone
        left, right = halves(node)
        visit(left)
        visit(right)
        sends, receives = [], []
        for mine, other in ((left, right), (right, left)):
            have, lack = holders(mine), [r for r in holders(other) if r not in holders(mine)]
            for place, receiver in enumerate(lack):
                sender = have[place % len(have)]
                if sender == rank:
                    sends.append((mine, receiver))
                if receiver == rank:
                    receives.append((mine, sender))
        if rank in owners:
            found.append(Exchange(node, tuple(sends), tuple(receives)))

    root = (0, micros)
    visit(root)
    # ranks without a micro batch get the result
    have = holders(root)
    for place, receiver in enumerate(r for r in range(world) if r not in have):
        sender = have[place % len(have)]
        if rank in (sender, receiver):
            sends = ((root, receiver),) if rank == sender else ()
            found.append(Exchange(root, sends, ((root, sender),) if rank == receiver else ()))
    return tuple(found)


def _span(numbers: range) -> Node:
    return (numbers.start, numbers.stop)


class Ordered(Spread):
    """Copies of the model on one or several ranks, whose gradients are added in the order of the tree."""

    is_ordered = True

    def _take(self, model: nn.Module) -> None:
        super()._take(model)
        self._statistics = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        self._others = [buffer for buffer in self._buffers if not buffer.is_floating_point()]
        # of the types and shapes of a sum, and how much there is of each type: what a message holds
        self._like = [*(parameter.detach() for parameter in self.trainable), *self._statistics]
        self._sizes: dict[torch.dtype, int] = {}
        for tensor in self._like:
            self._sizes[tensor.dtype] = self._sizes.get(tensor.dtype, 0) + tensor.numel()
        self.begin(0)

    def begin(self, micros: int) -> None:
        """Make ready for a step of so many micro batches."""
        self._micros = micros
        self._sums: dict[Node, list[Tensor]] = {}
        own = share(self.world.rank, micros, self.world.size, True)
        self._own = cover((0, micros), _span(own)) if micros else []
        self._before = [buffer.clone() for buffer in self._statistics]
        self._counts: list[Tensor] | None = None

    @contextlib.contextmanager
    def micro_batch(self, number: int, is_last: bool) -> Iterator[None]:
        for buffer, before in zip(self._statistics, self._before, strict=True):
            buffer.copy_(before)
        yield
        self._keep(number)

    def skip(self, number: int) -> None:
        """Of a micro batch none of whose samples can be read: it adds nothing."""
        with self.micro_batch(number, is_last=False):
            pass

    def _keep(self, number: int) -> None:
        """Take the gradients and statistics of a micro batch, and add up what is complete with it."""
        # a parameter that was not used has zeros, as it would beside a rank that did use it
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trainable]
        self.clear()
        if number == 0:
            self._counts = [buffer.clone() for buffer in self._others]
        self._sums[number, number + 1] = [*gradients, *(buffer.clone() for buffer in self._statistics)]
        for node in self._own:
            if node[0] <= number < node[1]:
                self._fold(node)

    def _fold(self, node: Node) -> bool:
        """Add up a subtree as far as its parts are there. Whether its sum is."""
        if node in self._sums:
            return True
        if node[1] - node[0] == 1:
            return False
        left, right = halves(node)
        if not (self._fold(left) and self._fold(right)):
            return False
        self._add(node, left, right)
        return True

    def _add(self, node: Node, left: Node, right: Node) -> None:
        total = self._sums.pop(left)
        with torch.no_grad():
            torch._foreach_add_(total, self._sums.pop(right))
        self._sums[node] = total

    def idle(self, votes: Tensor) -> None:
        """What this rank has not, it receives in `reduce`."""

    def reduce(self, votes: Tensor) -> Tensor:
        size = self.world.size
        for exchange in exchanges(self._micros, size, self.world.rank) if size > 1 else ():
            self._exchange(exchange)
            if exchange.node not in self._sums:
                self._add(exchange.node, *halves(exchange.node))
        total = self._sums.pop((0, self._micros))
        for parameter, gradient in zip(self.trainable, total, strict=False):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, added in zip(self._statistics, total[len(self.trainable) :], strict=True):
                buffer.copy_(added / self._micros)
            for buffer, first in zip(self._others, self._counts or [], strict=False):
                buffer.copy_(first)
        return self.world.add(votes)

    def _exchange(self, exchange: Exchange) -> None:
        """Send and receive the sums of subtrees, each as one message a type."""
        operations, arriving = [], []
        for node, peer in exchange.sends:
            operations += [dist.P2POp(dist.isend, flat, peer) for flat in self._packed(self._sums[node])]
        for node, peer in exchange.receives:
            device = self.world.device
            flats = [torch.empty(size, dtype=dtype, device=device) for dtype, size in self._sizes.items()]
            arriving.append((node, flats))
            operations += [dist.P2POp(dist.irecv, flat, peer) for flat in flats]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for node, flats in arriving:
            self._sums[node] = self._unpacked(flats)

    def _packed(self, tensors: list[Tensor]) -> list[Tensor]:
        """All tensors of a type as one, the types in the order in which they come."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        return [torch.cat(parts) for parts in by_type.values()]

    def _unpacked(self, flats: list[Tensor]) -> list[Tensor]:
        by_type = {flat.dtype: flat for flat in flats}
        at = dict.fromkeys(by_type, 0)
        found = []
        for like in self._like:
            begin = at[like.dtype]
            at[like.dtype] = begin + like.numel()
            found.append(by_type[like.dtype][begin : at[like.dtype]].view(like.shape))
        return found
