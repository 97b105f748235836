"""What differs between the programs that a run can execute: a task, and a script (any program that torchrun starts).

Each program is one class with a method per question: how its ranks start, what counts as a sign of life, what an exit
means, what counts as progress, how it stops and continues, and what `train ls` and `train show` can say. Code elsewhere
asks `of(spec)` and compares no names. Imports no torch.
"""

from __future__ import annotations

import abc
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..errors import EXIT_REFUSED, Refused
from ..run import imports, states
from ..run import spec as specs
from ..run.outcome import first_fault
from ..run.record import Attempt, Record
from ..run.run_folder import Lock, Run
from ..run.spec import Spec
from . import diagnose, last_words, meeting, script_command
from .decide import Death, Facts, LaunchMode

if TYPE_CHECKING:
    from ..zygote.client import Zygote
    from .health import Health, Kill
    from .ranks import Peers, Ranks

Say = Callable[[str], None]
KEEPER_TRIES = 3
"""Maximum number of resumes of a task by the keeper in a row without a new checkpoint. The next death fails the run."""
BEGINS_ANEW = "begins at step 0, unless the script loads its own checkpoint"
"""What a restart does without --on-restart and without a session."""
SAY_HOW = "if it can continue: --on-restart 'ARGS' ('' if it does so by itself)"
_LONGEST = 300
"""Maximum number of characters of an exception in the reason of a run."""
_KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
"""Exit codes of a script's rank that was killed. Errors of other ranks are then only consequences."""


