"""What differs between the programs that a run can execute: a task, and a script (any program that torchrun starts).

TASK, SCRIPT and SESSION, a script that has opened a session, are rows of one table: texts and constants. The classes
have a method where something is decided: how ranks start, what an exit means, how a run continues. Code elsewhere asks
`of(spec)` and compares no names. Imports no torch.
"""

from __future__ import annotations

import abc
import dataclasses
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .code import changes
from .errors import EXIT_REFUSED, Refused
from .format import ended
from .run import spec as specs
from .run import states
from .run.outcome import first_fault
from .run.record import Attempt, Record
from .run.run_folder import Lock, Run
from .run.spec import Spec
from .scripts.command import BEGINS_ANEW, healthy_minutes
from .supervise import diagnose, last_words
from .supervise.decide import Death, Facts, LaunchMode

if TYPE_CHECKING:
    from .supervise.health import Health, Kill
    from .supervise.ranks import Peers, Ranks
    from .zygote.client import Zygote

Say = Callable[[str], None]
KEEPER_TRIES = 3
"""Maximum number of resumes by the keeper in a row without a new checkpoint. The next death fails the run."""
_LONGEST = 300
"""Maximum number of characters of an exception in the reason of a run."""
_KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
"""Exit codes of a script's rank that was killed. Errors of other ranks are then only consequences."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program(abc.ABC):
    """A row of the table, and the questions that every program answers. What a run is comes as an argument."""

    name: str
    """The word for it in messages, and the label of its file in `train show`."""
    knows_steps: bool
    """Whether its ranks report steps, and a restart continues from its newest checkpoint."""
    default_restarts: int | None
    """Default of --max-restarts for a new run; None: `restarts` decides when a rank dies."""
    has_fields: bool = False
    """Whether its flags are config fields. Otherwise its own arguments follow after --."""
    launches_trials: bool = False
    """Whether its rank launches other runs, its trials."""
    shows_log: bool = True
    """Whether a terminal that follows the run shows the log of a rank, and not a progress bar."""
    unseen: str = "starting"
    """What `train top` says of a rank that gives no signs of life."""
    stop_remark: str = ""
    """What to say of the run {name} before waiting for a polite stop, if it may ignore that for ever; else ''."""
    lacks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps commands that do not work for it to the reason, as the end of a message."""
    not_for: Mapping[str, str]
    """Maps options that are for other programs to the reason, as the end of a message."""

    # --- what a user may ask

    def check_can(self, command: str, name: str) -> None:
        """Check that `train COMMAND` works for this program. Raises Refused."""
        if command in self.lacks:
            raise Refused(f"{name} runs a {self.name}, {self.lacks[command]}")

    def check_options(self, given: Mapping[str, Any]) -> None:
        """Check that no option is given (is not None) that is for other programs. Raises Refused."""
        for option, why in self.not_for.items():
            if given.get(option) is not None:
                raise Refused(f"--{option.replace('_', '-')} is for {why}")
        if self.has_fields and given.get("arguments"):
            raise Refused(f"unexpected {given['arguments'][0]}: a {self.name} takes flags only: --FLAG VALUE")

    @abc.abstractmethod
    def export(self, run: Run, spec: Spec, target: Path, *, step: int | None, which: str) -> int:
        """Write weights to a file. Returns their step.

        Args:
            step: Of the checkpoint; None: the newest.
            which: What `--weights` says; '': nothing.

        Raises:
            Refused: it has none, or they cannot be written.
        """

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

    @abc.abstractmethod
    def health(self, run: Run, spec: Spec, *, attempt: int, ranks: Iterable[int], kill: Kill) -> Health:
        """Return the watcher for these ranks, which knows their signs of life."""

    def first_step(self, newest: int) -> int | None:
        """Return the step after which an attempt continues, given that of the newest state; None: unknown."""
        return newest if self.knows_steps else None

    def now(self, record: Record) -> Program:
        """Return the program as the record says by now: a script may have opened a session."""
        return of_record(record)

    # --- what an exit means

    def reports_end(self, facts: Facts) -> bool:
        """Whether ranks report how they end (run/outcome.py). Otherwise exit codes of 0 mean that the run finished, and
        any end after a stop request is a stop."""
        return bool(facts.outcomes)

    def who_died(self, facts: Facts) -> Death:
        """Return the cause of an attempt's death, from reports, exit codes and logs."""
        first = first_fault(facts.outcomes)
        if first is None or not first.recurs:  # a fault that would recur, as in the task, may make other ranks abort
            for rank, code in sorted(facts.exits.items()):
                # SIGTERM: ended because of another rank, so not the first cause
                if code < 0 and code != -signal.SIGTERM:
                    death = _plain(facts, rank)  # a process that aborts prints why
                    return death if death.recurs else Death(f"rank {rank} {ended(code)}", False, rank)
        if first is not None:
            whose = "" if facts.ranks == 1 and facts.mode is LaunchMode.FOREGROUND else f"rank {first.rank}: "
            return Death(whose + first.reason, first.recurs, first.rank, is_raised=True)
        if facts.exits:
            return _plain(facts, min(facts.exits))
        return Death("the ranks ended without a report", False, 0)

    def last_words(self, facts: Facts, rank: int | None) -> Sequence[str]:
        """Return lines of the rank that died first in which to look for a likely cause, if it reported none."""
        return ()

    def how_stopped(self, exits: Mapping[int, int]) -> str:
        """Return how the program reacted to a stop request; '' if its ranks report that."""
        return ""

    def out_of_restarts(self, facts: Facts, deaths: int, why: str) -> tuple[str | None, str]:
        """Return the state (None: interrupted) and the reason of a run whose restarts are used up."""
        if self.knows_steps and facts.progress:  # interrupted: a resume continues
            return None, f"{why}; no restarts are left"
        if not self.knows_steps and facts.max_restarts == 0:
            return states.FAILED, why
        return states.FAILED, f"died {deaths} time{'s' if deaths > 1 else ''} {facts.no_progress}: {why}"

    # --- what counts as progress, and who starts it again

    def ran_well(self, spec: Spec, seconds: float) -> bool:
        """Whether an attempt of this length is progress, so that deaths before it no longer count."""
        return not self.knows_steps and seconds >= 60 * healthy_minutes(spec)

    def no_progress(self, spec: Spec) -> str:
        """Return the end of `interrupted 3 times in a row …`."""
        if self.knows_steps:
            return "without a new checkpoint"
        return f"before it had run {healthy_minutes(spec):g} minutes"

    def continues(self, spec: Spec) -> bool:
        """Whether a restart continues where the run was. Otherwise it may begin at step 0."""
        return self.knows_steps or spec.on_restart is not None or spec.expects_session

    def restarts(self, spec: Spec) -> int:
        """Return the maximum number of restarts in a row without progress."""
        if spec.max_restarts is not None:
            return spec.max_restarts
        return specs.MAX_RESTARTS if self.continues(spec) else 0

    def keeper_tries(self, spec: Spec) -> int:
        """Return how often in a row without progress the keeper starts the run again; 0: never."""
        return KEEPER_TRIES if self.knows_steps else self.restarts(spec)

    # --- what stop, ls, show, report and the exporter say

    def after_stop(self, spec: Spec, name: str) -> str:
        """Return how a user continues a stopped run."""
        return f"continue with: train resume {name}" if self.continues(spec) else f"train resume {name} {BEGINS_ANEW}"

    def train_more(self, name: str, reason: str) -> str:
        """Return the command that gives a finished run more to do; '' if none does."""
        field = "early_stopping.patience" if reason else "epochs"
        return f"train resume {shlex.quote(name)} --{field} N" if self.has_fields else ""

    def source(self, spec: Spec) -> str:
        """Return the file that the user launched, or the name of a built-in task."""
        return spec.script or spec.task_source or spec.task

    def label(self, spec: Spec) -> str:
        """Return the program of a run without a path, for pages that others may read."""
        return spec.script_module or Path(spec.script).name or spec.task

    def reports_steps(self, attempts: Sequence[Attempt]) -> bool:
        """Whether steps, losses and phases of this run are known."""
        return self.knows_steps or any(map(knows_steps, attempts))

    def get_figures(self, name: str) -> str:
        """Return what to do if a run has written no figures, as the end of a message."""
        if self.has_fields:
            return f"see: train logs {name}"
        return "launch it with --figures, or let it write lines into $TRAIN_RUN_DIR/metrics.jsonl (docs/scripts.md)"

    def new_code(self, spec: Spec, name: str) -> str:
        """Return the command that runs changed code after a failure; '' if a resume already does."""
        return changes.fork_with(name, spec.task_source) if spec.task_source else ""

    def on_restart(self, spec: Spec) -> str:
        """Return how a restart continues, if that differs from run to run; else ''."""
        if spec.on_restart:
            return shlex.join(spec.on_restart)
        if self.knows_steps:
            return ""
        if spec.on_restart is None:
            return "" if spec.expects_session else BEGINS_ANEW
        return "continues by itself"

    def command_line(self, spec: Spec) -> str:
        """Return the file and the arguments of a program without config fields; else ''."""
        return " ".join([f"-m {spec.script_module}" if spec.script_module else spec.script, *spec.script_arguments])


