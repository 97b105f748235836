"""The loop that keeps a run alive: start the ranks, watch them, decide what a death means, restart.

Every run ends here, whoever started it, and only this module records a run's end. Ranks write how they ended
(run/outcome.py), and decide.py decides from all facts. A supervisor that is killed before it has recorded the end
leaves an interrupted run, and a resume brings that run to the same end. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from .. import faults, screen, signals
from ..errors import EXIT_FAILED, Refused, one_line
from ..mirror.process import Mirror
from ..run import log_limit, metrics, outcome, run_folder, states
from ..run.log_limit import LogLimit
from ..run.outcome import Outcome
from ..run.record import Record
from ..run.run_folder import Run
from ..run.spec import Spec
from . import decide, diagnose, last_words, memory
from .decide import Decision, Facts, Judge, LaunchMode, StopCause
from .health import Health, Kill
from .ranks import Ranks

_AGAIN = 1.0
"""Seconds between two tries to record the process ids of the ranks."""


class Program(Judge, Protocol):
    """What differs between the programs that a run can execute while an attempt runs; see train/programs.py."""

    def now(self, record: Record) -> Program:
        """Return the program as the record says by now: a script may have opened a session."""

    def first_step(self, newest: int) -> int | None:
        """Return the step after which an attempt continues, given that of the newest state; None: unknown."""

    def health(self, run: Run, spec: Spec, *, attempt: int, ranks: Iterable[int], kill: Kill) -> Health:
        """Return the watcher for these ranks, which knows their signs of life."""

    def ran_well(self, spec: Spec, seconds: float) -> bool:
        """Whether an attempt of this length is progress, so that deaths before it no longer count."""

    def no_progress(self, spec: Spec) -> str:
        """Return the end of `interrupted 3 times in a row …`."""

    def restarts(self, spec: Spec) -> int:
        """Return the maximum number of restarts in a row without progress."""


def record_end(run: Run, state: str, *, reason: str, by: str | None = None) -> None:
    """Record the end of a run that has no process left, as its user or the keeper has decided.

    The caller must hold the run's lock.
    """

    def change(record: Record) -> None:
        record["ended"] = record.get("ended") or run_folder.now()

    run.update(change, state=state, reason=reason, stopped_by=by)


def _last_loss(run: Run) -> dict[str, Any]:
    """Return the loss of the last metrics line, for run.json, whose own is older. {}: this machine wrote no line."""
    line = metrics.last_training(run)
    return {"loss": line["loss"]} if line is not None and "loss" in line else {}


def record_waiting(run: Run, reason: str) -> None:
    """Record that a run waits for other machines."""
    run.note(state=states.RUNNING, reason=reason, ended=None)


def record_queued(run: Run, reason: str, **values: Any) -> None:
    """Record that a run that has stopped by itself waits in the queue."""
    run.update(state=states.QUEUED, reason=reason, queued=True, ended=None, **values)


def record_decision(run: Run, attempt: int | None, decision: Decision) -> None:
    """Write a decision into run.json.

    Args:
        attempt: None: the run has only waited for other machines and started no rank here.

    Raises:
        OSError, Refused: the disk fails, or the run folder is gone.
    """
    values: dict[str, Any] = {**_last_loss(run), **decision.figures, "stopped_by": decision.stopped_by}
    if decision.reason is not None:
        values |= {"reason": decision.reason, "ended": run_folder.now()}
    if attempt is None:
        # a very short wait was not recorded as running, and the run must not stay in the state `created`
        run.update(**{**values, "state": decision.state or states.RUNNING})
        return
    lines = None
    if decision.end == "died" and decision.rank is not None:
        lines = diagnose.last_lines(last_words.tail(run.logs(attempt), decision.rank))
    run.end_attempt(decision.end, decision.why, state=decision.state, last_lines=lines, **values)


class Alone:
    """One attempt that no agent supervises: this process is rank 0, and records the end of the run itself.

    While it is entered, a thread reads requests to stop. Other ranks may run in other processes.

    Args:
        ranks: Number of ranks, including those in other processes.
        mode: What could restart the ranks.
        is_for_look: Whether the run folder is removed at the end if it has no checkpoint.
    """

    def __init__(
        self, run: Run, spec: Spec, *, program: Program, ranks: int, stop: signals.StopRequest, mode: LaunchMode,
        is_for_look: bool = False,
    ) -> None:  # fmt: skip
        self._run, self._ranks, self._stop, self._mode, self._is_for_look = run, ranks, stop, mode, is_for_look
        self._program, self._over, self._mirror = program, threading.Event(), Mirror(run, spec)
        run.clear_stop()
        from_step = self._program.first_step(run.newest_checkpoint)
        self.number = run.begin_attempt(ranks, from_step, pids={"ranks": [os.getpid()]})
        self._watch = self._program.health(run, spec, attempt=self.number, ranks=[0], kill=self._kill)
        # a thread, so that `train stop` works while this process trains
        threading.Thread(target=self._listen, daemon=True, name="stop-watch").start()

    def end(self, reported: Mapping[int, Outcome]) -> Decision | None:
        """Record the end of the attempt. Returns None if the disk fails or the run folder is gone.

        Args:
            reported: Outcomes that may not be on the disk.
        """
        self._over.set()
        outcomes = {**outcome.read_all(self._run.logs(self.number)), **reported}
        facts = Facts(
            self._run.name, self._mode, self._program, ranks=self._ranks, outcomes=outcomes, asked=asked_by(self._stop),
            saved=self._run.newest_checkpoint, is_for_look=self._is_for_look,
        )  # fmt: skip
        decision = decide.decide(facts)
        with contextlib.suppress(OSError, Refused):
            record_decision(self._run, self.number, decision)
            return decision
        return None

    def close(self) -> None:
        """Remove a request to stop, and let the mirror finish."""
        self._run.clear_stop()
        with contextlib.suppress(OSError, Refused):
            is_finished = self._run.read()["state"] == states.FINISHED
            self._mirror.finish(waits=is_finished, is_asked=lambda: self._stop.asked)

    def _kill(self, pid: int, number: int) -> None:
        if number == signal.SIGKILL:  # no other process could record the end
            self.end({})
            os.kill(pid, number)

    def _listen(self) -> None:
        this = os.getpid()
        while not self._over.wait(0.2):
            _read_stop_file(self._run, self._stop)
            self._mirror.look()
            if self._stop.now:
                self._kill(this, signal.SIGKILL)
            if self._stop.asked:
                self._watch.look([this], [this], {}, is_stopping=True)


def supervise_alone(
    run: Run, spec: Spec, *, program: Program, ranks: int, train: Callable[[int], Outcome], stop: signals.StopRequest
) -> None:
    """Supervise one attempt of a task under torchrun, in the process that is rank 0.

    Args:
        ranks: Number of ranks, including those in other processes.
        train: trains this rank to its end, given the attempt.
    """
    alone = Alone(run, spec, program=program, ranks=ranks, stop=stop, mode=LaunchMode.TORCHRUN)
    decision = alone.end({0: train(alone.number)})
    if decision is not None and decision.message:
        _say(decision.message)
    alone.close()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        screen.remark(text)


def asked_by(stop: signals.StopRequest) -> StopCause | None:
    return StopCause(stop.by, stop.reason, stop.now) if stop.asked else None


def _read_stop_file(run: Run, stop: signals.StopRequest, is_for_all: bool = False) -> None:
    """Read a stop request from its file. A file also works from outside a container, where process ids differ.

    Args:
        is_for_all: Whether a user's request overrides a signal that only this machine has received.
    """
    wanted = run.stop_asked()
    if wanted == states.NOW or (wanted and (not stop.asked or (is_for_all and states.BY.get(wanted) == signals.USER))):
        stop.ask(states.BY.get(wanted, signals.USER), states.WHO.get(wanted, wanted), now=wanted == states.NOW)


def _log_limit(run: Run, spec: Spec, attempt: int, ranks: list[int]) -> LogLimit:
    """Return what limits the logs of these ranks, by the field `log.max` of a task or a script."""
    from ..config.schema import Log

    most = {**spec.config, **spec.watch}.get(log_limit.FIELD, Log.max)
    return LogLimit([run.logs(attempt) / f"rank{rank}.log" for rank in ranks], log_limit.MB * int(most))


def pids(ranks: list[int]) -> dict[str, Any]:
    """Return the process ids of an attempt, in the form of run.json."""
    return {"agent": os.getpid(), "ranks": ranks}


@dataclasses.dataclass(kw_only=True)
class Supervisor:
    """Keeps the ranks of one run alive until it ends."""

    run: Run
    spec: Spec
    program: Program
    ranks: Ranks
    mode: LaunchMode
    stop: signals.StopRequest
    is_for_look: bool = False
    """Whether the run folder is removed at the end if it has no checkpoint."""
    show: Callable[[], None] = lambda: None
    """Called regularly while ranks run."""
    say: Callable[[str], None] = _say
    """Prints a line on the terminal."""

    def __post_init__(self) -> None:
        self._attempt, self._from_step, self._began, self._hang = 0, 0, 0.0, ""
        self._is_interrupted, self._kills, self._mirror = False, memory.Kills(), Mirror(self.run, self.spec)

    def keep(self) -> int:
        """Run attempts until the run ends or must not be restarted. Returns the exit code.

        Raises:
            OSError, Refused: only for a launched run: its disk fails, or its folder is gone.
        """
        with contextlib.suppress(ValueError):  # the ranks report what is wrong with it
            faults.arm(os.environ.get("TRAIN_FAULT"), rank=-1)
        self.run.clear_stop()
        with self._suspended_together():
            decision = self._run_attempts()
        self.run.clear_stop()
        is_last = self.mode is LaunchMode.FOREGROUND or self.spec.is_submitted
        self._mirror.finish(
            waits=is_last and decision.state == states.FINISHED,
            is_asked=lambda: self.stop.asked or bool(self.run.stop_asked()),
        )
        return decision.code

    def _run_attempts(self) -> Decision:
        deaths = 0
        while True:
            decision = self.gather()
            if decision is not None:
                return decision
            self._kills, self._hang, self._began = memory.Kills(), "", time.monotonic()
            self._attempt = self.begin()
            self._live_through(self._attempt)
            decision = self._end(deaths)
            if not decision.again:
                return decision
            deaths = decision.deaths
            self._wait(decision.wait)

    # --- overridden for several machines in multi_node.py

    def gather(self) -> Decision | None:
        """Wait for everything that an attempt needs. Returns None when it is ready, else how the run ends without."""
        return None

    def begin(self) -> int:
        """Record a new attempt. Returns its number."""
        self._from_step = self.newest_state()
        return self.run.begin_attempt(self.ranks.count, self.program.first_step(self._from_step), pids=pids([]))

    def follow(self, watch: Health) -> None:
        """Called several times a second while ranks run."""

    def look_at_others(self) -> None:
        """Called several times a second while no rank runs."""

    def decide_end(self, facts: Facts) -> Decision:
        """Decide what happens to the run."""
        return decide.decide(facts)

    @property
    def leaves(self) -> bool:
        """Whether only this machine stops and the run continues without it."""
        return False

    def has_progressed(self, record: Mapping[str, Any]) -> bool:
        """Whether the attempt has trained further than the state from which it started."""
        return self.newest_state() > self._from_step

    # --- an attempt

    def _live_through(self, attempt: int) -> None:
        """Start the ranks and watch them until all have ended."""
        ranks = self.ranks
        ranks.start(self.spec, attempt)
        numbers = [rank_env.rank for rank_env in ranks.rank_envs]
        watch = self.program.health(self.run, self.spec, attempt=attempt, ranks=numbers, kill=ranks.end_peer)
        logs = _log_limit(self.run, self.spec, attempt, numbers)
        note_at, is_asked = 0.0, False
        while True:
            self.note_stops()
            self.follow(watch)
            if self._kills.is_due and len(ranks.living) == ranks.count:
                self._kills.look()
            if time.monotonic() > note_at:  # try again later if a stopped rank holds the record's lock
                note_at = math.inf if self.run.note(pids=pids(ranks.pids)) else time.monotonic() + _AGAIN
            if self.stop.now:
                ranks.signal(signal.SIGKILL)
            elif self.stop.asked and not is_asked:
                ranks.signal(signal.SIGTERM)
                is_asked = True
            watch.look(ranks.living, ranks.pids, ranks.exits, self.stop.asked)
            logs.look()
            self._mirror.look()
            self.show()
            if ranks.wait():
                break
        self._hang = watch.hang
        watch.close()
        logs.cut()

    def note_stops(self) -> None:
        """Read stop requests from the file and from Ctrl-C: the first saves and stops the run, a second ends it."""
        if self.stop.interrupts and not self._is_interrupted and self.mode is LaunchMode.FOREGROUND:
            self._is_interrupted = True
            below_bar = "\n" if os.isatty(2) else ""
            with contextlib.suppress(OSError):
                text = f"{self.run.name}: stopping after this step; Ctrl-C again ends it at once"
                os.write(2, f"{below_bar}{text}\n".encode())
        if self.stop.interrupts > 1 and not self.stop.now:
            self.stop.ask(signals.CTRL_C, "Ctrl-C twice", now=True)
        _read_stop_file(self.run, self.stop, is_for_all=self.leaves)

    def _wait(self, seconds: float) -> None:
        """Wait before a restart on a busy machine, unless a stop is requested."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop.asked and not self.run.stop_asked():
            self.look_at_others()
            time.sleep(0.1)

    # --- the end of an attempt

    def _end(self, deaths: int) -> Decision:
        """Record how the attempt has ended, and print what no rank has printed."""
        facts = self._facts(deaths)
        decision = self.decide_end(facts)
        try:
            faults.here("decided")
            record_decision(self.run, self._attempt, decision)
        except (OSError, Refused) as error:
            if self.mode is LaunchMode.LAUNCHED:
                raise
            reported = facts.outcomes.get(0)
            if facts.exits or (reported is not None and not reported.is_fault):
                self.say(f"cannot record how {self.run.name} ended: {one_line(error)}")
            return dataclasses.replace(decision, code=EXIT_FAILED)
        if decision.message:
            self.say(decision.message)
        return decision

    def _facts(self, deaths: int) -> Facts:
        record: Mapping[str, Any] = {}
        with contextlib.suppress(OSError, Refused):
            record = found = self.run.read()
            self.program = self.program.now(found)
        logs, count, exits = self.run.logs(self._attempt), self.ranks.count, self.ranks.exits
        ran_well = self.program.ran_well(self.spec, time.monotonic() - self._began)
        return Facts(
            name=self.run.name,
            mode=self.mode,
            program=self.program,
            ranks=count,
            outcomes=outcome.read_all(logs),
            exits=exits,
            logs={rank: last_words.tail(logs, rank) for rank in self.ranks.numbers},
            hang=self._hang,
            problem=self.ranks.problem,
            left_behind=self.ranks.left_behind,
            killed_at=self._kills.limit(),
            refused_at=memory.refused_at(),
            asked=asked_by(self.stop),
            leaves=self.leaves,
            saved=self.run.newest_checkpoint,
            is_ready=bool((record.get("attempts") or [{}])[-1].get("ready")),
            progress=self.has_progressed(record) or ran_well,
            deaths=deaths,
            max_restarts=self.program.restarts(self.spec),
            no_progress=self.program.no_progress(self.spec),
            is_for_look=self.is_for_look,
        )

    def newest_state(self) -> int:
        """Return the step after which a start now would continue, from a checkpoint or from memory."""
        return max(self.run.newest_checkpoint, self.ranks.copied)

    @contextlib.contextmanager
    def _suspended_together(self) -> Iterator[None]:
        """Make Ctrl-Z in a foreground run suspend the ranks too, which are in other sessions."""
        if self.mode is not LaunchMode.FOREGROUND:
            yield
            return

        def suspend(number: int, frame: object) -> None:
            self.ranks.signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)  # until the shell resumes it
            self.ranks.signal(signal.SIGCONT)

        before = signal.signal(signal.SIGTSTP, suspend)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, before)