class Program(abc.ABC):
    """The questions that every program answers. Has no state: what a run is comes as an argument."""

    name: str
    """The word for it in messages, and the label of its file in `train show`."""
    default_restarts: int | None
    """Default of --max-restarts for a new run; None: `restarts` decides when a rank dies."""
    shows_log: bool
    """Whether a terminal that follows the run shows the log of a rank, and not a progress bar."""
    unseen: str
    """What `train top` says of a rank that gives no signs of life."""
    lacks: ClassVar[Mapping[str, str]] = {}
    """Maps commands that do not work for it to the reason, as the end of a message."""

    # --- how it starts

    @abc.abstractmethod
    def imports(self) -> tuple[Sequence[str], str]:
        """Return what the zygote imports for a launch, in order, and the import for which the check waits."""

    @abc.abstractmethod
    def ranks(
        self, run: Run, *, spec: Spec, lock: Lock, count: int, zygote: Zygote, nodes: Peers | None, say: Say
    ) -> Ranks:
        """Return the ranks on this machine, not started yet.

        Args:
            nodes: The other machines, if the run has several.
            say: Prints a line on the terminal.
        """

    def edited(self, spec: Spec, name: str) -> list[str]:
        """Return warnings about files that a start runs as they are now, if they have changed since the launch."""
        return []

    @abc.abstractmethod
    def first_step(self, newest: int) -> int | None:
        """Return the step after which an attempt continues, given that of the newest state; None: unknown."""

    def check_can(self, command: str, name: str) -> None:
        """Check that `train COMMAND` works for this program. Raises Refused."""
        if command in self.lacks:
            raise Refused(f"{name} runs a {self.name}, {self.lacks[command]}")

    def export(self, run: Run, spec: Spec, target: Path, *, step: int | None, which: str) -> int:
        """Write weights to a file. Returns their step.

        Args:
            step: Of the checkpoint; None: the newest.
            which: What `--weights` says; '': nothing.

        Raises:
            Refused: it has none, or they cannot be written.
        """
        raise NotImplementedError(self.name)  # check_can refuses it

    # --- what its ranks show

    @abc.abstractmethod
    def health(self, run: Run, spec: Spec, *, attempt: int, ranks: Iterable[int], kill: Kill) -> Health:
        """Return the watcher for these ranks, which knows their signs of life."""

    # --- what an exit means

    @abc.abstractmethod
    def reports_end(self, facts: Facts) -> bool:
        """Whether ranks report how they end (run/outcome.py). Otherwise exit codes of 0 mean that the run finished, and
        any end after a stop request is a stop."""

    @abc.abstractmethod
    def who_died(self, facts: Facts) -> Death:
        """Return the cause of an attempt's death, from reports, exit codes and logs."""

    def last_words(self, facts: Facts, rank: int | None) -> Sequence[str]:
        """Return lines of the rank that died first in which to look for a likely cause, if it reported none."""
        return ()

    def how_stopped(self, exits: Mapping[int, int]) -> str:
        """Return how the program reacted to a stop request; '' if its ranks report that."""
        return ""

    @abc.abstractmethod
    def out_of_restarts(self, facts: Facts, deaths: int, why: str) -> tuple[str | None, str]:
        """Return the state (None: interrupted) and the reason of a run whose restarts are used up."""

    # --- what counts as progress, and who starts it again

    @abc.abstractmethod
    def ran_well(self, spec: Spec, seconds: float) -> bool:
        """Whether an attempt of this length is progress, so that deaths before it no longer count."""

    @abc.abstractmethod
    def no_progress(self, spec: Spec) -> str:
        """Return the end of `interrupted 3 times in a row …`."""

    @abc.abstractmethod
    def continues(self, spec: Spec) -> bool:
        """Whether a restart continues where the run was. Otherwise it may begin at step 0."""

    @abc.abstractmethod
    def restarts(self, spec: Spec) -> int:
        """Return the maximum number of restarts in a row without progress."""

    @abc.abstractmethod
    def keeper_tries(self, spec: Spec) -> int:
        """Return how often in a row without progress the keeper starts the run again; 0: never."""

    # --- stopping and continuing

    @abc.abstractmethod
    def stop_remark(self, name: str) -> str:
        """Return what to say before waiting for a polite stop, if the program may ignore it for ever; else ''."""

    @abc.abstractmethod
    def after_stop(self, spec: Spec, name: str) -> str:
        """Return how a user continues a stopped run."""

    @abc.abstractmethod
    def train_more(self, name: str, reason: str) -> str:
        """Return the command that gives a finished run more to do; '' if none does."""

    # --- what ls, show, report and the exporter say

    @abc.abstractmethod
    def source(self, spec: Spec) -> str:
        """Return the file that the user launched, or the name of a built-in task."""

    @abc.abstractmethod
    def label(self, spec: Spec) -> str:
        """Return the program of a run without a path, for pages that others may read."""

    @abc.abstractmethod
    def reports_steps(self, attempts: Sequence[Attempt]) -> bool:
        """Whether steps, losses and phases of this run are known."""

    @abc.abstractmethod
    def get_figures(self, name: str) -> str:
        """Return what to do if a run has written no figures, as the end of a message."""

    @abc.abstractmethod
    def new_code(self, spec: Spec, name: str) -> str:
        """Return the command that runs changed code after a failure; '' if a resume already does."""

    @abc.abstractmethod
    def on_restart(self, spec: Spec) -> str:
        """Return how a restart continues, if that differs from run to run; else ''."""

    @abc.abstractmethod
    def command_line(self, spec: Spec) -> str:
        """Return the file and the arguments of a program without config fields; else ''."""


