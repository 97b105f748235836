"""What a run is: one small dataclass per concern, composed into `Config`.

Each field is a flag of `train run` and `train launch` (`--optim.lr 0.1`) and a key of a TOML file. The text below a
field is the flag's help; its type says what values it takes and whether a resume may change it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

# built when first used: then once, all of Config together. Most processes of a run only read names and types
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)

Positive = Annotated[float, Field(gt=0)]

Epochs = Annotated[float, Field(ge=0, le=1e9)]

Minutes = Annotated[float, Field(ge=0, le=1e8)]
"""Up to 190 years: what counts nanoseconds in 64 bits ends at 292."""

NotNegative = Annotated[float, Field(ge=0)]

Count = Annotated[int, Field(ge=1, le=2**62)]

Share = Annotated[float, Field(ge=0, le=1)]


_OfTorch = Literal[
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"
]  # fmt: skip
OptimizerName = Annotated[_OfTorch, BeforeValidator(lambda name: name.lower() if isinstance(name, str) else name)]
"""A class of torch.optim in lower case; its own spelling is taken too."""


def _as_argument(value: Any, check: Callable[[Any], Any]) -> Any:
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("argument", "must be a finite number, true, false or a list of numbers") from None


Argument = Annotated[bool | float | list[float] | None, WrapValidator(_as_argument)]
"""A value in `optim.args`; None: as if it were not there."""

ON_RESUME = "may change on resume"
"""Marks a field that a resume may change: it does not touch what is computed, or says when it ends."""
T = TypeVar("T")
Changeable = Annotated[T, ON_RESUME]
"""The type of a field that a resume may change."""


@dataclass(config=_STRICT)
class Optim:
    name: OptimizerName = "adamw"
    """Optimizer of torch.optim, except those that need a closure or sparse gradients. A task's own
    optimizer(model, config) takes its place."""
    # the largest rates, scaled and multiplied with each other, are still numbers of single precision
    lr: Annotated[float, Field(gt=0, le=1e30)] = 1e-3
    """Peak learning rate, before schedule.scaling."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of sgd, beta1 of optimizers with betas. Others take theirs from optim.args."""
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.01
    """Weight decay (decoupled with adamw)."""
    args: dict[str, Argument] = dataclasses.field(default_factory=dict)
    """Further arguments of the optimizer, each a flag: --optim.args.betas '[0.9, 0.95]', --optim.args.eps 1e-6; none
    leaves one out. In a file the table [optim.args]."""
    no_decay: bool = False
    """No weight decay for biases, other vectors and the weights of normalisation layers."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Layer-wise rates: layer i of L has the rate lr * layer_decay^(L - i) (Clark et al., ELECTRA, 2020; layers as in
    docs/tasks.md); 1: one rate for all."""


@dataclass(config=_STRICT)
class Schedule:
    warmup_epochs: Epochs = 0.0
    """Epochs over which the learning rate rises linearly from near 0 to its peak; fractions are fine."""
    decay: Literal["constant", "linear", "cosine", "step", "wsd", "onecycle"] = "cosine"
    """What the learning rate does after the warm-up: constant; linear or cosine to min_factor; step: times gamma every
    step_epochs; wsd: constant, and linear to min_factor over the last steps (Hu et al., MiniCPM, 2024); onecycle: from
    1/25 up over 30 % of all steps, and down (Smith and Topin, 2018)."""
    min_factor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the peak rate that a decay does not fall below."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """With decay wsd: the share of all steps, at the end, in which the rate falls."""
    step_epochs: Annotated[float, Field(ge=1e-9, le=1e9)] = 30.0
    """With decay step: epochs between two drops."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """With decay step: the factor of each drop."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale lr by batch_size / base_batch_size (linear: Goyal et al. 2017; sqrt: its square root)."""
    base_batch_size: Count = 256
    """The global batch size at which optim.lr was chosen; used by scaling."""


SPREAD = ("fsdp", "hsdp")
"""Strategies with which a rank holds a part of the state only."""


