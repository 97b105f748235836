"""How runs stand: one look at a run folder, from which every view takes what it shows. Imports no torch.

The run itself is not asked, so that looking costs training nothing, and runs that died are found, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import shlex
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import programs, signals
from ..cluster import jobs
from ..programs import Program
from ..run import best, environment, folders, heartbeat, metrics, states
from ..run.heartbeat import Beat
from ..run.record import Record
from ..run.run_folder import Run, seconds_of
from ..run.spec import Spec, spec_of
from . import time_spent

ALIVE = (states.CREATED, states.QUEUED, states.RUNNING)
_BEAT = re.compile(r"rank(\d{1,6})\.beat")
_RATES = (*metrics.Speed.__annotations__, "lr", "grad_norm")
"""Metrics of a script that are no result."""
_MOST_METRICS = 4
"""Maximum number of metrics of a script that are shown as its result."""
_STARTED_BY = 60.0
"""Seconds after the start of an attempt in which the agent starts its ranks."""
MOST_RANKS = 1024
"""Maximum number of ranks of a run on one machine. A damaged run.json may contain any number."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank of the current attempt on this machine."""

    number: int
    beat: Beat | None
    """The last sign of life; None: there was none yet."""
    beaten: float
    """Time of the last sign of life, in seconds since the epoch; 0.0: never."""
    pid: int | None = None
    """Id of the process, as the agent has recorded it; None: unknown."""