class Task(Program):
    """A task: its ranks train by the loop of this package, report steps and ends, and continue from its checkpoints."""

    name, default_restarts, shows_log, unseen = specs.TASK, specs.MAX_RESTARTS, False, "starting"

    def imports(self) -> tuple[Sequence[str], str]:
        from ..zygote.client import CHECKS, RANKS

        return (*CHECKS, *RANKS), CHECKS[-1]

    def export(self, run: Run, spec: Spec, target: Path, *, step: int | None, which: str) -> int:
        from ..trainer.export import MODEL, export

        return export(run, spec, target, step=step, which=which or MODEL)

    def ranks(
        self, run: Run, *, spec: Spec, lock: Lock, count: int, zygote: Zygote, nodes: Peers | None, say: Say
    ) -> Ranks:
        from .ranks import TaskRanks

        return TaskRanks(run, spec, lock=lock, count=count, zygote=zygote, nodes=nodes)

    def first_step(self, newest: int) -> int | None:
        return newest

    def health(self, run: Run, spec: Spec, *, attempt: int, ranks: Iterable[int], kill: Kill) -> Health:
        from .health import TaskHealth

        return TaskHealth(spec.config, run.logs(attempt), ranks, kill)

    def reports_end(self, facts: Facts) -> bool:
        return True

    def who_died(self, facts: Facts) -> Death:
        first = first_fault(facts.outcomes)
        if first is None or not first.recurs:  # a fault that would recur, as in the task, may make other ranks abort
            for rank, code in sorted(facts.exits.items()):
                # SIGTERM: ended because of another rank, so not the first cause
                if code < 0 and code != -signal.SIGTERM:
                    death = _plain(facts, rank)  # a process that aborts prints why
                    return death if death.recurs else Death(f"rank {rank} {_how(code)}", False, rank)
        if first is not None:
            whose = "" if facts.ranks == 1 and facts.mode is LaunchMode.FOREGROUND else f"rank {first.rank}: "
            return Death(whose + first.reason, first.recurs, first.rank, is_raised=True)
        if facts.exits:
            return _plain(facts, min(facts.exits))
        return Death("the ranks ended without a report", False, 0)

    def out_of_restarts(self, facts: Facts, deaths: int, why: str) -> tuple[str | None, str]:
        if facts.progress:  # interrupted: a resume continues
            return None, f"{why}; no restarts are left"
        return states.FAILED, f"died {_times(deaths)} without a new checkpoint: {why}"

    def ran_well(self, spec: Spec, seconds: float) -> bool:
        return False

    def no_progress(self, spec: Spec) -> str:
        return "without a new checkpoint"

    def continues(self, spec: Spec) -> bool:
        return True

    def restarts(self, spec: Spec) -> int:
        return specs.MAX_RESTARTS if spec.max_restarts is None else spec.max_restarts

    def keeper_tries(self, spec: Spec) -> int:
        return KEEPER_TRIES

    def stop_remark(self, name: str) -> str:
        return ""

    def after_stop(self, spec: Spec, name: str) -> str:
        return f"continue with: train resume {name}"

    def train_more(self, name: str, reason: str) -> str:
        field = "early_stopping.patience" if reason else "epochs"
        return f"train resume {shlex.quote(name)} --{field} N"

    def source(self, spec: Spec) -> str:
        return spec.task_source or spec.task

    def label(self, spec: Spec) -> str:
        return spec.task

    def reports_steps(self, attempts: Sequence[Attempt]) -> bool:
        return True

    def get_figures(self, name: str) -> str:
        return f"see: train logs {name}"

    def new_code(self, spec: Spec, name: str) -> str:
        return imports.fork_with(name, spec.task_source) if spec.task_source else ""

    def on_restart(self, spec: Spec) -> str:
        return ""

    def command_line(self, spec: Spec) -> str:
        return ""


