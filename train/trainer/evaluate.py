"""Evaluation: every sample exactly once on any number of ranks, and the same figures to the last bit."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..build import determinism, objects, sampling
from ..build.loss import BatchValue, evaluation_values
from ..config import Config
from ..data import threads
from ..data.fetch import BadSample
from ..data.order import seed_of
from ..data.plan import MicroBatch, Plan, Sharing, evaluation_micro_batches
from ..data.progress import set_total
from ..data.seeding import owned, seed_compute
from ..errors import Refused, TrainingFailed
from ..parallel import gather
from ..parallel.compiling import compile_as_asked
from ..parallel.devices import NoGPU, pick_device, take_device
from ..parallel.precision import Precision, precision_on
from ..parallel.torch_private import buffers_of, fix_compiler
from ..parallel.world import World
from ..run import heartbeat
from ..run.run_folder import Run
from ..run.spec import Spec
from ..tasks import Task
from . import media
from .agreement import Agreement
from .predictions import Predictions

if TYPE_CHECKING:
    from ..build.hooks import Average

log = logging.getLogger("train")

_ASK_EVERY = 16
"""Number of micro batches between two checks of all ranks for a stop request."""
_LARGE = 64 << 20
"""Bytes from which a buffer counts as weights, not as statistics, and is not copied."""
Show = Callable[[dict[str, media.Media]], None]
"""Takes pictures, texts and sounds by name."""
Weights = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context manager that swaps in the weights to evaluate and restores the others on exit."""
Row = list[Tensor | float]
"""The figures of a micro batch: its number of samples, then total and count of each figure, in the order of names."""
_OTHER_NAMES = "metrics, and the parts of a loss, must have the same names for every batch"


def evaluate(
    task: Task,
    module: nn.Module,
    plans: Mapping[str, Plan],
    *,
    stream: Iterator[tuple[MicroBatch, Any]],
    world: World,
    sharing: Sharing,
    precision: Precision,
    average: Average | None = None,
    stop: Callable[[], bool] = lambda: False,
    beat: Callable[[int], None] = lambda phase: None,
    show: Show | None = None,
    failed: Callable[[], None] | None = None,
) -> tuple[dict[str, float], int] | None:
    """Evaluate all sets. Returns the figures and the number of samples that were read; None if a stop interrupted it.

    Loss and metrics are weighted by true counts. A collective: all ranks call it. Sums are made in the order of a data
    set, whatever the number of ranks.

    Args:
        plans: the plans of the evaluation sets by name.
        stream: begins with the batches of this rank's `evaluation_micro_batches`. No more than these are taken.
        sharing: which micro batches are this rank's.
        average: evaluated beside the weights. Each batch is computed with both, `images` with the weights.
        stop: whether this rank was asked to stop.
        beat: shows a sign of life in this phase, see run/heartbeat.py.
        show: called with what `images` makes of this rank's first batch, and on rank 0 with the pictures of each
            `compute_metrics`. None: `images` is not called.
        failed: as in Agreement.

    Raises:
        TrainingFailed: the task returns something else than figures, or not the same ones for every batch.
        DistError: an error on another rank.
    """
    agreement = Agreement(world, stop, failed)
    variants: dict[str, Weights] = {"": contextlib.nullcontext}  # by what the names of their figures begin with
    if average is not None:
        variants["ema."] = average.swapped
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    figures: dict[str, float] = {}
    samples = 0
    show_first = show
    try:
        # what an evaluation counts or observes is no part of training: a resume does not repeat it
        with torch.no_grad(), _same_buffers(module):
            for name, plan in plans.items():
                passes = [
                    _Pass(task, module, weights, world, precision, f"{prefix}{name}." if name else prefix)
                    for prefix, weights in variants.items()
                ]
                micros, slots = math.ceil(plan.evaluated / plan.micro_batch_size), sharing.computed
                if not _compute(passes, stream, len(slots(micros)), agreement, beat, show_first):
                    return None
                show_first, seed = None, seed_of(plan.seed, "compute_metrics")
                ends = [one.end(micros, seed, beat, show) for one in passes]
                samples += ends[0][1]
                for one, (found, _) in zip(passes, ends, strict=True):
                    figures |= {f"{one.prefix}{figure}": value for figure, value in found.items()}
    finally:
        for part, mode in modes:  # not train(): what is frozen stays in eval mode
            part.training = mode
    return figures, samples


