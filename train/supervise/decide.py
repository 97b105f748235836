"""Who died first and why, and what becomes of the run. Pure: from facts to a decision; nothing is read or written here.

attempts.py gathers the facts when an attempt is over, and carries the decision out.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Mapping
from typing import Any

from train import signals
from train.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_STOPPED
from train.run import states
from train.run.outcome import Kind, Outcome, first_fault
from train.supervise import diagnose, memory

LAST_LINES = 8
"""Lines of a dead rank's log that run.json keeps."""
_LONGEST_WAIT = 30.0
"""Seconds, at most, until a run is started again for which the machine had no room."""
_FEW = 5
"""So many lines may follow the traceback of a rank that was still ending when a peer had noticed."""
_KILLED = ("killed by signal: Killed", "exited unexpectedly")
"""What torch says of a loader's process that is gone."""
_BY_OTHERS = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
"""Ends that a script's rank did not choose; what its peers then met was no fault of theirs."""

CODES = {
    states.FINISHED: EXIT_FINISHED,
    states.STOPPED: EXIT_STOPPED,
    states.FAILED: EXIT_FAILED,
    states.INTERRUPTED: EXIT_FAILED,
    states.COPY: EXIT_FAILED,
}
"""The exit code that stands for each end of a run."""


class LaunchMode(enum.Enum):
    """How a run was started: it decides who could start it again."""

    LAUNCHED = "train launch"
    """An agent in tmux, which does."""
    FOREGROUND = "train run"
    """A process that waits for its ranks; nobody starts them again."""
    TORCHRUN = "torchrun"
    """Rank 0 of a torchrun of somebody else, which starts again what exits with another code than 0."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request to stop."""

    by: str
    """Who: see signals.py."""
    text: str
    """What run.json's reason says of it."""
    now: bool = False
    """Without saving."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that is known when an attempt is over."""

    name: str
    """The run's."""
    mode: LaunchMode
    is_script: bool = False
    ranks: int = 1
    outcomes: Mapping[int, Outcome] = dataclasses.field(default_factory=dict)
    """What ranks of a task left behind."""
    exits: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Codes of the ranks that were seen to fail first; of a signal: negative."""
    logs: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """The ends of what ranks said."""
    hang: str = ""
    """That it hung, and how."""
    problem: str = ""
    """Why the ranks could not be started."""
    killed_at: str | None = None
    """The limit of memory at which the kernel has killed meanwhile."""
    refused_at: str = ""
    """The limit at which memory can have been refused to a rank."""
    asked: Asked | None = None
    """Who wanted a stop."""
    saved: int = 0
    """The step of the newest checkpoint; 0: none."""
    is_ready: bool = True
    """Whether the ranks had come to training: before, there is nothing that a death could cost."""
    progress: bool = False
    """Whether the attempt has brought the run further."""
    deaths: int = 0
    """In a row without progress, before this one."""
    max_restarts: int = 0
    healthy_minutes: float = 0.0
    """How long a script must have run for it to count as progress."""
    lost: str = ""
    """Nodes that are gone, with all their ranks, in words."""
    regroup: str = ""
    """Why ranks were stopped to be begun again, with more nodes or fewer."""
    leaves: bool = False
    """Whether this node alone was asked to stop, and the others go on without it."""


@dataclasses.dataclass(frozen=True)
class Death:
    """Why an attempt died."""

    reason: str
    recurs: bool
    """Whether it would die so again."""
    rank: int | None
    """The one that died first, if that is known."""
    is_raised: bool = False
    """Whether it was an exception, told by the rank itself."""

    @property
    def lacks_gpu(self) -> bool:
        """Whether the GPUs are gone that the run computes on."""
        return self.is_raised and diagnose.NO_GPU in self.reason


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is recorded of an attempt and its run, and what follows."""

    end: str
    """Of the attempt: finished, stopped, failed or died."""
    state: str | None
    """Of the run. None: it stays recorded as running: it is begun again, or is interrupted when nobody lives."""
    why: str = ""
    """Of the attempt."""
    reason: str | None = None
    """Of the run. None: nothing is said of it yet."""
    stopped_by: str | None = None
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else run.json is to have."""
    rank: int | None = None
    """The one that died first; run.json keeps its last lines."""
    again: bool = False
    """Whether the run is to be begun again."""
    wait: float = 0.0
    """Seconds before that."""
    deaths: int = 0
    """In a row without progress, with this one."""
    message: str = ""
    """A line for the terminal, where no rank has said it."""
    code: int = EXIT_FAILED
    """What the process that supervised exits with."""


def decide(facts: Facts) -> Decision:
    """What becomes of a run whose attempt is over; where a machine may be behind it, with the check for that."""
    decision = _decide(facts)
    if decision.end not in (states.FAILED, "died") or decision.reason is None:  # it goes on, or who started it tells
        return decision
    hint = diagnose.hint("\n".join([decision.why, *_raised(facts, decision.why)]))
    if not hint:
        return decision
    message = decision.message and f"{decision.message}; {hint}"
    return dataclasses.replace(
        decision, why=f"{decision.why}; {hint}", reason=f"{decision.reason}; {hint}", message=message
    )


def refused(why: str) -> Decision:
    """That this node cannot be one of its run, which continues or waits without it."""
    figures = {states.REFUSED: True}
    return Decision(states.FAILED, states.FAILED, why, why, figures=figures, message=why, code=EXIT_REFUSED)


def _raised(facts: Facts, why: str) -> list[str]:
    """Every exception behind the fault, in a line each: its origin may say more than itself."""
    first = first_fault(facts.outcomes)
    lines = first.traceback.splitlines() if first is not None and first.reason in why else []
    return [line for line in lines if line[:1].strip() and ": " in line]


def _decide(facts: Facts) -> Decision:
    reported, asked = facts.outcomes.get(0), facts.asked
    if reported is not None and reported.kind is Kind.STOPPED and facts.regroup and not (asked or facts.lost):
        deaths = 0 if facts.progress else facts.deaths
        return Decision("stopped", None, facts.regroup, again=True, deaths=deaths, message=facts.regroup)
    if reported is not None and reported.kind is not Kind.DIED and not facts.lost:
        return _as_reported(facts, reported)
    if facts.lost and not asked:  # whatever the others say: a run has ended when all its nodes know how
        return _restarted_or_not(facts, Death(f"{facts.lost} is gone", False, None))
    if asked and asked.now and asked.by == signals.CTRL_C and facts.mode is LaunchMode.FOREGROUND:
        return _ended_at_once(facts, asked)
    is_quiet = not (facts.exits or facts.hang) and first_fault(facts.outcomes) is None
    if is_quiet and asked:
        return _stopped(asked, _how_stopped(facts, asked, None))
    if is_quiet and facts.is_script:
        return Decision(states.FINISHED, states.FINISHED, reason="", code=EXIT_FINISHED)
    death = who_died(facts)
    if facts.mode is LaunchMode.TORCHRUN:
        return Decision("died", None, death.reason, rank=death.rank)
    fails = death.recurs or (death.is_raised and not death.lacks_gpu and facts.mode is not LaunchMode.LAUNCHED)
    if asked and (facts.is_script or not fails):
        decision = _stopped(asked, _how_stopped(facts, asked, death))
        then = f"continue with: train resume {facts.name}"  # no rank has said so
        return dataclasses.replace(decision, message=f"{facts.name} {decision.reason}; {then}" if facts.hang else "")
    if facts.mode is LaunchMode.LAUNCHED:
        return _restarted_or_not(facts, death)
    if fails:
        return Decision(states.FAILED, states.FAILED, death.reason, death.reason, rank=death.rank, message=death.reason)
    reason = f"{death.reason}; continue with: train resume {facts.name}"
    return Decision("died", None, reason, reason, rank=death.rank, message=reason)


def _as_reported(facts: Facts, reported: Outcome) -> Decision:
    """Rank 0 has brought its run to an end of its own."""
    if reported.kind is Kind.FINISHED:
        figures = reported.figures | {"step": reported.step}
        return Decision(states.FINISHED, states.FINISHED, reason=reported.reason, figures=figures, code=EXIT_FINISHED)
    if reported.kind is Kind.STOPPED:
        # ranks know of a signal, or of another rank; who supervises them may know whose it was
        asked = facts.asked or Asked(signals.SIGNAL, reported.reason)
        others = "; this node has left, the run is not over" if facts.leaves else ""
        decision = _stopped(asked, f"stopped after step {reported.step} ({asked.text}){others}")
        return dataclasses.replace(decision, figures=reported.figures | {"step": reported.step})
    return Decision(states.FAILED, states.FAILED, reported.reason, reported.reason)


def _stopped(asked: Asked, reason: str) -> Decision:
    return Decision(states.STOPPED, states.STOPPED, reason, reason, stopped_by=asked.by, code=EXIT_STOPPED)


def _ended_at_once(facts: Facts, asked: Asked) -> Decision:
    """By a second Ctrl-C in a foreground run."""
    saved = f"the last checkpoint is of step {facts.saved}" if facts.saved else "there is no checkpoint"
    then = f"continues after step {facts.saved}" if facts.saved else "starts at step 1"
    message = f"{facts.name} was ended at once, without saving; train resume {facts.name} {then}"
    decision = _stopped(asked, f"stopped at once ({asked.text}); {saved}")
    return dataclasses.replace(decision, message=message, code=EXIT_INTERRUPTED)


def _how_stopped(facts: Facts, asked: Asked, death: Death | None) -> str:
    """The reason of a run that was asked to stop, of which no rank 0 says that it has saved and ended."""
    if asked.now and facts.mode is LaunchMode.TORCHRUN:
        return f"stopped at once ({asked.text})"
    parts = [f"stopped ({asked.text})"]
    # a death while the ranks were saving has cost steps, and its reason must not be lost
    if death is not None and facts.is_ready and not asked.now:
        parts[0] += f", and {death.reason}"
    if facts.saved:
        parts.append(f"the last checkpoint is of step {facts.saved}")
    if facts.is_script:
        parts.append(how_stopped(dict(facts.exits)))
    return "; ".join(parts)


def _restarted_or_not(facts: Facts, death: Death) -> Decision:
    """Whether an agent begins a run again that died so; what it ends as otherwise."""
    why = death.reason
    deaths = 1 if facts.progress else facts.deaths + 1
    decision = Decision("died", None, why, rank=death.rank, deaths=deaths)
    if death.recurs:
        return dataclasses.replace(decision, state=states.FAILED, reason=why)
    if death.lacks_gpu:  # interrupted: whoever resumes it finds out when there are GPUs again
        back = f"to go on when they are back: train resume {facts.name}, or train keeper, which waits for them"
        return dataclasses.replace(decision, reason=f"{why}; {back}")
    if facts.progress and facts.max_restarts == 0:
        return dataclasses.replace(decision, reason=f"{why}; no restarts are left")  # interrupted: a resume continues
    if deaths > facts.max_restarts:
        times = f"{deaths} time{'s' if deaths > 1 else ''}"
        without = "without a new checkpoint"
        if facts.is_script:
            without = f"before it had run {facts.healthy_minutes:g} minutes"
        return dataclasses.replace(decision, state=states.FAILED, reason=f"died {times} {without}: {why}")
    message = f"{why}; starting again ({deaths} of {facts.max_restarts} without progress)"
    wait = min(2.0**deaths, _LONGEST_WAIT) if diagnose.is_busy(why) else 0.0
    return dataclasses.replace(decision, again=True, wait=wait, message=message)


def who_died(facts: Facts) -> Death:
    """The cause of an attempt's death."""
    death = _of_memory(facts)
    if death is None and facts.hang:
        death = Death(facts.hang, False, None)
    if death is None:
        death = _of_script(facts) if facts.is_script and facts.exits else _of_task(facts)
    if facts.problem and not (facts.hang or death.recurs):
        return Death(f"the ranks cannot be started: {facts.problem}", False, 0)
    return death


