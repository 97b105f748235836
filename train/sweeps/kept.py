"""What a sweep keeps in its run folder (sweep.json), and how its trials stand.

The name of a trial is its key: its parameters stand in sweep.json before it is launched, so none is made twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .. import signals
from ..errors import Refused
from ..run import best, durable, metrics, states
from ..run.metrics import figures_of
from ..run.record import Record
from ..run.run_folder import Run
from .space import Parameters, Space, numbered, sweep_name

FILE = "sweep.json"
OF: Literal["trial_of"] = "trial_of"
"""Field of run.json of a trial: the id of its sweep."""
NOT_STARTED: Literal["refused_trials"] = "refused_trials"
"""Field of run.json of a sweep: maps trials that could not be started to the reason."""
REMOVED: Literal["removed_trials"] = "removed_trials"
"""Field of run.json of a sweep: names of trials that its user has removed. They are not made again."""
CHOSEN: Literal["rungs"] = "rungs"
"""Field of run.json of a sweep: maps the rungs that are decided, as text, to the trials that continue."""
READ: Literal["sweep_read"] = "sweep_read"
"""Field of run.json of a sweep: `stamp` of the file that its loop has read."""
WAITING, GONE = "waiting", "removed"
"""States of a trial without a run folder: it was not launched yet; its user has removed it."""
_LAST = "last:"
_SHARE = 3
"""At a rung one of so many continues, rounded down, and at least one (Li et al., "Hyperband", 2018: eta)."""


class Metric(NamedTuple):
    """By what trials are compared."""

    name: str
    is_least: bool
    is_last: bool
    """Whether the last evaluation counts, and not the best one."""

    @classmethod
    def read(cls, text: str) -> Metric:
        """Parse NAME, min:NAME or max:NAME, each also after `last:`."""
        aim = best.aim_of(text.removeprefix(_LAST))
        return cls(aim.metric, aim.is_least, text.startswith(_LAST))

    def best_of(self, values: Collection[float]) -> float:
        """Return the best of these values."""
        return min(values) if self.is_least else max(values)

    def of(self, run: Run, record: Record) -> float | None:
        """Return the value of a run; None: it has none. Without evaluations the loss is that of training."""
        values = best.values_of(run, bool(record.get("script")))
        return record.get("loss") if self._is_of_training(values) else self._among(values)

    def at(self, run: Run, rung: int) -> float | None:
        """Return the value that a run of a task had after this step; None: it had none."""
        values = best.values_of(run, False, rung)
        if not self._is_of_training(values):
            return self._among(values)
        lines = [line for line in metrics.each(run) if line["step"] <= rung]
        return figures_of(lines[-1]).get("loss") if lines else None

    def _is_of_training(self, values: Mapping[str, Sequence[float]]) -> bool:
        return self.name == "loss" and not values

    def _among(self, values: Mapping[str, Sequence[float]]) -> float | None:
        """Return the value among those of each metric."""
        found = values.get(self.name)
        return (found[-1] if self.is_last else self.best_of(found)) if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The content of sweep.json. A change of it is another object; see `changed`."""

    id: str
    """Trials have it in run.json."""
    launch: Mapping[str, Any]
    """The launch of a trial as JSON, without its name and parameters."""
    space: Space
    metric: str
    """What --metric says; '': not given."""
    at_once: int
    """Maximum number of trials that run at the same time; 0: not given, until the launch was checked."""
    trials: Mapping[str, Parameters]
    """Maps the names of the trials to their parameters, in the order in which they are launched."""
    by: str = "loss"
    """The metric that is used, as `Metric.read` takes it."""
    defaults: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps fields that the user has not set, and that differ from a single run, to their values."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps files that each trial reads when it is launched to their digests."""
    threads: int = 0
    """OMP_NUM_THREADS of the trials of a script that leaves it open; 0: not set."""
    asked: Space | None = None
    """The space with which the sweep was launched; None: it was not extended."""
    retry: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Maps failed trials that are to be started again to their number of attempts before."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Sweep:
        """Return the sweep from what `to_json` gave."""
        asked = content.get("asked")
        spaces = {"space": Space(**content["space"]), "asked": Space(**asked) if asked else None}
        return cls(**{**content, **spaces})

    @property
    def rungs(self) -> Sequence[int]:
        """Steps at which the trials are compared, and the best third continues."""
        return self.launch.get("rungs") or ()

    def to_json(self) -> dict[str, Any]:
        """Return the content as JSON has it."""
        return dataclasses.asdict(self)

    def to_text(self) -> str:
        """Return the content of the file."""
        return json.dumps(self.to_json(), indent=1) + "\n"

    def wants(self, other: Sweep) -> bool:
        """Whether another sweep asks for the same trials."""
        volatile = {"command_line", "visible", "ticket"}
        launches = [
            {key: value for key, value in one.launch.items() if value and key not in volatile} for one in (self, other)
        ]
        same_space = other.space in (self.space, self.asked)
        return launches[0] == launches[1] and same_space and self.metric == other.metric

    def extended(self, space: Space) -> Sweep:
        """Return the sweep with the trials of a larger space. Those that it has keep their names."""
        known = [*self.trials.values()]
        new = [parameters for parameters in space.cells() if parameters not in known]
        names = numbered(sweep_name(next(iter(self.trials))), len(known) + len(new))[len(known) :]
        trials = {**self.trials, **dict(zip(names, new, strict=True))}
        return dataclasses.replace(self, space=space, asked=self.asked or self.space, trials=trials)


