"""The configuration of a run: one small dataclass per concern, composed into `Config`.

Each field is a flag of `train run` and `train launch` (`--optim.lr 0.1`) and a key of a TOML file. The docstring of a
field is the flag's help. Its type says which values it takes and whether a resume may change it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from . import decays, strategies

# the validators are built once, at first use: most processes of a run only read names and types
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)

Positive = Annotated[float, Field(gt=0)]

Epochs = Annotated[float, Field(ge=0, le=1e9)]

Minutes = Annotated[float, Field(ge=0, le=1e8)]
"""Minutes, up to 190 years: a 64-bit count of nanoseconds ends at 292 years."""

NotNegative = Annotated[float, Field(ge=0)]

Count = Annotated[int, Field(ge=1, le=2**62)]

Share = Annotated[float, Field(ge=0, le=1)]


_OfTorch = Literal[
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"
]  # fmt: skip
NO_TASK = "no_task"
"""Type of the error about a value that no task can have."""
SESSION_CAN = "your own loop: a session can (docs/sessions.md)"
"""What to do instead of a task whose optimizer computes the loss several times in a step."""


def _as_optimizer(name: Any) -> Any:
    if isinstance(name, str) and name.lower() == "lbfgs":
        raise PydanticCustomError(NO_TASK, f"computes the loss several times in a step; write {SESSION_CAN}")
    return name.lower() if isinstance(name, str) else name


OptimizerName = Annotated[_OfTorch, BeforeValidator(_as_optimizer)]
"""A class of torch.optim in lower case. The spelling of the class is accepted, too."""


def _as_argument(value: Any, check: Callable[[Any], Any]) -> Any:
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("argument", "must be a finite number, true, false or a list of numbers") from None


Argument = Annotated[bool | float | list[float] | None, WrapValidator(_as_argument)]
"""A value in `optim.args`; None: the argument is not passed."""

if TYPE_CHECKING:
    StrategyName = str
    DecayName = str
else:
    StrategyName = Literal[strategies.names()]
    DecayName = Literal[decays.names()]

ON_RESUME = "may change on resume"
"""Marks a field that a resume may change: it does not affect what is computed, or only when training ends."""
T = TypeVar("T")
Changeable = Annotated[T, ON_RESUME]
"""The type of a field that a resume may change."""


@dataclass(config=_STRICT)
class Optim:
    name: OptimizerName = "adamw"
    """Optimizer of torch.optim: adadelta, adafactor, adagrad, adam, adamax, adamw, asgd, nadam, radam, rmsprop, rprop
    or sgd. A task's own optimizer(model, config) replaces it."""
    # the bound keeps scaled and multiplied rates within single precision
    lr: Annotated[float, Field(gt=0, le=1e30)] = 1e-3
    """Peak learning rate, before schedule.scaling."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of sgd. Other optimizers read theirs from optim.args, such as optim.args.betas."""
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.01
    """Weight decay. adamw applies it decoupled from the gradient."""
    args: dict[str, Argument] = dataclasses.field(default_factory=dict)
    """Further arguments of the optimizer, one flag each: --optim.args.betas '[0.9, 0.95]' --optim.args.eps 1e-6. The
    value none leaves an argument out. In a TOML file: the table [optim.args]."""
    no_decay: bool = False
    """true: no weight decay for biases, other vectors and the weights of normalisation layers."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor between the learning rates of adjacent layers: layer i of L has lr * layer_decay^(L - i). 1: one rate for
    all layers. docs/tasks.md says what a layer is. Source: Clark et al., ELECTRA, 2020."""


