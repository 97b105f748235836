"""Where a session runs: in a run of `train launch --script`, or in a run of its own; and how it reports there.

A launched session finds its run by the environment of its rank. It gives signs of life, writes lines into metrics.jsonl
and records how it ends, so that the agent, `train ls` and the keeper treat it like a task. Outside of a launched run
rank 0 makes a run folder (own_run.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from .. import faults, screen
from ..checkpoint.buffers import ENVIRONMENT
from ..errors import EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, Refused, TrainingFailed
from ..parallel.rank_env import RankEnv, is_under_torchrun, meeting_port, read_rank_env, store_port
from ..run import durable, heartbeat, outcome, proving
from ..run.heartbeat import Heart
from ..run.metrics import Lines, metrics_text
from ..run.outcome import Kind, Outcome
from ..run.run_folder import Run
from ..signals import CTRL_C
from . import own_run, waiting
from .agreement import Agreement
from .ending import Ending, Signals, leave_with
from .own_run import OwnRun
from .parting import Parting

log = logging.getLogger("train")

SAVE, STOP, COPY = "save", "stop", "copy"
"""What `Place.due` can say. COPY: into memory."""
_MEETING = datetime.timedelta(seconds=300)
"""How long a rank tries to reach the store."""
_PATIENCE = datetime.timedelta(hours=2)
"""How long ranks wait for one that makes a folder or verifies a checkpoint."""
_ASKED, _LEFT = "asked", "left"
"""Keys in the store: a rank was asked to stop; why one has stopped without the others."""
_LAST_WAIT = datetime.timedelta(seconds=60)
"""How long a rank that has stopped waits until rank 0 has recorded it."""
_SETTLE = 10.0
"""Seconds that a failing script gives a checkpoint that is being written."""
_NOTICED = 60.0
"""Seconds after which the refusal of a process that a rank has started is not the reason for the rank's end."""
_NOTE_EVERY = 1.0
"""Seconds between two notes of the progress in run.json, in a run of its own."""

_opened: Place | None = None


