"""The loop that keeps a run alive: start the ranks, watch them, decide what a death means, start again.

The one place where a run ends, whoever started it. Ranks write what happened to them (run/outcome.py),
decide.py decides by all that is known, and nothing else in the package writes a run's end. A supervisor that is killed
before it has written leaves an interrupted run, which a resume brings to the same end. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from train import faults, screen, signals
from train.errors import EXIT_FAILED, Refused, one_line
from train.run import durable, metrics, outcome, run_folder, states
from train.run.outcome import Outcome
from train.run.progress_lines import fold
from train.run.run_folder import Run
from train.supervise import decide, health, memory
from train.supervise.decide import Asked, Decision, Facts, LaunchMode, healthy_minutes
from train.supervise.ranks import Ranks

MAX_RESTARTS = 3
"""Default of --max-restarts: deaths in a row without a new checkpoint after which a run is not started again."""
_AGAIN = 1.0
"""Seconds between two attempts to note who the ranks are."""
_TAIL = 1 << 16
"""Bytes at the end of a log that are read: a progress bar fills much of it."""


def record_end(run: Run, state: str, reason: str, by: str | None = None) -> None:
    """Write down the end of a run of which no process lives: its user or the keeper has decided it.

    For the holder of its lock.
    """
    ended = run.read().get("ended") or run_folder.now()
    run.update(state=state, reason=reason, stopped_by=by, ended=ended)


def _last_loss(run: Run) -> dict[str, Any]:
    """The loss of the last line, for run.json, which has that of a clock's last tick; {}: no line was written here."""
    line = metrics.last_training(run)
    return {"loss": line.get("loss")} if line is not None else {}


def record_waiting(run: Run, reason: str) -> None:
    """Write down that a run waits for other machines."""
    run.note(state=states.RUNNING, reason=reason, ended=None)


def record_decision(run: Run, attempt: int | None, decision: Decision) -> None:
    """Carry a decision into run.json.

    Args:
        attempt: None: the run has waited for other machines, and no rank lived here.

    Raises:
        OSError, Refused: the disk does not take it, or the run folder is gone.
    """
    values: dict[str, Any] = {**_last_loss(run), **decision.figures, "stopped_by": decision.stopped_by}
    if decision.reason is not None:
        values |= {"reason": decision.reason, "ended": run_folder.now()}
    if attempt is None:
        # a wait of no time was never recorded: else the run would be about to begin for ever
        run.update(**{**values, "state": decision.state or states.RUNNING})
        return
    lines = None
    if decision.end == "died" and decision.rank is not None:
        lines = decide.last_lines(tail(run.logs(attempt), decision.rank))
    run.end_attempt(decision.end, decision.why, decision.state, lines, **values)


def supervise_alone(run: Run, ranks: int, train: Callable[[int], Outcome], stop: signals.StopRequest) -> None:
    """One attempt of which this process is rank 0 itself: under a foreign torchrun.

    Args:
        ranks: how many there are with those of other processes.
        train: trains the rank to its end, given the attempt.
    """
    run.clear_stop()
    number = run.begin_attempt(ranks, run.newest_checkpoint, pids={"ranks": [os.getpid()]})

    def end(reported: Mapping[int, Outcome]) -> Decision:
        outcomes = {**outcome.read_all(run.logs(number)), **reported}
        facts = Facts(
            run.name,
            LaunchMode.TORCHRUN,
            ranks=ranks,
            outcomes=outcomes,
            asked=asked_by(stop),
            saved=run.newest_checkpoint,
        )
        decision = decide.decide(facts)
        record_decision(run, number, decision)
        return decision

    over = threading.Event()

    def kill(pid: int, number: int) -> None:
        if number == signal.SIGKILL:  # nobody would hear it asked for its stacks
            with contextlib.suppress(OSError, Refused):
                end({})
            os.kill(pid, number)

    watch, this = health.health_of(run, number, [0], kill), os.getpid()

    def listen() -> None:  # `train stop` reaches a process that is busy with its rank
        while not over.wait(0.2):
            _hear(run, stop)
            if stop.now:
                kill(this, signal.SIGKILL)
            if stop.asked:
                watch.look([this], [this], {}, is_stopping=True)

    threading.Thread(target=listen, daemon=True, name="stop-watch").start()
    reported = {0: train(number)}
    over.set()
    with contextlib.suppress(OSError, Refused):
        if line := end(reported).message:
            _say(line)
    run.clear_stop()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        screen.remark(text)