def _compute(
    passes: Sequence[_Pass], stream: Iterator[tuple[MicroBatch, Any]], slots: int, agreement: Agreement,
    beat: Callable[[int], None], show: Show | None,
) -> bool:  # fmt: skip
    """Compute this rank's micro batches of a set. Returns False if a stop interrupted it."""
    for slot in range(slots):
        if slot % _ASK_EVERY == 0:
            if agreement.stops():
                return False
            for one in passes:
                one.predictions.collect()
        beat(heartbeat.EVALUATING)
        if agreement.error is not None:
            continue
        try:
            micro, batch = next(stream)
            assert micro.evaluation
            for one in passes if len(micro.indices) else ():  # else none of its samples could be read
                one.compute(micro, batch, show)
                show = None
        except (Exception, SystemExit) as error:
            agreement.caught(error)
    agreement.check()
    return True


class _Pass:
    """The computation of one evaluation set with the same weights."""

    def __init__(
        self, task: Task, module: nn.Module, weights: Weights, world: World, precision: Precision, prefix: str
    ) -> None:
        """`prefix`: what the names of its figures begin with: `ema.val.`."""
        self.task, self.module, self.weights, self.world, self.precision = task, module, weights, world, precision
        self.prefix = prefix
        self.rows: dict[int, Row] = {}
        self.names: list[str] = []
        self.predictions = Predictions(task, world)
        self.generators = owned(module, task.loss, task.metrics, task.predict, task.images)
        with weights():  # it may copy them
            self.inference = objects.inference_model(task, module).eval()

    def compute(self, micro: MicroBatch, batch: Any, show: Show | None) -> None:
        """Compute the figures and predictions of a micro batch, and the pictures where they are to be shown."""
        task, samples, made = self.task, len(micro.indices), None
        seed_compute(micro.seed, self.world.device, own=self.generators)
        with self.weights(), self.precision.autocast():
            figures = evaluation_values(task, self.module, inference=self.inference, batch=batch, samples=samples)
            if task.predict is not None:
                made = task.predict(self.inference, batch)
            if show is not None and task.images is not None:
                drawn = media.encoded(f"images in {task.file}", task.images(self.inference, batch))
                self.predictions.taken |= drawn.keys()
                show(drawn)
        if micro.is_repeated:
            return
        self.names = self.names or list(figures)
        if figures.keys() != set(self.names):
            raise TrainingFailed(_OTHER_NAMES)
        self.rows[micro.number] = _row(samples, figures)
        if task.predict is not None:
            self.predictions.add(micro.number, made, samples)

    def end(
        self, micros: int, seed: int, beat: Callable[[int], None], show: Show | None
    ) -> tuple[dict[str, float], int]:
        """Return the figures of the set and its number of samples. A collective."""
        figures, samples = summed(self.rows, self.names, micros, self.world)
        whole = self.predictions.figures(seed, beat, self.prefix)
        if show is not None and self.predictions.shown:
            show(self.predictions.shown)
        for name in figures.keys() & whole.keys():
            raise TrainingFailed(
                f"compute_metrics in {self.task.file} gives {name}, as the loss or metrics do; give it another name"
            )
        return figures | whole, samples


@contextlib.contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Context manager that restores each buffer on exit: the tensor and its content."""
    before = [
        (part, name, buffer, None if buffer is None or buffer.nbytes > _LARGE else buffer.detach().clone())
        for part in model.modules()
        for name, buffer in buffers_of(part).items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, content in before:
                buffers_of(part)[name] = buffer
                if buffer is not None and content is not None:
                    buffer.copy_(content)


def _row(samples: int, values: dict[str, BatchValue]) -> Row:
    row: Row = [samples]
    for name in sorted(values):
        row += [values[name].total(torch.float64), values[name].counted()]
    return row


def _on_host(rows: Iterable[Row], device: torch.device) -> list[list[float]]:
    """Return the rows as numbers. Tensors are transferred together, because the host waits for the device in each
    transfer."""
    rows = list(rows)
    tensors = [value.to(device, torch.float64) for row in rows for value in row if isinstance(value, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return [[next(numbers) if isinstance(value, Tensor) else float(value) for value in row] for row in rows]


def summed(rows: dict[int, Row], names: list[str], micros: int, world: World) -> tuple[dict[str, float], int]:
    """Return the figures of all ranks' rows by name, and the number of samples. A collective."""
    all_names = [found for found in world.gather(names) if found]  # a rank may have read nothing
    if any(set(found) != set(all_names[0]) for found in all_names):
        raise TrainingFailed(_OTHER_NAMES)
    names = all_names[0] if all_names else []
    table = np.zeros((micros, 1 + 2 * len(names)))
    if rows:
        table[list(rows)] = _on_host(rows.values(), world.device)
    whole = world.add(torch.from_numpy(table).to(world.device))  # each row is one rank's: adding zeros rounds nothing
    samples, *sums = [math.fsum(column) for column in whole.cpu().T.tolist()]
    means = {
        name: total / count if count else math.nan
        for name, total, count in zip(sorted(names), sums[::2], sums[1::2], strict=True)
    }
    return {name: means[name] for name in names} if samples else {"loss": math.nan}, round(samples)


