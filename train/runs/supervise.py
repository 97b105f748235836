"""The one place where a run ends: whoever started it, what becomes of it is decided and written down here.

Ranks leave behind what happened to them (record/outcome.py), runs/verdict.py decides by all that is known, and nothing
else in the package writes a run's end. A supervisor that is killed before it has written leaves an interrupted run,
which a resume brings to the same end. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from train import faults, screen, signals
from train.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, Refused, one_line
from train.record import outcome, store
from train.record.outcome import Kind
from train.record.store import Run
from train.runs import interrupt, memory, verdict
from train.runs.folding import fold
from train.runs.nodes import Nodes
from train.runs.processes import Guard, Processes
from train.runs.scripts import healthy_minutes
from train.runs.verdict import Asked, Decision, Facts, Road

MAX_RESTARTS = 3
"""Default of --max-restarts: deaths in a row without a new checkpoint after which a run is not started again."""
_AGAIN = 1.0
"""Seconds between two requests to stop to the same ranks, and between two attempts to note who they are."""
_TAIL = 1 << 16
"""Bytes at the end of a log that are read: a progress bar fills much of it."""


def rest(run: Run, state: str, reason: str, by: str | None = None) -> None:
    """Write down the end of a run of which nobody lives: its user or the keeper has decided it.

    For the holder of its lock.
    """
    ended = run.read().get("ended") or store.now()
    run.update(state=state, reason=reason, stopped_by=by, ended=ended)


def write(run: Run, attempt: int, decision: Decision) -> None:
    """Carry a decision into run.json.

    Raises:
        OSError, Refused: the disk does not take it, or the run folder is gone.
    """
    values: dict[str, Any] = {**decision.figures, "stopped_by": decision.stopped_by}
    if decision.reason is not None:
        values |= {"reason": decision.reason, "ended": store.now()}
    lines = None
    if decision.end == "died" and decision.rank is not None:
        lines = verdict.last_lines(tail(run.logs(attempt), decision.rank))
    run.end_attempt(decision.end, decision.why, decision.state, lines, **values)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        screen.say(f"train: {text}")


@dataclasses.dataclass
class Supervisor:
    """Keeps the ranks of one run alive until it ends."""

    run: Run
    processes: Processes
    road: Road
    stop: signals.StopRequest
    show: Callable[[], None] = lambda: None
    """Called while ranks live."""
    say: Callable[[str], None] = _say
    """A line for the terminal."""
    nodes: Nodes | None = None
    """This node among others, where the run is on several."""

    def __post_init__(self) -> None:
        self._attempt, self._kept, self._began, self._hang = 0, 0, 0.0, ""
        self._is_regrouping = False
        self._kills = memory.Kills()
        self._decision: Decision | None = None
        self._is_written = False
        self._deciding = threading.Lock()

    def keep(self) -> int:
        """Run attempts until the run ends or is not to be started again. Returns the exit code of its end.

        Raises:
            OSError, Refused: of a launched run: its disk fails, or its folder is gone.
        """
        if self.road in (Road.LAUNCHED, Road.SPAWNED):  # elsewhere the rank, which is this process, does it
            with contextlib.suppress(ValueError):  # ranks will say what is wrong with it
                faults.arm(os.environ.get("TRAIN_FAULT"), rank=-1)
        self.run.clear_stop()
        if self.road in (Road.ALONE, Road.TORCHRUN):
            threading.Thread(target=self._listen, daemon=True, name="stop-watch").start()
        deaths = 0
        while True:
            decision = self._gather() if self.nodes is not None else None
            if decision is not None:
                break
            self._live_through(self._begin())
            decision = self._end(deaths)
            if not decision.again:
                break
            deaths = decision.deaths
            self._wait(decision.wait)
        self.run.clear_stop()
        if self.nodes is not None:
            self.nodes.leave(goes_on=decision.end == "stopped" and self._leaves())
        return decision.code

    def _gather(self) -> Decision | None:
        """Wait for the other nodes. None when all are there; else how the run ends here without them."""
        assert self.nodes is not None
        nodes, said, until = self.nodes, "", time.monotonic() + 60 * self.nodes.settings.wait_minutes
        nodes.ready()
        while nodes.begun is None:
            self._listen_to_others()
            self._hear()
            words = nodes.waiting_for()
            asked = self._asked()
            decision: Decision | None = None
            if asked is not None:
                self._ask_others(asked)
                reason = f"stopped ({asked.words}) while {words}; the last checkpoint is of step {self._newest()}"
                decision = Decision("stopped", store.STOPPED, reason, reason, asked.by, code=EXIT_STOPPED)
            elif nodes.refused:
                decision = verdict.refused(nodes.refused)
            elif (ended := self._ended_without_this_node()) is not None:
                decision = ended
            elif nodes.closed:
                decision = Decision("died", None, nodes.closed, nodes.closed)
            elif time.monotonic() > until:
                minutes = f"{nodes.settings.wait_minutes:g} minutes"
                reason = f"gave up after {minutes} of {words}; go on with: train resume {self.run.name}"
                decision = Decision("died", None, reason, reason)
            if decision is not None:
                self._rest(decision)
                return decision
            if words != said:
                said = words
                self.say(words)
                self.run.note(state=store.RUNNING, reason=words, ended=None)
            self.show()
            time.sleep(0.02)
        nodes.take_over()
        self.say(f"all nodes are there: {', '.join(nodes.names())}; {nodes.interface or 'nothing'} leads there")
        return None

    def _ended_without_this_node(self) -> Decision | None:
        """How the run has ended, where this node was gone then and is told now. None: it goes on, or nobody says."""
        assert self.nodes is not None
        if self.nodes.told is None:
            return None
        restarts = int(self.run.read().get("max_restarts", MAX_RESTARTS))  # by which the others decide, too
        decision = verdict.decide(self.nodes.facts_of_others(Facts(self.run.name, self.road, max_restarts=restarts)))
        if decision.again:
            self.nodes.told = None  # of a round that is over, and this node waits for the next, as long as it may
        return None if decision.again else decision

    def _rest(self, decision: Decision) -> None:
        """Write down an end that came while no ranks lived here."""
        values: dict[str, Any] = {**decision.figures, "reason": decision.reason, "stopped_by": decision.stopped_by}
        if decision.state is not None:
            values["state"] = decision.state
        self.run.update(**values, ended=store.now())
        self.say(decision.reason or f"{self.run.name} has {decision.state}")

    def _listen_to_others(self) -> None:
        """Take in what is said at the table.

        Raises:
            Refused: this node has nothing to be one with: the others would save no checkpoint any more, for each has
                all, and come to an end that is not recorded here. To them it is gone.
        """
        assert self.nodes is not None
        if self.run.is_gone():
            raise Refused(f"{self.run.folder} was removed; what the others have goes on without this machine, or waits")
        self.nodes.tick()
        for line in self.nodes.remarks:
            self.say(line)
        self.nodes.remarks.clear()
        wanted = self.nodes.stop
        if wanted is not None and (not self.stop.asked or (wanted["now"] and not self.stop.now)):
            self.stop.ask(wanted["by"], wanted["words"], now=wanted["now"])

    def _join_in(self, guard: Guard | None) -> None:
        """Do what the other nodes do, and let them know what happens here."""
        nodes, asked = self.nodes, self._asked()
        assert nodes is not None
        self._listen_to_others()
        if guard is not None and guard.is_ending and not nodes.ended:
            nodes.trouble()
        if guard is not None and nodes.ended:
            guard.end()
        if asked is not None:
            self._ask_others(asked)
        elif nodes.regroup and not self._is_regrouping:
            self._is_regrouping = True
            self.processes.signal(signal.SIGTERM)  # they save, and end

    def _ask_others(self, asked: Asked) -> None:
        """Let the other nodes stop as this one does, unless they go on without it."""
        assert self.nodes is not None
        if not self._leaves():
            self.nodes.ask_stop(asked)

    def _leaves(self) -> bool:
        """Whether this node alone is to stop: of a run that may go on with fewer a signal, or its keeper's end, says
        that this machine goes away. `train stop` and Ctrl-C are a user's word, on whatever machine, for the run."""
        nodes, stop = self.nodes, self.stop
        if nodes is None or not nodes.settings.is_elastic or nodes.is_stopping:
            return False
        return stop.by in (signals.SIGNAL, signals.KEEPER) and not (stop.now or stop.interrupts)

    def _begin(self) -> int:
        self._kept, self._began = self._newest_kept(), time.monotonic()
        self._kills, self._hang = memory.Kills(), ""
        mine = [] if self.road is Road.LAUNCHED else [os.getpid()]
        self._is_regrouping = False
        ranks, more = self.processes.ranks, {}
        if self.nodes is not None:
            ranks, more = self.nodes.seats()[0].size, {"nodes": self.nodes.names(), "interface": self.nodes.interface}
        pids = self._pids(mine)
        number = self.run.begin_attempt(ranks, self._kept, pids=pids, **more)
        with self._deciding:
            self._attempt, self._decision, self._is_written = number, None, False
        return number

    def _pids(self, ranks: list[int]) -> dict[str, Any]:
        return ({"agent": os.getpid()} if self.road is Road.LAUNCHED else {}) | {"ranks": ranks}

    def _live_through(self, attempt: int) -> None:
        """From the start of the ranks until none is left."""
        guard = self.processes.start(attempt)
        started: list[int] = []
        note_at = 0.0
        asked_at: float | None = None
        while not self.processes.wait():
            self._hear()
            if self.nodes is not None:
                self._join_in(guard)
            if self.stop.at_once:  # whatever they wait for
                interrupt.end_processes()
                break
            pids = self.processes.pids()
            if not started and len(pids) == self.processes.ranks:
                started = pids
                self._kills.among(pids)
            if self._kills.is_due and self._all_live():
                self._kills.look()
            if started and time.monotonic() > note_at:  # again where a rank that stands still holds the record just now
                note_at = math.inf if self.run.note(pids=self._pids(started)) else time.monotonic() + _AGAIN
            if self.stop.asked and pids:
                asked_at = self._pass_on(asked_at)
            if guard is not None:
                guard.look(self.processes.living(), started, self.processes.exits(), self.stop.asked)
            self.show()
        if guard is not None:
            self._hang = guard.hang
            guard.close()

    def _all_live(self) -> bool:
        return len(self.processes.living()) == self.processes.ranks and not self.processes.exits()

    def _hear(self) -> None:
        """Take in a request that came by file: process ids mean nothing beyond the wall of a container."""
        wanted, by = self.run.stop_asked(), ""
        if self.road is Road.LAUNCHED and self.stop.interrupts > 1:
            wanted, by = store.NOW, signals.CTRL_C  # twice in the attached terminal waits for nothing
        is_for_all = self._leaves() and store.BY.get(wanted) == signals.USER
        if wanted == store.NOW or (wanted and (not self.stop.asked or is_for_all)):
            by = by or store.BY.get(wanted, signals.USER)
            self.stop.ask(by, store.WHO.get(wanted, wanted), now=wanted == store.NOW)

    def _pass_on(self, asked_at: float | None) -> float | None:
        """Let the ranks know that a stop is wanted. Returns when they were last asked to save first."""
        if self.stop.now:
            self.processes.signal(signal.SIGKILL)
        elif asked_at is None or (self.processes.repeats and time.monotonic() > asked_at + _AGAIN):
            self.processes.signal(signal.SIGTERM)
            return time.monotonic()
        return asked_at

    def _listen(self) -> None:
        """Let `train stop` reach a run whose only process is busy with its rank."""
        while True:
            time.sleep(0.2)
            self._hear()
            if self.stop.now:
                with contextlib.suppress(OSError, Refused):
                    self._decide_and_write(0)
                os.kill(os.getpid(), signal.SIGKILL)

    def _wait(self, seconds: float) -> None:
        """Let a busy machine come to rest, unless somebody asks for a stop."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop.asked and not self.run.stop_asked():
            if self.nodes is not None:
                self._listen_to_others()
            time.sleep(0.1)

    def _end(self, deaths: int) -> Decision:
        """Write down how the attempt has ended, and say what no rank has said."""
        if self.stop.at_once:
            self._end_within(interrupt.RECORDING)
            return self._decision or Decision("died", None, code=EXIT_INTERRUPTED)
        told = outcome.read(self.run.logs(self._attempt), 0)
        try:
            decision = self._decide_and_write(deaths)
        except (OSError, Refused) as error:
            if self.road is Road.LAUNCHED:
                raise
            assert self._decision is not None
            if self.processes.exits() or (told is not None and not told.is_fault):
                self.say(f"how {self.run.name} ended cannot be recorded: {one_line(error)}")
            elif self.processes.told() and self._decision.said:
                self.say(self._decision.said)
            return dataclasses.replace(self._decision, code=EXIT_FAILED)
        if decision.said:
            self.say(decision.said)
        return decision

    def _decide_and_write(self, deaths: int) -> Decision:
        """What becomes of the attempt, written down. Whoever comes first decides: the main thread, or one that cannot
        wait for it."""
        with self._deciding:
            if self._decision is None:
                facts = self._facts(deaths)
                if self.nodes is not None:
                    facts = self.nodes.exchange(facts, self._wait_for_others)
                self._decision = verdict.decide(facts)
                faults.here("decided")
            if not self._is_written:
                write(self.run, self._attempt, self._decision)
                self._is_written = True
            return self._decision

    def _wait_for_others(self) -> Asked | None:
        """While the ranks of other nodes end. Returns a stop that is wanted now."""
        assert self.nodes is not None
        self._hear()
        self._listen_to_others()
        asked = self._asked()
        if asked is None:
            return None
        self._ask_others(asked)
        return asked if asked.now else None

    def end_at_once(self) -> NoReturn:
        """End this process and all below it now, from any thread: after a second Ctrl-C, whatever hangs."""
        told = outcome.read(self.run.logs(self._attempt), 0)
        if told is not None and told.kind is not Kind.DIED:  # it has just come to its end, and leaves by itself
            time.sleep(interrupt.RECORDING)
        interrupt.end_processes()
        self._end_within(interrupt.RECORDING)
        os._exit(self._decision.code if self._decision is not None else EXIT_INTERRUPTED)

    def _end_within(self, seconds: float) -> None:
        """The same, where a disk that hangs keeps nobody waiting."""

        def end() -> None:
            with contextlib.suppress(OSError, Refused):
                self._decide_and_write(0)

        newest = self._newest()  # before what tells it is cleared away
        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        ending.join(seconds)
        if self._decision is None or self._decision.code == EXIT_INTERRUPTED:
            then = f"continues after step {newest}" if newest else "starts at step 1"
            interrupt.tell(
                f"train: {self.run.name} was ended at once, without saving; train resume {self.run.name} {then}"
            )

    def _facts(self, deaths: int) -> Facts:
        record: Mapping[str, Any] = {}
        with contextlib.suppress(OSError, Refused):
            record = self.run.read()
        logs = self.run.logs(self._attempt)
        is_script, exits = bool(record.get("script")), self.processes.exits()
        if self.nodes is not None and self.nodes.ended:  # what then was killed, was killed here
            exits = {rank: code for rank, code in exits.items() if code != -signal.SIGKILL}
        minutes = healthy_minutes(record)
        ran_well = is_script and time.monotonic() - self._began >= 60 * minutes
        newest, killed_at = self._newest(), self._kills.limit()
        return Facts(
            name=self.run.name,
            road=self.road,
            is_script=is_script,
            ranks=self.processes.ranks,
            outcomes={**outcome.read_all(logs), **self.processes.told()},
            exits=exits,
            logs={rank: tail(logs, rank) for rank in (range(self.processes.ranks) if is_script and exits else exits)},
            hang=self._hang,
            problem=self.processes.problem,
            killed_at=killed_at,
            refused_at=memory.refused_at(),
            asked=self._asked(),
            leaves=self._leaves(),
            saved=newest,
            is_ready=bool((record.get("attempts") or [{}])[-1].get("ready")),
            progress=self._newest_kept() > self._kept or ran_well,
            deaths=deaths,
            max_restarts=int(record.get("max_restarts", MAX_RESTARTS)),
            healthy_minutes=minutes,
        )

    def _asked(self) -> Asked | None:
        stop = self.stop
        return Asked(stop.by, stop.reason, stop.now, stop.at_once) if stop.asked or stop.at_once else None

    def _newest(self) -> int:
        return next(iter(self.run.steps_saved()), 0)

    def _newest_kept(self) -> int:
        """The step that a start now would continue after: from the disk or from memory."""
        return max(self._newest(), self.processes.kept())


def tail(logs: Path, rank: int) -> str:
    """The end of what a rank said, progress bars folded; '' if nothing can be read."""
    try:
        with (logs / f"rank{rank}.log").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            return fold(file.read()).decode(errors="replace")
    except OSError:
        return ""
