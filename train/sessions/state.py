"""The state of a session: what is registered, its checkpoints and snapshots, its updates, and its weights' digest.

A checkpoint is written behind training: the state is copied to host memory, and a thread writes and publishes it. Its
collectives have a group of their own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import faults, screen
from ..checkpoint import manifest as manifests
from ..checkpoint.buffers import Buffers
from ..checkpoint.commit import CannotSave, Committer, Content
from ..checkpoint.load import reason_of
from ..checkpoint.newest import ResumeState, newest_state, newest_valid
from ..checkpoint.serialize import Serialized
from ..checkpoint.staging import Staging
from ..checkpoint.state_dict import size_of, weights_sha256
from ..checkpoint.writer import DurableWriter
from ..config.schema import Checkpoint
from ..errors import Refused, TrainingFailed, one_line
from ..parallel.world import World
from ..run import durable, heartbeat, owner
from ..run.run_folder import Run
from ..supervise import memory
from . import buckets, by_rank, objects
from .memory import InMemory, Memory
from .objects import Module, Optimizer, Parts, Registered, Whole
from .reading import Reading
from .updates import LONG, Updates, are_zero

log = logging.getLogger("train")
T = TypeVar("T")

LIBRARY = "library"
"""Folder in a checkpoint for what a library writes by itself."""
_PATIENCE = datetime.timedelta(hours=2)
"""How long ranks wait for one that writes or reads a checkpoint."""
_CPU = torch.device("cpu")


class Place(Protocol):
    """What this file needs to know of where a session runs."""

    rank: int
    size: int
    local_rank: int
    run: Run
    attempt: int

    local_size: int
    snapshot_memory: str
    """Address of the memory for snapshots; '': none."""

    @property
    def is_written(self) -> bool:
        """Whether the disk has taken all lines of metrics.jsonl."""

    def beat(self, phase: int, step: int) -> None:
        """Give a sign of life."""

    def agree(self, key: str, make: Callable[[], str]) -> str:
        """Return on every rank what `make` gives on rank 0. Works without a process group."""

    def not_exact(self, reason: str) -> None:
        """Name what no checkpoint restores."""


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a loop stands: what comes next."""

    epoch: int = 0
    batch: int = 0
    updates: int = 0


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a session continues with, besides its objects, which are loaded."""

    position: Position
    values: dict[str, Any]
    """This rank's plain values."""
    metrics_bytes: int
    """Length of metrics.jsonl at that time."""
    library: Path | None = None
    """The folder that a library has written."""
    is_on_disk: bool = True
    """Whether the newest checkpoint holds it."""


@dataclasses.dataclass(frozen=True)
class Now:
    """What a checkpoint or a snapshot holds besides the registered objects."""

    position: Position
    values: dict[str, Any]
    """This rank's plain values."""
    metrics_bytes: int
    """Length of metrics.jsonl."""


