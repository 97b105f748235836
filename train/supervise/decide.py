"""Decides which rank died first and why, and what happens to the run. Pure functions, which read and write nothing.

attempts.py collects the facts when an attempt is over, and carries out the decision.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .. import causes, signals
from ..errors import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_STOPPED
from ..run import states
from ..run.outcome import Kind, Outcome, first_fault

_LONGEST_WAIT = 30.0
"""Maximum number of seconds before a restart of a run for which the machine was too busy."""

CODES = {
    states.FINISHED: EXIT_FINISHED,
    states.STOPPED: EXIT_STOPPED,
    states.FAILED: EXIT_FAILED,
    states.INTERRUPTED: EXIT_FAILED,
    states.COPY: EXIT_FAILED,
}
"""Maps the final state of a run to an exit code."""


class LaunchMode(enum.Enum):
    """How a run was started, and so what can restart it."""

    LAUNCHED = "train launch"
    """By an agent in tmux, which restarts the ranks."""
    FOREGROUND = "train run"
    """By a process that waits for its ranks; nothing restarts them."""
    TORCHRUN = "torchrun"
    """By torchrun, which restarts ranks that exit with another code than 0. This process is rank 0."""


@dataclasses.dataclass(frozen=True)
class StopCause:
    """A request to stop."""

    by: str
    """Who requested it: see signals.py."""
    text: str
    """Text for the reason in run.json."""
    now: bool = False
    """Whether to stop without saving."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that is known when an attempt is over."""

    name: str
    """Name of the run."""
    mode: LaunchMode
    program: Judge
    ranks: int = 1
    outcomes: Mapping[int, Outcome] = dataclasses.field(default_factory=dict)
    """Maps a rank to its reported outcome."""
    exits: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Maps the ranks that failed first to their exit codes; negative: killed by that signal."""
    logs: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Maps these ranks to the end of their logs."""
    hang: str = ""
    """Description of a hang; '': none."""
    problem: str = ""
    """Why the ranks could not be started."""
    left_behind: Sequence[int] = ()
    """Processes that the ranks have started and not ended; they were ended."""
    killed_at: str | None = None
    """The memory limit at which the kernel has killed a process during the attempt."""
    refused_at: str = ""
    """The memory limit at which an allocation can have failed."""
    asked: StopCause | None = None
    """The stop request, if any."""
    saved: int = 0
    """Step of the newest checkpoint; 0: none."""
    is_ready: bool = True
    """Whether the ranks had started to train. Before that, a death loses no steps."""
    progress: bool = False
    """Whether the attempt has trained further."""
    deaths: int = 0
    """Number of deaths in a row without progress before this one."""
    max_restarts: int = 0
    no_progress: str = ""
    """The end of `died 3 times …`: how long the run has made no progress."""
    lost: str = ""
    """Names of the nodes that are gone with all their ranks."""
    regroup: str = ""
    """Why the ranks were stopped to restart with more or fewer nodes."""
    leaves: bool = False
    """Whether only this node was asked to stop and the others continue without it."""
    is_for_look: bool = False
    """Whether the run folder is removed at the end if it has no checkpoint."""

    @property
    def then(self) -> str:
        """The end of a sentence that says how a user continues; '' if the run folder is about to be removed."""
        return "" if self.is_for_look and not self.saved else f"; continue with: train resume {self.name}"


@dataclasses.dataclass(frozen=True)
class Death:
    """Why an attempt died."""

    reason: str
    recurs: bool
    """Whether a new attempt would die in the same way."""
    rank: int | None
    """The rank that died first, if known."""
    _: dataclasses.KW_ONLY
    is_raised: bool = False
    """Whether the cause was an exception that the rank itself reported."""

    @property
    def lacks_gpu(self) -> bool:
        """Whether the run's GPUs are gone."""
        return self.is_raised and causes.NO_GPU in self.reason