class Task(Program):
    """A task: its ranks train by the loop of this package, report steps and ends, and continue from its checkpoints."""

    def export(self, run: Run, spec: Spec, target: Path, *, step: int | None, which: str) -> int:
        from .trainer.export import MODEL, export

        return export(run, spec, target, step=step, which=which or MODEL)

    def imports(self) -> tuple[Sequence[str], str]:
        from .zygote.client import CHECKS, RANKS

        return (*CHECKS, *RANKS), CHECKS[-1]

    def ranks(
        self, run: Run, *, spec: Spec, lock: Lock, count: int, zygote: Zygote, nodes: Peers | None, say: Say
    ) -> Ranks:
        from .supervise.ranks import TaskRanks

        return TaskRanks(run, spec, lock=lock, count=count, zygote=zygote, nodes=nodes)

    def health(self, run: Run, spec: Spec, *, attempt: int, ranks: Iterable[int], kill: Kill) -> Health:
        from .supervise.health import TaskHealth

        return TaskHealth(spec.config, run.logs(attempt), ranks, kill=kill)

    def reports_end(self, facts: Facts) -> bool:
        return True


class Script(Program):
    """A script: any program that torchrun starts. Its exit codes and its output are all that is known of it.

    Many scripts overwrite their own checkpoints when they are simply started again. So by default a script is restarted
    only if it is known to continue: its user has said how (--on-restart), or its source opens a session. A script whose
    ranks report how they end is judged by that, like a task.
    """

    def export(self, run: Run, spec: Spec, target: Path, *, step: int | None, which: str) -> int:
        from .trainer.export import export_registered

        return export_registered(run, target, step=step, name=which)

    def imports(self) -> tuple[Sequence[str], str]:
        from .zygote.client import SCRIPT

        return SCRIPT, SCRIPT[-1]

    def ranks(
        self, run: Run, *, spec: Spec, lock: Lock, count: int, zygote: Zygote, nodes: Peers | None, say: Say
    ) -> Ranks:
        from .scripts.ranks import ScriptRanks

        return ScriptRanks(run, spec, lock=lock, count=count, zygote=zygote, say=say)

    def health(self, run: Run, spec: Spec, *, attempt: int, ranks: Iterable[int], kill: Kill) -> Health:
        from .scripts.health import ScriptHealth

        return ScriptHealth(run, spec, attempt=attempt, ranks=ranks, kill=kill)

    def who_died(self, facts: Facts) -> Death:
        if facts.outcomes:
            return super().who_died(facts)
        exits = sorted(facts.exits.items())
        for rank, code in exits:
            if code == EXIT_REFUSED:  # as for wrong arguments
                return _plain(facts, rank, ", so it is not restarted")
        for rank, code in exits:
            if code in _KILLED_FROM_OUTSIDE:
                return Death(f"rank {rank} {ended(code)}", False, rank)
        # SIGTERM: ended because of another rank, so not the first cause
        order = [rank for rank, _ in sorted(exits, key=lambda item: (item[1] == -signal.SIGTERM, item[0]))]
        known = (rank for rank, _ in exits if _in_log(facts, rank))
        return _plain(facts, next(known, last_words.first_to_fail(facts.exits, facts.logs, order)))

    def last_words(self, facts: Facts, rank: int | None) -> Sequence[str]:
        log = facts.logs.get(rank, "") if rank is not None else ""
        return last_words.own(log) or diagnose.last_lines(log)

    def how_stopped(self, exits: Mapping[int, int]) -> str:
        codes = set(exits.values())
        if self.knows_steps:
            return ""
        if codes == {-signal.SIGKILL}:
            return "the script was killed"
        if codes == {-signal.SIGTERM}:
            return "the script died of SIGTERM, which it does not handle"
        code = max(codes, default=0)
        how = f"code {code}" if code >= 0 else signal.Signals(-code).name
        return f"the script ended by itself on SIGTERM, with {how}"


