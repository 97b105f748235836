"""Snapshots: copies of the training state in memory that outlives the ranks. A rank's death costs only the steps since
the last one.

Each rank copies a part: with fsdp and hsdp its own part of the state, in ddp an equal share of what the ranks of the
first machine hold alike. All copy after the same step: rank 0 requests a copy in the stats of a step, as often as
copies take a hundredth of the time, and a rank that cannot take part vetoes it there. A copy is sealed once the loss of
its step is known to be finite and the lines of the run are written up to it. A rank whose last copy is not sealed
vetoes the next one, so the copy that is overwritten is never the newest one that all ranks have sealed.

On a GPU the device copies into pinned memory, beside the next forward and backward (side_copy.py), and the host does
not wait: a thread waits for the copy and seals it. On a CPU everything happens at once.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from .. import format
from ..parallel.world import World
from . import serialize
from .buffers import Buffers, begin_of_tensors
from .serialize import Content, Serialized, Source
from .side_copy import SideCopy
from .staging import PinnedMemory

log = logging.getLogger("train")

SHARE = 0.01
"""Maximum share of the time that copies may take from training."""
_BUSY = 0.25
"""Maximum share of the time that a core may compute checksums while a GPU trains."""
_SPEED = 1e9
"""Bytes per second: the first estimate of the speed of a copy."""
_SLACK = 1 << 16
"""Bytes by which the pickled part of a state may grow."""
_AT_ONCE = 1 << 26
"""Maximum bytes that are reserved without a thread, in some hundredths of a second."""
_PATIENCE = 10.0
"""Seconds to wait at the end for an unfinished copy, because a device may hang."""


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A copy that is written but not sealed."""

    slot: int
    step: int
    state: Serialized
    side: SideCopy | None
    """The copy that a GPU makes; None on a CPU."""
    seconds: float
    """Seconds of the host that the copy took."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """The buffers of all parts of the state that a rank has, on its machine."""

    all: list[Buffers]
    own: int = 0
    """The part that this rank copies."""

    def checked(self, world: World) -> list[Buffers]:
        """Return the parts that this rank verifies: its own, or all if it loads without the others."""
        return self.all if world.size == 1 else [self.all[self.own]]


class Copies:
    """One rank's copies: writes them, and seals them. A subclass says when."""

    def __init__(
        self, parts: Parts | None, *, world: World, fingerprint: str, mark: str, memory_left: Callable[[], int]
    ) -> None:  # fmt: skip
        """
        Args:
            parts: this rank copies to one of them and loads from all; None: it has no copies.
            fingerprint: of everything that must be the same where a copy is used.
            mark: the mark of this attempt, the same on all machines.
            memory_left: returns the bytes of memory that are left.
        """
        self.parts, self._world = parts, world
        self.fingerprint, self.memory_left, self._mark = fingerprint, memory_left, mark
        self._buffers = parts.all[parts.own] if parts is not None else None
        self._memory: list[PinnedMemory] = []
        """The buffers, after they are reserved."""
        self._thread: threading.Thread | None = None
        """Reserves the memory, or seals a copy."""
        self._draft: _Draft | None = None
        self._stream: torch.cuda.Stream | None = None
        """The stream of a GPU's copies, once there is one."""
        self._unheld: SideCopy | None = None
        """The GPU's copy that the next update has to wait for."""
        self._problem = ""
        """Why no more copies are possible; '' while they are."""
        self._is_over = False
        """Whether that has been reported, and this rank refuses copies from now on."""
        self.cost = 0.0
        """Seconds that a copy takes."""
        self._costs = collections.deque[float](maxlen=3)
        """Seconds of the last copies. The least counts, because on a busy machine one may take very long."""
        self._begun = -math.inf
        """Time at which the last copy began, or will begin."""

    def attach(self, state: Source, is_written: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Set what is copied.

        Args:
            is_written: whether the disk has taken all lines of this rank.
            say: a line for people, on the first rank of a machine.
        """
        self._state, self._is_written, self._say = state, is_written, say

    @property
    def _next(self) -> float:
        """Time at which the next copy may start, so that copies take at most SHARE of the time."""
        return self._begun + self.cost * (1 / SHARE - 1)

    def _is_known(self, step: int) -> bool:
        """Whether the state after this step may be used."""
        return True

    def _try_continue(self, step: int, is_due: bool) -> None:
        """Do `_continue`, and report a problem."""
        try:
            if self._buffers is not None:
                self._continue(step, is_due)
        except Exception as error:  # an optimizer may hold what cannot be serialized
            self._problem = str(error)
        if self._problem:
            self._is_over = True
            line = f"no snapshots in memory: {self._problem}"
            self._say(line)
            if not self._world.is_lead:  # with fsdp it may be this rank alone whose memory is short
                log.warning(line)

    def _continue(self, step: int, is_due: bool) -> None:
        """Seal the last copy, begin a new one, or reserve the memory for them."""
        if self._draft is not None and self._is_known(self._draft.step) and self._is_written():
            draft, self._draft = self._draft, None
            self._start(self._seal, draft)
        if is_due and self._memory and self._draft is None:
            self._copy(step)
        elif not self._memory and not self._is_busy:
            self._prepare(self._serialize(step))

    def wait(self, seconds: float | None = None) -> None:
        """Wait for an unfinished copy."""
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        """Give the memory back at the end of training, after an unfinished copy."""
        self.wait(_PATIENCE)
        if self._unheld is not None and not self._is_busy:
            self._start(self._unheld.wait)
            self.wait(_PATIENCE)
        if not self._is_busy:
            self._release()

    @property
    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, what: Callable[..., object], *arguments: Any) -> None:
        self._thread = threading.Thread(target=what, args=arguments, daemon=True, name="snapshot")
        self._thread.start()

    def _serialize(self, step: int) -> Serialized:
        assert self.parts is not None
        part, parts = self.parts.own, len(self.parts.all)
        return serialize.serialize(self._state, self.fingerprint, step, self._mark, part, parts)

    def _copy(self, step: int) -> None:
        """Copy the state after a step into the older buffer."""
        began = time.perf_counter()
        self.wait()
        state = self._serialize(step)
        if state.size > min(len(memory.map) for memory in self._memory):
            self._release()  # it has grown, perhaps by layers that no step before has used
            self._prepare(state)
            return
        assert self._buffers is not None
        self._begun = time.monotonic()
        slot, side, device = self._buffers.begin(), None, self._world.device
        memory = self._memory[slot].bytes
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            side = self._unheld = SideCopy(state, memory, device, self._stream)
        else:
            state.copy_to(memory)
        draft = _Draft(slot, step, state, side, time.perf_counter() - began)
        if self._is_known(step) and side is None and self._is_written():
            self._seal(draft)
        else:
            self._draft = draft

    def _seal(self, draft: _Draft) -> None:
        """Wait for the device, and write the header."""
        try:
            assert self._buffers is not None
            taken = draft.seconds + (draft.side.wait() if draft.side is not None else 0.0)
            began = time.perf_counter()
            memory, plain = self._memory[draft.slot].map, draft.state.plain
            self._buffers.seal(draft.slot, memory, draft.step, plain, draft.state.length)
            sealing = time.perf_counter() - began
            cost = taken + sealing if draft.side is None else max(taken, sealing * SHARE / _BUSY)
            self._costs.append(cost)
            self.cost = min(self._costs)
        except Exception as error:
            self._problem = str(error)

    def _prepare(self, state: Serialized) -> None:
        """Reserve pinned memory for copies of a state, if there is enough."""
        assert self._buffers is not None
        size = begin_of_tensors(len(state.plain) + max(len(state.plain), _SLACK)) + state.length
        ranks = self._world.local_size
        missing, left = 2 * size - self._buffers.taken, self.memory_left()
        if missing > 0 and missing * ranks > left / 2:
            self._problem = (
                f"2 x {format.size(size * ranks)} are more than half of the {format.size(left)} that are left; "
                "a death now costs the steps since the last checkpoint"
            )
            return
        if not self._buffers.holds(size):  # else it is that of the attempt before
            self._say(f"snapshots in memory: 2 x {format.size(size * ranks)}")
        self.cost = size / _SPEED
        if size <= _AT_ONCE and self._world.device.type == "cpu":
            self._reserve(size)
        else:
            self._start(self._reserve, size)

    def _reserve(self, size: int) -> None:
        """Reserve the memory, map it, and pin it for a GPU."""
        try:
            assert self._buffers is not None
            self._buffers.reserve(size)
            device = self._world.device if self._world.device.type == "cuda" else None
            maps = self._buffers.map()
            self._memory = [PinnedMemory(memory, device, "snapshots make training wait") for memory in maps]
        except (OSError, ValueError, RuntimeError) as error:
            self._problem = str(error)

    def _release(self) -> None:
        for memory in self._memory:
            memory.unpin()
        self._memory = []


class Snapshots(Copies):
    """One rank's copies in a task: the ranks agree on each in the stats of a step."""

    def __init__(self, parts: Parts | None, *, is_on: bool, world: World, **options: Any) -> None:
        """
        Args:
            is_on: whether copies are wanted; the same on all ranks.
            options: those of Copies.
        """
        super().__init__(parts, world=world, **options)
        self._is_on = is_on
        self._requested = collections.deque[bool](maxlen=4)
        """Whether this rank requested a copy, in each step whose stats are not read yet."""
        self._known = 0
        """The last step whose stats have been read."""
        self._is_due = False
        """Whether all ranks have agreed on a copy since the last step."""
        self._pace, self._last = 0.0, time.monotonic()
        """Seconds that a step takes, and when the last one ended."""
        self._steps_ahead = 2 if world.device.type == "cuda" else 1
        """Number of steps from a request to its copy: stats of a GPU are read a step later."""

    def _is_known(self, step: int) -> bool:
        return self._known >= step

    def copy_request(self) -> float:
        """Return what this rank adds to the stats of its step. All ranks copy if the sum is positive.

        1: a copy is due, by rank 0's clock; -1: this rank cannot take part.
        """
        if not self._is_on:
            return 0.0
        has_sealed = bool(self._memory) and self._draft is None and not self._is_busy
        is_ready = not self._is_over and self._is_written() and (has_sealed or self._buffers is None)
        begins = max(time.monotonic(), self._last + self._steps_ahead * self._pace)
        requests = is_ready and self._world.is_first and begins >= self._next and not any(self._requested)
        if requests:
            self._begun = begins
        self._requested.append(requests)
        return float(requests) if is_ready else -1.0

    def stats_read(self, step: int, requests: float) -> None:
        """Use the sum of all ranks' requests in the stats of a step whose loss is finite and whose lines are
        written."""
        if not self._is_on or self._is_over:
            return
        self._known = step
        self._is_due |= requests > 0
        if self._requested.popleft() and requests <= 0:  # another rank cannot yet: ask again in the next step
            self._begun = -math.inf

    def after_step(self, step: int) -> None:
        """Copy the state after this step, if all ranks have agreed to."""
        if not self._is_on or self._is_over:
            return
        self._pace = time.monotonic() - self._last
        is_due, self._is_due = self._is_due, False
        self._try_continue(step, is_due)
        self._last = time.monotonic()

    def hold(self) -> None:
        """Let the GPU finish an unfinished copy before it changes weights or the optimizer's state. The host does not
        wait."""
        if self._unheld is not None:
            self._unheld.hold()
            self._unheld = None


def newest_common(parts: Parts, world: World) -> int:
    """Return the newest step of which all ranks have a copy, by the headers alone; 0: none. A collective."""
    own = set.intersection(*(set(part.steps) for part in parts.checked(world)))
    return max(set.intersection(*world.gather(own)), default=0)


def read(parts: Parts, *, world: World, step: int, fingerprint: str) -> Content | None:
    """Read the copy after a step, on all ranks or on none. A collective.

    If a rank cannot use its copy, or the copies are of different attempts, all ranks wipe theirs.
    """
    own = parts.checked(world)
    marks = world.gather({serialize.mark_of(part, step, fingerprint) for part in own})
    known = set.union(*marks)
    if None in known or len(known) > 1:
        wipe(parts, world, first=step, last=step)
        return None
    return serialize.read(parts.all, step)


def wipe(parts: Parts, world: World, *, first: int, last: float = math.inf) -> None:
    """Invalidate the copies of these steps, on each rank those that it verifies."""
    for part in parts.checked(world):
        part.wipe_steps(first, last)