def _of_memory(facts: Facts) -> Death | None:
    """That the kernel took a process for its memory."""
    if not facts.killed_at or facts.hang:
        return None
    killed = [rank for rank, code in sorted(facts.exits.items()) if code == -signal.SIGKILL]
    lost = [rank for rank in facts.exits if any(word in facts.logs.get(rank, "")[-4000:] for word in _KILLED)]
    for ranks, whose in ((killed, "rank"), (lost, "a process of rank")):
        if ranks:
            reason = f"out of memory: {whose} {ranks[0]} was killed at {facts.killed_at}; {memory.ADVICE}"
            return Death(reason, True, ranks[0])
    return None


def _of_task(facts: Facts) -> Death:
    first = first_fault(facts.outcomes)
    if first is None or not first.recurs:  # one that would recur, of the task for example, may make peers abort
        for rank, code in sorted(facts.exits.items()):
            # a rank that others ended shows SIGTERM; the first cause is another one
            if code < 0 and code != -signal.SIGTERM:
                found = _cause_in_log(facts, rank, code)  # an abort tells why
                if found and found.recurs:
                    return Death(f"rank {rank}: {found.reason}", True, rank)
                return Death(f"rank {rank} {_how(code)}", False, rank)
    if first is not None:
        whose = "" if facts.ranks == 1 and facts.mode is LaunchMode.FOREGROUND else f"rank {first.rank}: "
        return Death(whose + first.reason, first.recurs, first.rank, is_raised=True)
    if facts.exits:
        rank, code = min(facts.exits.items())
        found = _cause_in_log(facts, rank, code)
        if found and (found.recurs or diagnose.is_busy(found.reason)):
            return Death(f"rank {rank}: {found.reason}", found.recurs, rank)
        return _plain(facts, rank, code)
    return Death("the ranks ended without saying how", False, 0)


