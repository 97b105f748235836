"""`parallel.reduce ordered`: gradients of micro batches are added in one order, whatever the number of ranks.

Sums of floating-point numbers depend on their order, so a run on three ranks ends with other bits than one on two. Here
the order is that of a binary tree over the micro batches of a step: the tree over [low, high) adds the sum of its first
half to the sum of its second half. A rank computes neighbouring micro batches, adds up the subtrees that are its own,
and exchanges the sums of larger ones with the ranks that hold their siblings. a + b has the same bits on both sides, so
every rank ends with the same sum, and any number of ranks with the same bits as one.

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

from ..data.plan import micro_batches_of_rank
from ..errors import TrainingFailed
from .overlap import OverlappedSums, flatten_as, pair_levels, view_as
from .strategy import Strategy
from .torch_private import add_all_, copy_all

Node = tuple[int, int]
"""A subtree: its first micro batch, and the one after its last."""


def halves(node: Node) -> tuple[Node, Node]:
    """Return the two subtrees that a node adds."""
    low, high = node
    middle = low + (high - low + 1) // 2
    return (low, middle), (middle, high)


def cover(node: Node, own: Node) -> list[Node]:
    """Return the largest subtrees of `node` within the micro batches `own`, in order."""
    low, high = max(node[0], own[0]), min(node[1], own[1])
    if low >= high:
        return []
    if (low, high) == node:
        return [node]
    left, right = halves(node)
    return cover(left, own) + cover(right, own)


def ending(own: Node, number: int) -> tuple[Node, list[Node]]:
    """Return the largest subtree of `own` that ends with a micro batch, and the subtrees that the micro batch is added
    to, in order."""
    node, siblings = own, list[Node]()
    while own[1] - own[0] > 1:
        left, right = halves(own)
        if number < left[1]:
            own = node = left
            siblings.clear()
        else:
            own = right
            siblings.append(left)
    return node, siblings[::-1]


@dataclass(frozen=True)
class Exchange:
    """A rank's part in the sum of one node that it shares with other ranks."""

    node: Node
    sends: tuple[tuple[Node, int], ...]
    """Subtrees whose sums are sent to other ranks."""
    receives: tuple[tuple[Node, int], ...]


@functools.lru_cache(maxsize=64)
def exchanges(micros: int, world: int, rank: int) -> tuple[Exchange, ...]:
    """Return what a rank exchanges with others, in order, until it holds the sum over all micro batches of a step.

    After it, each rank that computes a micro batch of a node holds the node's sum. Every rank holds the root's.
    """
    shares = [_span(micro_batches_of_rank(other, micros, world=world, is_ordered=True)) for other in range(world)]
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


