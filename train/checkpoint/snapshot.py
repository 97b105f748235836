"""Snapshots: copies of the training state in memory that outlives the ranks. A rank's death costs only the steps since
the last one.

In ddp rank 0 copies the whole state, with fsdp and hsdp each rank copies its part. All copy after the same step: rank 0
requests a copy in the stats of a step, as often as copies take a hundredth of the time, and a rank that cannot take
part vetoes it there. A copy is sealed once the loss of its step is known to be finite and the lines of the run are
written up to it.

On a GPU the device copies, between the update of the step and the next forward, into pinned memory, and the host does
not wait: a thread waits for the copy and seals it. On a CPU everything happens at once.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from train import format
from train.checkpoint import serialize
from train.checkpoint.buffers import Buffers, begin_of_tensors
from train.checkpoint.serialize import Content, Serialized
from train.checkpoint.staging import PinnedMemory
from train.checkpoint.state_dict import TrainState
from train.parallel.world import World

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
    begun: Any
    ended: Any
    """CUDA events around the copy; None on a CPU."""
    seconds: float
    """Seconds of the host that the copy took."""


class Snapshots:
    """One rank's copies."""

    def __init__(
        self, buffers: Buffers | None, is_on: bool, world: World, is_sharded: bool, fingerprint: str, mark: str,
        memory_left: Callable[[], int],
    ) -> None:  # fmt: skip
        """
        Args:
            buffers: this rank copies to and loads from them; None: it has none.
            is_on: whether copies are wanted; the same on all ranks.
            is_sharded: each rank has a part of the state only.
            fingerprint: of everything that must be the same where a copy is used.
            mark: the mark of this attempt, the same on all machines.
            memory_left: returns the bytes of memory that are left.
        """
        self.buffers, self._is_on, self._world, self.is_sharded = buffers, is_on, world, is_sharded
        self.fingerprint, self.memory_left, self._mark = fingerprint, memory_left, mark
        self._copies = is_sharded or world.is_first
        self._memory: list[PinnedMemory] = []
        """The buffers, after they are reserved."""
        self._thread: threading.Thread | None = None
        """Reserves the memory, or seals a copy."""
        self._draft: _Draft | None = None
        self._problem = ""
        """Why no more copies are possible; '' while they are."""
        self._is_over = False
        """Whether that has been reported, and this rank refuses copies from now on."""
        self.cost = 0.0
        """Seconds that a copy takes. SHARE says how long to wait before the next one."""
        self._costs = collections.deque[float](maxlen=3)
        """Seconds of the last copies. The least counts, because on a busy machine one may take very long."""
        self._next = 0.0
        """Time at which the next copy may start."""
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

    def attach(self, state: TrainState, is_written: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Set what is copied.

        Args:
            is_written: whether the disk has taken all lines of this rank.
            say: a line for people, on the first rank of a machine.
        """
        self._state, self._is_written, self._say = state, is_written, say

    def copy_request(self) -> float:
        """Return what this rank adds to the stats of its step. All ranks copy if the sum is positive.

        1: a copy is due, by rank 0's clock; -1: this rank cannot take part.
        """
        if not self._is_on:
            return 0.0
        is_ready = not self._is_over and self._is_written() and (bool(self._memory) or not self._copies)
        begins = max(time.monotonic(), self._last + self._steps_ahead * self._pace)
        requests = is_ready and self._world.is_first and begins >= self._next
        if requests:
            self._next = begins + self.cost * (1 / SHARE - 1)
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
            self._next = 0.0

    def after_step(self, step: int) -> None:
        """Copy the state after this step, if all ranks have agreed to."""
        if not self._is_on or self._is_over:
            return
        self._pace = time.monotonic() - self._last
        try:
            if self._copies:
                self._continue(step)
        except Exception as error:  # an optimizer may hold what cannot be serialized
            self._problem = str(error)
        self._last = time.monotonic()
        if self._problem:
            self._is_over = True
            line = f"no snapshots in memory: {self._problem}"
            self._say(line)
            if not self._world.is_lead:  # with fsdp it may be this rank alone whose memory is short
                log.warning(line)

    def _continue(self, step: int) -> None:
        """Seal the last copy, begin a new one, or reserve the memory for them."""
        is_written = self._is_written()
        is_due, self._is_due = self._is_due, False
        if self._draft is not None and self._known >= self._draft.step and is_written:
            draft, self._draft = self._draft, None
            self._start(self._seal, draft)
        if is_due and self._memory and self._draft is None and is_written:
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
        if not self._is_busy:
            self._release()

    @property
    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, what: Callable[..., None], *arguments: Any) -> None:
        self._thread = threading.Thread(target=what, args=arguments, daemon=True, name="snapshot")
        self._thread.start()

    def _serialize(self, step: int) -> Serialized:
        return serialize.serialize(self._state, self.fingerprint, step, self._mark)

    def _copy(self, step: int) -> None:
        """Copy the state after a step into the older buffer."""
        began = time.perf_counter()
        self.wait()  # for the copy before: no part may fall two copies behind
        state = self._serialize(step)
        if state.size > min(len(memory.map) for memory in self._memory):
            self._release()  # it has grown, perhaps by layers that no step before has used
            self._prepare(state)
            return
        assert self.buffers is not None
        self._next = time.monotonic() + self.cost * (1 / SHARE - 1)
        slot, begun = self.buffers.begin(), self._event()
        state.copy_to(self._memory[slot].bytes)
        draft = _Draft(slot, step, state, begun, self._event(), time.perf_counter() - began)
        if self._known >= step:
            self._seal(draft)
        else:
            self._draft = draft

    def _event(self) -> torch.cuda.Event | None:
        if self._world.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._world.device))
        return event

    def _seal(self, draft: _Draft) -> None:
        """Wait for the device, and write the header."""
        try:
            assert self.buffers is not None
            taken = draft.seconds
            if draft.ended is not None:
                torch.cuda.set_device(self._world.device)  # else this thread would open the first one
                draft.ended.synchronize()
                taken += draft.begun.elapsed_time(draft.ended) / 1000
            began = time.perf_counter()
            self.buffers.seal(draft.slot, self._memory[draft.slot].map, draft.step, draft.state.plain, draft.state.end)
            sealing = time.perf_counter() - began
            cost = taken + sealing if draft.ended is None else max(taken, sealing * SHARE / _BUSY)
            self._costs.append(cost)
            self._next += (min(self._costs) - self.cost) * (1 / SHARE - 1)
            self.cost = min(self._costs)
        except Exception as error:
            self._problem = str(error)

    def _prepare(self, state: Serialized) -> None:
        """Reserve pinned memory for copies of a state, if there is enough."""
        assert self.buffers is not None
        size = begin_of_tensors(len(state.plain) + max(len(state.plain), _SLACK)) + state.end
        ranks = self._world.local_size if self.is_sharded else 1
        missing, left = 2 * size - self.buffers.taken, self.memory_left()
        if missing > 0 and missing * ranks > left / 2:
            self._problem = (
                f"{2 * ranks} x {format.size(size)} are more than half of the {format.size(left)} that are left; "
                "a death now costs the steps since the last checkpoint"
            )
            return
        if not self.buffers.holds(size):  # else it is that of the attempt before
            self._say(f"snapshots in memory: 2 x {format.size(size)}" + (" for each rank" if self.is_sharded else ""))
        self.cost = size / _SPEED
        if size <= _AT_ONCE and self._world.device.type == "cpu":
            self._reserve(size)
        else:
            self._start(self._reserve, size)

    def _reserve(self, size: int) -> None:
        """Reserve the memory, map it, and pin it for a GPU."""
        try:
            assert self.buffers is not None
            self.buffers.reserve(size)
            device = self._world.device if self._world.device.type == "cuda" else None
            maps = self.buffers.map()
            self._memory = [PinnedMemory(memory, device, "snapshots make training wait") for memory in maps]
        except (OSError, ValueError, RuntimeError) as error:
            self._problem = str(error)

    def _release(self) -> None:
        for memory in self._memory:
            memory.unpin()
        self._memory = []


def newest_common(buffers: Buffers, world: World) -> int:
    """Return the newest step of which all ranks have a copy, by the headers alone; 0: none. A collective."""
    return max(set.intersection(*world.gather(set(buffers.steps))), default=0)


def read(buffers: Buffers, world: World, step: int, fingerprint: str) -> Content | None:
    """Read this rank's copy after a step, on all ranks or on none. A collective.

    If a rank cannot use its copy, or the copies are of different attempts, all ranks wipe theirs.
    """
    slot = buffers.steps[step]
    content = serialize.read(buffers, slot, fingerprint)
    marks = world.gather(content.mark if content is not None else None)
    if None in marks or len(set(marks)) > 1:
        buffers.wipe(slot)
        return None
    return content
