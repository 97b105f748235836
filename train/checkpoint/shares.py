"""The state of a step, in memory that no rank owns, where each rank has a part of it only (fsdp, hsdp).

Nobody can leave behind what another held, so each rank copies its part, all after the same step, as often as that takes
a hundredth of the time: at each copy the ranks agree when the next one is due. A death costs the steps since the last
copy. One that comes while they copy leaves some parts a copy older: each has two, and what all have is taken up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable

import torch

from train.checkpoint import packed, room
from train.checkpoint.beside import SHARE, Beside, Lines
from train.checkpoint.packed import Content
from train.checkpoint.shared import Slots, begin_of_tensors
from train.parallel.precision import Precision
from train.parallel.strategy import Strategy
from train.parallel.world import World

log = logging.getLogger("train")

_SOON = 4
"""Steps to the next copy while nobody knows what one costs, or memory for it is not there yet."""


@dataclasses.dataclass(frozen=True)
class _Told:
    """What a rank tells the others before a copy."""

    problem: str
    """Why it will take no more; '' if it will."""
    is_ready: bool
    """Whether it has memory for its part."""
    cost: float
    """Seconds that the last copy took, 0 before there was one."""
    pace: float
    """Seconds of a step since then."""
    has_grown: bool
    """Whether its part did not fit into the memory taken for it."""


class Shares:
    """One rank's part in keeping the state; in place of `Snapshots`. Without slots on all ranks it does nothing."""

    def __init__(
        self, slots: Slots | None, fingerprint: str, world: World, say: Callable[[str], None],
        left: Callable[[], int], mark: str = "",
    ) -> None:  # fmt: skip
        """The arguments are those of `Snapshots`."""
        self._slots, self._fingerprint, self._world, self._say, self._left_over = slots, fingerprint, world, say, left
        self._mark, self._due, self._problem, self._cost = mark, 0, "", 0.0
        self._since, self._from, self._has_grown = time.monotonic(), 0, False
        is_beside = slots is not None and world.device.type == "cuda"
        self._beside = Beside(slots, world.device) if slots is not None and is_beside else None
        self.lines: Callable[[], Lines] = lambda: list
        self.aside = contextlib.nullcontext()
        """Nobody looks at the state while the task's code runs."""

    @property
    def is_on(self) -> bool:
        return self._slots is not None

    def attach(self, strategy: Strategy, optimizer: torch.optim.Optimizer, precision: Precision) -> None:
        """Say what is kept."""
        self._strategy, self._optimizer, self._precision = strategy, optimizer, precision

    def begin_update(self) -> None:
        """Nobody looks at the state in the middle of a step."""

    def leave_behind(self) -> bool:
        """A part alone is of no use to those who come after."""
        return False

    def end_update(self, step: int) -> None:
        """The state is that after this step, and its loss is in order. A collective, where a copy is due."""
        if self._slots is None or step < self._due:
            return
        if self._beside is not None:  # the copy before, over since long: no part is to be two copies older than another
            self._beside.wait()
            self._cost, self._problem = self._beside.cost, self._problem or self._beside.problem
        begun = time.monotonic()
        size = self._look_for_room() if self._due == 0 else 0
        pace = (begun - self._since) / max(step - self._from, 1)
        told = self._world.gather(_Told(self._problem, self._is_ready(), self._cost, pace, self._has_grown))
        self._since, self._from = begun, step
        problem = next((each.problem for each in told if each.problem), "")
        if problem:
            self._slots = None
            if self._world.is_lead:
                self._say(problem)
            return
        if any(each.has_grown for each in told):  # of layers that no step before has used, say
            self._due, self._has_grown = 0, False
            return
        is_ready = all(each.is_ready for each in told)
        if self._due == 0 and not is_ready:  # there is enough everywhere
            if size:
                room.take(self._slots, size, self._fail)
                if self._world.is_lead:
                    self._say(f"snapshots in memory: 2 x {room.words(size)} for each rank")
            is_ready = self._world.is_everywhere(self._is_ready())
        cost = max(each.cost for each in told)
        if is_ready:
            begun = time.monotonic()
            self._copy(step)
            self._cost = time.monotonic() - begun
        soon = math.ceil(cost * (1 / SHARE - 1) / max(1e-6, *(each.pace for each in told)))
        self._due = step + (soon if cost else _SOON)

    def _is_ready(self) -> bool:
        """Whether memory for this part is there, and is its device's where it copies. One without lets all wait: a copy
        that others made alone would take the place of the one that all have."""
        assert self._slots is not None
        return self._slots.holds(self._size) and (self._beside is None or self._beside.holds(self._size))

    def close(self) -> None:
        """At the end of training."""
        if self._beside is not None:
            self._beside.close()

    def _look_for_room(self) -> int:
        """When the optimizer has its state: whether there is memory for this part. Returns the bytes to take."""
        assert self._slots is not None
        self._size = 0
        try:
            found = self._pack(0)
        except Exception as error:  # an optimizer may hold what cannot be copied like this
            self._problem = f"no snapshots in memory: {error}"
            return 0
        self._size = room.needed(found)
        if self._slots.holds(self._size):  # since an attempt before
            return 0
        self._problem = room.problem(self._slots, self._size, self._left_over(), self._world.node.size)
        return self._size

    def _fail(self, why: str) -> None:
        """Tell the others before the next copy that there will be none."""
        self._problem = why

    def _pack(self, step: int) -> packed.Packed:
        return packed.pack(
            self._strategy.module.state_dict(keep_vars=True), self._optimizer, self._precision,
            fingerprint=self._fingerprint, step=step, mark=self._mark,
        )  # fmt: skip

    def _copy(self, step: int) -> None:
        assert self._slots is not None
        try:
            found = self._pack(step)
            if self._beside is not None:
                self._has_grown = not self._slots.holds(room.least(found))
                if not self._has_grown:
                    self._beside.copy(step, found, self.lines())
                return
            lines = self.lines()()  # the same losses on all ranks, and so the same answer
            if lines is None:
                return
            plain = found.plain(lines)
            self._has_grown = not self._slots.holds(begin_of_tensors(len(plain)) + found.end)
            if not self._has_grown:
                self._slots.write(step, plain, found.pieces())
        except Exception as error:
            self._problem = f"no more snapshots in memory: {error}"


def newest(slots: Slots, world: World, saved: int) -> int:
    """The newest step of which all ranks have their parts, as far as headers tell. A collective.

    Args:
        saved: the step of the newest checkpoint, of any rank's folder.

    Returns:
        0 where there is none, or none as new as a checkpoint. What lies there is forgotten then: it belongs to steps
        that are made anew, and in their place no copies would be taken.
    """
    found = world.gather(set(slots.steps))
    step = max(set.intersection(*found), default=0)
    if step and step >= saved:
        return step
    slots.wipe_from(0)
    return 0


def take_up(slots: Slots, world: World, step: int, fingerprint: str) -> Content | None:
    """This rank's part of the state after a step, on all ranks or on none. A collective.

    What else lies there is forgotten if they have it: an attempt that went on from elsewhere may have left it. Else
    this one is.
    """
    content = packed.read(slots, slots.steps[step], fingerprint)
    marks = world.gather(content.mark if content is not None else None)
    is_whole = None not in marks and len(set(marks)) == 1
    for other, slot in slots.steps.items():
        if (other == step) != is_whole:
            slots.wipe(slot)
    return content if is_whole else None
