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
from train.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, Refused, one_line
from train.run import outcome, run_folder, states
from train.run.outcome import Outcome
from train.run.progress_lines import fold
from train.run.run_folder import Run
from train.supervise import decide, health, memory
from train.supervise.decide import Asked, Decision, Facts, LaunchMode, healthy_minutes
from train.supervise.nodes import Nodes
from train.supervise.ranks import Ranks

MAX_RESTARTS = 3
"""Default of --max-restarts: deaths in a row without a new checkpoint after which a run is not started again."""
_AGAIN = 1.0
"""Seconds between two attempts to note who the ranks are."""
_RECORDING = 3.0
"""Seconds that writing down the end may take after a second Ctrl-C: a disk that hangs keeps no user waiting."""
_TAIL = 1 << 16
"""Bytes at the end of a log that are read: a progress bar fills much of it."""


def rest(run: Run, state: str, reason: str, by: str | None = None) -> None:
    """Write down the end of a run of which no process lives: its user or the keeper has decided it.

    For the holder of its lock.
    """
    ended = run.read().get("ended") or run_folder.now()
    run.update(state=state, reason=reason, stopped_by=by, ended=ended)


def write(run: Run, attempt: int, decision: Decision) -> None:
    """Carry a decision into run.json.

    Raises:
        OSError, Refused: the disk does not take it, or the run folder is gone.
    """
    values: dict[str, Any] = {**decision.figures, "stopped_by": decision.stopped_by}
    if decision.reason is not None:
        values |= {"reason": decision.reason, "ended": run_folder.now()}
    lines = None
    if decision.end == "died" and decision.rank is not None:
        lines = decide.last_lines(tail(run.logs(attempt), decision.rank))
    run.end_attempt(decision.end, decision.why, decision.state, lines, **values)


def alone(run: Run, mode: LaunchMode, ranks: int, train: Callable[[int], Outcome], stop: signals.StopRequest) -> None:
    """One attempt of which this process is rank 0 itself: under a foreign torchrun.

    Args:
        ranks: how many there are with those of other processes.
        train: trains the rank to its end, given the attempt.
    """
    run.clear_stop()
    number = run.begin_attempt(ranks, newest(run), pids={"ranks": [os.getpid()]})

    def end(reported: Mapping[int, Outcome]) -> Decision:
        outcomes = {**outcome.read_all(run.logs(number)), **reported}
        facts = Facts(run.name, mode, ranks=ranks, outcomes=outcomes, asked=_asked(stop), saved=newest(run))
        decision = decide.decide(facts)
        write(run, number, decision)
        return decision

    over = threading.Event()

    def listen() -> None:  # `train stop` reaches a process that is busy with its rank
        while not over.wait(0.2):
            _hear(run, stop)
            if stop.now:
                with contextlib.suppress(OSError, Refused):
                    end({})
                os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=listen, daemon=True, name="stop-watch").start()
    reported = {0: train(number)}
    over.set()
    with contextlib.suppress(OSError, Refused):
        if line := end(reported).message:
            _say(line)
    run.clear_stop()


def newest(run: Run) -> int:
    """The step of the newest checkpoint; 0: none."""
    return next(iter(run.steps_saved()), 0)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        screen.say(f"train: {text}")


def _asked(stop: signals.StopRequest) -> Asked | None:
    return Asked(stop.by, stop.reason, stop.now, stop.at_once) if stop.asked or stop.at_once else None


def _hear(run: Run, stop: signals.StopRequest, is_for_all: bool = False) -> None:
    """Take in a request that came by file: process ids mean nothing beyond the wall of a container.

    Args:
        is_for_all: whether a user's request goes before a signal that this machine alone has got.
    """
    wanted = run.stop_asked()
    if wanted == states.NOW or (wanted and (not stop.asked or (is_for_all and states.BY.get(wanted) == signals.USER))):
        stop.ask(states.BY.get(wanted, signals.USER), states.WHO.get(wanted, wanted), now=wanted == states.NOW)