def read(run: Run) -> Sweep:
    """Read sweep.json. Raises Refused if it is missing or damaged."""
    try:
        made = Sweep.from_json(json.loads(durable.read_bytes(run.folder / FILE)))
        mappings = made.trials, made.space.repeat, made.launch, *made.trials.values()
        if not all(type(one) is dict for one in mappings) or any("/" in name for name in made.trials):
            raise ValueError("not as this program writes it")
        return made
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Refused(f"{run.path / FILE} cannot be read ({error}); remove the sweep: train rm {run.name}") from None


def stamp(run: Run) -> int:
    """Return what differs from one content of sweep.json to the next."""
    found = (run.folder / FILE).stat()
    return found.st_mtime_ns ^ found.st_ino


def find(run: Run) -> Sweep | None:
    """Return the sweep of this run; None: it is no sweep, or a damaged one."""
    with contextlib.suppress(Refused):
        return read(run) if (run.folder / FILE).exists() else None
    return None


@dataclasses.dataclass(frozen=True)
class Trial:
    """How a trial stands."""

    name: str
    parameters: Parameters
    state: str
    """WAITING, GONE, or the effective state of its run; failed if it could not be started."""
    _: dataclasses.KW_ONLY
    reason: str = ""
    record: Record | None = None
    """run.json with the effective state; None: it was not launched."""
    value: float | None = None
    """Of the metric; None until it has finished, or has reached a rung."""
    reached: float = math.inf
    """How far it was compared, where that differs: a rung, a little more for one that continues, infinite: its end."""

    @property
    def has_failed(self) -> bool:
        return self.state == states.FAILED

    @property
    def rung(self) -> int:
        """The rung at which it was compared, or will be; 0: it has not stopped at one."""
        is_there = self.record is not None and self.record["stopped_by"] == signals.RUNG
        return self.record.get("rung", 0) if is_there and self.record is not None else 0

    @property
    def has_reached_rung(self) -> bool:
        return bool(self.rung) or self.state == states.FINISHED

    @property
    def said(self) -> str:
        """Its state, for people."""
        return f"{self.state} at {self.rung}" if self.rung else self.state

    @property
    def is_live(self) -> bool:
        return self.state in (states.CREATED, states.RUNNING, states.QUEUED)


def look(runs: Path, name: str, sweep: Sweep, *, known: Record) -> Trial:
    """Return how a trial stands.

    Args:
        runs: The folder of the runs.
        known: run.json of the sweep.
    """
    refused = known.get(NOT_STARTED) or {}
    run, parameters = Run(runs / name), sweep.trials[name]
    if not (run.folder / "run.json").exists():
        if name in refused:
            return Trial(name, parameters, states.FAILED, reason=refused[name])
        return Trial(name, parameters, GONE if name in known.get(REMOVED, ()) else WAITING)
    try:
        record = run.read_effective()
    except Refused as error:
        return Trial(name, parameters, states.FAILED, reason=str(error))
    if record.get(OF) != sweep.id:
        why = f"another run has the name {name}; rename it: train mv {name} NEW"
        return Trial(name, parameters, states.FAILED, reason=why)
    made = Trial(name, parameters, record["state"], reason=record.get("reason") or "", record=record)
    metric = Metric.read(sweep.by)
    if made.state == states.FINISHED:
        last = [rung for rung in sweep.rungs if rung <= record["step"]]
        reached = math.inf if len(last) == len(sweep.rungs) else last[-1] if last else 0  # stopped early
        return dataclasses.replace(made, value=metric.of(run, record), reached=reached)
    chosen = [rung for rung in sweep.rungs if name in (known.get(CHOSEN) or {}).get(str(rung), ())]
    rung = max([made.rung, *chosen])
    if not rung or made.has_failed:
        return made
    value = _value_at(metric, run.path, record.get("created"), rung)
    return dataclasses.replace(made, value=value, reached=rung + (0.5 if rung in chosen else 0.0))


@functools.lru_cache(4096)
def _value_at(metric: Metric, folder: Path, created: str | None, rung: int) -> float | None:
    """Do as `Metric.at`, reading the metrics of a run once: they no longer change where it has been. A sweep looks at
    the trials that continue twice a second.

    Args:
        created: When the run was created: another one may get its name.
    """
    return metric.at(Run(folder), rung)


def next_rung(sweep: Sweep, name: str, chosen: Mapping[str, Collection[str]]) -> int:
    """Return the first rung after which a trial does not continue, or not yet; 0: it continues to its end.

    Args:
        chosen: Field CHOSEN of the sweep.
    """
    return next((rung for rung in sweep.rungs if name not in chosen.get(str(rung), ())), 0)