@dataclass(config=_STRICT)
class Parallel:
    strategy: Changeable[Literal["auto", "single", "ddp", "fsdp", "hsdp"]] = "auto"
    """How the model is spread. auto: ddp on several ranks, single on one. ddp: a copy on every rank; fsdp: parameters,
    gradients and optimizer state in parts; hsdp: fsdp in groups of shard_size ranks."""
    reduce: Literal["fast", "ordered"] = "fast"
    """How gradients are added. fast: as is quickest; ordered: in one order, so that any number of ranks, and a run that
    changes it, ends with the same bits (single and ddp; give micro_batch_size and cpu_threads)."""
    shard_size: Changeable[Count | None] = None
    """With hsdp: how many ranks hold one copy of the model among them; must divide the ranks."""
    wrap: Changeable[str] = "auto"
    """With fsdp and hsdp: what is gathered at a time: names of the model's classes with commas, or auto, by size."""
    recompute: Changeable[str] = ""
    """Activation checkpointing: compute the insides of modules again in the backward pass, not keep them. Class names
    with commas, or auto, by size; empty: of none. Does not change the result."""
    find_unused_parameters: Changeable[bool] = False
    """With ddp: look for parameters that a step did not use (slower; for models with optional branches)."""
    timeout_minutes: Changeable[Annotated[Minutes, Field(gt=0)]] = 10.0
    """How long a rank waits for the others in a collective before it gives up."""


@dataclass(config=_STRICT)
class Data:
    root: Changeable[str] = ""
    """Folder of the data set, for tasks that read one."""
    name: str = ""
    """Name of a torchvision data set that lies in root (CIFAR10, MNIST, …); empty: class folders."""
    workers: Changeable[Annotated[int, Field(ge=0, le=1024)] | None] = None
    """Loader processes per rank; 0 loads in the training process. Does not change the result. Default: on GPUs a fair
    share of the cores less one, at least 1 and at most 8, for data sets that read item by item; else 0."""
    drop_last: bool = False
    """Leave out the short last batch of every epoch (other samples each time). Evaluations see everything."""
    on_error: Changeable[Literal["stop", "skip"]] = "stop"
    """What a sample that cannot be read does: stop the run, named; or be left out and listed. Not with fsdp."""
    on_device: Changeable[bool] = False
    """Keep the data on the device, where they are tensors in memory (a TensorDataset). Does not change the result."""

    @property
    def leaves_out(self) -> bool:
        """Whether samples that cannot be read are left out, so that the true counts are known after a step only."""
        return self.on_error == "skip"


@dataclass(config=_STRICT)
class Checkpoint:
    every_steps: Changeable[Count | None] = None
    """Save every so many steps, besides every_minutes."""
    every_minutes: Changeable[NotNegative] = 10.0
    """Save when so many minutes have passed since the last save; 0 turns this off."""
    keep: Changeable[Count] = 3
    """How many checkpoints are kept; the newest ones."""
    best: Changeable[str] = ""
    """Keep also the checkpoint with the best value of this metric (loss: the lowest, others: the highest; min:NAME and
    max:NAME say which); saves at every evaluation."""
    asynchronous: Changeable[bool] = True
    """Write in the background: training waits only for a copy of the state in host memory."""
    snapshots: Changeable[bool] = True
    """Launched runs: copy the state into memory that the agent owns, as often as that takes a hundredth of the time, so
    that a rank's death costs only the steps since the last copy. Takes twice the memory of the state; where that does
    not fit, the log says so."""


@dataclass(config=_STRICT)
class Log:
    every_steps: Changeable[Count] = 10
    """A line in metrics.jsonl (and TensorBoard) every so many steps."""
    samples: Changeable[bool] = False
    """Write the data set index of every consumed sample to samples.rank*.log."""
    tensorboard: Changeable[bool] = True
    """Write TensorBoard event files."""
    gradients: Changeable[bool] = False
    """Also log the global 2-norm of the gradients, before clipping, as grad_norm."""
    mfu: Changeable[bool] = False
    """Also log mfu, the share of a known GPU's peak that forward and backward use, counted in an attempt's first step.
    Not for a task that compiles functions of its own: torch would not compile what it meets while it counts."""
    trace: Changeable[str] = ""
    """Trace steps FIRST:LAST of rank 0 by torch's profiler, into trace/ of the run folder; empty: none. As --trace."""
    wandb: Changeable[str] = ""
    """Send curves to Weights & Biases, to this PROJECT or ENTITY/PROJECT (needs the package wandb; with
    WANDB_MODE=offline they stay in the run folder); empty: do not."""


@dataclass(config=_STRICT)
class Eval:
    every_epochs: Changeable[Epochs | None] = 1.0
    """Evaluate every so many epochs, and at the end; 0: at the end only. Fractions are fine. Replaces every_steps."""
    every_steps: Changeable[Count | None] = None
    """Evaluate every so many steps, and at the end. Replaces every_epochs."""
    limit_batches: Changeable[Annotated[int, Field(ge=0, le=2**62)]] = 0
    """Evaluate at most so many global batches: a random choice of samples, always the same; 0: all of them."""


@dataclass(config=_STRICT)
class Init:
    file: str = ""
    """Begin with the weights of this file (.safetensors, or of torch.save), or of a run: NAME, NAME@best, NAME@STEP. As
    --init."""
    skip: str = ""
    """Patterns of names that are not loaded: 'fc.*,embed'."""
    rename: str = ""
    """Beginnings of names in the file, and what takes their place: 'backbone.=encoder.,old.=new.'."""
    partial: bool = False
    """Load what fits, by name and shape; else all must."""