class Script(Program):
    """A script: any program that torchrun starts. Its exit codes and its output are all that is known of it.

    Many scripts overwrite their own checkpoints when they are simply started again. So by default a script is restarted
    only if it is known to continue: its user has said how (--on-restart), or its source opens a session. A script whose
    ranks report how they end is judged by that, like a task.
    """

    name, default_restarts, shows_log, unseen = specs.SCRIPT, None, True, "running"
    lacks: ClassVar = {
        "model": "whose model only its own code can build",
        "archive": "whose files lie outside the run folder; copy them by hand",
        "fork": "whose checkpoints are not known here; start it with: train launch",
        "eval": "whose checkpoints are not known here; evaluate them with the script",
        "export": "whose checkpoints are not known here; export them with the script",
    }

    def imports(self) -> tuple[Sequence[str], str]:
        from ..zygote.client import SCRIPT

        return SCRIPT, SCRIPT[-1]

    def ranks(
        self, run: Run, *, spec: Spec, lock: Lock, count: int, zygote: Zygote, nodes: Peers | None, say: Say
    ) -> Ranks:
        from .ranks import ScriptRanks

        starts = script_command.Starts(spec)

        def command(attempt: int) -> script_command.Start:
            has_failed = script_command.has_failed(run.attempts()[:-1], 60 * healthy_minutes(spec))
            arguments, line = starts.arguments(run.path, attempt, has_failed)
            for text in (*self.edited(spec, run.name), *filter(None, [line])):
                say(text)
            program = ["-m", spec.script_module] if spec.script_module else [spec.script]
            sources = [Path(name) for name in (spec.script, *spec.script_files) if name.endswith(".py")]
            has_port = bool(script_command.ports_set(sources))
            return script_command.Start([*program, *arguments], line, has_port, meeting.asks_rank(sources))

        return ScriptRanks(run, lock, count, zygote, command)

    def edited(self, spec: Spec, name: str) -> list[str]:
        changed = imports.changed(spec.script_files)
        return [f"{changed} changed since {name} was launched; the new version runs"] if changed else []

    def first_step(self, newest: int) -> int | None:
        return None

    def health(self, run: Run, spec: Spec, *, attempt: int, ranks: Iterable[int], kill: Kill) -> Health:
        from .health import ScriptHealth
        from .script_figures import ScriptFigures

        def tell(text: str) -> None:
            run.note(reason=f"{text}; to end it: train stop {run.name} --now")

        return ScriptHealth(ScriptFigures(run, spec, attempt), run.logs(attempt), spec.watch, ranks, kill, tell)

    def reports_end(self, facts: Facts) -> bool:
        return bool(facts.outcomes)

    def who_died(self, facts: Facts) -> Death:
        if facts.outcomes:
            return TASK.who_died(facts)
        exits = sorted(facts.exits.items())
        for rank, code in exits:
            if code == EXIT_REFUSED:  # as for wrong arguments
                return _plain(facts, rank, ", so it is not restarted")
        for rank, code in exits:
            if code in _KILLED_FROM_OUTSIDE:
                return Death(f"rank {rank} {_how(code)}", False, rank)
        # SIGTERM: ended because of another rank, so not the first cause
        order = [rank for rank, _ in sorted(exits, key=lambda item: (item[1] == -signal.SIGTERM, item[0]))]
        known = (rank for rank, _ in exits if _in_log(facts, rank))
        return _plain(facts, next(known, last_words.first_to_fail(facts.exits, facts.logs, order)))

    def last_words(self, facts: Facts, rank: int | None) -> Sequence[str]:
        log = facts.logs.get(rank, "") if rank is not None else ""
        return last_words.own(log) or diagnose.last_lines(log)

    def how_stopped(self, exits: Mapping[int, int]) -> str:
        codes = set(exits.values())
        if codes == {-signal.SIGKILL}:
            return "the script was killed"
        if codes == {-signal.SIGTERM}:
            return "the script died of SIGTERM, which it does not handle"
        code = max(codes, default=0)
        how = f"code {code}" if code >= 0 else signal.Signals(-code).name
        return f"the script ended by itself on SIGTERM, with {how}"

    def out_of_restarts(self, facts: Facts, deaths: int, why: str) -> tuple[str | None, str]:
        if facts.max_restarts == 0:
            return states.FAILED, why
        return states.FAILED, f"died {_times(deaths)} before it had run {facts.healthy_minutes:g} minutes: {why}"

    def ran_well(self, spec: Spec, seconds: float) -> bool:
        return seconds >= 60 * healthy_minutes(spec)

    def no_progress(self, spec: Spec) -> str:
        return f"before it had run {healthy_minutes(spec):g} minutes"

    def continues(self, spec: Spec) -> bool:
        return spec.on_restart is not None or spec.expects_session

    def restarts(self, spec: Spec) -> int:
        if spec.max_restarts is not None:
            return spec.max_restarts
        return specs.MAX_RESTARTS if self.continues(spec) else 0

    def keeper_tries(self, spec: Spec) -> int:
        return self.restarts(spec)

    def stop_remark(self, name: str) -> str:
        return f"waiting for {name} to stop; to end it at once: train stop {name} --now"

    def after_stop(self, spec: Spec, name: str) -> str:
        return f"continue with: train resume {name}" if self.continues(spec) else f"train resume {name} {BEGINS_ANEW}"

    def train_more(self, name: str, reason: str) -> str:
        return ""

    def source(self, spec: Spec) -> str:
        return spec.script

    def label(self, spec: Spec) -> str:
        return spec.script_module or Path(spec.script).name

    def reports_steps(self, attempts: Sequence[Attempt]) -> bool:
        return any(map(knows_steps, attempts))

    def get_figures(self, name: str) -> str:
        return "launch it with --figures, or let it write lines into $TRAIN_RUN_DIR/metrics.jsonl (docs/scripts.md)"

    def new_code(self, spec: Spec, name: str) -> str:
        return ""

    def on_restart(self, spec: Spec) -> str:
        if spec.on_restart:
            return shlex.join(spec.on_restart)
        if spec.on_restart is None:
            return "" if spec.expects_session else BEGINS_ANEW
        return "continues by itself"

    def command_line(self, spec: Spec) -> str:
        return " ".join([f"-m {spec.script_module}" if spec.script_module else spec.script, *spec.script_arguments])