class Judge(Protocol):
    """What the program of a run says about the end of an attempt; see train/programs.py."""

    def reports_end(self, facts: Facts) -> bool:
        """Whether ranks report how they end. Otherwise exit codes of 0 mean that the run finished, and any end after a
        stop request is a stop."""

    def who_died(self, facts: Facts) -> Death:
        """Return the cause of an attempt's death, from reports, exit codes and logs."""

    def last_words(self, facts: Facts, rank: int | None) -> Sequence[str]:
        """Return lines of the rank that died first in which to look for a likely cause, if it reported none."""

    def how_stopped(self, exits: Mapping[int, int]) -> str:
        """Return how the program reacted to a stop request; '' if its ranks report that."""

    def out_of_restarts(self, facts: Facts, deaths: int, why: str) -> tuple[str | None, str]:
        """Return the state (None: interrupted) and the reason of a run whose restarts are used up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What to record about an attempt and its run, and what follows."""

    end: str
    """End of the attempt: finished, stopped, failed or died."""
    state: str | None
    """State of the run. None: recorded as running, because it restarts (or counts as interrupted without processes)."""
    why: str = ""
    """Why the attempt ended."""
    reason: str | None = None
    """Why the run ended. None: not recorded yet."""
    stopped_by: str | None = None
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """More values for run.json."""
    rank: int | None = None
    """The rank that died first; run.json keeps its last lines."""
    again: bool = False
    """Whether to restart the run."""
    wait: float = 0.0
    """Seconds to wait before the restart."""
    deaths: int = 0
    """Number of deaths in a row without progress, including this one."""
    message: str = ""
    """A line for the terminal, unless a rank has printed it."""
    code: int = EXIT_FAILED
    """Exit code of the supervising process."""


def decide(facts: Facts) -> Decision:
    """Decide what happens to a run whose attempt is over. If the machine may be the cause, name the doctor check."""
    decision = _decide(facts)
    if decision.end not in (states.FAILED, "died") or decision.reason is None:  # restarts, or torchrun reports it
        return decision
    fault = facts.outcomes.get(decision.rank) if decision.rank is not None else None
    if fault is not None and fault.is_own:
        return decision
    said = _raised(facts, decision.why) or facts.program.last_words(facts, decision.rank)
    hint = causes.hint("\n".join([decision.why, *said]))
    if not hint:
        return decision
    message = decision.message and f"{decision.message}; {hint}"
    return dataclasses.replace(
        decision, why=f"{decision.why}; {hint}", reason=f"{decision.reason}; {hint}", message=message
    )


def refused(why: str) -> Decision:
    """Return the decision for a node that cannot join its run; the run continues or waits without it."""
    figures = {states.REFUSED: True}
    return Decision(
        end=states.FAILED, state=states.FAILED, why=why, reason=why, figures=figures, message=why, code=EXIT_REFUSED
    )


def _raised(facts: Facts, why: str) -> list[str]:
    """Return a line for every exception behind the fault: the original one may say more than the last one."""
    first = first_fault(facts.outcomes)
    lines = first.traceback.splitlines() if first is not None and first.reason in why else []
    return [line for line in lines if line[:1].strip() and ": " in line]


def _decide(facts: Facts) -> Decision:
    reported, asked = facts.outcomes.get(0), facts.asked
    if reported is not None and reported.kind is Kind.STOPPED and facts.regroup and not (asked or facts.lost):
        deaths = 0 if facts.progress else facts.deaths
        return Decision(end="stopped", state=None, why=facts.regroup, again=True, deaths=deaths, message=facts.regroup)
    if reported is not None and reported.kind is not Kind.DIED and not facts.lost:
        return _as_reported(facts, reported)
    if facts.lost and not asked:  # whatever the others report: a run has ended only when all its nodes know how
        return _restarted_or_not(facts, Death(f"{facts.lost} is gone", False, None))
    if asked and asked.now and asked.by == signals.CTRL_C and facts.mode is LaunchMode.FOREGROUND:
        return _ended_at_once(facts, asked)
    is_quiet = not (facts.exits or facts.hang) and first_fault(facts.outcomes) is None
    if is_quiet and asked:
        return _stopped(asked, _how_stopped(facts, asked, None))
    if is_quiet and not facts.program.reports_end(facts):
        left = f"left processes behind ({', '.join(map(str, facts.left_behind))}); they were ended"
        reason = left if facts.left_behind else ""
        return Decision(end=states.FINISHED, state=states.FINISHED, why=reason, reason=reason, code=EXIT_FINISHED)
    death = who_died(facts)
    if facts.mode is LaunchMode.TORCHRUN:
        return Decision(end="died", state=None, why=death.reason, rank=death.rank)
    fails = death.recurs or (death.is_raised and not death.lacks_gpu and facts.mode is not LaunchMode.LAUNCHED)
    if asked and not (fails and facts.program.reports_end(facts)):
        decision = _stopped(asked, _how_stopped(facts, asked, death))
        message = f"{facts.name} {decision.reason}{facts.then}"  # no rank has printed this
        return dataclasses.replace(decision, message=message if facts.hang else "")
    if facts.mode is LaunchMode.LAUNCHED:
        return _restarted_or_not(facts, death)
    if fails:
        return Decision(
            end=states.FAILED,
            state=states.FAILED,
            why=death.reason,
            reason=death.reason,
            rank=death.rank,
            message=death.reason,
        )
    reason = f"{death.reason}{facts.then}"
    return Decision(end="died", state=None, why=reason, reason=reason, rank=death.rank, message=reason)