class RunStatus:
    """How a run stands, as one look has found it.

    Facts for which other files must be read are read when they are first asked for.
    """

    def __init__(self, run: Run, record: Record) -> None:
        """
        Args:
            record: run.json with the effective state, as cluster/jobs.py returns it.
        """
        self.run, self._known = run, record
        self.best: Mapping[str, float] = {}
        """Maps a metric to its best value; {} until `find_best` is called, because that compares runs."""

    @functools.cached_property
    def line(self) -> metrics.Training | None:
        """The last training line of metrics.jsonl; None: there is none yet."""
        # a fork starts with lines of another run
        known = not self._known.get("forked_from") or any(attempt.get("ready") for attempt in self._known["attempts"])
        return metrics.last_training(self.run) if known and self.state != states.OTHER_FORMAT else None

    @functools.cached_property
    def record(self) -> Record:
        """run.json with the effective state, and with the step, epoch and metrics of the last training line."""
        return metrics.up_to_date(self._known, self.line)

    def to_json(self) -> dict[str, Any]:
        """Return run.json with the current facts, and what deaths have cost."""
        if self.state == states.OTHER_FORMAT:
            return {**self.record}
        return {**self.record, "restarts": self.restarts, "seconds_lost": self.seconds_lost}

    # --- what it is

    @property
    def name(self) -> str:
        return self._known["name"]

    @property
    def owner(self) -> str:
        """The owner, if that is another user; else ''."""
        return self._known.get("owner") or ""

    @property
    def sweep(self) -> str:
        """The id of a sweep; '' of another run."""
        return self._known.get("sweep") or ""

    @property
    def trial_of(self) -> str:
        """The id of the sweep of which it is a trial; '' of another run."""
        return self._known.get("trial_of") or ""

    @property
    def user(self) -> str:
        """The user that created it; '' if unknown."""
        return self.record.get("user") or ""

    @property
    def machine(self) -> str:
        """The name of the machine on which it runs or has run last; '' if it was never started."""
        return self.record.get("host") or ""

    @property
    def gpus(self) -> list[str]:
        """The numbers or UUIDs of the GPUs that its ranks on one machine see; []: they use none, or it is unknown."""
        record = self.record
        names = [] if record.get("device") == "cpu" else str(record.get("gpus") or "").replace(" ", "").split(",")
        found = list(filter(None, names))
        in_order = range(min(record["world_size"] or 1, MOST_RANKS)) if record.get("device") == "cuda" else ()
        return found or [str(number) for number in in_order]

    @functools.cached_property
    def spec(self) -> Spec:
        return spec_of(self.record, {} if self.state == states.OTHER_FORMAT else self.run.read_config())

    @property
    def config(self) -> Mapping[str, Any]:
        """The fields of config.toml that have an effect, by their dotted names."""
        return self.spec.used_config

    @property
    def program(self) -> Program:
        return programs.of_record(self.record)

    @property
    def arguments(self) -> str:
        """The arguments of a script, as a shell takes them, with … in place of secrets."""
        return environment.shown(self.record.get("script_arguments") or ())

    # --- its state

    @property
    def state(self) -> str:
        """The effective state; see states.ALL."""
        return self._known["state"]

    @property
    def reason(self) -> str:
        """Why it is in this state, as a line; '' if there is nothing to say."""
        return self._known.get("reason") or ""

    @property
    def waits_for(self) -> str:
        """What it waits for before it can train, as a line: other machines, or its engine; '' if nothing is known."""
        return self.reason if self.is_alive and not self.is_at_work else ""

    @property
    def is_alive(self) -> bool:
        """Whether the run has not ended, or is about to start."""
        return self.state in ALIVE

    @property
    def is_at_work(self) -> bool:
        """Whether an attempt runs. If not, the signs of life of the last attempt are old.

        No attempt runs while an engine has the run queued again, while its nodes gather, or while it is being resumed.
        """
        attempts = self.record["attempts"]
        return self.state == states.RUNNING and bool(attempts) and attempts[-1]["end"] is None

    @property
    def last_change(self) -> float:
        """When it ended or started, in seconds since the epoch; of a killed run when its record was last written."""
        if self.state in (states.INTERRUPTED, states.COPY):
            with contextlib.suppress(OSError):
                return (self.run.folder / "run.json").stat().st_mtime
        return seconds_of(self._known.get("ended") or self._known.get("started")) or 0.0

    @property
    def started(self) -> float:
        """When it was started last, else created, in seconds since the epoch; 0.0: unknown."""
        return seconds_of(self._known.get("started") or self._known.get("created")) or 0.0

    @property
    def next_command(self) -> str:
        """What a user can type next; '' if nothing."""
        return next_command(self.record)

    # --- its progress

    @functools.cached_property
    def step(self) -> int:
        """The last step made by any rank, counted from 1."""
        logs = self._logs if self.is_alive else None
        return max(self.record["step"], heartbeat.reached(logs)) if logs else self.record["step"]

    @property
    def total(self) -> int | None:
        """The step after which the run ends; None: unknown."""
        return self.record.get("total_steps")

    @property
    def done(self) -> str:
        """The step and the last step, as text; '' if the steps are unknown."""
        return f"{self.step}/{self.total}" if self.total else str(self.step or "")

    @property
    def loss(self) -> float | None:
        """The loss of the last training line; of an ended run that of the last evaluation, if there was one."""
        return metrics.loss_of(self.record)

    @functools.cached_property
    def metrics(self) -> Mapping[str, float | None]:
        """The metrics of the last evaluation."""
        line = None if self.record.get("metrics") else metrics.last_evaluation(self.run)
        return line["eval"] if line is not None else self.record.get("metrics") or {}

    @property
    def result(self) -> Mapping[str, float | None]:
        """The metrics of the last evaluation of this attempt; without one the loss and what a script has written."""
        if measured := self.record.get("metrics"):
            return measured | ({"loss": self.loss} if "loss" in measured else {})
        shown = {"loss": self.record.get("loss"), **(self.record.get("last_figures") or {})}
        return {name: shown[name] for name in [name for name in shown if name not in _RATES][:_MOST_METRICS]}

    def measured(self, name: str) -> float | None:
        """Return a number of the last training line, such as lr or samples_per_s; None: unknown, or the run ended."""
        found: Any = self.line.get(name) if self.line is not None and self.is_alive else None
        return found

    @property
    def step_time(self) -> float | None:
        """Seconds of a step; None: unknown, or the run has ended."""
        known = self.measured("step_time")
        return self.record.get("step_time") if known is None and self.is_alive else known

    @property
    def waits(self) -> float | None:
        """Share of a step in which rank 0 waited for data, from 0 to 1; None: unknown, or the run has ended."""
        waited, step_time = self.measured("data_wait"), self.step_time
        return min(waited / step_time, 1.0) if waited is not None and step_time else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step, at the mean speed of this attempt; None: unknown, or no attempt runs."""
        if not self.is_at_work or not self.total:
            return None
        attempt = self.record["attempts"][-1]
        ready, made = seconds_of(attempt.get("ready")), self.step - (attempt["from_step"] or 0)
        each = (time.time() - ready) / made if ready is not None and made > 0 else self.step_time
        return None if each is None else max(each * (self.total - self.step), 0.0)

    @functools.cached_property
    def size(self) -> int:
        """The bytes of its folder. All its files are looked at."""
        return folders.size_of(self.run.folder)

    @property
    def saved(self) -> tuple[int, float] | None:
        """The step of the newest checkpoint, and when it was written, in seconds since the epoch."""
        for step in self.run.steps_saved():
            with contextlib.suppress(OSError):
                return step, self.run.checkpoint(step).stat().st_mtime
        return None

    # --- what it went through

    @property
    def restarts(self) -> int:
        """How many attempts were started after another one had died."""
        return time_spent.restarts(self._known)

    @functools.cached_property
    def account(self) -> time_spent.TimeSpent:
        """Where its time went."""
        return time_spent.of_run(self.run, self.record)

    @property
    def seconds_lost(self) -> float | None:
        """Seconds that deaths cost; None: unknown, as it is after a death until training has continued."""
        attempts = self.record["attempts"]
        has_died = self.state in (states.INTERRUPTED, states.COPY) or (attempts and attempts[-1]["end"] == "died")
        if has_died or not self.program.reports_steps(attempts):
            return None
        return round(self.account.parts["lost"], 3) if self.restarts or self.state == states.FAILED else 0.0

    @property
    def deaths(self) -> int:
        """How many attempts died. The death of a killed agent is recorded only when the next attempt starts."""
        ends = [attempt["end"] for attempt in self.record["attempts"]]
        unsaid = self.state in (states.INTERRUPTED, states.COPY) and ends[-1:] == [None]
        return ends.count("died") + unsaid

    # --- its ranks

    @property
    def _logs(self) -> Path | None:
        """The folder with the logs of the last attempt; None if there was no attempt."""
        attempts = self.record["attempts"]
        return self.run.logs(attempts[-1]["number"]) if attempts else None

    @functools.cached_property
    def ranks(self) -> list[Rank]:
        """The ranks of the current attempt, including those without a sign of life yet.

        Of a run on several machines, those with a sign of life here: which others belong here is not recorded.
        """
        logs = self._logs
        if logs is None:
            return []
        expected = 0 if self.record.get("cluster") else min(self.record["world_size"] or 1, MOST_RANKS)
        numbers = set(range(expected))
        with contextlib.suppress(OSError):
            numbers |= {int(match[1]) for path in logs.iterdir() if (match := _BEAT.fullmatch(path.name))}
        found, pids = [], (self.record.get("pids") or {}).get("ranks")
        started = pids if expected and isinstance(pids, list) else []
        for rank in sorted(numbers)[:MOST_RANKS]:
            path = logs / f"rank{rank}.beat"
            beat, beaten = heartbeat.read(path), 0.0
            if beat is not None:
                with contextlib.suppress(OSError):
                    beaten = path.stat().st_mtime
            pid = started[rank] if rank < len(started) and isinstance(started[rank], int) else None
            found.append(Rank(rank, beat, beaten, beat.pid if beat is not None else pid))
        return found

    @property
    def last_progress(self) -> float | None:
        """When a run at work last showed progress, in seconds since the epoch; None: its steps are unknown.

        The latest sign of any rank counts: a rank that has done its part waits for the others without a sign.
        """
        attempts = self.record["attempts"]
        if not attempts or not self.program.reports_steps(attempts):
            return None
        last = max((rank.beaten for rank in self.ranks), default=0.0)
        return max(last, seconds_of(attempts[-1]["started"]) or 0.0) or None

    def process(self, rank: Rank) -> Any:
        """Return psutil's view of a rank; None if it is not visible: on another machine, or outside this container."""
        import psutil

        if rank.pid is None or self.record.get("host") != socket.gethostname():
            return None
        started = self.record["attempts"][-1]["started"] if self.record["attempts"] else None
        seen = rank.beaten or (seconds_of(started) or 0.0) + _STARTED_BY
        with contextlib.suppress(psutil.Error, ValueError, OverflowError):
            found = psutil.Process(rank.pid)
            if found.create_time() <= seen + 1:  # otherwise the rank is dead, and another process has its number
                return found
        return None