class Session(Script):
    """A script that has opened a session: it reports steps and ends like a task, and continues from its checkpoints."""

    unseen = "starting"
    lacks: ClassVar = {
        "eval": "which evaluates by itself; see its metrics: train show",
        "model": "whose model only its own code can build; take its weights: run.state_dict('model')",
    }

    def export(self, run: Run, spec: Spec, target: Path, *, step: int | None, which: str) -> int:
        from ..trainer.export import export_registered

        return export_registered(run, target, step=step, name=which)

    def first_step(self, newest: int) -> int | None:
        return newest

    def how_stopped(self, exits: Mapping[int, int]) -> str:
        return TASK.how_stopped(exits)

    def out_of_restarts(self, facts: Facts, deaths: int, why: str) -> tuple[str | None, str]:
        return TASK.out_of_restarts(facts, deaths, why)

    def ran_well(self, spec: Spec, seconds: float) -> bool:
        return TASK.ran_well(spec, seconds)

    def no_progress(self, spec: Spec) -> str:
        return TASK.no_progress(spec)

    def continues(self, spec: Spec) -> bool:
        return True

    def keeper_tries(self, spec: Spec) -> int:
        return TASK.keeper_tries(spec)

    def on_restart(self, spec: Spec) -> str:
        return super().on_restart(spec) if spec.on_restart else ""

    def reports_steps(self, attempts: Sequence[Attempt]) -> bool:
        return TASK.reports_steps(attempts)


TASK, SCRIPT, SESSION = Task(), Script(), Session()
PROGRAMS: Mapping[str, Program] = {specs.TASK: TASK, specs.SCRIPT: SCRIPT, specs.SESSION: SESSION}


def of(spec: Spec) -> Program:
    """Return the program of a run."""
    return PROGRAMS[spec.program]


def of_record(record: Record) -> Program:
    """Return the program of a run of which only the record was read."""
    return PROGRAMS[specs.program_of(record)]


def knows_steps(attempt: Attempt) -> bool:
    """Whether the steps of an attempt are known."""
    return attempt.get("from_step") is not None


def healthy_minutes(spec: Spec) -> float:
    """Return the minutes an attempt of a script must run to count as progress (watch.healthy_minutes)."""
    from .. import config

    return float(spec.watch.get("healthy_minutes") or config.Watch.healthy_minutes)


def _in_log(facts: Facts, rank: int) -> diagnose.Verdict | None:
    """Return what a rank's log shows for certain. An exception says why a process has exited, not why it was killed."""
    log = facts.logs.get(rank, "")
    raised = last_words.raised(log) if facts.exits.get(rank, 1) > 0 else ""
    return diagnose.in_log(log, raised, facts.refused_at)


def _plain(facts: Facts, rank: int, remark: str = "") -> Death:
    """Return the death of a rank as its exit code and its log tell it.

    Args:
        remark: What follows from an exit code with which a restart would end again; '': the log decides.
    """
    how = f" {_how(facts.exits[rank])}" if rank in facts.exits else ""
    found = _in_log(facts, rank)
    said = found.reason if found else last_words.raised(facts.logs.get(rank, ""))[:_LONGEST]
    reason = ": ".join(filter(None, [f"rank {rank}{how}{remark}", said]))
    return Death(f"{reason}; {_see(facts, rank)}", bool(remark) or (found is not None and found.recurs), rank)


def _see(facts: Facts, rank: int) -> str:
    if not facts.then:  # there will be no log
        return "its last lines are above"
    return f"see: train logs {facts.name} --rank {rank}"


def _how(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _times(deaths: int) -> str:
    return f"{deaths} time{'s' if deaths > 1 else ''}"
