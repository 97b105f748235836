"""The state of the last finished step, in memory that no rank owns (shared.py): the death of a rank costs no step.

It gets there in two ways. Rank 0 copies its state after a step, as often as that takes a hundredth of the time; on a
GPU the device does, and the host goes on (beside.py). And a rank whose peer has died leaves its own behind before it
ends: copies of a model on several ranks are equal after every step, so that the state of any survivor is the state of
the run. It is taken between two updates only:

    begin_update()                  from here on no other thread may look
    the optimizer's step, which waits for nobody
    end_update(step)                weights, optimizer and buffers are those after this step

In the middle of a step, where a rank waits for a peer that is gone, weights and optimizer are still those after the
step before. Buffers are not: a forward has changed them, and no rank's but the first one's count. What the ranks agreed
on in the last step (`Strategy.agreed`) takes their place. What a module keeps as its extra state (`get_extra_state`) a
forward has changed, too: a copy of it is made after each step, of models that have one. And while the task's own code
runs (`aside`) weights may be others for a moment, as averages are for an evaluation: nobody looks until it has ended.

A snapshot is for ranks that the same supervisor starts again: same configuration, on any number of ranks.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from train.checkpoint import room
from train.checkpoint.beside import SHARE, Beside, Lines
from train.checkpoint.packed import Packed, pack
from train.checkpoint.shared import Slots, begin_of_tensors
from train.parallel.precision import Precision
from train.parallel.strategy import Strategy
from train.parallel.world import World

log = logging.getLogger("train")

_FORWARD = 1.5
"""Seconds that it waits for the task's code to end. A forward may take longer than the supervisor waits: if by torch's
count of changes nothing has been done to the weights, they are looked at then."""
_PATIENCE = 20.0
"""Seconds that a survivor waits for its own update to end, and for others to have left their states behind."""


class Snapshots:
    """One rank's part in keeping the state. Without slots it does nothing."""

    def __init__(
        self,
        slots: Slots | None,
        fingerprint: str,
        world: World,
        say: Callable[[str], None],
        left: Callable[[], int],
        mark: str = "",
    ) -> None:
        """
        Args:
            fingerprint: of all that must be the same where the state is taken up.
            left: bytes of memory that can still be had.
            mark: of this attempt, the same on all machines.
        """
        self._mark = mark
        self._slots, self._fingerprint, self._world, self._say, self._left_over = slots, fingerprint, world, say, left
        self._lock = threading.Lock()
        self._holder: int | None = None
        self.aside: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        """To be entered while the task's code runs."""
        self._is_aside = self._is_wanted = False
        self._left_behind = threading.Event()
        self._versions: list[int] = []
        """How often each parameter had been changed after that step."""
        self._at = 0
        """The step whose state this rank holds; 0: none that is worth keeping."""
        self._agreed: Mapping[int, Tensor] = {}
        self._extra: dict[str, Any] | None = {}
        """What else the model's state had after that step; None: it cannot be copied."""
        self._due = 0.0
        self._needed = self._room = 0
        """Bytes of the state when it was last looked at, and for which memory was asked."""
        is_beside = slots is not None and world.device.type == "cuda"
        self._beside = Beside(slots, world.device) if slots is not None and is_beside else None
        self.lines: Callable[[], Lines] = lambda: list
        """Gives what reads the lines of the last steps."""

    @property
    def is_on(self) -> bool:
        return self._slots is not None

    @property
    def _serves(self) -> bool:
        """Whether this rank's state can serve when another is dead. On a GPU the host does not know what state the
        device is in while it waits for a peer that is gone."""
        return self.is_on and self._world.size > 1 and self._world.device.type == "cpu"

    def attach(self, strategy: Strategy, optimizer: torch.optim.Optimizer, precision: Precision) -> None:
        """Say what is kept."""
        self._strategy, self._optimizer, self._precision = strategy, optimizer, precision
        # found now: in the middle of a step a forward may have put another tensor in the place of a buffer
        state = strategy.module.state_dict(keep_vars=True)
        owned = {id(value) for values in (strategy.module.parameters(), strategy.module.buffers()) for value in values}
        self._extras = [name for name, value in state.items() if id(value) not in owned]
        self._buffers = {name: id(value) for name, value in state.items() if _is_buffer(value)}
        self._parameters = list(strategy.module.parameters())
        if self._serves:
            self.aside = _Aside(self._enter, self._exit)
            threading.Thread(target=self._wait_for_death, daemon=True, name="bell").start()

    def begin_update(self) -> None:
        """Before the optimizer's step: the state is in no order from now on."""
        if self._slots is not None:
            self._lock.acquire()
            self._holder = threading.get_ident()

    def end_update(self, step: int) -> None:
        """The state is that after this step, and its loss is in order."""
        if self._holder is None:
            return
        is_first = not self._at
        self._at = step
        if self._serves:
            self._agreed = self._strategy.agreed
            self._versions = self._changes()
            if self._extras:
                self._extra = self._copied()
        self._holder = None
        self._lock.release()
        if not self._world.is_lead or self._slots is None:
            return
        if is_first:
            self._reserve()
        elif self._is_due():
            self._take()
            if self._slots is not None and self._needed > self._room:
                self._reserve()

    def _is_due(self) -> bool:
        return time.monotonic() >= self._due and (self._beside is None or self._beside.is_due)

    def close(self) -> None:
        """At the end of training."""
        if self._beside is not None:
            self._beside.close()

    def leave_behind(self) -> bool:
        """Before this rank ends because another has died: leave its state to those who come after. Whether it has."""
        if not self._serves or self._holder == threading.get_ident():
            return False
        self._is_wanted, is_locked = True, False
        try:
            is_locked = self._lock.acquire(timeout=_FORWARD)
            if not is_locked and not (self._is_aside and self._versions == self._changes()):
                is_locked = self._lock.acquire(timeout=_PATIENCE)
                if not is_locked:
                    return False
            return bool(self._at) and self._write(self._left(), _PATIENCE)
        except Exception as error:  # whatever it is, the checkpoint on the disk is there
            log.warning("the state after step %d could not be left in memory: %s", self._at, error)
            return False
        finally:
            self._left_behind.set()
            if is_locked:
                self._lock.release()

    def _enter(self) -> None:
        if self._is_wanted:  # nothing comes of what would follow: a peer is gone
            self._left_behind.wait(_PATIENCE)
        self._lock.acquire()
        self._is_aside = True

    def _exit(self) -> None:
        self._is_aside = False
        self._lock.release()

    def _changes(self) -> list[int]:
        return [parameter._version for parameter in self._parameters if id(parameter) not in self._agreed]

    def _wait_for_death(self) -> None:
        assert self._slots is not None
        with contextlib.suppress(OSError):
            self._slots.wait_for_bell()
            self.leave_behind()

    def _copied(self) -> dict[str, Any] | None:
        """A copy of what the model's state has besides parameters and buffers."""
        with contextlib.suppress(Exception):  # it may hold anything
            state = self._strategy.module.state_dict(keep_vars=True)
            return copy.deepcopy({name: state[name] for name in self._extras})
        return None

    def _left(self) -> dict[str, Any] | None:
        """The model's state with the buffers that the ranks agreed on; None where that is not known."""
        agreed, extra, state = self._agreed, self._extra, dict[str, Any]()
        if extra is None:
            return None
        for name, value in self._strategy.module.state_dict(keep_vars=True).items():
            if name in extra:
                state[name] = extra[name]
            elif _is_buffer(value):
                if self._buffers.get(name) not in agreed:
                    return None
                state[name] = agreed[self._buffers[name]]
            else:  # a forward may update parameters, too
                state[name] = agreed.get(id(value), value)
        return state

    def _write(self, model: dict[str, Tensor] | None, patience: float) -> bool:
        lines = self.lines()()
        if model is None or lines is None:
            return False
        packed = self._pack(model)
        plain = packed.plain(lines)
        assert self._slots is not None
        self._needed = begin_of_tensors(len(plain)) + packed.end
        if not self._slots.holds(self._needed) and not (patience and self._finds_room(packed)):
            return False
        return self._slots.write(self._at, plain, packed.pieces(), patience)

    def _finds_room(self, packed: Packed) -> bool:
        """Of a survivor: whether there is memory that rank 0 had not come to take, in its first step, say."""
        assert self._slots is not None
        size = room.needed(packed)
        if room.problem(self._slots, size, self._left_over()):
            return False
        self._slots.reserve(size)
        return True

    def _pack(self, model: dict[str, Tensor]) -> Packed:
        return pack(
            model, self._optimizer, self._precision, fingerprint=self._fingerprint, step=self._at, mark=self._mark
        )

    def _take(self) -> None:
        """On the first rank of a machine, between two steps."""
        began = time.monotonic()
        try:
            model = self._strategy.module.state_dict(keep_vars=True)
            if self._beside is None:
                self._write(model, 0.0)
            else:
                self._copy(self._beside, model)
        except Exception as error:  # an optimizer may hold what cannot be copied like this
            self._give_up(f"no snapshots in memory: {error}")
        now = time.monotonic()
        self._due = now + (now - began) * (1 / SHARE - 1)

    def _copy(self, beside: Beside, model: dict[str, Tensor]) -> None:
        if beside.problem:
            return self._give_up(beside.problem)
        packed = self._pack(model)
        self._needed = room.least(packed)
        beside.copy(self._at, packed, self.lines())
        return None

    def _reserve(self) -> None:
        """On the first rank of a machine, when the optimizer has its state: take the memory, if it is there. And again
        where there is more of it later: of layers that no step before has used, say."""
        assert self._slots is not None
        try:
            packed = self._pack(self._strategy.module.state_dict(keep_vars=True))
        except Exception as error:
            return self._give_up(f"no snapshots in memory: {error}")
        size = self._room = room.needed(packed)
        if self._slots.holds(size):  # since an attempt before
            return None
        problem = room.problem(self._slots, size, self._left_over())
        if problem:
            return self._give_up(problem)
        self._say(f"snapshots in memory: 2 x {room.words(size)}")
        return room.take(self._slots, size, self._say)

    def _give_up(self, why: str) -> None:
        self._slots = None
        self._say(why)


class _Aside(contextlib.AbstractContextManager[None]):
    """Two functions as a context, at less cost than a generator."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *_: object) -> None:
        self._leave()


def _is_buffer(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and bool(value.numel())
