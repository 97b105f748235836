"""Runs from Python: launch, find and list them, wait for them, and use what they have learned.

    run = trainstation.launch("digits", name="first", nproc=2, epochs=5, optim={"lr": 0.1})
    run.wait()
    trainstation.sweep("digits", name="lr", grid={"optim.lr": [0.01, 0.1]}, repeat=3)

A call is written as a command line and read by the parser of that command. So Python knows every flag, and refuses what
the command line refuses, in the same words. Imports no torch until a model is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from . import caches, cli, screen
from .commands import ls, parser
from .commands.from_python import of_program, options_of, values_of
from .commands.options import matching
from .errors import Refused
from .monitor.status import RunStatus, find_best, here, look, look_at
from .run import best, folders, metrics, run_folder
from .run.owner import TrustedRun
from .sweeps import kept
from .views import sweep as comparison

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from torch import Tensor, nn

__all__ = ["Refused", "Run", "Sweep", "find", "launch", "plot", "prove", "runs", "sweep"]

P = ParamSpec("P")
T = TypeVar("T")
_LOOK_EVERY = 0.5
"""Seconds between two looks for evaluations."""


def _refusing(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function refuse like a command: by one exception, whose traceback ends at the call."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Refused as error:
            refusal = error
        except (OSError, UnicodeEncodeError) as error:
            refusal = Refused(cli.problem(error))
        refusal.__context__ = refusal.__cause__ = None
        raise refusal.with_traceback(None)

    return called


@_refusing
def launch(
    task: str | Path | types.ModuleType | None = None, /, *, script: str | Path | None = None,
    arguments: str | Sequence[object] = (), runs: str | Path | None = None, **options: Any,
) -> Run:  # fmt: skip
    """Start a run in the background and return it. It outlives this process.

    Args:
        task: A built-in task, the path of a Python file, or a module.
        script: A torchrun program to start instead of a task.
        arguments: The script's own arguments, as a list, or as one text that is split as a shell does.
        runs: Folder of the runs. Default: $TRAIN_RUNS, else ./runs.
        options: Flags of `train launch`: name="first", nproc=2, epochs=5, optim={"lr": 0.1}, **{"optim.lr": 0.1}.

    Raises:
        Refused: the request is wrong; nothing was created.
    """
    asked = of_program("launch", task, {"script": script, "runs": runs, **options}, arguments=arguments)
    folder, name = cli.carry_out("launch", asked, "start")
    return Run(folder, name)


@_refusing
def sweep(
    task: str | Path | types.ModuleType | None = None, /, *, grid: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | None = None, repeat: Mapping[str, Any] | int | None = None,
    script: str | Path | None = None, arguments: str | Sequence[object] = (), runs: str | Path | None = None,
    **options: Any,
) -> Sweep:  # fmt: skip
    """Start a sweep in the background and return it: a run for each combination of values. It outlives this process.

    Args:
        task, script, arguments, runs: As in `launch`. `{lr}` in the arguments of a script is the value of lr.
        grid: Maps parameters to lists of values: {"optim.lr": [1e-4, 1e-3]}.
        search: Maps parameters to what their values are drawn from: {"optim.lr": "log:1e-5..1e-2"}. Needs trials=20.
        repeat: As grid: the table takes the mean over these. A number N: N seeds.
        options: Flags of `train sweep`: name="lr", at_once=2, metric="max:accuracy", rungs=[500, 2000], and those of a
            launch.

    Raises:
        Refused: the request is wrong; nothing was created.
    """
    repeat = {"seed": range(repeat)} if isinstance(repeat, int) else repeat
    parts = {"grid": grid, "search": search, "repeat": repeat}
    spaces = {option: values_of(part) for option, part in parts.items() if part}
    asked = of_program("sweep", task, {"script": script, "runs": runs, **spaces, **options}, arguments=arguments)
    folder, name = cli.carry_out("sweep", asked, "start")
    return Sweep(folder, name)


@_refusing
def prove(
    task: str | Path | types.ModuleType | None = None, /, *, script: str | Path | None = None,
    arguments: str | Sequence[object] = (), runs: str | Path | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Prove that a run ends with the same bits however it is killed. Return the facts of proof.json.

    `verdict` is "EXACT", "NOT EXACT" or "FAILED". With `also="1,3"` the facts of the other numbers of ranks are in
    `also`, in a list.

    Args:
        task, script, arguments, runs: As in `launch`.
        options: Flags of `train prove`: nproc=2, updates=60, kills=4, moments=1, also="1,3", and those of a launch.

    Raises:
        Refused: the request is wrong; nothing was created.
    """
    asked = of_program("prove", task, {"script": script, "runs": runs, **options}, arguments=arguments)
    first, *others = cli.carry_out("prove", asked, "proofs")
    return first.to_json() | ({"also": [one.to_json() for one in others]} if others else {})