def is_left_out(one: Trial, chosen: Mapping[str, Collection[str]]) -> bool:
    """Whether others were better at the rung at which a trial has stopped.

    Args:
        chosen: Field CHOSEN of the sweep.
    """
    return str(one.rung) in chosen and one.name not in chosen[str(one.rung)]


def has_ended(one: Trial, chosen: Mapping[str, Collection[str]]) -> bool:
    """Whether nothing of a trial is left to do, or it has failed; `chosen` as in `is_left_out`."""
    return one.state in (states.FINISHED, states.FAILED, GONE) or is_left_out(one, chosen)


def open_failures(sweep: Sweep, trials: Sequence[Trial], chosen: Mapping[str, Collection[str]]) -> list[Trial]:
    """Return the failed trials that may be started again: no rung was decided without them; `chosen` as in
    `is_left_out`."""
    return [one for one in trials if one.has_failed and str(next_rung(sweep, one.name, chosen)) not in chosen]


def rests_for_sweep(run: Run, record: Record) -> bool:
    """Whether a trial has stopped at a rung from which its sweep, which lives, may still let it continue."""
    if record["stopped_by"] != signals.RUNG or record["state"] != states.STOPPED:
        return False
    sweep = Run(run.path.parent / sweep_name(run.name))
    with contextlib.suppress(Refused, OSError):  # the sweep is gone
        known = sweep.read()
        chosen = (known.get(CHOSEN) or {}).get(str(record.get("rung")))
        return known.get("sweep") == record.get(OF) and sweep.alive() and (chosen is None or run.name in chosen)
    return False


def best_at(rung: int, runs: Path, sweep: Sweep, *, entered: Sequence[Trial]) -> list[str]:
    """Return the trials that continue after a rung: those of the best third, by the mean of those that repeat.

    It depends on what the trials had measured by then alone, and on their order where that is equal.

    Args:
        entered: The trials that continued after the rung before.
    """
    metric = Metric.read(sweep.by)
    found = [
        dataclasses.replace(
            one, value=metric.at(Run(runs / one.name), rung) if one.has_reached_rung else None, reached=math.inf
        )
        for one in entered
    ]
    order = rows(found, [*sweep.space.repeat], metric)
    least = max(1, len(order) // _SHARE)
    return [one.name for row in order[:least] for one in row.trials if one.value is not None]


def look_at_all(run: Run, sweep: Sweep) -> list[Trial]:
    """Return how all trials of a sweep stand, given its run."""
    known = run.read()
    return [look(run.path.parent, name, sweep, known=known) for name in sweep.trials]


def note_removed(run: Run) -> None:
    """Note in the record of its sweep that a run is removed, if it is a trial, so that it is not made again."""
    sweep = Run(run.path.parent / sweep_name(run.name))

    def change(record: Record) -> None:
        record["removed_trials"] = [*record.get(REMOVED, ()), run.name]

    with contextlib.suppress(Refused, OSError):  # the run is damaged, or its sweep is gone
        of = run.read().get(OF)
        if of and sweep.read().get("sweep") == of:
            sweep.update(change)


def own_runs(run: Run) -> list[Run]:
    """Return the runs of a sweep's trials; none of a run that is no sweep."""
    sweep = find(run)
    if sweep is None:
        return []
    found = look_at_all(run, sweep)
    return [Run(run.path.parent / one.name) for one in found if one.record is not None]


def deviation_of(values: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample; nan if a value is not finite, None if there are fewer than two."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


class Row(NamedTuple):
    """Trials with the same parameters, but for those that repeat."""

    parameters: Parameters
    trials: Sequence[Trial]

    @property
    def reached(self) -> float:
        """How far the trials that came furthest are, as `Trial.reached`."""
        return max((one.reached for one in self.trials if one.value is not None), default=0.0)

    @property
    def values(self) -> list[float]:
        """The values of the trials that came furthest."""
        return [one.value for one in self.trials if one.value is not None and one.reached == self.reached]

    @property
    def mean(self) -> float | None:
        return math.fsum(self.values) / len(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the values; None: there are fewer than two."""
        return deviation_of(self.values)

    def best(self, metric: Metric) -> Trial | None:
        """Return the best trial."""
        values = self.values
        there = [one for one in self.trials if values and one.reached == self.reached]
        return next((one for one in there if one.value == metric.best_of(values)), None)


def rows(trials: Sequence[Trial], repeated: Collection[str], metric: Metric) -> list[Row]:
    """Return the rows of trials: those that came further first, then the best mean first; without a value last."""
    found: dict[tuple[tuple[str, str], ...], list[Trial]] = {}
    for one in trials:
        key = tuple((name, value) for name, value in one.parameters.items() if name not in repeated)
        found.setdefault(key, []).append(one)
    made = [Row(dict(key), members) for key, members in found.items()]

    def order(row: Row) -> tuple[bool, float, float]:
        mean = row.mean
        return (mean is None, -row.reached, (mean or 0.0) * (1 if metric.is_least else -1))

    return sorted(made, key=order)