class Sweep(Script):
    """A sweep: our loop as a script. Its trials are runs of their own."""

    def imports(self) -> tuple[Sequence[str], str]:
        return (), ""

    def ranks(
        self, run: Run, *, spec: Spec, lock: Lock, count: int, zygote: Zygote, nodes: Peers | None, say: Say
    ) -> Ranks:
        from .scripts.ranks import LoopRanks

        return LoopRanks(run, lock=lock, count=count, zygote=zygote)

    def health(self, run: Run, spec: Spec, *, attempt: int, ranks: Iterable[int], kill: Kill) -> Health:
        from .scripts.health import LoopHealth

        return LoopHealth(run.logs(attempt), kill)

    def how_stopped(self, exits: Mapping[int, int]) -> str:
        return ""

    def get_figures(self, name: str) -> str:
        return f"see: train ls {name}"

    def on_restart(self, spec: Spec) -> str:
        return ""

    def new_code(self, spec: Spec, name: str) -> str:
        return ""


TASK = Task(
    name=specs.TASK, knows_steps=True, default_restarts=specs.MAX_RESTARTS, has_fields=True, shows_log=False,
    not_for={
        "on_restart": "scripts; a task continues from its checkpoint by itself",
        "figures": "scripts; a task writes its metrics itself",
    },
)  # fmt: skip
SCRIPT = Script(
    name=specs.SCRIPT, knows_steps=False, default_restarts=None, unseen="running",
    stop_remark="waiting for {name} to stop; to end it at once: train stop {name} --now",
    lacks={
        "model": "whose model only its own code can build",
        "archive": "whose files lie outside the run folder; copy them by hand",
        "fork": "whose checkpoints are not known here; start it with: train launch",
        "eval": "whose checkpoints are not known here; evaluate them with the script",
        "export": "whose checkpoints are not known here; export them with the script",
    },
    not_for={
        "config": "tasks; give the arguments of a script after --",
        "nnodes": "tasks; start a script on several machines with torchrun",
        "task": "tasks; a script starts as its file is now, so edit the file",
    },
)  # fmt: skip
SESSION = dataclasses.replace(
    SCRIPT, knows_steps=True, unseen="starting",
    lacks={
        "eval": "which evaluates by itself; see its metrics: train show",
        "model": "whose model only its own code can build; take its weights: run.state_dict('model')",
    },
)  # fmt: skip
SWEEP = Sweep(
    name=specs.SWEEP, knows_steps=False, default_restarts=None, unseen="running", launches_trials=True,
    lacks=dict.fromkeys(
        ("model", "archive", "fork", "eval", "export", "mirror"),
        "whose trials are runs of their own; name one of them; to see them: train ls NAME",
    ),
    not_for=dict.fromkeys(
        ("on_restart", "figures", "nproc", "gpus"), "tasks and scripts; the trials of a sweep keep what they have"
    ),
)  # fmt: skip
PROGRAMS: Mapping[str, Program] = {specs.TASK: TASK, specs.SCRIPT: SCRIPT, specs.SESSION: SESSION, specs.SWEEP: SWEEP}


def of(spec: Spec) -> Program:
    """Return the program of a run."""
    return PROGRAMS[spec.program]


def of_record(record: Record) -> Program:
    """Return the program of a run of which only the record was read."""
    return PROGRAMS[specs.program_of(record)]


def knows_steps(attempt: Attempt) -> bool:
    """Whether the steps of an attempt are known."""
    return attempt.get("from_step") is not None


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
    how = f" {ended(facts.exits[rank])}" if rank in facts.exits else ""
    found = _in_log(facts, rank)
    said = found.reason if found else last_words.raised(facts.logs.get(rank, ""))[:_LONGEST]
    reason = ": ".join(filter(None, [f"rank {rank}{how}{remark}", said]))
    return Death(f"{reason}; {_see(facts, rank)}", bool(remark) or (found is not None and found.recurs), rank)


def _see(facts: Facts, rank: int) -> str:
    if not facts.then:  # there will be no log
        return "its last lines are above"
    return f"see: train logs {facts.name} --rank {rank}"