def _of_script(facts: Facts) -> Death:
    causes = {rank: found for rank, code in facts.exits.items() if (found := _cause_in_log(facts, rank, code))}
    for rank, code in sorted(facts.exits.items()):
        if code in _BY_OTHERS:
            return Death(f"rank {rank} {_how(code)}", False, rank)
    if not any(found.recurs for found in causes.values()):
        # its peers notice a rank that fails by losing it, maybe before it has ended
        for rank in sorted(facts.logs.keys() - facts.exits.keys()):
            found = diagnose.of_log(facts.logs[rank], 1, _FEW, facts.refused_at)
            if found and found.recurs:
                return Death(f"rank {rank}: {found.reason}", True, rank)
    for rank, found in sorted(causes.items(), key=lambda item: (not item[1].recurs, item[0])):
        return Death(f"rank {rank}: {found.reason} ({_how(facts.exits[rank])})", found.recurs, rank)
    rank, code = min(facts.exits.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[0]))
    return _plain(facts, rank, code)


def _cause_in_log(facts: Facts, rank: int, code: int) -> diagnose.Cause | None:
    return diagnose.of_log(facts.logs.get(rank, ""), code, limit=facts.refused_at)


def _plain(facts: Facts, rank: int, code: int) -> Death:
    return Death(f"rank {rank} {_how(code)}; see: train logs {facts.name} --rank {rank}", False, rank)


def _how(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def last_lines(log: str) -> list[str]:
    """The last lines of a rank, for the story of the run."""
    return [line.rstrip()[:1000] for line in log.splitlines() if line.strip()][-LAST_LINES:]


def healthy_minutes(record: Mapping[str, Any]) -> float:
    """How long an attempt of a script must have run to be no failure to start (watch.healthy_minutes)."""
    from train import config

    return float((record.get("watch") or {}).get("healthy_minutes") or config.Watch.healthy_minutes)


def how_stopped(failures: dict[int, int]) -> str:
    """How a script took a request to stop, from the exit codes of the ranks that did not exit with 0."""
    codes = set(failures.values())
    if codes == {-signal.SIGKILL}:
        return "the script was killed"
    if codes == {-signal.SIGTERM}:
        return "the script died of SIGTERM, for it does not handle it"
    code = max(codes, default=0)
    how = f"code {code}" if code >= 0 else signal.Signals(-code).name
    return f"the script ended by itself on SIGTERM, with {how}"