@dataclass(config=_STRICT)
class Schedule:
    warmup_epochs: Epochs = 0.0
    """Epochs in which the learning rate rises linearly from near 0 to its peak. Fractions are allowed."""
    decay: DecayName = "cosine"
    """Learning rate after the warm-up. constant: it stays. linear, cosine: it falls to min_factor. step: it is
    multiplied by gamma every step_epochs. wsd: it stays, then falls linearly to min_factor in the last decay_share of
    the steps (Hu et al., MiniCPM, 2024). onecycle: it rises from 1/25 in 30 % of the steps, then falls (Smith and
    Topin, 2018). plateau: it is multiplied by gamma when metric has not improved in patience evaluations."""
    min_factor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lowest learning rate of a decay, as a share of the peak."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """For decay wsd: share of all steps, at the end, in which the learning rate falls."""
    step_epochs: Annotated[float, Field(ge=1e-9, le=1e9)] = 30.0
    """For decay step: epochs between two drops."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """For decay step and plateau: factor of each drop."""
    metric: str = ""
    """For decay plateau: metric of the evaluations. Written as for checkpoint.best, such as max:accuracy."""
    patience: Count = 3
    """For decay plateau: number of evaluations in a row without an improvement after which the rate drops."""
    total_epochs: Changeable[Annotated[float, Field(gt=0, le=1e9)] | None] = None
    """Epoch with which cosine, linear, wsd, onecycle or a task's schedule() ends. Later steps have the learning rate of
    its last step. Default: the end of the run."""
    start_epoch: Epochs = 0.0
    """Epoch with which the warm-up and the decay start, for a new cycle in a fork."""
    scaling: Literal["none", "linear"] = "none"
    """linear: multiply lr by batch_size / base_batch_size (Goyal et al., 2017)."""
    base_batch_size: Count = 256
    """Global batch size for which optim.lr was chosen. Used by scaling."""


@dataclass(config=_STRICT, kw_only=True)
class Parallel:
    strategy: Changeable[StrategyName] = "auto"
    """How ranks share the model. auto: ddp on several ranks, single on one. ddp: each rank has a copy. fsdp: each rank
    holds a part of the parameters, gradients and optimizer state. hsdp: fsdp in groups of shard_size ranks."""
    reduce: Literal["fast", "ordered"] = "fast"
    """How gradients are summed. fast: in the fastest order. ordered: in a fixed order, so that any number of ranks,
    even if it changes, ends with the same bits. ordered needs single or ddp; set micro_batch_size and cpu_threads,
    too."""
    shard_size: Changeable[Count | None] = None
    """For hsdp: number of ranks that share one copy of the model. It must divide the number of ranks."""
    wrap: Changeable[str] = "auto"
    """For fsdp and hsdp: modules that are gathered as a unit. For compile blocks: modules that are compiled. Class
    names with commas, or auto: chosen by size; with compile blocks, the repeated blocks."""
    recompute: Changeable[str] = ""
    """Modules whose activations are computed again in the backward pass instead of kept (activation checkpointing).
    Class names with commas, or auto: chosen by size. Empty: none. Does not change the result."""
    find_unused_parameters: Changeable[bool] = False
    """For ddp: search for parameters that a step did not use. Slower; for models with optional branches."""
    timeout_minutes: Changeable[Annotated[Minutes, Field(gt=0)]] = 10.0
    """Minutes a rank waits for the others in a collective before it fails."""


@dataclass(config=_STRICT)
class Data:
    root: Changeable[str] = ""
    """Folder of the dataset, for tasks that read one."""
    name: str = ""
    """Name of a torchvision dataset in data.root, such as CIFAR10 or MNIST. Empty: class folders."""
    workers: Changeable[Annotated[int, Field(ge=0, le=1024)] | None] = None
    """Data workers: loader processes per rank. 0: load in the training process. Does not change the result. Default on
    GPUs, for datasets that read item by item: the rank's share of the cores minus one, from 1 to 8. Otherwise 0."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of datasets(), such as of a random split, and of the choice that eval.limit_batches makes. Default: seed.
    Runs with other seeds keep the same split if they have the same data.seed."""
    drop_last: bool = False
    """true: skip the short last batch of each epoch, whose samples differ each time. Evaluations use all samples."""
    on_error: Changeable[Literal["stop", "skip"]] = "stop"
    """What to do if a sample cannot be read. stop: fail and name the sample. skip: leave it out and list it in
    skipped.jsonl; not with fsdp."""
    on_device: Changeable[bool] = False
    """true: keep the data on the device, if the dataset is a TensorDataset. Does not change the result."""

    @property
    def leaves_out(self) -> bool:
        """Whether unreadable samples are skipped, so that the true counts are known only after a step."""
        return self.on_error == "skip"


@dataclass(config=_STRICT)
class Checkpoint:
    every_steps: Changeable[Count | None] = None
    """Steps between two checkpoints, in addition to every_minutes."""
    every_minutes: Changeable[NotNegative] = 10.0
    """Minutes between two checkpoints. 0: off."""
    keep: Changeable[Count] = 3
    """Number of checkpoints to keep: the newest ones."""
    best: Changeable[str] = ""
    """Metric whose best checkpoint is kept, too. A loss and its parts are best at their lowest, other metrics at their
    highest; min:NAME or max:NAME says otherwise. The run then saves at every evaluation."""
    keep_best: Changeable[Count] = 1
    """Number of checkpoints that are best by checkpoint.best to keep, besides the newest ones."""
    mirror: Changeable[str] = ""
    """URL or absolute path of a folder for this run alone, into which a process behind training copies the checkpoints
    and the run's other files: s3://BUCKET/NAME, hf://, sftp://, another disk. train fetch URL fetches the run.
    Credentials come from the files and variables of the libraries. Empty: none."""
    asynchronous: Changeable[bool] = True
    """true: write checkpoints in the background. Training waits only until the state is copied to host memory."""
    snapshots: Changeable[bool] = True
    """true: in a launched run, copy the state into the agent's memory as often as 1 % of the time allows. After a
    crash, training restarts from the last copy. Needs twice the memory of the state; the log says if that does not
    fit."""


@dataclass(config=_STRICT)
class Log:
    every_steps: Changeable[Count] = 10
    """Steps between two lines in metrics.jsonl and TensorBoard."""
    max: Changeable[Annotated[int, Field(ge=0, le=2**40)]] = 256
    """Maximum MB of the log of each rank and attempt. Of a longer one, the middle is removed. 0: no limit. Scripts have
    this field, too."""
    samples: Changeable[bool] = False
    """true: write the dataset index of every used sample to samples.rank*.log."""
    tensorboard: Changeable[bool] = True
    """true: write TensorBoard event files."""
    gradients: Changeable[bool] = False
    """true: log the global 2-norm of the gradients before clipping as grad_norm."""
    mfu: Changeable[bool] = False
    """true: log mfu, the share of the GPU's peak that forward and backward use. Only on known GPUs. Not for a task that
    compiles functions itself: torch.compile is off in the first step of an attempt, which counts the operations."""
    wandb: Changeable[str] = ""
    """PROJECT or ENTITY/PROJECT of Weights & Biases to send curves to. Empty: none. Needs the package wandb. With
    WANDB_MODE=offline the curves stay in the run folder."""


@dataclass(config=_STRICT)
class Eval:
    every_epochs: Changeable[Epochs | None] = 1.0
    """Epochs between two evaluations. The run also evaluates at the end; 0: only then. Fractions are allowed. Replaces
    every_steps."""
    every_steps: Changeable[Count | None] = None
    """Steps between two evaluations. The run also evaluates at the end. Replaces every_epochs."""
    limit_batches: Changeable[Annotated[int, Field(ge=0, le=2**62)]] = 0
    """Maximum number of global batches per evaluation: a random choice of samples, always the same. 0: all."""
    first: bool = True
    """true: evaluate a few samples before the run is created, to find a bug there in seconds. false: do not."""


@dataclass(config=_STRICT)
class Ema:
    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Factor per step of an exponential moving average of the weights; none: off. The run evaluates the average, too
    (metrics ema.NAME). train export --weights ema writes it."""
    warmup: Annotated[int, Field(ge=0, le=2**62)] = 0
    """Let the factor rise to decay: it is (1 + step) / (warmup + step) while that is smaller. 10 is common; 0: off."""