def doing(ranks: Iterable[Rank]) -> str:
    """Return what ranks do, one of heartbeat.NAMES, as shown by the rank that is furthest behind."""
    beats = [rank.beat for rank in ranks if rank.beat is not None]
    behind = min(beats, key=lambda beat: (beat.step, beat.count), default=None)
    phase = behind.phase if behind is not None else heartbeat.STARTING
    return heartbeat.NAMES[phase if 0 <= phase < len(heartbeat.NAMES) else heartbeat.STARTING]


def find_best(found: Iterable[RunStatus], texts: Iterable[str] = ()) -> None:
    """Find the best value of each metric of runs that are compared.

    Args:
        texts: min:METRIC and max:METRIC to find, too.
    """
    found, texts = [*found], [*texts]
    configs = [one.config for one in found]
    for one in found:
        one.best = best.bests(one.run, bool(one.record.get("script")), [one.config, *configs], texts=texts)


def here(run: Run, of_any_format: bool = False) -> RunStatus:
    """Return how a run stands by its folder alone. Arguments and errors as in `Run.read`."""
    return RunStatus(run, run.read_effective(of_any_format))


def look(run: Run, tell: jobs.Tell) -> RunStatus:
    """Return how a run stands, by its folder and its engine.

    Raises:
        Refused: the record cannot be read.
    """
    return RunStatus(run, jobs.status(run, tell))