def _as_reported(facts: Facts, reported: Outcome) -> Decision:
    """Decide as rank 0 has reported."""
    if reported.kind is Kind.FINISHED:
        figures = reported.figures | {"step": reported.step}
        return Decision(
            end=states.FINISHED, state=states.FINISHED, reason=reported.reason, figures=figures, code=EXIT_FINISHED
        )
    if reported.kind is Kind.STOPPED:
        # ranks know only of a signal or of another rank; their supervisor may know who sent it
        asked = facts.asked or StopCause(reported.by or signals.SIGNAL, reported.reason)
        others = "; only this node has left, the run continues" if facts.leaves else ""
        decision = _stopped(asked, f"stopped after step {reported.step} ({asked.text}){others}")
        return dataclasses.replace(decision, figures=reported.figures | {"step": reported.step})
    return Decision(end=states.FAILED, state=states.FAILED, why=reported.reason, reason=reported.reason)


def _stopped(asked: StopCause, reason: str) -> Decision:
    return Decision(
        end=states.STOPPED, state=states.STOPPED, why=reason, reason=reason, stopped_by=asked.by, code=EXIT_STOPPED
    )


def _ended_at_once(facts: Facts, asked: StopCause) -> Decision:
    """Decide after a second Ctrl-C in a foreground run."""
    saved = f"the last checkpoint is of step {facts.saved}" if facts.saved else "there is no checkpoint"
    then = f"continues after step {facts.saved}" if facts.saved else "starts at step 1"
    way = f"; train resume {facts.name} {then}" if facts.then else ""
    message = f"{facts.name} was ended at once, without saving{way}"
    decision = _stopped(asked, f"stopped at once ({asked.text}); {saved}")
    return dataclasses.replace(decision, message=message, code=EXIT_INTERRUPTED)


def _how_stopped(facts: Facts, asked: StopCause, death: Death | None) -> str:
    """Return the reason of a run that was asked to stop but whose rank 0 does not report that it has saved."""
    if asked.now and facts.mode is LaunchMode.TORCHRUN:
        return f"stopped at once ({asked.text})"
    parts = [f"stopped ({asked.text})"]
    # a death while the ranks were saving has lost steps, so keep its reason
    if death is not None and facts.is_ready and not asked.now:
        parts[0] += f", and {death.reason}"
    if facts.saved:
        parts.append(f"the last checkpoint is of step {facts.saved}")
    return "; ".join(filter(None, [*parts, facts.program.how_stopped(facts.exits)]))


def _restarted_or_not(facts: Facts, death: Death) -> Decision:
    """Decide whether an agent restarts a run after this death, or how the run ends."""
    why = death.reason
    deaths = 1 if facts.progress else facts.deaths + 1
    decision = Decision(end="died", state=None, why=why, rank=death.rank, deaths=deaths)
    if death.recurs:
        return dataclasses.replace(decision, state=states.FAILED, reason=why)
    if death.lacks_gpu:  # interrupted: a resume finds out whether the GPUs are back
        back = f"when they are back: train resume {facts.name} (a keeper does that by itself)"
        return dataclasses.replace(decision, reason=f"{why}; {back}")
    if deaths > facts.max_restarts:
        state, reason = facts.program.out_of_restarts(facts, deaths, why)
        return dataclasses.replace(decision, state=state, reason=reason)
    message = f"{why}; restarting ({deaths} of {facts.max_restarts} without progress)"
    wait = min(2.0**deaths, _LONGEST_WAIT) if causes.BUSY.matches(why) else 0.0
    return dataclasses.replace(decision, again=True, wait=wait, message=message)


def who_died(facts: Facts) -> Death:
    """Return the cause of an attempt's death."""
    death = _of_memory(facts)
    if death is None and facts.hang:
        death = Death(facts.hang, False, None)
    if death is None:
        death = facts.program.who_died(facts)
    if facts.problem and not (facts.hang or death.recurs):
        return Death(f"the ranks cannot be started: {facts.problem}", False, 0)
    return death


def _of_memory(facts: Facts) -> Death | None:
    """Return the death if the kernel killed a process for lack of memory, else None."""
    if not facts.killed_at or facts.hang:
        return None
    killed = [rank for rank, code in sorted(facts.exits.items()) if code == -signal.SIGKILL]
    lost = [rank for rank in facts.exits if causes.KILLED_WORKER.matches(facts.logs.get(rank, "")[-4000:])]
    for ranks, whose in ((killed, "rank"), (lost, "a process of rank")):
        if ranks:
            reason = f"out of memory: {whose} {ranks[0]} was killed at {facts.killed_at}; {causes.MEMORY.remedy}"
            return Death(reason, True, ranks[0])
    return None
