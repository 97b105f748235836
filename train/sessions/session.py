"""A session makes a loop exact that stays the user's: after a kill it continues in the middle of an epoch, and ends
with the same weights.

    session = ts.session(seed=0, save_every=500)
    loader = session.loader(dataset, batch_size=64)
    session.register(model=model, optimizer=optimizer)
    for epoch in session.epochs(30):
        for batch in loader:
            …
            session.log(loss=loss)
    session.finish()

A border is where the body of a batch ends, or the work at the end of an epoch. There checkpoints are taken and stops
are agreed. None is taken between an epoch's last batch and the end of the work after it: the script would enter an
empty inner loop, without the variables that a batch sets. No generator's state is saved: what is drawn at random
follows from the seed and the position (seeds.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from .. import faults, screen
from ..checkpoint.digests import Digests
from ..data.seeding import Seed, owned
from ..errors import Refused, TrainingFailed
from ..run import heartbeat, metrics
from ..run.metrics import Lines
from ..run.outcome import Kind
from . import lightning, seeds, unbound
from .arithmetic import Arithmetic
from .loader import Loader
from .means import Means
from .place import COPY, SAVE, STOP, Place
from .state import Now, Position, State
from .strays import Strays

log = logging.getLogger("train")

_EPOCHS, _RANGE, _BATCHES = "session.epochs()", "session.range()", "session.batches()"
_PEEK = "and to look at a sample write loader.dataset[0], or read a plain DataLoader"
_FACTS, _MEANS, _LEFT = "session.loader", "session.mean", "session.left"
"""Keys, beside the user's values, for what a checkpoint says of the loader, for the means of the epoch, and for whether
the loop was left by `break`."""
_LONG_BATCHES, _LONG_SECONDS = 50, 60.0
"""Batches, and seconds, that a stop or a save waits for a border without a pending gradient."""
_OF_LINES = ("step", "epoch", "total_steps")
"""Names in a line of metrics.jsonl that the session sets itself."""


def session(
    *, seed: int = 0, save_every: int | None = None, save_minutes: float = 10.0, log_samples: bool = False,
    deterministic: bool = True,
    snapshots: bool = True,
) -> Session:  # fmt: skip
    """Open the session of this process: find its run, and seed all ranks alike. It belongs into the first line of
    main().

    Args:
        seed: what is drawn at random follows from it.
        save_every: updates of the optimizer between two checkpoints; None: checkpoints follow the clock alone.
        save_minutes: minutes between two checkpoints; 0: never by the clock.
        log_samples: write the data set indices of each rank's samples into samples.rankR.log of the run folder.
        deterministic: let torch choose algorithms whose sums are the same in each run.
        snapshots: copy the state into memory too, in a launched run. False: it does not fit there twice.

    Raises:
        Refused: a value is wrong, this process has a session already, or its run cannot hold one.
    """
    is_number = isinstance(save_minutes, (int, float)) and 0 <= save_minutes < float("inf")
    place = Place.open(save_every=save_every, save_minutes=save_minutes if is_number else None)
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise Refused(f"seed={seed!r}: give a whole number from 0 to 2**63 - 1")
    if save_every is not None and (not isinstance(save_every, int) or save_every < 1):
        raise Refused(f"save_every={save_every!r}: give the number of updates between two checkpoints, at least 1")
    if not is_number:
        raise Refused(f"save_minutes={save_minutes!r}: give the minutes between two checkpoints; 0 for none by time")
    return Session(place, seed, log_samples=log_samples, deterministic=deterministic, snapshots=snapshots)


class Session:
    """What `session` returns. Every rank calls its methods alike."""

    def __init__(
        self, place: Place, seed: int, *, log_samples: bool = False, deterministic: bool = True, snapshots: bool = True
    ) -> None:  # fmt: skip
        self._place, self._seed, self._log_samples = place, seed, log_samples
        self._state = State(place, snapshots=snapshots)
        self._loader: Loader | None = None
        self._own: list[Seed] = []
        """Generators that the registered objects hold."""
        self._at = Position()
        self._saved_at: Position | None = None
        """Where the newest checkpoint was taken."""
        self._resumed_at: Position | None = None
        self._means = Means()
        self._has_left = self._was_left = False
        """Whether a `break` has left the loop, and whether one had before the checkpoint that was loaded."""
        self._facts: dict[str, int] = {}
        """What the checkpoint that was loaded says of the loader."""
        self._library: Path | None = None
        self._write: Callable[[Path], None] | None = None
        self._before_fetch: Callable[[], None] = lambda: None
        """What a library's binding does between two batches."""
        self._is_registered = self._is_complete = self._is_over = self._wants_save = self._wants_copy = False
        self._driver = self._loop = ""
        """What gives out the steps now, and what has before: a loop of the session or a library's name."""
        self._passes = self._first = 0
        """Passes over the loader in this epoch, and the batch with which the last one began."""
        self._count: int | None = None
        """Epochs or steps of the loop."""
        self._clean_at = Position()
        """The last border at which no gradient was pending."""
        self._waits = 0, time.monotonic()
        """Borders at which something was due and a gradient pending, and when that began."""
        self._digest = ""
        self._samples: Lines | None = None
        self.values: dict[str, Any] = {}
        """Plain values that a checkpoint keeps (a best metric, a counter): numbers, texts, lists and dicts of them. Set
        them after `register`, which fills this from the checkpoint."""
        if place.is_first and seeds.have_drawn():
            log.warning(
                "warning: something was drawn from torch's generator before ts.session(), which seeds it: a model made "
                "there has other weights in each run; call ts.session() first"
            )
        self._digests: Digests | None = None
        """Digests of the state after each update, in a run of `train prove`."""
        if place.asked is not None:
            self._digests = Digests(place.asked, place.run, rank=place.rank, attempt=place.attempt)
            self._log_samples = True
        seeds.at_start(seed)
        self._arithmetic = Arithmetic(place.not_exact, is_first=place.is_first) if deterministic else None
        self._strays = Strays(self._name_stray)
        place.explain = self._explain
        place.at_exit(self.finish, lambda: self._is_complete, self._state.settle)

    # --- before the loop

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> Loader:
        """Return the loader of the data to train on. It takes what DataLoader takes, and shuffles.

        Args:
            dataset: a map-style data set.
            batch_size: samples of a *global* batch. Each rank gets `batch_size / world_size` of them.
            options: those of DataLoader; `device`, to which batches are moved; and `weights`, see Loader.

        Raises:
            Refused: an option contradicts an exact order, or the ranks cannot share a batch equally.
        """
        if self._loader is not None:
            raise Refused("a session has one loader, for training; read evaluation data with a DataLoader")
        place = self._place
        self._loader = Loader(
            self, dataset, batch_size=batch_size, seed=self._seed, rank=place.rank, size=place.size,
            wait=place.stop.wait, **options,
        )  # fmt: skip
        place.stop.wait.can_save = self._can_save_in_wait
        if problem := self._loader.problem():
            place.not_exact(f"{type(dataset).__name__}: {problem}")
        return self._loader

    def register(self, **objects: Any) -> None:
        """Register all that a checkpoint holds, and load the newest whole checkpoint, if there is one.

        Call it once, after all objects are made: a scheduler's constructor writes into the optimizer.

        Args:
            objects: modules, optimizers, schedulers, scalers and what else has state_dict() and load_state_dict().

        Raises:
            Refused: an object cannot be saved, or the checkpoint holds other objects.
        """
        self._state.register(**objects)
        self._own = owned(*objects.values())
        self._continue()

    def lightning(self) -> Any:
        """Return the callback that makes Lightning's Trainer exact: `Trainer(callbacks=[session.lightning()])`."""
        return lightning.callback(self)

    def huggingface(self, trainer: Any) -> None:
        """Make a Trainer of Hugging Face exact. Call it before `trainer.train()`.

        Raises:
            Refused: the Trainer is set to something that cannot be exact.
        """
        from .huggingface import attach

        attach(self, trainer)

    def newest(self) -> str | None:
        """Return the path of the checkpoint from which a library continues, for `ckpt_path=` or
        `resume_from_checkpoint=`; None: the run has none."""
        if self._write is None:
            raise Refused("call session.newest() after session.lightning() or session.huggingface(trainer)")
        if self._library is None:
            return None
        run = self._place.run
        folder = run.path / self._library.relative_to(run.folder)  # a path that messages can show
        return str(file if (file := folder / lightning.FILE).exists() else folder)

    def _continue(self) -> None:
        """Load the newest checkpoint, and cut the lines of later steps."""
        saved, size = self._state.load(), 0
        if saved is not None:
            self._at, self._library, size = saved.position, saved.library, saved.metrics_bytes
            values = dict(saved.values)
            self._facts = values.pop(_FACTS, {})
            self._means.load(values.pop(_MEANS, {}))
            self._was_left = values.pop(_LEFT, False) and not self._is_fork(saved.position)
            self.values.update(values)
            self._clean_at = self._resumed_at = at = saved.position
            self._saved_at = at if saved.is_on_disk else None
            if self._place.is_first:
                source = "" if saved.is_on_disk else ", as it was in memory"
                with contextlib.suppress(OSError):
                    where = f"update {at.updates}, epoch {at.epoch + 1}, batch {at.batch}"
                    screen.say(f"session: continues after {where}{source}")
        self._place.began(self._state.updates, size)
        self._is_registered = True
        faults.here("loaded")
        seeds.after_register(self._seed, self._own)

    def _is_fork(self, at: Position) -> bool:
        """Whether this run begins with the checkpoint of another one, and so trains further."""
        return (self._place.run.read().get("forked_from") or {}).get("step") == at.updates

    def _explain(self, error: BaseException) -> str:
        """Return what an exception has to do with a resume; '' if nothing."""
        at = self._resumed_at
        if at is None or self._at.epoch > at.epoch:
            return ""
        where = f"batch {at.batch} of epoch {at.epoch + 1}" if self._loop != _RANGE else f"step {at.batch}"
        return unbound.explain(error, where)

    def _name_stray(self) -> None:
        where = "steps" if self._loop == _RANGE else "batches"
        remedy = "for batch in session.batches(loader, steps=N)" if self._loop == _RANGE else "session.loader"
        self._place.not_exact(
            f"a DataLoader is read across {where}: a resume starts it at its first batch; read it with {remedy}"
        )

    # --- the loop

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the numbers of the epochs, from 0. After a resume they begin with the checkpoint's epoch.

        Args:
            count: number of epochs; None: forever.
        """
        with self._looping(_EPOCHS, count):
            end = 0 if self._was_left else count
            for epoch in itertools.count(self._at.epoch) if end is None else range(self._at.epoch, end):
                self._passes, self._place.parting.at = 0, epoch + 1
                if not self._at.batch:
                    self._means.clear()
                self._strays.body()
                seeds.begin_epoch(self._seed, epoch, self._own)
                if self._loader is not None:
                    self._go_to_epoch(self._loader)
                if not self._at.batch:
                    self._state.put_gradients()
                yield epoch
                self._place.parting.at = epoch + 2  # this rank has not left
                if not self._passes:  # a loop without a loader
                    self._state.border()
                self._state.end_work()
                self._at = Position(epoch + 1, 0, self._state.updates)
                self.pause_if_due()

    def range(self, count: int) -> Iterator[int]:
        """Yield the numbers of steps, from 0, for a loop without a loader. After a resume they begin with the first
        one that the checkpoint lacks."""
        with self._looping(_RANGE, count):
            for step in range(count if self._was_left else self._at.batch, count):
                self._place.parting.at = step + 1
                self.before_batch(step)
                yield step
                self._place.parting.at = step + 2
                self.after_batch(step + 1)

    def batches(self, loader: Loader, steps: int) -> Iterator[Any]:
        """Yield this many batches, for a loop that counts steps: one epoch follows the other. After a resume they begin
        with the first batch that the checkpoint lacks.

        Args:
            loader: what `session.loader` has returned.
        """
        if loader is not self._loader:
            raise Refused(f"session.batches(…) reads session.loader(…), and was given a {type(loader).__name__}")
        with self._looping(_BATCHES, steps):
            if self._facts and self._facts != loader.facts:
                raise Refused("other data or another batch_size: session.batches() goes on only with those of its run")
            done = steps if self._was_left else self._at.epoch * len(loader) + self._at.batch
            while done < steps:
                self._passes = 0
                if not self._at.batch:
                    self._means.clear()
                self._go_to_epoch(loader)
                for batch in loader:
                    done += 1
                    self._place.parting.at = done
                    yield batch
                    self._place.parting.at = done + 1
                    if done == steps:  # the loader tells of all other batches
                        self.after_batch(loader.start)
                        break

    @contextlib.contextmanager
    def _looping(self, loop: str, count: int | None) -> Iterator[None]:
        """Context manager around what gives out the steps."""
        self._begin_loop(loop, count)
        try:
            yield
            self._end_loop()
        except GeneratorExit:
            self._leave_loop()
            raise
        finally:
            self._driver = ""

    def _begin_loop(self, loop: str, count: int | None) -> None:
        if not self._is_registered:
            raise Refused(f"call session.register(model=…, optimizer=…) before {loop}")
        if count is not None and (not isinstance(count, int) or count < 0):
            raise Refused(f"{loop.removesuffix(')')}{count!r}): give a whole number of at least 0")
        if self._driver or self._loop not in ("", loop):
            raise Refused(f"{loop} beside {self._driver or self._loop}: a session has one loop")
        self._driver = self._loop = loop
        self._count, self._is_complete, self._has_left = count, False, False
        self._place.parting.begin("epoch" if loop == _EPOCHS else "step")

    def _go_to_epoch(self, loader: Loader) -> None:
        """Let the next pass begin where the checkpoint was taken."""
        at, before, now = self._at, self._facts, loader.facts
        if before and before != now and at.batch:
            raise Refused(
                f"the checkpoint was taken after batch {at.batch} of an epoch of {before['samples']} samples in "
                f"batches of {before['batch_size']}, and the loader has {now['samples']} in batches of "
                f"{now['batch_size']}; use the data and batch_size of that run, or a checkpoint between two epochs"
            )
        self._facts = now
        loader.go_to(at.epoch, at.batch)

    def _end_loop(self) -> None:
        """The loop has reached its end. Several ranks save here, because a script may disconnect them before it
        ends."""
        self._is_complete = True
        self._place.parting.reach_end()
        self._state.count_end()
        self._at = dataclasses.replace(self._at, updates=self._state.updates)
        if self._place.size > 1:
            self._wait_for_save()
            if self._at != self._saved_at:
                self._save(is_last=True)
            self._digest = self._state.digest()
        self._place.beat(heartbeat.EVALUATING, self._state.updates)

    def _leave_loop(self) -> None:
        """A `break` leaves the loop, or an exception. The checkpoint of the end holds what the body has done."""
        self._has_left = True
        self._place.parting.leave()
        at, loader, updates = self._at, self._loader, self._state.updates
        last = len(loader) if loader is not None else 1 if self._loop == _EPOCHS else None
        batch = at.batch
        if updates > at.updates and batch != last:
            batch = loader.start if loader is not None else batch + 1
        self._at = Position(at.epoch + 1, 0, updates) if batch == last else Position(at.epoch, batch, updates)

    # --- for the loader, and for authors of bindings: library.py says in which order they call what

    def begin_pass(self, epoch: int, batch: int) -> None:
        """A pass over the loader begins with this batch of this epoch."""
        if self._driver in (_EPOCHS, _BATCHES):
            if epoch != self._at.epoch:  # by load_state_dict()
                raise Refused(f"the loader is set to epoch {epoch} in epoch {self._at.epoch}; leave that out")
            if self._passes:
                raise Refused(f"the loader was iterated twice in one epoch; count it as one more epoch, {_PEEK}")
        elif self._driver in ("", _RANGE):
            raise Refused(f"iterate over the loader inside: for epoch in session.epochs(…); {_PEEK}")
        self._passes, self._first = self._passes + 1, batch
        if self._log_samples and self._driver in (_EPOCHS, _BATCHES):
            self._open_samples(epoch, batch)

    def check_epoch(self, epoch: int) -> None:
        """The script sets the epoch of the loader."""
        if self._driver == _EPOCHS and epoch != self._at.epoch:
            raise Refused(
                f"set_epoch({epoch}) in epoch {self._at.epoch}: write set_epoch(epoch), with the number that "
                "session.epochs() gives, or leave it out"
            )

    def _can_save_in_wait(self) -> bool:
        """Whether the state is that of the last border, while a batch is waited for, and this process saves alone."""
        return self._place.size == 1 and self._driver in (_EPOCHS, _BATCHES) and self._state.is_clean

    def stop_in_wait(self) -> NoReturn:
        """Stop in place of a batch that does not come."""
        if self._can_save_in_wait():
            self._wait_for_save()
            if self._at != self._saved_at:
                self._save(is_last=True)
            self._place.stop_here(step=self._state.updates, epoch=self._at.epoch + 1)
        self._place.stop_without_a_batch()

    def before_batch(self, step: int) -> None:
        """Seed the body of a batch, counted over all epochs from 0, once the batch is fetched."""
        self._strays.body()
        self._state.put_gradients()  # the first time
        seeds.before_step(self._seed, step, self._place.rank, self._own)

    def after_batch(self, batch: int) -> None:
        """The body of a batch is over, and so many batches of this epoch are done."""
        if self._driver not in (_EPOCHS, _RANGE, _BATCHES):
            self._before_fetch()
            return
        state = self._state
        state.border()
        updates = state.updates
        self._at = Position(self._at.epoch, batch, updates)
        self._place.beat(heartbeat.TRAINING, updates)
        faults.here("step")
        is_last = self._driver != _RANGE and self._loader is not None and batch == len(self._loader)
        if is_last and self._driver == _BATCHES:  # no work follows
            self._at = Position(self._at.epoch + 1, 0, updates)
        self.pause_if_due(only_agree=is_last and self._driver == _EPOCHS)

    def end_pass(self, epoch: int) -> None:
        """All batches of an epoch are done. Its end work follows, and draws the same after a resume."""
        self._state.put_gradients()
        if self._driver == _EPOCHS and self._first and not self._state.is_clean:
            log.warning(
                "warning: epoch %d ends between two updates; if your loop makes one at the last batch, count batches "
                "with enumerate(loader, loader.start), because this pass began in the middle", epoch,
            )  # fmt: skip
        self._place.beat(heartbeat.EVALUATING, self._state.updates)
        self._strays.body()
        seeds.after_pass(self._seed, epoch, self._place.rank, self._own)

    def hand_over(
        self, library: str, *, write: Callable[[Path], None], before_fetch: Callable[[], None] = lambda: None
    ) -> None:
        """Let a library give out the steps, and read where the newest checkpoint was taken.

        Args:
            library: its name, for messages.
            write: writes the library's own checkpoint into a folder. All ranks call it.
            before_fetch: called between two batches of a pass, before the second one is fetched.

        Raises:
            Refused: something is registered.
        """
        if self._is_registered:
            raise Refused(f"{library} saves its own objects; leave out session.register")
        self._driver = self._loop = library
        self._write, self._before_fetch = write, before_fetch
        self._continue()

    def adopt(self, model: Any, optimizers: list[Any], scaler: Any = None) -> None:
        """Lay out the buckets of this model's DDP, take its digest at the end, and count the optimizers' updates."""
        self._state.register(model=model)
        self._state.follow(optimizers, scaler)

    def begin_training(self) -> None:
        """Let the loader begin at `position`, whatever was read from it before: a peek, a search for a rate."""
        if self._loader is not None:
            self._loader.go_to(self._at.epoch, self._at.batch)
            if self._log_samples:
                self._open_samples(self._at.epoch, self._at.batch)

    def claim_signals(self) -> None:
        """Take the signals back from a library that has set handlers."""
        self._place.claim_signals()

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._place.size

    @property
    def position(self) -> Position:
        """Where the loop stands: at the newest checkpoint at first, then where `batch_done` says."""
        return self._at

    @property
    def updates(self) -> int:
        """Number of updates of the optimizer so far."""
        return self._state.updates

    @property
    def is_clean(self) -> bool:
        """Whether no gradient is pending."""
        return self._state.is_clean

    @property
    def library_folder(self) -> Path | None:
        """The folder of the newest checkpoint that `write` has filled; None: the run has no checkpoint."""
        return self._library

    def owns(self, loader: Any) -> bool:
        """Return whether this is the session's loader."""
        return loader is not None and loader is self._loader

    def batch_done(self, epoch: int, batch: int) -> None:
        """Note that so many batches of this epoch are done."""
        self._state.border()
        self._at = Position(epoch, batch, self._state.updates)
        self._place.beat(heartbeat.TRAINING, self._state.updates)

    def evaluating(self) -> None:
        """Give a sign of life in an evaluation, which may take long."""
        self._place.beat(heartbeat.EVALUATING, self._state.updates)

    def add_line(self, figures: Mapping[str, Any], *, of: str = "", total_steps: int | None = None) -> None:
        """Append a line with these metrics to metrics.jsonl.

        Args:
            of: "eval" for metrics of an evaluation.
            total_steps: updates of the whole training, if known.
        """
        if not figures or not self._place.is_first:
            return
        numbers = {name: float(value) for name, value in figures.items()}
        line = {"step": self._state.updates, "epoch": self._at.epoch + 1}
        total = {"total_steps": total_steps} if total_steps and not of else {}
        self._place.log(line | total | ({of: numbers} if of else numbers))

    def trained(self) -> None:
        """Save at the end of the training. What the script does after it belongs to no checkpoint."""
        if self._at != self._saved_at:
            self._save(is_last=True)
        self._is_complete = True

    def pause_if_due(self, *, only_agree: bool = False) -> None:
        """Save or stop here if that is due and no gradient is pending. All ranks call it after the same batch.

        Args:
            only_agree: save and stop at the next border. The work at an epoch's end comes before it.
        """
        state, place = self._state, self._place
        if self._arithmetic is not None:
            self._arithmetic.look()
        if state.looks_clean:
            self._clean_at = self._at
        if self._digests is not None and state.made_update:
            self._follow_proof(self._digests)
        if place.size > 1 and state.is_long and any(state.gather(place.wants_stop())):
            place.agree_to_stop()
        if place.size == 1 or state.made_update:  # several ranks agree by updates
            due = place.due(state.updates, state.copy_wish(place.copy_every))
        else:
            due = place.agreed
        self._wants_copy |= due == COPY
        if only_agree:
            return
        if due not in (SAVE, STOP) and not self._wants_save:
            self._waits = 0, time.monotonic()
            self._wants_copy = not state.copy(self._now, self._wants_copy) and self._wants_copy
        elif self._may_pause():
            self._save(is_last=due == STOP)
            if due == STOP:
                place.stop_here(step=state.updates, epoch=self._at.epoch + 1)

    def _follow_proof(self, digests: Digests) -> None:
        """Do what `train prove` asks for at this border, on all ranks alike."""
        at, updates = self._at, self._state.updates
        digests.after(updates, lambda: self._state.whole(self.values), (at.epoch, at.batch))
        self._wants_save |= digests.saves(updates)
        if digests.stops(updates, self._place.stop):
            self._place.agree_to_stop()

    def _may_pause(self) -> bool:
        """Whether what is due is done at this border: no gradient is pending, or that is so for long. Pending ones are
        in the checkpoint, too. A collective."""
        count, since = self._waits
        self._waits = count + 1, since
        is_long = count >= _LONG_BATCHES or time.monotonic() - since > _LONG_SECONDS
        found = self._state.gather((self._state.is_clean, is_long))
        if not all(is_clean for is_clean, _ in found):
            if not any(is_long for _, is_long in found):
                return False
            if self._place.is_first and self._state.updates:
                log.warning(
                    "warning: the last %d batches each ended with a gradient pending, so the checkpoint of step %d "
                    "holds gradients", count, self._state.updates,
                )  # fmt: skip
            self._state.name_lost(self._write is not None)
        self._waits = 0, time.monotonic()
        return True

    def _save(self, *, is_last: bool = False) -> None:
        """Save a checkpoint of this position. A collective.

        Raises:
            TrainingFailed: it is the last one and could not be saved.
        """
        self._wants_save = False
        place, state = self._place, self._state
        problem = place.sync()
        if self._samples is not None and not self._samples.sync():
            problem = problem or self._samples.problem
        if problem := next(filter(None, state.gather(problem)), ""):
            if is_last:
                raise TrainingFailed(f"the lines of the last steps could not be written: {problem}")
            log.warning("warning: no checkpoint, because metrics.jsonl could not be written (%s)", problem)
        else:
            if state.save(self._now(), is_last=is_last, write=self._write):
                self._saved_at = self._at
        place.saved(state.updates)  # tried again when the next one is due
        place.beat(heartbeat.TRAINING, state.updates)

    def _now(self) -> Now:
        """Return what a checkpoint of this position holds besides the registered objects."""
        own = {_MEANS: self._means.state(), _LEFT: self._has_left or self._was_left}
        values = self.values | own | ({_FACTS: self._loader.facts} if self._loader is not None else {})
        return Now(self._at, values, self._place.metrics_size())

    def _wait_for_save(self) -> None:
        """Wait for the checkpoint that is being written."""
        if not self._state.wait():
            self._saved_at = None

    # --- the samples of each batch

    def _open_samples(self, epoch: int, batch: int) -> None:
        """Cut this rank's sample log to the batches before this one, and open it."""
        assert self._loader is not None
        if self._samples is None:
            path = metrics.samples_file(self._place.run, self._place.rank)
            metrics.cut_samples(path, epoch * len(self._loader) + batch)
            self._samples = Lines(path)
            self._loader.note = self._note_samples

    def _note_samples(self, step: int, indices: npt.NDArray[np.int64]) -> None:
        """Write the line of a batch before its body."""
        assert self._samples is not None
        self._samples.add(metrics.samples_text(step + 1, indices.tolist()))
        self._samples.flush()

    # --- in the loop

    def log(self, **figures: Any) -> None:
        """Append a line with these metrics to metrics.jsonl, where `train ls`, `top`, `plot` and `report` find them.

        Args:
            figures: numbers, or tensors of one value. `loss` and `lr` have their places in the views. Those of rank 0
                count. A value that is not finite is written as null.

        Raises:
            Refused: a metric is no number.
        """
        if not self._place.is_first:
            return
        line: dict[str, Any] = {"step": self._state.updates, "epoch": self._at.epoch + 1}
        if (total := self._total_steps()) is not None:
            line["total_steps"] = total
        for name, value in figures.items():
            if name in _OF_LINES:
                raise Refused(f"session.log({name}=…): the session writes {name} itself; choose another name")
            try:
                line[name] = value if type(value) in (int, float) else float(value)
            except (TypeError, ValueError, RuntimeError):
                raise Refused(f"session.log({name}=…) takes a number, not {type(value).__name__}") from None
        self._place.log(line)

    def mean(self, name: str, value: Any = None) -> Any:
        """Add a value, and return this rank's mean since the epoch began. A checkpoint holds it, so after a resume it
        counts the whole epoch.

        Args:
            value: a number, or a tensor of one value: then the mean is a tensor too, and nothing waits for a GPU. None:
                only return the mean, as a number.

        Raises:
            Refused: the value is no number, or there is none.
        """
        if self._write is not None:
            raise Refused(f"session.mean() in the loop of {self._loop}: log the value with the library")
        return self._means.read(name) if value is None else self._means.add(name, value)

    def _total_steps(self) -> int | None:
        """Return the updates of the whole loop; None where they are not known: before the first update, and where
        updates do not come every so many batches."""
        at, count, batches = self._clean_at, self._count, len(self._loader) if self._loader is not None else 1
        if count is None or not at.updates:
            return None
        done = at.epoch * batches + at.batch
        every = done // at.updates
        if done != every * at.updates:
            return None
        if self._loop == _BATCHES:
            return count // every
        return count * batches // every if batches % every == 0 else None

    @property
    def should_stop(self) -> bool:
        """Whether the run ends at the next border: after this batch, or after this epoch's work, which may leave out
        what takes long. The same on all ranks."""
        return self._place.is_stopping

    def save(self) -> None:
        """Take a checkpoint at the next border: when this batch's body is over, or in an epoch's last batch and after
        it, when this epoch's work is over. Call it on every rank."""
        self._wants_save = True

    # --- the end

    def finish(self) -> None:
        """Save, and end the run as finished, with the digest of the registered modules. A clean end of the script does
        the same.

        Raises:
            Refused: nothing is registered, or the ranks are connected no more.
        """
        if self._is_over:
            return
        if not self._is_registered:
            raise Refused("call session.register(model=…, optimizer=…) before session.finish()")
        place, state = self._place, self._state
        place.parting.settle()
        self._wait_for_save()
        digest = self._digest
        if place.size == 1 or dist.is_initialized():
            faults.here("digest")
            self._is_complete = True
            state.count_end()
            self._at = dataclasses.replace(self._at, updates=state.updates)
            digest = state.digest()
            # weights may have changed since the end of the loop; rank 0 has the digest
            if self._write is None and state.gather(not digest or digest != self._digest)[0]:
                self._save(is_last=True)
        elif not self._saved_at or self._saved_at.updates != state.updates:
            raise Refused("call session.finish() before torch.distributed.destroy_process_group()")
        faults.here("finish")
        self._is_over = True
        figures = {"weights_sha256": digest} if digest else {}
        place.end(Kind.FINISHED, step=state.updates, epoch=self._epochs_done(), figures=figures)
        faults.here("finished")

    def _epochs_done(self) -> int:
        """Return the epoch that the run has ended in, counted from 1."""
        return self._at.epoch + (self._at.batch > 0) or 1