def _warn(bad: Sequence[BadSample]) -> None:
    for one in bad:
        log.warning("warning: left out: %s: %s", one, one.reason)


def evaluate_run(
    run: Run, spec: Spec, step: int | None, *, change: Callable[[Task, Config], Config] | None = None
) -> tuple[int, int, dict[str, float]]:
    """Evaluate a checkpoint of a run in this process. Returns its step, the number of samples and the figures.

    Args:
        change: Changes the configuration of the run, perhaps to other data.

    Raises:
        Refused: the task has no evaluation set or fails on it, or there is no usable checkpoint.
    """
    from ..build.hooks import Average  # late: a launch imports this file, and these are slow to import
    from .load import load_trained

    task, config, model, step, averaged = load_trained(run, spec, step, change)
    determinism.set_determinism(config)
    device = _device_of(run, config)
    name = precision_on(device, config)
    if name != config.precision:
        log.warning("warning: a CPU cannot compute in %s; evaluated in %s", config.precision, name)
    precision = Precision(name, device)
    train_set, eval_sets = objects.make_datasets(task, config)
    if not eval_sets:
        raise Refused(f"the task of {run.name} has no evaluation set: its datasets() returns None for it")
    differs = objects.data_differs(run, task, config=config, train_set=train_set, eval_sets=eval_sets)
    if differs and change is None:
        log.warning("warning: the data differ from those that %s was trained with: %s", run.name, differs)
    plans = objects.evaluation_plans(config, eval_sets)
    plan = objects.plan_of(config, sampling.samples_of(spec, train_set))
    set_total(objects.total_steps(config, plan))
    world = World(0, size=1, local_rank=0, device=device)
    workers = config.data.workers or 0
    if workers and (problem := threads.problem()):  # of model(), say: that of a rank starts later
        log.warning("warning: evaluated without data workers: %s", problem)
        workers = 0
    loader = objects.make_loader(
        task,
        config=config,
        precision=precision,
        train_set=None,
        eval_sets=eval_sets,
        workers=workers,
        left_out=_warn,
    )
    with loader, objects.refusing(task), gather.evaluating(run.read()["world_size"]):
        take_device(device)
        sharing = Sharing()
        last = max(step - 1, 0)
        epoch = plan.epoch(last)
        numbered = enumerate(plans.values(), 1)
        micros = (
            evaluation_micro_batches(one, sharing, evaluation=number, step=last, epoch=epoch)
            for number, one in numbered
        )
        stream = loader.batches(itertools.chain.from_iterable(micros))
        model = determinism.lay_out(model, config).to(device)
        compile_as_asked(model, config)
        fix_compiler(bool(config.compile), config.deterministic)
        average = Average(model, config) if averaged else None
        if average is not None:
            average.load(averaged)
        evaluated = evaluate(
            task, model, plans, stream=stream, world=world, sharing=sharing, precision=precision, average=average
        )
    assert evaluated is not None
    figures, samples = evaluated
    return step, samples, figures


def _device_of(run: Run, config: Config) -> torch.device:
    """Return the device to evaluate on: that of training, or the CPU if there is no GPU."""
    try:
        return pick_device(config, 1, 0)
    except NoGPU:
        log.warning("warning: %s was trained on a GPU, but torch sees none here; evaluated on the CPU", run.name)
        return torch.device("cpu")