class _EndAtOnce(BaseException):
    """Ctrl-C was typed twice. Raised by a signal handler, so that nothing is waited for."""


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
    nodes: Nodes | None = None
    """This node among others, where the run is on several."""

    def __post_init__(self) -> None:
        self._attempt, self._from_step, self._began, self._hang = 0, 0, 0.0, ""
        self._is_over, self._regroups_for = False, ""
        self._kills = memory.Kills()
        self._decision: Decision | None = None

    def keep(self) -> int:
        """Run attempts until the run ends or is not to be started again. Returns the exit code of its end.

        Raises:
            OSError, Refused: of a launched run: its disk fails, or its folder is gone.
        """
        with contextlib.suppress(ValueError):  # ranks will say what is wrong with it
            faults.arm(os.environ.get("TRAIN_FAULT"), rank=-1)
        self.run.clear_stop()
        self.stop.on_interrupt = self._on_interrupt
        try:
            with self._suspended_together():
                decision = self._run_attempts()
        except _EndAtOnce:
            return self._end_at_once()
        finally:
            self.stop.on_interrupt = None
        self.run.clear_stop()
        if self.nodes is not None:
            self.nodes.leave()
        return decision.code

    def _run_attempts(self) -> Decision:
        deaths = 0
        while True:
            decision = self._gather() if self.nodes is not None else None
            if decision is not None:
                return decision
            self._attempt = self._begin()
            self._live_through(self._attempt)
            decision = self._end(deaths)
            if not decision.again:
                return decision
            deaths = decision.deaths
            self._wait(decision.wait)

    def _begin(self) -> int:
        self._from_step, self._began = self._newest_state(), time.monotonic()
        self._kills, self._hang = memory.Kills(), ""
        self._is_over, self._regroups_for = False, ""
        count, more = self.ranks.count, {}
        if self.nodes is not None:
            self._from_step, count = self.nodes.from_step, self.nodes.rank_envs()[0].size
            more = {"nodes": self.nodes.names(), "interface": self.nodes.interface}
        return self.run.begin_attempt(count, self._from_step, pids=self._pids([]), **more)

    def _pids(self, ranks: list[int]) -> dict[str, Any]:
        return {"agent": os.getpid(), "ranks": ranks}

    def _live_through(self, attempt: int) -> None:
        """From the start of the ranks until none is left."""
        ranks = self.ranks
        ranks.start(attempt)
        watch = health.of(self.run, attempt, [rank_env.rank for rank_env in ranks.rank_envs], ranks.end_peer)
        note_at, is_asked = 0.0, False
        while True:
            self._hear()
            if self.nodes is not None:
                self._follow_others(watch)
            if self._kills.is_due and len(ranks.living) == ranks.count:
                self._kills.look()
            if time.monotonic() > note_at:  # again where a rank that stands still holds the record just now
                note_at = math.inf if self.run.note(pids=self._pids(ranks.pids)) else time.monotonic() + _AGAIN
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

    def _hear(self) -> None:
        """Take in what was asked for by file, or by Ctrl-C twice in the attached terminal."""
        if self.mode is LaunchMode.LAUNCHED and self.stop.interrupts > 1 and not self.stop.now:
            self.stop.ask(signals.CTRL_C, states.WHO[states.NOW], now=True)
        _hear(self.run, self.stop, is_for_all=self._leaves())

    def _wait(self, seconds: float) -> None:
        """Let a busy machine come to rest, unless a stop is asked for."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop.asked and not self.run.stop_asked():
            if self.nodes is not None:
                self._look_at_others()
            time.sleep(0.1)

    # --- the end of an attempt

    def _end(self, deaths: int) -> Decision:
        """Write down how the attempt has ended, and print what no rank has printed."""
        reported = outcome.read(self.run.logs(self._attempt), 0)
        try:
            decision = self._decide_and_write(deaths)
        except (OSError, Refused) as error:
            if self.mode is LaunchMode.LAUNCHED:
                raise
            assert self._decision is not None
            if self.ranks.exits or (reported is not None and not reported.is_fault):
                self.say(f"how {self.run.name} ended cannot be recorded: {one_line(error)}")
            return dataclasses.replace(self._decision, code=EXIT_FAILED)
        if decision.message:
            self.say(decision.message)
        return decision

    def _decide_and_write(self, deaths: int) -> Decision:
        facts = self._facts(deaths)
        if self.nodes is not None:
            self._decision = self.nodes.settle(facts, self._wait_for_others)
        else:
            self._decision = decide.decide(facts)
        faults.here("decided")
        write(self.run, self._attempt, self._decision)
        return self._decision

    def _facts(self, deaths: int) -> Facts:
        record: Mapping[str, Any] = {}
        with contextlib.suppress(OSError, Refused):
            record = self.run.read()
        logs, count, exits = self.run.logs(self._attempt), self.ranks.count, self.ranks.exits
        is_script = bool(record.get("script"))
        if self._is_over:  # what then was killed, was killed here
            exits = {rank: code for rank, code in exits.items() if code != -signal.SIGKILL}
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
            asked=_asked(self.stop),
            leaves=self._leaves(),
            saved=newest(self.run),
            is_ready=bool((record.get("attempts") or [{}])[-1].get("ready")),
            progress=self._has_progressed(record) or ran_well,
            deaths=deaths,
            max_restarts=int(record.get("max_restarts", MAX_RESTARTS)),
            healthy_minutes=minutes,
            regroup=self._regroups_for,
        )

    def _has_progressed(self, record: Mapping[str, Any]) -> bool:
        if self.nodes is not None and self.nodes.settings.node:  # node 0 has the checkpoints
            return int(record.get("step") or 0) > self._from_step
        return self._newest_state() > self._from_step

    def _newest_state(self) -> int:
        """The step that a start now would continue after: from the disk or from memory."""
        return max(newest(self.run), self.ranks.copied)

    # --- a run on several machines

    def _gather(self) -> Decision | None:
        """Wait for the other nodes. None when all are there; else how the run ends here without them."""
        assert self.nodes is not None
        nodes, message, until = self.nodes, "", time.monotonic() + 60 * self.nodes.settings.wait_minutes
        nodes.join(self._newest_state())
        while nodes.round is None:
            self._look_at_others()
            self._hear()
            waits = nodes.waiting_for()
            decision = self._end_of_waiting(waits, time.monotonic() > until)
            if decision is not None:
                self._rest(decision)
                return decision
            if waits != message:
                message = waits
                self.say(waits)
                self.run.note(state=states.RUNNING, reason=waits, ended=None)
            self.show()
            time.sleep(0.02)
        nodes.take_over()
        self.say(f"all nodes are there: {', '.join(nodes.names())}; {nodes.interface or 'nothing'} leads there")
        return None

    def _end_of_waiting(self, waits: str, is_too_late: bool) -> Decision | None:
        """How the run ends here while it waits for other nodes; None: it does not."""
        assert self.nodes is not None
        nodes, asked = self.nodes, _asked(self.stop)
        if asked is not None:
            saved = f"; the last checkpoint is of step {newest(self.run)}" if newest(self.run) else ""
            reason = f"stopped ({asked.text}) while {waits}{saved}"
            decision = Decision("stopped", states.STOPPED, reason, reason, asked.by, code=EXIT_STOPPED)
            is_users = asked.by == signals.USER or self.stop.interrupts > 0
            if is_users and not asked.now:  # else this machine alone goes away
                nodes.ask_stop(asked)
                nodes.end_waiting(decision)
            return decision
        if nodes.refused:
            return decide.refused(nodes.refused)
        if nodes.end is None and is_too_late:
            minutes = f"{nodes.settings.wait_minutes:g} minutes"
            reason = f"gave up after {minutes} of {waits}; go on with: train resume {self.run.name}"
            return Decision("died", None, reason, reason)
        return nodes.end

    def _rest(self, decision: Decision) -> None:
        """Write down an end that came while no ranks lived here."""
        values: dict[str, Any] = {**decision.figures, "reason": decision.reason, "stopped_by": decision.stopped_by}
        if decision.state is not None:
            values["state"] = decision.state
        self.run.update(**values, ended=run_folder.now())
        self.say(decision.reason or f"{self.run.name} has {decision.state}")

    def _look_at_others(self) -> None:
        """Take in what the other nodes publish.

        Raises:
            Refused: this node's run folder is gone: to the others it is, too.
        """
        assert self.nodes is not None
        if self.run.is_gone():
            raise Refused(f"{self.run.folder} was removed; the other nodes go on without this one, or wait for it")
        self.nodes.look()
        for line in self.nodes.remarks:
            self.say(line)
        self.nodes.remarks.clear()
        wanted = self.nodes.stop
        if wanted is not None and not self.stop.asked:
            self.stop.ask(wanted.by, wanted.text)

    def _follow_others(self, watch: health.TaskHealth | health.ScriptHealth) -> None:
        """Do what the other nodes do, and let them know what happens here."""
        nodes, asked = self.nodes, _asked(self.stop)
        assert nodes is not None
        self._look_at_others()
        if watch.is_ending:
            nodes.trouble()
        if not self._is_over and nodes.is_over:
            self._is_over = True
            watch.end()
        if asked is not None:
            if not (asked.now or self._leaves()):
                nodes.ask_stop(asked)
        elif not self._regroups_for and (came := nodes.came):
            self._regroups_for = f"{came} came"
            self.ranks.signal(signal.SIGTERM)  # they save, and end

    def _leaves(self) -> bool:
        """Whether this node alone is to stop: of a run that may go on with fewer a signal, or its keeper's end, says
        that this machine goes away. `train stop` and Ctrl-C are a user's word, on whatever machine, for the run."""
        nodes, stop = self.nodes, self.stop
        if nodes is None or not nodes.settings.is_elastic or nodes.stop is not None:
            return False
        return stop.by in (signals.SIGNAL, signals.KEEPER) and not (stop.now or stop.interrupts)

    def _wait_for_others(self) -> Asked | None:
        """While the ranks of other nodes end. Returns a stop that is wanted at once."""
        self._hear()
        self._look_at_others()
        asked = _asked(self.stop)
        return asked if asked is not None and asked.now else None

    # --- Ctrl-C in a foreground run: the first one stops it after the step, the second one ends it at once

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

    def _on_interrupt(self, times: int) -> None:
        """Called by the signal handler."""
        if self.mode is not LaunchMode.FOREGROUND:
            return
        if times > 1:
            self.stop.at_once, self.stop.on_interrupt = True, None
            raise _EndAtOnce
        below_bar = "\n" if os.isatty(2) else ""
        os.write(2, f"{below_bar}{self.run.name}: stopping after this step; again: at once\n".encode())

    def _end_at_once(self) -> int:
        """Kill everything and write down the end, whatever hangs. Returns the exit code."""
        saved = newest(self.run)
        self.ranks.end_at_once()
        ending = threading.Thread(target=self._record_end_at_once, daemon=True)
        ending.start()
        ending.join(_RECORDING)
        if self._decision is not None and self._decision.code != EXIT_INTERRUPTED:
            return self._decision.code  # it had just come to its end
        then = f"continues after step {saved}" if saved else "starts at step 1"
        self.say(f"{self.run.name} was ended at once, without saving; train resume {self.run.name} {then}")
        return EXIT_INTERRUPTED

    def _record_end_at_once(self) -> None:
        with contextlib.suppress(OSError, Refused):
            self._decide_and_write(0)
            self.run.clear_stop()


def tail(logs: Path, rank: int) -> str:
    """The end of a rank's log, progress bars folded; '' if nothing can be read."""
    try:
        with (logs / f"rank{rank}.log").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            return fold(file.read()).decode(errors="replace")
    except OSError:
        return ""