@dataclass(config=_STRICT)
class Ema:
    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights, with this factor a step; evaluated beside them (ema.NAME), and
    exported by train export --weights ema; none: off."""
    warmup: Annotated[int, Field(ge=0, le=2**62)] = 0
    """Let the factor rise to decay: (1 + step) / (warmup + step) where that is less; 10 is usual, 0: off."""


@dataclass(config=_STRICT)
class EarlyStopping:
    metric: Changeable[str] = ""
    """End the run when this figure of the evaluations no longer improves, named as in checkpoint.best; empty: never."""
    patience: Changeable[Count] = 3
    """After so many evaluations in a row without an improvement."""
    min_delta: Changeable[NotNegative] = 0.0
    """An improvement is a change by more than this."""


@dataclass(config=_STRICT)
class Watch:
    hang_minutes: Changeable[NotNegative | None] = None
    """A launched run in which no rank moves for so long is ended and started again; 0: never; none: 5, or 20 times the
    slowest step so far if that is longer; with --script, where neither output nor use of the CPU is seen: 30."""
    start_minutes: Changeable[Positive] = 30.0
    """The same for starting, with the first step and compilation, and for saving."""
    healthy_minutes: Changeable[Positive] = 10.0
    """With --script: an attempt that ran for so long was no failure to start: deaths are counted anew after it."""


@dataclass(config=_STRICT)
class Config:
    epochs: Changeable[Annotated[float, Field(gt=0, le=1e9)] | None] = 10.0
    """Passes over the training data; fractions are fine. Replaces steps."""
    steps: Changeable[Count | None] = None
    """Optimizer updates. Replaces epochs."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Everything random follows from this number: order, augmentation, dropout, first weights."""
    batch_size: Count = 64
    """Global batch size: samples per optimizer update over all ranks."""
    micro_batch_size: Count | Literal["auto"] | None = None
    """Samples per forward and backward; default: batch_size over the ranks of the first launch, rounded up. auto: as
    many of these as the device has memory for, found by trying at the first launch."""
    micro_batches: Literal["even", "full"] | None = None
    """How a global batch is cut into micro batches of at most micro_batch_size: even, the default: they differ by at
    most one sample; full: all but the last one have that size, as in runs of earlier versions."""
    precision: Literal["fp64", "fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Arithmetic: bf16 and fp16 are autocast over fp32 weights; fp16 and tf32 need a GPU."""
    compile: bool = False
    """Compile the model with torch.compile; once for each shape, so that what was seen before decides nothing."""
    channels_last: bool = False
    """Keep images and the weights of convolutions channels last, which GPUs compute faster."""
    clip_grad_norm: Positive | None = None
    """Scale gradients down to at most this global 2-norm; none: off."""
    on_nan: Changeable[Literal["stop", "skip"]] = "stop"
    """What a loss or gradient that is not finite does: stop the run, named; or have the update of its step left out and
    listed, at most 10 in a row. A GPU is waited for in every step then. Not with fp16, whose scaler skips by itself."""
    sync_batchnorm: bool = False
    """Share BatchNorm's batch statistics between ranks; needs GPUs and batches that divide evenly."""
    deterministic: bool = True
    """Compute in a fixed order, so that a resumed run is equal bit for bit on a GPU too; what has none is refused.
    false: the fastest algorithms, found by trial."""
    device: Changeable[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where to compute: auto takes the GPUs if there are any when the run is launched, and the run stays there."""
    cpu_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """CPU threads per rank, fixed for the life of a run (another number gives other bits). Default:
    OMP_NUM_THREADS where set; else 1 for a model of less than 100,000 parameters on a CPU, and the cores over the
    ranks for others."""
    freeze: str = ""
    """Parameters that are not trained: patterns of names of parameters or modules, with commas ('backbone.*,embed').
    Modules that are frozen as a whole stay in eval mode."""
    optim: Optim = dataclasses.field(default_factory=Optim)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    data: Data = dataclasses.field(default_factory=Data)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    log: Log = dataclasses.field(default_factory=Log)
    eval: Eval = dataclasses.field(default_factory=Eval)
    init: Init = dataclasses.field(default_factory=Init)
    ema: Ema = dataclasses.field(default_factory=Ema)
    early_stopping: EarlyStopping = dataclasses.field(default_factory=EarlyStopping)
    watch: Watch = dataclasses.field(default_factory=Watch)
    task: Any = None
    """The task's Settings; its fields are flags --task.NAME."""