def look_at(runs: Iterable[Run], tell: jobs.Tell) -> list[RunStatus]:
    """Return how runs stand.

    Args:
        tell: called with a line for each engine that does not answer and each record that cannot be read.
    """
    return [RunStatus(run, record) for run, record in jobs.statuses(runs, tell)]


def next_command(record: Record) -> str:
    """Return what a user can type next for a run in this state; '' if nothing.

    Args:
        record: run.json with the effective state.
    """
    if record.get("owner"):  # it belongs to another user
        return ""
    name, spec = shlex.quote(record["name"]), spec_of(record, {})
    program = programs.of(spec)
    watch = f"watch: train logs {name} --follow"
    resume = f"train resume {name}" + (" on each machine" if record.get("cluster") else "")
    again = "continue" if program.continues(spec) else "start again"
    changed, more = (
        program.new_code(spec, record["name"]),
        program.train_more(record["name"], record.get("reason") or ""),
    )
    new_code = f"; with changed code: {changed}" if changed else ""
    commands = {
        states.CHECKING: f"end its launch: train stop {name}",
        states.CREATED: watch,
        states.QUEUED: f"{watch}; take it out: train stop {name}",
        states.RUNNING: f"{watch}; save and stop: train stop {name}",
        states.STOPPED: f"{again}{' without its sweep' * (record.get('stopped_by') == signals.RUNG)}: {resume}",
        states.INTERRUPTED: f"{again}: {resume}",
        states.COPY: f"adopt and continue: {resume} (this executes the code in the run folder)",
        states.OTHER_FORMAT: f"look: train logs {name}; remove: train rm {name}",
        states.FAILED: f"look: train logs {name}; try again: {resume}{new_code}",
        states.FINISHED: f"weights: train export {name} --to {name}.safetensors; train more: {more}" if more else "",
    }
    compare = f"compare its trials: train ls {name}" if program.launches_trials else ""
    return "; ".join(filter(None, [commands.get(record["state"], ""), compare]))