class State:
    """The registered objects and their checkpoints. Every method is called by all ranks alike."""

    def __init__(self, place: Place, keep: int = Checkpoint.keep, snapshots: bool = True) -> None:
        """
        Args:
            keep: number of checkpoints to keep: the newest ones.
            snapshots: whether copies in memory are wanted.
        """
        self._place, self._kept = place, Checkpoint(keep=keep, asynchronous=False)
        self._wants_memory = snapshots
        self._memory: Memory | None = None
        self._now: Callable[[], Now] | None = None
        """Returns what goes into a snapshot that is taken now."""
        self._staging: Staging | None = None
        self._busy: Future[None] | None = None
        """The checkpoint that is being written."""
        self._objects: dict[str, Registered] = {}
        self._settings: dict[str, dict[str, str]] = {}
        """How the objects were made, before a checkpoint was loaded."""
        self._updates = Updates(not_exact=place.not_exact, warn=self._warn)
        self._gradients_read: dict[str, dict[Any, Any]] = {}
        """Gradients of the checkpoint, by object and parameter, until the loop continues."""
        self._known_world: World | None = None
        self._committer: Committer | None = None

    # --- what is registered

    def register(self, **given: Any) -> None:
        """Register all that a checkpoint holds. Once, after everything is made.

        Raises:
            Refused: a checkpoint cannot hold an object, or this is the second call.
        """
        if self._objects:
            raise Refused("session.register was called twice; register everything in one call, after all is made")
        made, problem = {}, ""
        try:
            made = self._made(given)
        except Refused as error:
            problem = str(error)
        self._check_ranks(given, problem)
        modules = [one for one in made.values() if isinstance(one, Module)]
        for one in made.values():
            if isinstance(one, Module):
                one.prefix = f"{one.name}." if len(modules) > 1 else ""
                self.lay_buckets(one.value)
                self._updates.watch(one.value.parameters())
                if one.is_compiled:
                    self._warn(
                        f"{one.name} is compiled: a resume is exact if shapes of batches do not vary and no kernel is "
                        "chosen by its time (max-autotune)"
                    )
            elif isinstance(one, Optimizer):
                one.modules = modules
                self._updates.follow(one.name, one.value)
            elif isinstance(one.value, torch.amp.GradScaler):
                self._updates.follow_scaler(one.value)
        self._name_parameters(made, modules)
        self._objects = made
        self._settings = {name: one.settings() for name, one in made.items()}

    def _name_parameters(self, made: dict[str, Registered], modules: list[Module]) -> None:
        """Name optimizers whose parameters no checkpoint holds."""
        if any(objects.is_of_user(one) for one in made.values()):  # it may save them by itself
            return
        held = {id(parameter) for one in modules for parameter in one.value.parameters()}
        for one in made.values():
            lost = [one for one in one.parameters if id(one) not in held] if isinstance(one, Optimizer) else []
            if lost:
                self._place.not_exact(
                    f"{one.name}: {len(lost)} of its parameters are in no registered module, so no checkpoint holds "
                    "them; register the module"
                )

    def _warn(self, line: str) -> None:
        if self._place.rank == 0:
            log.warning("warning: %s", line)

    def _made(self, given: dict[str, Any]) -> dict[str, Registered]:
        """Return what stands for the objects, and for the optimizers that they hold.

        Raises:
            Refused: a checkpoint cannot hold an object.
        """
        if not given:
            raise Refused("session.register() has nothing to register; give it names: register(model=model)")
        made = {name: objects.registered(name, value) for name, value in given.items()}
        known = {id(one.value): one for one in made.values()}
        for one in sorted(made.values(), key=lambda one: one.order):
            for name, held in objects.held_optimizers(one).items():
                inner = known.get(id(held := objects.unwrapped(held)))
                if inner is None:
                    made[name] = known[id(held)] = inner = Optimizer(name, held)
                if isinstance(one, Optimizer) and isinstance(inner, Optimizer):
                    inner.share_groups(one)
        self._check_scalers(given)
        for one in made.values():
            self._check_plain(one)
        return made

    def _check_ranks(self, given: dict[str, Any], problem: str) -> None:
        """Check that all ranks register the same. A collective: a rank that is refused here must not leave the others
        waiting.

        Args:
            problem: why this rank's objects are refused.

        Raises:
            Refused: on all ranks.
        """
        if self._place.size == 1:
            if problem:
                raise Refused(problem)
            return
        kinds = {name: type(value).__name__ for name, value in given.items()}
        found = self._world.gather((problem, kinds))
        if problem := next(filter(None, (one for one, _ in found)), ""):
            raise Refused(problem)
        first = found[0][1]
        for rank, (_, other) in enumerate(found):
            for name in {**first, **other}:
                if name not in first or name not in other:
                    one, lacks = (0, rank) if name in first else (rank, 0)
                    raise Refused(f"register: rank {one} registers {name}, rank {lacks} does not; make it on all ranks")
                if first[name] != other[name]:
                    raise Refused(
                        f"register: {name} is a {first[name]} on rank 0 and a {other[name]} on rank {rank}; register "
                        "the same on all ranks"
                    )

    def lay_buckets(self, module: nn.Module) -> None:
        """Lay out the buckets of every DDP in a module, for a library that registers nothing."""
        lines = buckets.lay_out(module)
        for line in lines:
            self._warn(line)

    def follow(self, optimizers: Iterable[Any], scaler: Any = None) -> None:
        """Count the updates of optimizers that a library saves by itself."""
        for number, optimizer in enumerate(optimizers):
            self._updates.follow(f"{LIBRARY}.{number}", objects.unwrapped(optimizer))
        if isinstance(scaler, torch.amp.GradScaler):
            self._updates.follow_scaler(scaler)

    def _check_plain(self, one: Registered) -> None:
        try:
            objects.packed(one.take_apart(Parts()))
        except ValueError as error:
            raise Refused(
                f"register({one.name}=…): its state cannot be saved: {error}; state_dict() must hold only tensors, "
                "numbers, strings, lists and dicts"
            ) from None

    def _check_scalers(self, given: dict[str, Any]) -> None:
        for name, value in given.items():
            scaler = getattr(value, "scaler", None)  # Accelerate's optimizer has one, which scales every loss
            if isinstance(scaler, torch.amp.GradScaler) and not any(one is scaler for one in given.values()):
                raise Refused(f"register({name}=…): its loss scaler is missing; add it: scaler=accelerator.scaler")

    @property
    def modules(self) -> dict[str, Module]:
        return {name: one for name, one in self._objects.items() if isinstance(one, Module)}

    # --- updates

    @property
    def updates(self) -> int:
        """The optimizer updates so far; without an optimizer, the batches."""
        return self._updates.total

    @property
    def is_clean(self) -> bool:
        """Whether no gradient is pending. Reads all parameters."""
        return self._updates.is_clean

    @property
    def looks_clean(self) -> bool:
        """Whether no gradient seems to be pending. Reads two parameters."""
        return self._updates.looks_clean

    @property
    def made_update(self) -> bool:
        """Whether there was an update in the last body or after it. The same on all ranks."""
        return self._updates.made_update

    def border(self) -> None:
        """The body of a batch is over. Called before `updates` and `is_clean` are read."""
        self._updates.end_body()

    def end_work(self) -> None:
        """The work at the end of an epoch is over."""
        self._updates.end_work()

    def count_end(self) -> None:
        """Let a loop without any update have a checkpoint of its end."""
        self._updates.count_end()

    @property
    def is_long(self) -> bool:
        """Whether so many batches went without an update that stops are agreed without. The same on all ranks."""
        return self._updates.without > 0 and self._updates.without % LONG == 0

    def name_lost(self, is_of_library: bool) -> None:
        """Name gradients that a checkpoint between two updates lacks: FSDP2 hides them until they are summed."""
        parameters = [one for each in self.modules.values() for one in each.value.parameters()]
        if is_of_library or (not self.made_update and any(isinstance(one, DTensor) for one in parameters)):
            self._place.not_exact(f"gradients: were accumulated after step {self.updates}, are lost in a resume")

    @property
    def _kinds(self) -> dict[str, str]:
        """Return the classes of what is registered. A module's may vary: its state tells whether it fits."""
        return {name: type(one.value).__name__ for name, one in self._objects.items() if not isinstance(one, Module)}

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on every rank."""
        return self._world.gather(value)

    # --- saving

    def save(
        self, now: Now, *, is_last: bool = False, write: Callable[[Path], None] | None = None
    ) -> bool:  # fmt: skip
        """Save a checkpoint, or start to. Returns whether there is or will be one; a warning says why not. Before the
        first update there is nothing to save.

        The caller has made metrics.jsonl and the sample logs durable.

        Args:
            is_last: no other save follows: it is written before this returns, and an older checkpoint gives way if the
                disk is full.
            write: writes what a library saves by itself into a folder. Called on all ranks, which wait for it.

        Raises:
            TrainingFailed: a value cannot be saved, or this was the last chance.
        """
        self.wait()
        step = now.position.updates
        if not step:
            return False
        self._place.beat(heartbeat.SAVING, step)
        if self._committer is None:
            self._committer = Committer(
                self._place.run, self._world.with_own_group(_PATIENCE), kept=self._kept, attempt=self._place.attempt,
                saved=self._note_saved,
            )  # fmt: skip
        own, size, facts = self._content(now, is_library=write is not None)
        is_behind = write is None and not is_last and self._has_room(own)
        if is_behind:
            self._staging = self._staging or Staging()
            own = self._staging.copy(own)
            faults.here("save.staged")
        content = Content(size, lambda partial: self._write(partial, own, write), facts)
        if is_behind:
            pool = ThreadPoolExecutor(1, "save")
            self._busy = pool.submit(self._committer.commit, step, lambda: content)
            pool.shutdown(wait=False)  # no idle thread, beside which workers would be forked
            return True
        try:
            self._committer.commit(step, lambda: content)
        except CannotSave as error:
            if is_last and (older := self._committer.make_room(error)):
                log.warning("warning: %s; the checkpoint of step %d was removed for the last one", error, older)
                return self.save(now, is_last=True, write=write)
            if is_last:
                raise TrainingFailed(f"the checkpoint of step {step} could not be saved: {error}") from error
            self._say_not_saved(error)
            return False
        return True

    def wait(self) -> bool:
        """Wait for the checkpoint that is being written. Returns whether there was none or it is on the disk.

        Raises:
            RuntimeError: another rank is gone.
        """
        busy, self._busy = self._busy, None
        try:
            if busy is not None:
                busy.result()
        except CannotSave as error:
            self._say_not_saved(error)
            return False
        return True

    def settle(self, seconds: float) -> None:
        """Give the checkpoint that is being written some time, as the process fails."""
        if self._busy is not None:
            concurrent.futures.wait([self._busy], seconds)

    def _say_not_saved(self, error: CannotSave) -> None:
        self._warn(f"a checkpoint could not be saved ({error}); training continues")

    def _has_room(self, own: dict[str, Any]) -> bool:
        """Whether all ranks have memory for a copy of what they write."""
        needed = size_of(own) - (self._staging.bytes if self._staging is not None else 0)
        return not self._world.any(needed * self._place.local_size > memory.left() / 2)

    def _note_saved(self, step: int) -> None:
        self._place.run.note(saved_step=step, step=step)  # a script may log no lines

    def _take_apart(self, parts: Parts, values: dict[str, Any], *, is_library: bool = False) -> dict[str, Any]:
        """Return the state in plain values, after its tensors were put into `parts`."""
        states = {name: one.take_apart(parts) for name, one in self._objects.items()}
        return {
            "states": states, "gradients": {} if is_library else self._gradients(parts), "refs": parts.refs,
            "values": values, "updates": self._updates.state(), "settings": self._settings, "kinds": self._kinds,
        }  # fmt: skip

    def _content(self, now: Now, *, is_library: bool) -> tuple[dict[str, Any], int, dict[str, Any]]:
        """Return what a checkpoint will hold: what this rank writes, the bytes of all ranks, and facts for the
        manifest. A collective."""
        parts, world = Parts(), self._world
        tree = self._take_apart(parts, now.values, is_library=is_library)
        problem, rest = "", b""
        try:
            rest = objects.packed(tree)
        except ValueError as error:
            problem = self._problem(tree["states"], now.values, error)
        sums = by_rank.sums_of(parts.tensors) if world.size > 1 else {}
        found = world.gather((problem, sums, by_rank.digest_of(rest)))
        if problem := next(filter(None, (one[0] for one in found)), ""):
            raise TrainingFailed(problem)
        rest_tensor = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
        if world.size > 1:
            own = by_rank.part_of(
                parts.tensors, rest_tensor, rank=world.rank, gathered=[(sums, digest) for _, sums, digest in found]
            )
        else:
            own = {"rest": rest_tensor}
            for (section, name), tensor in parts.tensors.items():
                own.setdefault(section, {})[name] = tensor
        facts = {
            "epoch": now.position.epoch + 1, "world_size": world.size, "torch": torch.__version__,
            "session": {
                "registered": list(self._objects), "modules": list(self.modules), "metrics_bytes": now.metrics_bytes,
                "position": dataclasses.asdict(now.position), "library": is_library,
            },
        }  # fmt: skip
        return own, sum(tensor.nbytes for tensor in parts.tensors.values()), facts  # DTensors count as a whole

    def _gradients(self, parts: Parts) -> dict[str, Any]:
        """Return the gradients that a later step may use, by object and parameter.

        Those of a GAN's discriminator hold what the generator's backward left; others may accumulate for longer. 0
        stands for a gradient that is used up: it comes back as zeros, because a step skips parameters without any.
        """
        found: dict[str, Any] = {}
        seen: set[int] = set()
        pending: list[tuple[str, Any, Tensor, Any]] = []
        for name, one in sorted(self._objects.items(), key=lambda item: item[1].order):
            for key, parameter, of in one.parameters_by_key():
                if parameter.grad is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    found.setdefault(name, {})[key] = 0
                    if not self._updates.is_used(parameter):
                        pending.append((name, key, parameter.grad, of))
        gradients = [gradient for _, _, gradient, _ in pending]
        if not any(isinstance(one, DTensor) for one in gradients) and are_zero(gradients):
            return found
        for name, key, gradient, of in pending:
            place = objects.OBJECTS, f"{name}.gradient.{key}"
            found[name][key] = parts.take_out(lambda _, place=place: place, of)(gradient)  # type: ignore[misc]
        return found

    def put_gradients(self) -> None:
        """Restore gradients where the loop continues: the script's own zero_grad() before it must not clear them."""
        for name, gradients in self._gradients_read.items():
            for key, parameter, _ in self._objects[name].parameters_by_key() if gradients else ():
                if (found := gradients.get(key)) is not None:
                    is_tensor = isinstance(found, Tensor)
                    parameter.grad = found.to(parameter.device) if is_tensor else torch.zeros_like(parameter.detach())
        self._gradients_read = {}

    def _problem(self, states: dict[str, Any], values: dict[str, Any], error: ValueError) -> str:
        for name, state in states.items():
            try:
                objects.packed(state)
            except ValueError as problem:
                return f"the state of {name} cannot be saved: {problem}"
        for name, value in values.items():
            try:
                objects.packed(value)
            except ValueError as problem:
                return f"session.values[{name!r}] cannot be saved: {problem}; keep only numbers, texts, lists and dicts"
        return f"session.values cannot be saved: {error}"

    def _write(
        self, partial: Path, own: dict[str, Any], write: Callable[[Path], None] | None
    ) -> manifests.Files:  # fmt: skip
        assert self._committer is not None
        writer, world = DurableWriter(partial), self._committer.world
        dcp.save(own, storage_writer=writer, process_group=world.group, no_dist=world.size == 1)
        files = {name: entry for part in world.gather(writer.entries) for name, entry in part.items()}
        if write is None:
            return files
        world.on_first((partial / LIBRARY).mkdir)
        write(partial / LIBRARY)
        world.barrier()
        return files | world.on_first(lambda: dict(_durable(partial)))

    # --- snapshots in memory

    def copy_wish(self, every: int) -> int:
        """Return the number of updates between two copies that this rank wants, if the ranks should agree on another
        than the present one; else 0."""
        return self._memory.wish(self.updates, every) if self._memory is not None and self._place.rank == 0 else 0

    def copy(self, now: Callable[[], Now], is_due: bool) -> bool:
        """Copy the state into memory, if that is due and no gradient is pending. Returns whether it was copied. Called
        at each border."""
        if self._memory is None or not self.updates:
            return False
        self._now, is_due = now, is_due and self.is_clean
        self._memory.after_border(self.updates, is_due)
        return is_due

    def take_apart(self, into: Serialized) -> dict[str, Any]:
        """Return the state with references instead of tensors, for a snapshot."""
        assert self._now is not None
        parts, now = Parts(), self._now()
        tree = self._take_apart(parts, now.values)
        tensors = {key: into.add(tensor) for key, tensor in parts.tensors.items()}
        return tree | {"tensors": tensors, "position": now.position, "metrics_bytes": now.metrics_bytes}

    def whole(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the states of the registered objects with their tensors, and the plain values."""
        states = {}
        for name, one in self._objects.items():
            found = one.take_apart(Whole())
            states[name] = found["state"] | {"beside": found["beside"]} if isinstance(one, Module) else found
        return states | {f"values.{name}": value for name, value in values.items()}

    def _open_memory(self) -> None:
        """Open this rank's memory for copies, if all ranks have one. A collective."""
        place, world, buffers = self._place, self._world, None
        if self._wants_memory and place.snapshot_memory:
            try:
                buffers = Buffers(place.snapshot_memory, place.local_rank)
            except OSError as error:
                log.warning("warning: no snapshots in memory: %s", error)
        if world.any(buffers is None) or buffers is None:
            return
        kinds = {name: type(one.value).__name__ for name, one in self._objects.items()}
        fingerprint = json.dumps([kinds, torch.__version__, place.rank, place.size])
        parts = Parts()
        self._take_apart(parts, {})
        device = next((tensor.device for tensor in parts.tensors.values() if tensor.is_cuda), _CPU)
        self._memory = Memory(buffers, world=world, fingerprint=fingerprint, attempt=place.attempt, device=device)
        self._memory.attach(self, lambda: place.is_written, self._say)

    def _say(self, line: str) -> None:
        if self._place.rank == 0:
            with contextlib.suppress(OSError):
                screen.remark(line)

    # --- loading

    def load(self) -> Saved | None:
        """Load the newest whole checkpoint into the registered objects; None: there is none.

        Raises:
            Refused: it does not fit what is registered.
        """
        run, place, content = self._place.run, self._place, None
        if place.size > 1 and not self._objects and not dist.is_initialized():  # a library connects its ranks later
            step, manifest = json.loads(place.agree("checkpoint", lambda: json.dumps(self._newest())))
            start = ResumeState(step, step, manifest=manifest)
        else:
            if self._objects:
                self._open_memory()
            start, content = newest_state(
                run, self._world, self._memory, beat=lambda: place.beat(heartbeat.STARTING, 0)
            )
        if content is not None:
            return self._load_from_memory(InMemory(content), start)
        return self._load(run.checkpoint(start.step), start.manifest) if start.manifest else None

    def _newest(self) -> tuple[int, dict[str, Any]]:
        manifests.clean(self._place.run)  # what a kill left
        return newest_valid(self._place.run, sets_aside=True)

    def _load_from_memory(self, reading: InMemory, start: ResumeState) -> Saved:
        rest = reading.rest()
        self._load_objects(reading, rest, f"the snapshot of step {start.step}")
        return Saved(rest["position"], rest["values"], rest["metrics_bytes"], is_on_disk=start.saved == start.step)

    def _load(self, folder: Path, manifest: dict[str, Any]) -> Saved:
        self._check_fits(folder, manifest)
        facts, same = manifest["session"], manifest["world_size"] == self._place.size
        try:
            owner.check_checkpoint(folder)
            reading = Reading(folder, self._place.rank if same else 0)
            rest = reading.rest()
        except (dcp.api.CheckpointException, ValueError, KeyError) as error:
            raise Refused(f"{folder.name} cannot be read: {reason_of(error)}") from error
        if not same and self._place.rank == 0:
            before = manifest["world_size"]
            own = "; what each rank had of its own is rank 0's now" if reading.has_own else ""
            log.warning(
                "warning: %s is of %d ranks, and this run has %d: sums differ in the last bits%s",
                folder.name, before, self._place.size, own,
            )  # fmt: skip
        self._load_objects(reading, rest, f"the checkpoint {folder.name}")
        library = folder / LIBRARY if facts["library"] else None
        return Saved(Position(**facts["position"]), rest["values"], facts["metrics_bytes"], library)

    def _load_objects(self, reading: Reading | InMemory, rest: dict[str, Any], name_of: str) -> None:
        """Load the registered objects, pending gradients and the counts of updates."""
        kinds = rest["kinds"]
        left = [
            f"{name}: was {kinds.get(name)}, is {now}" for name, now in self._kinds.items() if kinds.get(name) != now
        ]
        for name, one in sorted(self._objects.items(), key=lambda item: item[1].order):
            try:
                one.prepare(rest["states"][name])
                left += one.load(reading.state(rest["states"][name], one))
                self._gradients_read[name] = reading.state(rest["gradients"].get(name, {}), one)
            except Exception as error:  # of torch, or of the user's load_state_dict
                why = reason_of(error) if isinstance(error, dcp.api.CheckpointException) else one_line(error)[:300]
                raise Refused(f"{name} does not fit {name_of}: {why}") from error
        for line in left:
            self._place.not_exact(line)
        self._updates.load(rest["updates"])
        for name, before in rest.get("settings", {}).items() if self._place.rank == 0 else ():
            self._say_replaced(name, before, self._settings.get(name, {}))

    def _say_replaced(self, name: str, before: dict[str, str], now: dict[str, str]) -> None:
        """Say which settings of this script the checkpoint has replaced: nothing that a user sets is ignored."""
        for key in [key for key in before if now.get(key, before[key]) != before[key]][:3]:
            log.warning(
                "warning: %s was made with %s %s, but the checkpoint goes on with %s; to change it, set it after "
                "session.register", name, key, now[key], before[key],
            )  # fmt: skip

    def _check_fits(self, folder: Path, manifest: dict[str, Any]) -> None:
        if "session" not in manifest:
            raise Refused(f"{folder} is a checkpoint of a task, not of a session; choose another --name")
        saved, own = set(manifest["session"]["registered"]), set(self._objects)
        if manifest["session"]["library"]:
            if own:
                raise Refused(f"{folder.name} is of a library, which loads it by itself; do not register anything")
            return
        if lacks := sorted(saved - own):
            raise Refused(f"{folder.name} holds {', '.join(lacks)}, which session.register does not name; register it")
        if new := sorted(own - saved):
            raise Refused(
                f"{folder.name} does not hold {', '.join(new)}; leave it out of session.register, or start a new run"
            )

    # --- the end

    def digest(self) -> str:
        """Return the SHA-256 of the registered modules' tensors on rank 0; '' on other ranks and without a module."""
        tensors: dict[str, Tensor] = {}
        for one in self.modules.values():
            tensors |= one.tensors()
        found = weights_sha256(tensors, self._place.rank == 0) if tensors else ""
        self._world.gather(None)  # a rank that has sent its part must not end while the first one still receives
        return found

    @property
    def _world(self) -> World:
        """The ranks, with a group on the CPU of their own.

        Raises:
            Refused: the script has not connected them.
        """
        if self._known_world is None:
            place = self._place
            if place.size > 1 and not dist.is_initialized():
                raise Refused(
                    f"there are {place.size} ranks, but torch.distributed does not connect them; call "
                    "torch.distributed.init_process_group() before session.register"
                )
            alone = World(place.rank, size=place.size, local_rank=place.local_rank, device=_CPU)
            self._known_world = alone.with_own_group(_PATIENCE)
        return self._known_world


def _durable(partial: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Make what a library has written durable, and yield the manifest's entries."""
    for place, _, names in os.walk(partial / LIBRARY):
        for name in names:
            path = Path(place, name)
            durable.sync(path)
            yield str(path.relative_to(partial)), manifests.file_digest(path)
        durable.sync(Path(place))