def asked_by(stop: signals.StopRequest) -> Asked | None:
    return Asked(stop.by, stop.reason, stop.now) if stop.asked else None


def _hear(run: Run, stop: signals.StopRequest, is_for_all: bool = False) -> None:
    """Take in a request that came by file: process ids mean nothing beyond the wall of a container.

    Args:
        is_for_all: whether a user's request goes before a signal that this machine alone has got.
    """
    wanted = run.stop_asked()
    if wanted == states.NOW or (wanted and (not stop.asked or (is_for_all and states.BY.get(wanted) == signals.USER))):
        stop.ask(states.BY.get(wanted, signals.USER), states.WHO.get(wanted, wanted), now=wanted == states.NOW)


def pids(ranks: list[int]) -> dict[str, Any]:
    """Who an attempt's processes are, as run.json has it."""
    return {"agent": os.getpid(), "ranks": ranks}


@dataclasses.dataclass
class Supervisor:
    """Keeps the ranks of one run alive until it ends."""

    run: Run
    ranks: Ranks
    mode: LaunchMode
    stop: signals.StopRequest
    show: Callable[[], None] = lambda: None
    """Called while ranks live."""
    say: Callable[[str], None] = _say
    """A line for the terminal."""

    def __post_init__(self) -> None:
        self._attempt, self._from_step, self._began, self._hang = 0, 0, 0.0, ""
        self._is_interrupted = False
        self._kills = memory.Kills()

    def keep(self) -> int:
        """Run attempts until the run ends or is not to be started again. Returns the exit code of its end.

        Raises:
            OSError, Refused: of a launched run: its disk fails, or its folder is gone.
        """
        with contextlib.suppress(ValueError):  # ranks will say what is wrong with it
            faults.arm(os.environ.get("TRAIN_FAULT"), rank=-1)
        self.run.clear_stop()
        with self._suspended_together():
            decision = self._run_attempts()
        self.run.clear_stop()
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

    # --- what is more where the run is on several machines: multi_node.py

    def gather(self) -> Decision | None:
        """Wait for all that is needed for an attempt. None when it is there; else how the run ends without it."""
        return None

    def begin(self) -> int:
        """Record a new attempt. Returns its number."""
        self._from_step = self.newest_state()
        return self.run.begin_attempt(self.ranks.count, self._from_step, pids=pids([]))

    def follow(self, watch: health.Health) -> None:
        """Called while ranks live, several times a second."""

    def look_at_others(self) -> None:
        """Called while none live, several times a second."""

    def settle(self, facts: Facts) -> Decision:
        """What becomes of the run."""
        return decide.decide(facts)

    @property
    def leaves(self) -> bool:
        """Whether this machine alone is to stop, and the run continues without it."""
        return False

    def has_progressed(self, record: Mapping[str, Any]) -> bool:
        """Whether the attempt has brought a task further."""
        return self.newest_state() > self._from_step

    # --- an attempt

    def _live_through(self, attempt: int) -> None:
        """From the start of the ranks until none is left."""
        ranks = self.ranks
        ranks.start(attempt)
        watch = health.health_of(self.run, attempt, [rank_env.rank for rank_env in ranks.rank_envs], ranks.end_peer)
        note_at, is_asked = 0.0, False
        while True:
            self.hear()
            self.follow(watch)
            if self._kills.is_due and len(ranks.living) == ranks.count:
                self._kills.look()
            if time.monotonic() > note_at:  # again where a rank that stands still holds the record just now
                note_at = math.inf if self.run.note(pids=pids(ranks.pids)) else time.monotonic() + _AGAIN
            if self.stop.now:
                ranks.signal(signal.SIGKILL)
            elif self.stop.asked and not is_asked:
                ranks.signal(signal.SIGTERM)
                is_asked = True
            watch.look(ranks.living, ranks.pids, ranks.exits, self.stop.asked)
            self.show()
            if ranks.wait():
                break
        self._hang = watch.hang
        watch.close()

    def hear(self) -> None:
        """Take in what was asked for by file, or by Ctrl-C: the first lets the run save and stop, a second ends it."""
        if self.stop.interrupts and not self._is_interrupted and self.mode is LaunchMode.FOREGROUND:
            self._is_interrupted = True
            below_bar = "\n" if os.isatty(2) else ""
            with contextlib.suppress(OSError):
                os.write(2, f"{below_bar}{self.run.name}: stopping after this step; again: at once\n".encode())
        if self.stop.interrupts > 1 and not self.stop.now:
            self.stop.ask(signals.CTRL_C, "Ctrl-C twice", now=True)
        _hear(self.run, self.stop, is_for_all=self.leaves)

    def _wait(self, seconds: float) -> None:
        """Let a busy machine come to rest, unless a stop is asked for."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop.asked and not self.run.stop_asked():
            self.look_at_others()
            time.sleep(0.1)

    # --- the end of an attempt

    def _end(self, deaths: int) -> Decision:
        """Write down how the attempt has ended, and print what no rank has printed."""
        facts = self._facts(deaths)
        decision = self.settle(facts)
        try:
            faults.here("decided")
            record_decision(self.run, self._attempt, decision)
        except (OSError, Refused) as error:
            if self.mode is LaunchMode.LAUNCHED:
                raise
            reported = facts.outcomes.get(0)
            if facts.exits or (reported is not None and not reported.is_fault):
                self.say(f"how {self.run.name} ended cannot be recorded: {one_line(error)}")
            return dataclasses.replace(decision, code=EXIT_FAILED)
        if decision.message:
            self.say(decision.message)
        return decision

    def _facts(self, deaths: int) -> Facts:
        record: Mapping[str, Any] = {}
        with contextlib.suppress(OSError, Refused):
            record = self.run.read()
        logs, count, exits = self.run.logs(self._attempt), self.ranks.count, self.ranks.exits
        is_script = bool(record.get("script"))
        minutes = healthy_minutes(record)
        ran_well = is_script and time.monotonic() - self._began >= 60 * minutes
        return Facts(
            name=self.run.name,
            mode=self.mode,
            is_script=is_script,
            ranks=count,
            outcomes=outcome.read_all(logs),
            exits=exits,
            logs={rank: tail(logs, rank) for rank in (range(count) if is_script and exits else exits)},
            hang=self._hang,
            problem=self.ranks.problem,
            killed_at=self._kills.limit(),
            refused_at=memory.refused_at(),
            asked=asked_by(self.stop),
            leaves=self.leaves,
            saved=self.run.newest_checkpoint,
            is_ready=bool((record.get("attempts") or [{}])[-1].get("ready")),
            progress=self.has_progressed(record) or ran_well,
            deaths=deaths,
            max_restarts=int(record.get("max_restarts", MAX_RESTARTS)),
            healthy_minutes=minutes,
        )

    def newest_state(self) -> int:
        """The step that a start now would continue after: from the disk or from memory."""
        return max(self.run.newest_checkpoint, self.ranks.copied)

    @contextlib.contextmanager
    def _suspended_together(self) -> Iterator[None]:
        """Let Ctrl-Z in a foreground run stop the ranks, too, which have sessions of their own."""
        if self.mode is not LaunchMode.FOREGROUND:
            yield
            return

        def suspend(number: int, frame: object) -> None:
            self.ranks.signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)  # until the shell lets it go on
            self.ranks.signal(signal.SIGCONT)

        before = signal.signal(signal.SIGTSTP, suspend)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, before)


def tail(logs: Path, rank: int) -> str:
    """The end of a rank's log, progress bars folded; '' if nothing can be read."""
    try:
        return fold(durable.read_tail(logs / f"rank{rank}.log", _TAIL)).decode(errors="replace")
    except OSError:
        return ""