@_refusing
def find(name: str, *, runs: str | Path | None = None) -> Run:
    """Return the run of this name.

    Args:
        runs: Folder of the runs. Default: $TRAIN_RUNS, else ./runs.

    Raises:
        Refused: there is none.
    """
    found = folders.find(_folder(runs), name)
    return Run(found.folder.parent, found.name)


@_refusing
def runs(*names: str, state: str | Sequence[str] | None = None, runs: str | Path | None = None) -> list[Run]:
    """Return the runs, the oldest first.

    Args:
        names: Names of runs, or patterns such as "exp-*". Default: all runs.
        state: Only runs in this state, or in one of these states.
        runs: Folder of the runs. Default: $TRAIN_RUNS, else ./runs.

    Raises:
        Refused: no run has this name, or there is no such state.
    """
    folder = _folder(runs)
    found = look_at(matching(folder, [*names] or ["*"], must=False), screen.remark)
    if state is not None:
        found = ls.in_states(state if isinstance(state, str) else ",".join(state), found)
    return [Run(folder, one.name) for one in found]


@_refusing
def plot(runs: Sequence[Run], to: str | Path | None = None) -> Figure:
    """Draw the curves of several runs into one picture, which a notebook shows. Return the picture.

    Args:
        to: A file to write as well: .png, .svg or .pdf.
    """
    from .views import plot

    given = [runs] if isinstance(runs, Run) else [*runs]
    if not given or not all(isinstance(run, Run) for run in given):
        raise Refused("plot() takes a list of runs, such as trainstation.runs('exp-*')")
    chosen = [run._run() for run in given]
    caches.provide()
    if to is not None:
        plot.plot(chosen, Path(to))
    figure: Figure = plot.picture(chosen)[0]
    vars(figure)["_repr_png_"] = functools.partial(_png, figure)  # for notebooks without %matplotlib inline
    return figure


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A run, as `launch`, `find` and `runs` return it."""

    runs: Path
    """The folder of the runs."""
    name: str

    def __repr__(self) -> str:
        try:
            one = self._look()
        except (Refused, OSError) as error:
            return f"<Run {self.name}: {error}>"
        return f"<Run {self.name}: {one.state}{f', step {one.done}' if one.total else ''}>"

    def _repr_html_(self) -> str:
        from .views import cell

        try:
            return cell.html(self._look())
        except (Refused, OSError) as error:
            return cell.line(str(error))

    # --- how it stands

    @property
    @_refusing
    def state(self) -> str:
        """created, queued, running, stopped, interrupted, copy, failed, finished or other-format; see: train ls -h."""
        return self._look().state

    @property
    @_refusing
    def record(self) -> dict[str, Any]:
        """The fields of run.json, with the current state and step."""
        return dict(self._look().record)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.runs / self.name

    @property
    @_refusing
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, the oldest first. An evaluation has its metrics in `eval`."""
        return [dict(line) for line in metrics.lines(self._run())]

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """Yield each evaluation as it comes, until the run has ended: `step`, `epoch`, and the metrics in `eval`.

        Raises:
            Refused: the run is gone.
        """
        run, seen = self._run(), 0
        while True:
            is_over = not run.alive()  # before the look, which then sees the last line
            for line in _refusing(metrics.evaluations)(run):
                if line["step"] > seen:
                    seen = line["step"]
                    yield dict(line)
            if is_over:
                return
            time.sleep(_LOOK_EVERY)

    @property
    @_refusing
    def best(self) -> dict[str, float]:
        """The best value of each metric of the evaluations, as `train ls --columns best.NAME` shows it."""
        one = here(self._run())
        find_best([one])
        return {**one.best}

    @_refusing
    def to_pandas(self) -> pandas.DataFrame:
        """Return the metrics as a table, one row per line. An evaluation's metrics are columns `eval.NAME`."""
        try:
            import pandas
        except ImportError:
            raise Refused("to_pandas() needs pandas; pip install pandas, or use run.metrics") from None
        rows = []
        for line in metrics.lines(self._run()):
            figures = line["eval"] if metrics.is_evaluation(line) else {}
            rows.append(
                {name: value for name, value in line.items() if name != "eval"}
                | {f"eval.{name}": value for name, value in figures.items()}
            )
        return pandas.DataFrame(rows)

    @_refusing
    def logs(self, rank: int = 0, attempt: int | str | None = None) -> str:
        """Return the output of a rank.

        Args:
            attempt: Number of the attempt, or "all". Default: the last one.
        """
        from .commands import logs

        given = options_of("logs", [self.name], {"runs": self.runs, "rank": rank, "attempt": attempt})
        return _Text(logs.text(given, self.runs))

    @_refusing
    def show(self) -> None:
        """Print the run's story, as `train show` does."""
        self._command("show")

    def plot(self, to: str | Path | None = None) -> Figure:
        """Draw the curves of the run. Return the picture, which a notebook shows.

        Args:
            to: A file to write as well: .png, .svg or .pdf.
        """
        return plot([self], to)

    @_refusing
    def wait(self, timeout: float = math.inf) -> str:
        """Wait until the run has ended, and show its progress. Return its state.

        An interrupt ends only the waiting: the run continues.

        Args:
            timeout: Seconds after which to return although the run has not ended.
        """
        from .views import cell, follow

        one = follow.first_look(self._run())
        view = cell.Cell(one) if cell.is_notebook() else follow.view_of(one)
        try:
            return follow.watch(one, view, timeout=timeout).state
        except KeyboardInterrupt:
            raise Interrupted(f"{self.name} continues; to wait for it again: run.wait()") from None
        finally:
            view.close()

    # --- change it

    @_refusing
    def stop(self, now: bool = False) -> Run:
        """Save the run, stop it, and wait until it has ended.

        Args:
            now: Do not save. The steps since the last checkpoint are lost.
        """
        self._command("stop", now=now)
        return self

    @_refusing
    def resume(self, **options: Any) -> Run:
        """Continue the run from its newest checkpoint.

        Args:
            options: Flags of `train resume`: nproc=4, epochs=40.
        """
        self._command("resume", "start", **options)
        return self

    @_refusing
    def fork(self, *, arguments: str | Sequence[object] = (), **options: Any) -> Run:
        """Start a new run that continues from a checkpoint of this one, and return it.

        Args:
            arguments: Other arguments for a script, as for `launch`.
            options: Flags of `train fork`: name="second", checkpoint="best", optim={"lr": 0.01}.
        """
        has_fields = here(self._run()).program.has_fields
        asked = options_of(
            "fork", [self.name], {"runs": self.runs, **options}, arguments=arguments, has_fields=has_fields
        )
        return Run(self.runs, cli.carry_out("fork", asked, "start"))

    # --- use it

    @_refusing
    def model(self, checkpoint: int | str | None = None, device: str = "cpu", weights: str = "") -> nn.Module:
        """Return the trained model of a task, in eval mode.

        Args:
            checkpoint: Step of a checkpoint, or "best". Default: the newest one.
            device: Where the model is to be: cpu, cuda, cuda:1.
            weights: "model", or "ema" for the average that ema.decay keeps. Default: model; with checkpoint="best" the
                weights that the metric was measured with.
        """
        from .trainer import predict

        wanted, weights = self._chosen(checkpoint, "model", weights)
        return predict.model_of(self._trusted_run(), wanted, device=device, weights=weights)

    @_refusing
    def predict(
        self, dataset: Any, checkpoint: int | str | None = None, device: str = "cpu", batch_size: int | None = None
    ) -> Any:
        """Return what the task's predict returns for each sample of a data set, joined, on the CPU.

        Without predict: what the model returns for a batch (for its first part, if a batch is a tuple or list).

        Args:
            dataset: A map-style data set: it has len() and [index].
            checkpoint: Step of a checkpoint, or "best". Default: the newest one.
            device: Where to compute.
            batch_size: Number of samples computed at a time. Default: the run's micro_batch_size.
        """
        from .trainer import predict

        step, which = self._chosen(checkpoint, "model")
        return predict.predictions(
            self._trusted_run(), step, dataset, device=device, weights=which, batch_size=batch_size
        )

    @_refusing
    def state_dict(self, name: str = "", checkpoint: int | str | None = None) -> dict[str, Tensor]:
        """Return the saved weights, on the CPU, without executing the run's code.

        Args:
            name: The name under which a script's session registered the model. Default: model, or the only one.
            checkpoint: Step of a checkpoint, or "best". Default: the newest one.
        """
        from .checkpoint import registered

        step, weights = self._chosen(checkpoint, "export")
        return registered.state_dict(self._trusted_run(), name, step, weights=weights)[1]

    @_refusing
    def export(self, to: str | Path, checkpoint: int | str | None = None, weights: str | None = None) -> Path:
        """Write the weights to a file for other programs, as `train export` does. Return its path.

        Args:
            to: A .safetensors, .pt or .onnx file.
            checkpoint: Step of a checkpoint, or "best". Default: the newest one.
            weights: "model", "ema" or "trained"; of a script the name that its session registered.
        """
        import torch

        from .run.spec import read_spec
        from .trainer import predict

        run, target = self._trusted_run(), Path(to).absolute()
        with predict.visited(run, read_spec(run), torch.device("cpu")):
            self._command("export", to=target, checkpoint=checkpoint, weights=weights)
        return target

    # --- inside

    def _run(self) -> run_folder.Run:
        return folders.find(self.runs, self.name)

    def _trusted_run(self) -> TrustedRun:
        return folders.find_trusted(self.runs, self.name)

    def _look(self) -> RunStatus:
        return look(self._run(), screen.remark)

    def _command(self, command: str, function: str = "run", **options: Any) -> Any:
        """Call a function of a command with this run."""
        return cli.carry_out(command, options_of(command, [self.name], {"runs": self.runs, **options}), function)

    def _chosen(self, checkpoint: int | str | None, use: str, weights: str = "") -> tuple[int | None, str]:
        """Return the step that `checkpoint` means (None: the newest one), and which weights; `weights`: asked for."""
        from . import programs
        from .run.spec import read_spec

        spec = read_spec(run := self._run())
        programs.of(spec).check_can(use, run.name)
        wanted = best.checkpoint_named(run, spec, None if checkpoint is None else str(checkpoint), tell=screen.remark)
        return wanted.step, wanted.weights(weights, screen.remark, run.name)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep, as `sweep` returns it. Sweep(folder, name) is one that exists."""

    runs: Path
    """The folder of the runs."""
    name: str

    @property
    def run(self) -> Run:
        """The run that launches the trials: its state, its log."""
        return Run(self.runs, self.name)

    @property
    def state(self) -> str:
        """As of a run: finished when all trials have ended."""
        return self.run.state

    @property
    @_refusing
    def trials(self) -> list[Run]:
        """The runs of the trials that were launched, in their order."""
        return [Run(self.runs, one.name) for one in kept.own_runs(self.run._run())]

    @property
    @_refusing
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the table, the best first: parameters, n, mean, deviation, best, trials."""
        return comparison.as_json(*comparison.of_sweep(self.run._run()))

    @property
    def best(self) -> Run | None:
        """The best trial of the parameters with the best mean, among those that have finished; None: none has."""
        name = next((row["best"] for row in self.rows), None)
        return Run(self.runs, name) if name else None

    @_refusing
    def table(self, metric: str = "") -> str:
        """Return the table, as `train ls NAME` prints it.

        Args:
            metric: Another metric than the sweep's.
        """
        return _Text(comparison.table(*comparison.of_sweep(self.run._run(), metric)))

    def wait(self, timeout: float = math.inf) -> str:
        """Wait until all trials have ended. Return the state of the sweep. See `Run.wait`."""
        return self.run.wait(timeout)

    @_refusing
    def stop(self, now: bool = False) -> Sweep:
        """Save and stop the sweep and its trials. See `Run.stop`."""
        self.run.stop(now)
        return self

    @_refusing
    def resume(self) -> Sweep:
        """Continue the sweep and the trials that it has stopped."""
        self.run.resume()
        return self

    @_refusing
    def add(self, values: Mapping[str, Any] | None = None, /, *, trials: int | None = None) -> Sweep:
        """Give the sweep more trials, also when it has finished.

        Args:
            values: More values of its parameters: {"optim.lr": [3e-3]}.
            trials: Of a search: its new number of draws.
        """
        cli.carry_out(
            "sweep",
            options_of("sweep", [self.name], {"runs": self.runs, "add": values_of(values), "trials": trials}),
            "start",
        )
        return self

    @_refusing
    def retry_failed(self) -> Sweep:
        """Start the failed trials again."""
        cli.carry_out("sweep", options_of("sweep", [self.name], {"runs": self.runs, "retry_failed": True}), "start")
        return self


class Interrupted(KeyboardInterrupt):
    """The waiting was interrupted. The run continues."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints."""
        return [f"KeyboardInterrupt: {self}"]


class _Text(str):
    """A text that Python's prompt and notebooks show as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80)
    return file.getvalue()


def _folder(runs: str | Path | None) -> Path:
    return parser.runs_folder(None if runs is None else str(runs))