class Place:
    """Where the session of this process runs. One per process; see `open`."""

    def __init__(self, *, save_every: int | None, save_minutes: float | None) -> None:
        self.rank = 0
        self._own: OwnRun | None = None
        self._ended: Outcome | None = None
        self._is_spawned = _is_spawned()
        self._is_open = self._is_due = self._is_stopping = self._has_begun = False
        self.stop = Signals()
        # first: it prints what refuses the rest
        self._ending = Ending(failed=self._failed, exited=self._exited, own_code=lambda: self._own_code)
        self.explain: Callable[[BaseException], str] = lambda error: ""
        """Returns what an exception means in this session; ''."""
        self.parting = Parting(None, rank=0, size=1, fail=self._give_up)
        try:
            self._find(save_every, save_minutes)
        except BaseException:
            self.stop.release()  # in a notebook they belong to the kernel
            raise

    def _find(self, save_every: int | None, save_minutes: float | None) -> None:
        """Find the run, or make one."""
        rank_env = _rank_env()
        self.rank, self.size = rank_env.rank, rank_env.size
        self.local_rank, self.local_size = rank_env.local_rank, rank_env.local_size
        self._save_every, self._save_seconds = save_every or 0, 60 * (save_minutes or 0.0)
        self._saved, self._saved_at = 0, time.monotonic()
        self.copy_every = self._copied = 0
        """Number of updates between two copies in memory, on which the ranks have agreed; 0: none yet."""
        self.snapshot_memory = ""
        """Address of the memory for snapshots; '': none."""
        self._lines: Lines | None = None
        self._note_at = 0.0
        self._finish: Callable[[], None] = lambda: None
        self._is_complete: Callable[[], bool] = lambda: True
        self._settle: Callable[[float], None] = lambda _: None
        self.asked: proving.Asked | None = None
        """What `train prove` asks for; None: nothing."""
        self._store = _connect(rank_env)
        self.parting = Parting(self._store, rank=self.rank, size=self.size, fail=self._give_up)
        if _is_launched():
            self.run, self.attempt = _launched_run(), int(os.environ["TRAIN_ATTEMPT"])
            self.snapshot_memory = os.environ.pop(ENVIRONMENT, "")
            self.asked = proving.take()
            if self.is_first:
                self.run.note(session=True)
        else:
            self.run, self.attempt = self._run_of_its_own()
        self.logs = self.run.logs(self.attempt)
        if durable.try_lock(self.logs / f"rank{self.rank}.session", patience=0.0) is None:
            raise Refused(
                f"{self.run.name} has a session of rank {self.rank} already, and this process inherits its "
                "environment; start a run of its own: env -u TRAIN_RUN_DIR python FILE"
            )
        self.heart = Heart(self.logs / f"rank{self.rank}.beat")
        self._agreement = Agreement(self._store, rank=self.rank, size=self.size, settle=_settle)
        self._is_open = True

    @classmethod
    def open(cls, *, save_every: int | None = None, save_minutes: float | None = None) -> Place:
        """Find the run of this process, or make one.

        Args:
            save_every: Updates between two checkpoints; None: only by time.
            save_minutes: Minutes between two checkpoints; None: only by updates.

        Raises:
            Refused: a session cannot run here, or one is open already.
        """
        global _opened  # noqa: PLW0603 - a process has one place
        if _opened is not None:
            raise Refused("this process has a session already; open one session, in the first line of main()")
        if threading.current_thread() is not threading.main_thread():
            raise Refused("a session reads signals, so open it in the main thread")
        _opened = cls(save_every=save_every, save_minutes=save_minutes)
        return _opened

    def _run_of_its_own(self) -> tuple[Run, int]:
        """Make the run on rank 0, and tell the others."""

        def make() -> str:
            self._own = OwnRun(ranks=self.size, stop=self.stop)
            return f"{self._own.attempt} {self._own.run.path}"

        attempt, _, path = self.agree("run", make).partition(" ")
        return self._own.run if self._own is not None else Run(Path(path)).held(), int(attempt)

    def agree(self, key: str, make: Callable[[], str]) -> str:
        """Return on every rank what `make` gives on rank 0. Works without a process group.

        Args:
            key: A name that is used once.

        Raises:
            Refused: `make` is refused on rank 0.
        """
        if self._store is None:
            return make()
        if self.is_first:
            try:
                text = make()
            except BaseException as error:
                self._tell(key, f"!{error}")
                raise
            self._tell(key, f"={text}")
            return text
        self._store.wait([key], _PATIENCE)
        told = str(self._store.get(key).decode())
        if told.startswith("!"):
            raise Refused(told[1:])
        return told[1:]

    def _tell(self, key: str, text: str) -> None:
        if self._store is not None:
            self._store.set(key, text)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # --- from the first batch to the last

    def began(self, from_step: int, metrics_bytes: int = 0) -> None:
        """Record that training begins after this update. Cuts metrics.jsonl to what its checkpoint has seen.

        Raises:
            Refused: the ranks are others than the environment of this process says.
        """
        _check_group(self.size)
        self._has_begun, self._saved, self._saved_at = True, from_step, time.monotonic()
        self._copied = from_step
        if self.size > 1:
            self.stop.wait.listen(lambda: self._is_told(_ASKED), lambda: self._tell(_ASKED, "1"))
        if self.is_first:
            with contextlib.suppress(FileNotFoundError):
                if self.run.metrics.stat().st_size > metrics_bytes:
                    os.truncate(self.run.metrics, metrics_bytes)
            self._lines = Lines(self.run.metrics)
            self.run.note_ready(from_step, session=True)
        self.beat(heartbeat.STARTING, from_step)

    def beat(self, phase: int, step: int) -> None:
        """Give a sign of life: the phase (run/heartbeat.py), and the last update."""
        self.heart.beat(phase, step)

    def log(self, line: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl, on rank 0. Readers see it at once."""
        if self._lines is None:
            return
        text: Any = line
        self._lines.add(metrics_text(text))
        self._lines.flush()
        now = time.monotonic()
        if self._own is not None and now >= self._note_at:  # an agent notes it itself
            self._note_at = now + _NOTE_EVERY
            known = {name: line[name] for name in ("step", "epoch", "loss", "total_steps") if name in line}
            self.run.note(**known)

    def not_exact(self, reason: str) -> None:
        """Name what no checkpoint restores: in the log, and in run.json for `train show`. Any rank may call it.

        Args:
            reason: `OBJECT: was A, is B`, or another line of that length.
        """
        if self.run.note_not_exact(reason):
            log.warning("not exact: %s", reason)

    def sync(self) -> str:
        """Make the lines durable. Returns what prevents this; '' if nothing does."""
        return "" if self._lines is None or self._lines.sync() else self._lines.problem

    @property
    def is_written(self) -> bool:
        """Whether the disk has taken all lines."""
        return self._lines is None or self._lines.is_written

    def metrics_size(self) -> int:
        """Return the bytes of metrics.jsonl, which a checkpoint notes; 0 on ranks other than the first."""
        return self.run.metrics.stat().st_size if self._lines is not None else 0

    def due(self, updates: int, copy_every: int = 0) -> str:
        """Return what all ranks do now, after this many updates: SAVE, STOP, COPY, or '' for nothing.

        Call it once at each border where a checkpoint may be taken, on every rank. SAVE lasts until `saved`.

        Args:
            copy_every: the number of updates between two copies in memory that this rank wants; 0: as it is.
        """
        self.stop.look()
        self._ending.goes_on()
        wants = STOP if self.stop.asked else SAVE if self._is_time() else f"{COPY} {copy_every}" if copy_every else ""
        agreed, _, number = self._agreement.due(updates, wants).partition(" ")
        if agreed == COPY:
            self.copy_every, self._copied = int(number), updates
        self._is_stopping |= agreed == STOP
        self._is_due |= agreed == SAVE
        if self._save_every and updates // self._save_every > self._saved // self._save_every:
            self._is_due = True
        if self.agreed:
            return self.agreed
        if not self.copy_every or updates // self.copy_every == self._copied // self.copy_every:
            return ""
        self._copied = updates
        return COPY

    @property
    def agreed(self) -> str:
        """What all ranks have agreed on and is not done yet, as `due` says it."""
        return STOP if self._is_stopping else SAVE if self._is_due else ""

    def wants_stop(self) -> bool:
        """Whether this rank was asked to stop."""
        self.stop.look()
        return self.stop.asked

    def agree_to_stop(self) -> None:
        """Note that all ranks have agreed to stop, without an update."""
        self._is_stopping = True

    @property
    def is_stopping(self) -> bool:
        """Whether the next `due` will say STOP, as far as this rank knows: the same on all ranks, because they agree
        before."""
        if self.size == 1:
            return self.stop.asked
        return self._is_stopping or self._agreement.comes_next == STOP

    def _is_time(self) -> bool:
        return self.is_first and 0 < self._save_seconds <= time.monotonic() - self._saved_at and not self._is_due

    def saved(self, updates: int) -> None:
        """Note that a checkpoint of this update was published."""
        self._saved, self._saved_at, self._is_due = updates, time.monotonic(), False

    def claim_signals(self) -> None:
        """Take the signals back from a library, whose handlers are not called from now on."""
        self.stop.claim()

    # --- the end

    def at_exit(
        self, finish: Callable[[], None], is_complete: Callable[[], bool],
        settle: Callable[[float], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Set what a clean exit without an end does, and what a failure does first.

        Args:
            finish: Ends the session as finished.
            is_complete: Whether the loop has reached its end. If not, an exit after a request to stop is a stop.
            settle: Gives a checkpoint that is being written some seconds.
        """
        self._finish, self._is_complete, self._settle = finish, is_complete, settle

    def end(
        self, kind: Kind, *, step: int, epoch: int | None = None, reason: str = "",
        figures: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Record how this rank ends. The run's end is recorded when its processes have ended."""
        known = {} if epoch is None else {"epoch": epoch}
        self._report(Outcome(rank=self.rank, kind=kind, step=step, reason=reason, figures=known | dict(figures or {})))
        if kind is Kind.FINISHED:
            self.stop.release()  # what the script does from now on is its own
            self.parting.close()
        if self._lines is not None:
            self._lines.sync()

    def _report(self, end: Outcome) -> None:
        if not self._is_open:  # the line is printed, and the exit code says the rest
            self._ended = end
            if self._is_spawned and _is_launched():  # the rank that has started this process knows only that it is gone
                self.run = _launched_run()
                logs = self.run.logs(int(os.environ["TRAIN_ATTEMPT"]))
                outcome.write(logs, dataclasses.replace(end, rank=int(os.environ.get("RANK", "0"))))
            return
        of_worker = outcome.read(self.logs, self.rank) if end.kind is Kind.DIED else None
        if of_worker is not None and of_worker.kind is Kind.REFUSED and end.time - of_worker.time < _NOTICED:
            end = of_worker
        self._ended = end
        self.beat(heartbeat.ENDING, end.step)
        with contextlib.suppress(OSError):
            outcome.write(self.logs, end)

    def stop_here(self, *, step: int, epoch: int | None = None) -> NoReturn:
        """End this process as stopped. The checkpoint of this update has been published.

        Raises:
            SystemExit: always, so that `finally` and `with` of the script are left properly.
        """
        reason = self.stop.reason or "another rank was asked to"
        self.end(Kind.STOPPED, step=step, epoch=epoch, reason=reason)
        if self.is_first:
            with contextlib.suppress(OSError):
                screen.remark(f"stopped after step {step}; continue with: train resume {self.run.name}")
            self._tell("stopped", "1")
        elif self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.wait(["stopped"], _LAST_WAIT)
        raise SystemExit(self._stop_code)

    def stop_without_a_batch(self) -> NoReturn:
        """End this process as stopped at the newest checkpoint, because a batch does not come. Ranks that wait for this
        one learn why it is gone."""
        step = self.run.newest_checkpoint
        at = f"at the checkpoint of step {step}" if step else "before the first checkpoint"
        why = f"stopped {at}, because rank {self.rank} has waited {waiting.PATIENCE:.0f} s for a batch"
        self._tell(_LEFT, why)
        self._stopped_at_newest(step, why)
        if self.size == 1:
            raise SystemExit(self._stop_code)
        self._exited()
        leave_with(self._stop_code)  # `finally` of the script may wait for the other ranks

    def _stopped_at_newest(self, step: int, why: str) -> None:
        self.end(Kind.STOPPED, step=step, reason=self.stop.reason or "another rank was asked to")
        with contextlib.suppress(OSError):
            screen.remark(why + (f"; continue with: train resume {self.run.name}" if step else ""))

    def _why_left(self) -> str:
        """Return why another rank has stopped without this one; '' if none has."""
        return str(self._store.get(_LEFT).decode()) if self._is_open and self._is_told(_LEFT) else ""

    def _is_told(self, key: str) -> bool:
        with contextlib.suppress(RuntimeError):  # the store is gone
            return self._store is not None and bool(self._store.check([key]))
        return False

    @property
    def _stop_code(self) -> int:
        is_restarted = not _is_launched() and own_run.is_of_torchrun()
        return 0 if is_restarted else EXIT_STOPPED

    @property
    def _own_code(self) -> int:
        """The exit code of the end that is on record."""
        kind = Kind.FINISHED if self._ended is None else self._ended.kind
        return {Kind.FINISHED: 0, Kind.STOPPED: self._stop_code, Kind.REFUSED: EXIT_REFUSED}.get(kind, EXIT_FAILED)

    def _give_up(self, reason: str) -> None:
        """End this process as failed. Called in a thread."""
        self._ending.fail(TrainingFailed(reason))

    def _failed(self, error: BaseException) -> bool:
        """Record an exception that has ended the script. Returns whether the request was wrong."""
        self.parting.close()
        if self._is_open:
            self._settle(_SETTLE)
        if self._ended is None or self._ended.kind is not Kind.STOPPED:  # else the checkpoint is saved: it stays so
            if isinstance(error, KeyboardInterrupt) and self._own is not None:
                self.stop.ask(CTRL_C, "Ctrl-C twice", now=True)
            elif why := self._why_left():  # so this rank could not reach it
                self._stopped_at_newest(self.run.newest_checkpoint, why)
                self._exited()
                leave_with(self._stop_code)
            else:
                self._report(self._outcome_of(error))
        if self._own is not None:
            self._own.end(self._ended)
        return self._ended is not None and self._ended.kind is Kind.REFUSED

    def _outcome_of(self, error: BaseException) -> Outcome:
        rank, step = self.rank, self.heart.step if self._is_open else 0
        if isinstance(error, Refused):
            return Outcome(rank=rank, kind=Kind.REFUSED, step=step, reason=str(error), recurs=True)
        if isinstance(error, TrainingFailed):
            return Outcome(rank=rank, kind=Kind.FAILED, step=step, reason=str(error), recurs=True)
        if isinstance(error, SystemExit):
            how = f"with code {error.code}" if isinstance(error.code, int) else f"with: {error.code}"
            return Outcome(rank=rank, kind=Kind.DIED, step=step, reason=f"the script called sys.exit {how}")
        from ..supervise import diagnose

        try:
            raise error
        except BaseException as raised:
            why = diagnose.failure_of(raised, None)
        if hint := self.explain(error):
            why["reason"] += f"; {hint}"
            with contextlib.suppress(OSError):
                screen.remark(hint)
        return Outcome(rank=rank, kind=Kind.DIED, step=step, is_of_system=isinstance(error, OSError), **why)

    def _exited(self) -> int | None:
        """Record a clean exit. Returns the exit code; None: Python's own."""
        self.parting.close()
        code = None
        if self._ended is None and self._has_begun:
            if self.stop.asked and not self._is_complete():
                reason, step = self.stop.reason, self.run.newest_checkpoint
                self.end(Kind.STOPPED, step=step, reason=reason)
                code = self._stop_code
            else:
                self._finish()
        if self._own is not None:
            self._own.end(self._ended)
        return code


def _rank_env() -> RankEnv:
    """Return which rank this process is.

    Raises:
        Refused: the environment is wrong, or of several machines, or this process belongs to another one.
    """
    if _is_spawned():
        raise Refused(
            "a session does not run in a process of multiprocessing; start ranks with train launch or torchrun, and "
            "put what the script does below: if __name__ == '__main__':"
        )
    rank_env = read_rank_env() if is_under_torchrun() else RankEnv()
    if rank_env.size != rank_env.local_size:
        raise Refused("a session runs on one machine; for several machines write a task: docs/tasks.md")
    try:
        faults.arm(os.environ.get("TRAIN_FAULT"), rank_env.rank)
    except ValueError as error:
        raise Refused(error) from None
    return rank_env


def _is_spawned() -> bool:
    """Whether multiprocessing has started this process, for example for a data worker."""
    is_importing = getattr(multiprocessing.current_process(), "_inheriting", False)  # the script, just now
    return is_importing or multiprocessing.parent_process() is not None


def _is_launched() -> bool:
    """Whether `train launch` has started this process."""
    return "TRAIN_RUN_DIR" in os.environ and "TRAIN_ATTEMPT" in os.environ


def _launched_run() -> Run:
    """Return the run of the environment.

    Raises:
        Refused: it is a task's.
    """
    run = Run(Path(os.environ["TRAIN_RUN_DIR"])).held()
    if not run.read().get("script"):
        raise Refused(
            f"{run.name} runs a task, which needs no session; to run a script: env -u TRAIN_RUN_DIR python FILE"
        )
    return run


def _connect(rank_env: RankEnv) -> Any:
    """Return the store of the ranks; None for a single one.

    Raises:
        Refused: the launcher has none.
    """
    if rank_env.size == 1:
        return None
    import torch.distributed as dist

    host, port = "127.0.0.1", store_port()
    if port is None:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise Refused("the ranks of a session meet at torchrun's store; start them with train launch or torchrun")
        host, port = os.environ.get("MASTER_ADDR", host), meeting_port()
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_MEETING)
    store.add("sessions", 1)  # the launcher sees that this rank meets others: scripts/meeting.py
    return dist.PrefixStore(f"trainstation/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _check_group(size: int) -> None:
    """Check that the script's process group has the ranks of the environment. Raises Refused."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != size:
        ranks = dist.get_world_size()
        how = f"start it with: train launch --script FILE --nproc {ranks}, or torchrun --nproc-per-node {ranks} FILE"
        raise Refused(f"the process group has {ranks} ranks, but this process was started as one of {size}; {how}")


def _settle() -> None:
    """Wait until the GPU has computed all that is queued there."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