class Ordered(Strategy):
    """Copies of the model on one or several ranks, whose gradients are added in the order of the tree."""

    is_ordered = True

    def _take(self, model: nn.Module) -> None:
        super()._take(model)
        self._statistics = self.buffers.statistics()
        averaged = {id(one) for one in self._statistics}
        self._others = [one for one in self.buffers.tensors if id(one) not in averaged]
        self._before = [torch.empty_like(buffer) for buffer in self._statistics]
        # of the types and shapes of a sum, and how much there is of each type: what a message holds
        self._like = [*(parameter.detach() for parameter in self.trainable), *self._statistics]
        self._sizes: dict[torch.dtype, int] = {}
        for tensor in self._like:
            self._sizes[tensor.dtype] = self._sizes.get(tensor.dtype, 0) + tensor.numel()
        size = self.world.size
        self._overlapped = OverlappedSums(self.world, self._like) if size > 1 and pair_levels(size) else None
        for place, parameter in enumerate(self.trainable):
            parameter.register_post_accumulate_grad_hook(functools.partial(self._gradient_is_ready, place))
        self.begin(0)

    def begin(self, micros: int) -> None:
        self._micros = micros
        self._sums: dict[Node, list[Tensor]] = {}
        """Maps a subtree to the sums of its gradients and statistics."""
        mine = micro_batches_of_rank(self.world.rank, micros, world=self.world.size, is_ordered=True)
        self._left = set(mine)
        """Number of micro batches of this rank that are not computed yet."""
        self._own = cover((0, micros), _span(mine)) if micros else []
        if self._before:
            copy_all(self._before, self._statistics)
        self._counts: list[Tensor] | None = None
        self._overlaps = self._overlapped is not None and micros > 0 and micros % self.world.size == 0
        self._made: list[Tensor | None] | None = None
        """The sums that the present micro batch completes; None between micro batches."""
        if self._overlapped is not None:
            self._overlapped.begin()

    @contextlib.contextmanager
    def micro_batch(self, number: int, is_last: bool) -> Iterator[None]:
        if self._before:
            copy_all(self._statistics, self._before)
        if number not in self._left:  # another rank's, computed with weight 0: it enters no sum, not even as zeros
            yield
            self._clear()
            return
        self._left.remove(number)
        node, siblings = ending(next(own for own in self._own if own[0] <= number < own[1]), number)
        self._siblings = [self._sums.pop(sibling) for sibling in siblings]
        self._made = [None] * len(self._like)
        self._sending = self._overlapped if is_last and self._overlaps else None
        yield
        self._sums[node] = self._end_micro_batch(number)

    def _gradient_is_ready(self, place: int, parameter: Tensor) -> None:
        """Add a gradient as soon as it is computed: it is still in the cache, and can be sent."""
        if self._made is None or parameter.grad is None:
            return
        if self._made[place] is not None:
            raise TrainingFailed(
                "a backward pass computes the gradient of a parameter in parts, but ordered sums need it whole; "
                "use checkpoint(…, use_reentrant=False), or a new run with --parallel.reduce fast"
            )
        self._add(place, parameter.grad)
        parameter.grad = None

    @torch.no_grad()
    def _add(self, place: int, value: Tensor) -> None:
        """Add a gradient or statistic of this micro batch to the sums of the subtrees that end before it.

        Adds in place, so that the next gradient gets this one's memory, which is in the cache; or adds where the sum is
        sent from.
        """
        assert self._made is not None
        view = None if self._sending is None else self._sending.views[place]
        for sibling in self._siblings:
            value = torch.add(sibling[place], value, out=sibling[place] if view is None else view)
        if view is not None and not self._siblings:
            view.copy_(value)
        self._made[place] = value
        if self._sending is not None:
            self._sending.written(place)

    def _end_micro_batch(self, number: int) -> list[Tensor]:
        """Add what no hook adds: the statistics, and zeros for unused parameters, because another rank may have used
        them. Returns the sums."""
        assert self._made is not None
        self.buffers.restore()
        if number == 0:
            self._counts = [buffer.clone() for buffer in self._others]
        for place, parameter in enumerate(self.trainable):
            if self._made[place] is None:
                self._add(place, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for place, buffer in enumerate(self._statistics, len(self.trainable)):
            self._add(place, buffer.clone())
        made = [total for total in self._made if total is not None]
        self._made, self._siblings = None, []
        self._clear()
        return made

    def reduce(self, stats: Tensor) -> Tensor:
        size = self.world.size
        summed = stats.clone() if size > 1 else stats
        adding = dist.all_reduce(summed, async_op=True) if size > 1 else None
        if self._overlaps:
            assert self._overlapped is not None
            with self.communication.waiting():
                self._overlapped.finish()
            total = self._overlapped.views
        else:
            total = self._exchanged()
        for parameter, gradient in zip(self.trainable, total, strict=False):
            parameter.grad = gradient
        with torch.no_grad():
            if self._statistics:
                # not torch._foreach_div: on a GPU it rounds otherwise, and takes that way only for some layouts
                copy_all(self._statistics, [added / self._micros for added in total[len(self.trainable) :]])
            if self._counts:
                copy_all(self._others, self._counts)
        if adding is not None:
            with self.communication.waiting():
                adding.wait()
        return summed

    def _exchanged(self) -> list[Tensor]:
        """Return the sums of a step in which ranks send each other what they lack."""
        size = self.world.size
        for exchange in exchanges(self._micros, size, self.world.rank) if size > 1 else ():
            self._exchange(exchange)
            if exchange.node not in self._sums:
                left, right = (self._sums.pop(half) for half in halves(exchange.node))
                with torch.no_grad():
                    add_all_(left, right)
                self._sums[exchange.node] = left
        return self._sums.pop((0, self._micros))

    def _exchange(self, exchange: Exchange) -> None:
        """Send and receive the sums of subtrees, each as one message per type."""
        operations, arriving = [], []
        for node, peer in exchange.sends:
            operations += [dist.P2POp(dist.isend, flat, peer) for flat in self._packed(self._sums[node])]
        for node, peer in exchange.receives:
            device = self.world.device
            flats = [torch.empty(size, dtype=dtype, device=device) for dtype, size in self._sizes.items()]
            arriving.append((node, flats))
            operations += [dist.P2POp(dist.irecv, flat, peer) for flat in flats]
        if operations:
            with self.communication.waiting():
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        for node, flats in arriving:
            self._sums[node] = self._unpacked(flats)

    def _packed(self, tensors: list[Tensor]) -> list[Tensor]:
        """Pack all tensors of a type into one. Types are in the order of their first tensor."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor, like in zip(tensors, self._like, strict=True):
            by_type.setdefault(tensor.dtype, []).append(flatten_as(tensor, like))
        return [torch.cat(parts) for parts in by_type.values()]

    def _unpacked(self, flats: list[Tensor]) -> list[Tensor]:
        by_type = {flat.dtype: flat for flat in flats}
        at = dict.fromkeys(by_type, 0)
        found = []
        for like in self._like:
            begin = at[like.dtype]
            at[like.dtype] = begin + like.numel()
            found.append(view_as(by_type[like.dtype][begin : at[like.dtype]], like))
        return found
