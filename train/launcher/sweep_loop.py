"""The loop of a sweep, which runs as the rank of a run: launches trials, adopts those that exist, ends when all have.

    python -P …/train/module_runner.py train.launcher.sweep_loop RUN_FOLDER

It keeps nothing in memory that a killed loop would lose: sweep.json says which trials there are, and their run folders
how they stand. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import screen, signals
from ..code import changes
from ..errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, Refused
from ..format import figure
from ..programs import KEEPER_TRIES
from ..run import environment, outcome, states
from ..run.outcome import Kind, Outcome
from ..run.run_folder import Run
from ..signals import StopRequest
from ..sweeps import kept
from ..sweeps.kept import WAITING, Metric, Trial
from . import tmux
from .launches import Resume, from_json
from .sweep import launch_of, stop_trials

_LOOK_EVERY = 0.5
"""Seconds between two looks at the trials."""
_TRIES = 2
"""Number of refusals in a row after which a trial counts as failed: another process may just be ending."""
_FIRST = 3
"""Number of trials that fail, with none that finishes, after which the sweep fails."""
_OF_RANK = (
    "TRAIN_ATTEMPT", "TRAIN_AGENT_PID", "TRAIN_RUN_DIR", "TRAIN_NAME", "RANK", "LOCAL_RANK", "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)  # fmt: skip
"""Variables of this process that trials must not see."""


def main() -> None:
    """Run the loop of the sweep whose folder is the argument."""
    stop = StopRequest()
    run, attempt = Run(Path(sys.argv[1])).held(), int(os.environ["TRAIN_ATTEMPT"])
    environ, _ = environment.resumed(environment.read(run.folder), os.environ, as_recorded=True)
    os.environ.clear()
    os.environ.update({name: value for name, value in environ.items() if name not in _OF_RANK})
    if threads := kept.read(run).threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    sys.exit(Loop(run, attempt, stop).keep())


class Loop:
    """The loop of one attempt of a sweep."""

    def __init__(self, run: Run, attempt: int, stop: StopRequest) -> None:
        self._run, self._attempt, self._stop = run, attempt, stop
        self._sweep = kept.read(run)
        self._stamp = 0
        self._ended: dict[str, Trial] = {}
        """Trials that have ended, which are not looked at again."""
        self._before: set[str] | None = None
        """Trials that had failed before this attempt."""
        self._chosen: dict[str, list[str]] = run.read().get(kept.CHOSEN) or {}
        self._refusals: Counter[str] = Counter()
        self._noted: dict[str, Any] | None = None
        self._resumes: Counter[str] = Counter()
        """How often a trial was resumed because its processes were killed."""
        self._retried: set[str] = set()
        """Failed trials that were started again."""
        self._warned: set[str] = set()
        self._known: set[str] = set()
        """Trials whose end was printed."""

    def keep(self) -> int:
        """Launch and watch trials until all have ended, or until a stop is requested. Returns the exit code."""
        is_fresh = False
        while not self._stop.asked:
            trials = self._look()
            self._note(trials)
            failed = [one for one in trials if one.has_failed]
            self._before = {one.name for one in failed} if self._before is None else self._before
            new = [one for one in failed if one.name not in self._before]
            if len(new) >= _FIRST and not any(one.has_reached_rung for one in trials):
                whole = f"the first {_FIRST} trials failed: {new[0].reason} ({new[0].name})"
                return self._end(Kind.FAILED, f"{whole}; go on all the same: train resume {self._run.name}", trials)
            if problem := self._choose(trials):
                return self._end(Kind.FAILED, problem, trials)
            todo = [one for one in trials if self._is_open(one)]
            if not todo and not any(one.is_live for one in trials):
                if is_fresh:
                    return self._conclude(trials)
                is_fresh = True
                self._ended.clear()  # look at all once more: a user may have resumed one
                continue
            is_fresh = False
            if todo and sum(one.is_live and not self._is_open(one) for one in trials) < self._sweep.at_once:
                if edited := changes.changed(self._sweep.files):
                    way = f"put it back, then: train resume {self._run.name}; or start another sweep"
                    stop_trials(self._run)
                    return self._end(Kind.FAILED, f"{edited} changed since the sweep was launched; {way}", trials)
                self._start(todo[0])
            else:
                time.sleep(_LOOK_EVERY)
        screen.say("stopping the trials")
        stop_trials(self._run)
        self._ended.clear()
        self._note(self._look())
        return EXIT_STOPPED

    def _look(self) -> list[Trial]:
        stamp = kept.stamp(self._run)
        if stamp != self._stamp:
            self._stamp, self._sweep = stamp, kept.read(self._run)
            self._ended.clear()
        known = self._run.read()
        trials = []
        for name in self._sweep.trials:
            one = self._ended.get(name) or kept.look(self._run.path.parent, name, self._sweep, known=known)
            if one.state in (states.RUNNING, states.FINISHED):  # a refusal may have met a moment between two states
                self._refusals.pop(name, None)
            elif self._refusals[name] >= _TRIES and not Run(self._run.path.parent / name).alive():
                reason = (known.get(kept.NOT_STARTED) or {}).get(name, one.reason)
                one = Trial(name, one.parameters, states.FAILED, reason=reason)
            if not (one.is_live or self._is_open(one)):
                self._ended[name] = one
            trials.append(one)
        return trials

    def _is_open(self, one: Trial) -> bool:
        """Whether a trial is to be started, or started again."""
        if one.state == WAITING:
            return True
        if one.record is None or self._refusals[one.name] >= _TRIES:
            return False
        if one.state == states.INTERRUPTED:
            return self._resumes[one.name] < KEEPER_TRIES
        if one.state == states.CREATED:  # killed before its first attempt
            return not Run(self._run.path.parent / one.name).alive()
        if one.state == states.FAILED:
            is_wanted = len(one.record["attempts"]) <= self._sweep.retry.get(one.name, -1)
            return is_wanted and one.name not in self._retried
        if one.rung:
            return one.rung != kept.next_rung(self._sweep, one.name, self._chosen)
        return states.rests_by_itself(one.record) or one.record["stopped_by"] == signals.SWEEP

    def _choose(self, trials: Sequence[Trial]) -> str:
        """Decide which trials continue after a rung that all have reached: the last one to the end. Returns why none
        can; '' else."""
        entered, metric = list(trials), Metric.read(self._sweep.by)
        for rung in self._sweep.rungs:
            if str(rung) not in self._chosen:
                names = [one.name for one in entered]
                if not entered or any(one.is_live or self._is_open(one) for one in entered):
                    return ""
                self._ended.clear()  # a decision stays: look at all once more, a user may have resumed one
                entered = [one for one in self._look() if one.name in names]
                if any(one.is_live or self._is_open(one) for one in entered):
                    return ""
                if all(one.has_failed for one in entered):
                    return ""
                best = kept.best_at(rung, self._run.path.parent, self._sweep, entered=entered)
                if not best:
                    return f"no trial has {self._sweep.by} after step {rung}; see: train ls {self._run.name}"
                repeated = self._sweep.space.repeat
                is_decided = len(kept.rows([one for one in entered if one.name in best], repeated, metric)) == 1
                steps = [step for step in self._sweep.rungs if step == rung or (step > rung and is_decided)]
                chosen = self._chosen | {str(step): best for step in steps}
                self._run.update(rungs=chosen)
                self._chosen = chosen
                self._ended.clear()
                how = "continue to the end" if is_decided or rung == steps[-1] == self._sweep.rungs[-1] else "continue"
                screen.say(f"step {rung}: {len(best)} of {len(entered)} trials {how}: {', '.join(best)}")
            entered = [one for one in entered if one.name in self._chosen[str(rung)]]
        return ""

    def _has_ended(self, one: Trial) -> bool:
        return kept.has_ended(one, self._chosen)

    def _start(self, one: Trial) -> None:
        """Start a trial, or resume it. A refusal counts as a failure when it was tried again."""
        runs, name = self._run.path.parent, one.name
        said = " ".join(f"{field}={value}" for field, value in one.parameters.items())
        is_ending = one.state != WAITING and Run(runs / name).alive()  # it records its end first
        if is_ending or name in tmux.checking(runs):  # a killed loop has asked for it
            time.sleep(_LOOK_EVERY)
            return
        rung = kept.next_rung(self._sweep, name, self._chosen)
        try:
            if one.state == WAITING:
                copy = self._run.path / "task.py"  # the user may have edited the file since
                more = {"copy": str(copy)} if copy.exists() else {}
                sweep = dataclasses.replace(self._sweep, launch={**self._sweep.launch, **more})
                warnings = from_json(launch_of(sweep, runs, name, rung)).start(lambda: self._stop.asked)
            else:
                self._resumes[name] += one.state == states.INTERRUPTED
                self._retried |= {name} if one.has_failed else set()
                warnings = Resume(
                    runs=str(runs), name=name, queue=bool(self._sweep.launch["lease"]), by_sweep=True, rung=rung
                ).start(lambda: self._stop.asked)
        except tmux.Cancelled:
            return
        except Refused as error:
            self._refusals[name] += 1
            if self._refusals[name] >= _TRIES:
                reason = str(error)
                screen.say(f"{name} cannot be started: {reason}")
                self._run.update(lambda record: _refuse(record, name, reason))
            time.sleep(_LOOK_EVERY)
            return
        self._refusals.pop(name, None)
        screen.say(f"{name} {'started' if one.state == WAITING else 'resumed'}: {said}")
        for line in [line for line in warnings if line not in self._warned]:
            self._warned.add(line)
            screen.say(f"{name}: warning: {line}")

    def _note(self, trials: Sequence[Trial]) -> None:
        """Note in run.json how far the sweep is, and print what has ended."""
        metric = Metric.read(self._sweep.by)
        mean = kept.rows(trials, self._sweep.space.repeat, metric)[0].mean
        figures = {metric.name: mean} if mean is not None else {}
        ended = [one for one in trials if self._has_ended(one)]
        for one in ended:
            if self._noted is not None and one.name not in self._known:
                value = "" if one.value is None else f": {metric.name} {figure(one.value)}"
                state = f"left out at step {one.rung}" if one.rung else one.state
                screen.say(f"{one.name} {state}{value or (one.reason and f': {one.reason}')}")
        self._known = {one.name for one in ended}
        now: dict[str, Any] = {
            "step": len(ended),
            "total_steps": len(trials),
            "last_figures": figures,
            kept.READ: self._stamp,
        }
        if now != self._noted and self._run.note(**now):
            self._noted = now

    def _conclude(self, trials: Sequence[Trial]) -> int:
        failed = [one for one in trials if one.has_failed]
        again = f"; again: train sweep {self._run.name} --retry-failed"
        if not kept.open_failures(self._sweep, trials, self._chosen):
            again = ""  # the others were compared without them
        others = [one for one in trials if not self._has_ended(one)]
        parts = [
            f"{len(found)} of {len(trials)} trials {verb} ({', '.join(one.name for one in found[:3])}"
            f"{', …' if found[3:] else ''}){way}"
            for found, verb, way in (
                (failed, "failed", again),
                (others, "did not finish", ""),
            )
            if found
        ]
        if failed and not any(one.state == states.FINISHED for one in trials):
            return self._end(Kind.FAILED, f"{parts[0]}; {failed[0].name}: {failed[0].reason}", trials)
        return self._end(Kind.FINISHED, "; ".join(parts), trials)

    def _end(self, kind: Kind, reason: str, trials: Sequence[Trial]) -> int:
        """Report how the sweep has ended. Returns the exit code."""
        if reason:
            screen.say(reason)
        step = sum(map(self._has_ended, trials))
        outcome.write(self._run.logs(self._attempt), Outcome(rank=0, kind=kind, step=step, reason=reason, recurs=True))
        return EXIT_FINISHED if kind is Kind.FINISHED else EXIT_FAILED


def _refuse(record: Any, name: str, reason: str) -> None:
    record[kept.NOT_STARTED] = {**(record.get(kept.NOT_STARTED) or {}), name: reason}


if __name__ == "__main__":
    main()