@dataclass(config=_STRICT)
class EarlyStopping:
    metric: Changeable[str] = ""
    """Metric of the evaluations. The run ends when it stops improving. Written as for checkpoint.best. Empty: never."""
    patience: Changeable[Count] = 3
    """Number of evaluations in a row without an improvement after which the run ends."""
    min_delta: Changeable[NotNegative] = 0.0
    """A change of the metric counts as an improvement only if it is larger than this."""


@dataclass(config=_STRICT)
class Watch:
    hang_minutes: Changeable[NotNegative | None] = None
    """Minutes without progress of any rank after which a launched run is restarted. 0: never. Default for a task: 5, or
    20 times the slowest step if that is longer. Default for a --script: 30 without output or CPU use."""
    start_minutes: Changeable[Positive] = 30.0
    """The limit of hang_minutes while a run starts (with the first step), while a rank compiles, and while it saves."""
    healthy_minutes: Changeable[Positive] = 10.0
    """For --script: minutes after which an attempt counts as healthy. The count of restarts then begins again at 0."""


@dataclass(config=_STRICT, kw_only=True)
class Config:
    epochs: Changeable[Annotated[float, Field(gt=0, le=1e9)] | None] = 10.0
    """Passes over the training data. Fractions are allowed. Replaces steps."""
    steps: Changeable[Count | None] = None
    """Number of optimizer updates. Replaces epochs."""
    overfit: Count | None = None
    """Train and evaluate on the same N samples of the training set: a random choice, always the same. A model that
    learns has a loss near 0 after some hundred steps. The learning rate stays constant unless --schedule.decay is
    given. none: off."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of everything random: order of samples, augmentation, dropout, initial weights. data.seed replaces it for
    datasets()."""
    batch_size: Count = 64
    """Global batch size: samples per optimizer update, over all ranks."""
    micro_batch_size: Count | Literal["auto"] | None = None
    """Maximum number of samples per forward and backward. Default: batch_size / ranks of the first launch, rounded up.
    auto: as many of these as fit into the device's memory, found by trying at the first launch."""
    precision: Literal["auto", "fp64", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Arithmetic. auto: tf32 on GPUs of compute capability 8.0 or newer, else fp32; chosen once, at the launch. bf16
    and fp16: autocast over fp32 weights, faster than tf32. fp16 and tf32 need a GPU."""
    compile: bool | Literal["blocks"] = False
    """Compile with torch.compile, separately for each shape. true: the whole model. blocks: each of its repeated blocks
    by itself, or the classes in parallel.wrap; faster to compile, and the better choice for fsdp."""
    channels_last: bool = False
    """true: store images and weights of convolutions channels last, which is faster on GPUs."""
    clip_grad_norm: Positive | None = None
    """Maximum global 2-norm of the gradients; larger ones are scaled down. none: off."""
    on_nan: Changeable[Literal["stop", "skip"]] = "stop"
    """What to do if the loss or a gradient is not finite. stop: fail and name it. skip: skip the update and list the
    step, at most 10 in a row. skip waits for the GPU in each step; not with fp16, whose scaler skips by itself."""
    sync_batchnorm: bool = False
    """true: share the batch statistics of BatchNorm between ranks. Needs GPUs, and batches that divide evenly."""
    deterministic: bool = True
    """true: use deterministic algorithms, so that a resumed run ends with the same bits on a GPU, too; operations that
    have none are refused. false: use the fastest algorithms, found by trial."""
    device: Changeable[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where to compute. auto: on GPUs if the launch finds any, else on the CPU. A resume keeps this choice."""
    cpu_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """CPU threads per rank, fixed for the life of the run: another number gives other bits. Default: OMP_NUM_THREADS if
    set; else 1 for a model with fewer than 100,000 parameters on a CPU; else cores / ranks."""
    init: str = ""
    """Weights to start from: a file (.safetensors, or of torch.save), or a run: NAME, NAME@best or NAME@STEP."""
    init_skip: str = ""
    """Weights of init that are not loaded: patterns of names with commas, such as 'fc.*,embed'."""
    trace: Changeable[str] = ""
    """Steps FIRST:LAST of rank 0 to trace with torch's profiler, into trace/ of the run folder. Empty: none."""
    freeze: str = ""
    """Parameters that are not trained: patterns of parameter or module names with commas, such as 'backbone.*,embed'.
    Fully frozen modules stay in eval mode."""
    optim: Optim = dataclasses.field(default_factory=Optim)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    data: Data = dataclasses.field(default_factory=Data)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    log: Log = dataclasses.field(default_factory=Log)
    eval: Eval = dataclasses.field(default_factory=Eval)
    ema: Ema = dataclasses.field(default_factory=Ema)
    early_stopping: EarlyStopping = dataclasses.field(default_factory=EarlyStopping)
    watch: Watch = dataclasses.field(default_factory=Watch)
    task: Any = None
    """The Settings of the task. Their fields are flags --task.NAME."""
