"""What a run is: one small dataclass per concern, composed into `Config`.

Each field is a flag of `train run` and `train launch` (`--optim.lr 0.1`) and a key of a TOML file; the
text below a field is the flag's help. Later wins: these defaults, the task's `DEFAULTS`, the file, the flags.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pydantic_core
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from train.errors import Refused, nearest, one_line

_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=2**62)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(config=_STRICT)
class Optim:
    name: Literal["sgd", "adam", "adamw"] = "adamw"
    """Optimizer. A task's own optimizer(model, config) takes its place."""
    lr: Positive = 1e-3
    """Peak learning rate, before schedule.scaling."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of sgd, beta1 of adam and adamw."""
    weight_decay: NotNegative = 0.01
    """Weight decay (decoupled with adamw)."""


@dataclass(config=_STRICT)
class Schedule:
    warmup_epochs: NotNegative = 0.0
    """Epochs over which the learning rate rises linearly from near 0 to its peak; fractions are fine."""
    decay: Literal["constant", "cosine", "step"] = "cosine"
    """What the learning rate does after the warm-up: constant, cosine to 0, or times gamma every step_epochs."""
    step_epochs: Positive = 30.0
    """With decay step: epochs between two drops."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """With decay step: the factor of each drop."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale lr by batch_size / base_batch_size (linear: Goyal et al. 2017; sqrt: its square root)."""
    base_batch_size: Count = 256
    """The global batch size at which optim.lr was chosen; used by scaling."""


@dataclass(config=_STRICT)
class Parallel:
    strategy: Literal["auto", "single", "ddp"] = "auto"
    """How the model is spread: auto takes ddp where there are several ranks and single where there is one."""
    find_unused_parameters: bool = False
    """With ddp: look for parameters that a step did not use (slower; for models with optional branches)."""
    timeout_minutes: Positive = 10.0
    """How long a rank waits for the others in a collective before it gives up."""


@dataclass(config=_STRICT)
class Data:
    root: str = ""
    """Folder of the data set, for tasks that read one."""
    name: str = ""
    """Name of a torchvision data set that lies in root (CIFAR10, MNIST, …); empty: class folders."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Loader processes per rank; 0 loads in the training process. Does not change the result."""
    drop_last: bool = False
    """Leave out the short last batch of every epoch (other samples each time). Evaluations see everything."""
    on_error: Literal["stop", "skip"] = "stop"
    """What a sample that cannot be read does: stop the run, named; or be left out, counted and listed."""


@dataclass(config=_STRICT)
class Checkpoint:
    every_steps: Count | None = None
    """Save every so many steps, besides every_minutes."""
    every_minutes: NotNegative = 10.0
    """Save when so many minutes have passed since the last save; 0 turns this off."""
    keep: Count = 3
    """How many checkpoints are kept; the newest ones."""
    best: str = ""
    """Keep also the checkpoint with the best value of this metric (loss: the lowest, others: the highest); saves at
    every evaluation."""
    asynchronous: bool = True
    """Write in the background: training waits only for a copy of the state in host memory."""


@dataclass(config=_STRICT)
class Log:
    every_steps: Count = 10
    """A line in metrics.jsonl (and TensorBoard) every so many steps."""
    samples: bool = False
    """Write the data set index of every consumed sample to samples.rank*.log."""
    tensorboard: bool = True
    """Write TensorBoard event files."""


@dataclass(config=_STRICT)
class Eval:
    every_epochs: NotNegative = 1.0
    """Evaluate every so many epochs, and at the end; 0: at the end only. Fractions are fine."""
    limit_batches: Annotated[int, Field(ge=0, le=2**62)] = 0
    """Evaluate at most so many global batches: a random choice of samples, always the same; 0: all of them."""


@dataclass(config=_STRICT)
class Watch:
    hang_minutes: NotNegative | None = None
    """A launched run in which no rank moves for so long is ended and started again; 0: never; none: 5, or 20 times the
    slowest step so far if that is longer; with --script, where neither output nor use of the CPU is seen: 30."""
    start_minutes: Positive = 30.0
    """The same for starting, with the first step and compilation, and for saving."""
    healthy_minutes: Positive = 10.0
    """With --script: an attempt that ran for so long was no failure to start: deaths are counted anew after it."""


@dataclass(config=_STRICT)
class Config:
    epochs: Annotated[float, Field(gt=0, le=1e9)] | None = 10.0
    """Passes over the training data; fractions are fine. Replaces steps."""
    steps: Count | None = None
    """Optimizer updates. Replaces epochs."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Everything random follows from this number: order, augmentation, dropout, first weights."""
    batch_size: Count = 64
    """Global batch size: samples per optimizer update over all ranks."""
    micro_batch_size: Count | None = None
    """Samples per forward and backward; default: batch_size over the ranks of the first launch, rounded up."""
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic: bf16 and fp16 are autocast over fp32 weights; fp16 needs a GPU."""
    compile: bool = False
    """Compile the model with torch.compile."""
    clip_grad_norm: Positive | None = None
    """Scale gradients down to at most this global 2-norm; none: off."""
    sync_batchnorm: bool = False
    """Share BatchNorm's batch statistics between ranks; needs GPUs and batches that divide evenly."""
    deterministic: bool = True
    """Use deterministic algorithms where they exist, so that a resumed run is equal bit for bit on a GPU too."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute: auto takes the GPUs if there are any."""
    cpu_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """CPU threads per rank, fixed for the life of a run (another number gives other bits). Default: OMP_NUM_THREADS or
    MKL_NUM_THREADS where set; else one for each GFLOP of a micro batch, at least one and at most a fair share of the
    cores."""
    optim: Optim = dataclasses.field(default_factory=Optim)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    data: Data = dataclasses.field(default_factory=Data)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    log: Log = dataclasses.field(default_factory=Log)
    eval: Eval = dataclasses.field(default_factory=Eval)
    watch: Watch = dataclasses.field(default_factory=Watch)
    task: Any = None
    """The task's Settings; its fields are flags --task.NAME."""


MAY_CHANGE = ("epochs", "steps", "device", "parallel.timeout_minutes")
"""Fields that a resume may change, besides the groups in MAY_CHANGE_GROUPS."""
MAY_CHANGE_GROUPS = ("log.", "checkpoint.", "watch.", "data.workers", "data.root", "data.on_error", "eval.")


@dataclasses.dataclass(frozen=True)
class FieldInfo:
    """One field as a flag: its dotted name, type, default and help."""

    name: str
    annotation: Any
    default: Any
    help: str


@functools.cache
def fields() -> dict[str, FieldInfo]:
    """Every field of Config by its dotted name, in the order of the dataclasses; the task's own are not among them."""
    return {info.name: info for info in _walk(Config, "")}


def _walk(owner: Any, prefix: str) -> typing.Iterator[FieldInfo]:
    hints = typing.get_type_hints(owner, include_extras=True)
    for name, field in owner.__pydantic_fields__.items():
        if prefix == "" and name == "task":
            continue
        if dataclasses.is_dataclass(hints[name]):
            yield from _walk(hints[name], f"{prefix}{name}.")
        else:
            yield FieldInfo(prefix + name, hints[name], field.default, field.description or "")


def is_optional(annotation: Any) -> bool:
    """Whether None is among the values of this type."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return typing.get_origin(annotation) in (types.UnionType, typing.Union) and type(None) in typing.get_args(
        annotation
    )


def _plain(annotation: Any) -> set[Any]:
    """The classes a type is made of: {int, NoneType} for Count | None."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _plain(typing.get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        return set().union(*map(_plain, typing.get_args(annotation)))
    return {type(value) for value in typing.get_args(annotation)} if origin is Literal else {origin or annotation}


def type_name(annotation: Any) -> str:
    """The type as help shows it: `N`, `X`, `true|false`, `sgd|adam`."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is Literal:
        return "|".join(str(value) for value in typing.get_args(annotation))
    plain = _plain(annotation) - {type(None)}
    name = {bool: "true|false", int: "N", float: "X"}.get(next(iter(plain)), "TEXT") if len(plain) == 1 else "VALUE"
    return name + ("|none" if is_optional(annotation) else "")


def parse_value(name: str, annotation: Any, text: str) -> Any:
    """The value that a flag's text stands for.

    Raises:
        Refused: the text is not of the field's type or out of its range.
    """
    plain = _plain(annotation)
    if type(None) in plain and text.lower() == "none":
        return None
    if bool in plain and plain <= {bool, type(None)}:
        if text not in ("true", "false"):
            raise Refused(f"--{name} {text}: must be true or false")
        return text == "true"
    value: Any = text
    if plain & {list, tuple, dict}:
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            raise Refused(f"--{name} {text}: must be written as in TOML, for example [1, 2]") from None
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise Refused(f"--{name} {text}: {_reason(error, annotation)}") from None


def _reason(error: pydantic.ValidationError, annotation: Any = None) -> str:
    first = error.errors()[0]
    message = first["msg"][0].lower() + first["msg"][1:]
    if first["type"] == "literal_error":
        choices = typing.get_args(annotation) if annotation is not None else ()
        message += nearest(str(first["input"]), [str(choice) for choice in choices])
    return one_line(message.replace("input should", "should"))


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a configuration file.

    Raises:
        Refused: it cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a mark before the text
    except OSError as error:
        raise Refused(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{path} is not valid TOML: {one_line(error)}") from None


def flatten(tree: dict[str, Any], source: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} as {"optim.lr": 1}; groups only as deep as Config goes.

    Raises:
        Refused: a group was given a plain value.
    """
    flat: dict[str, Any] = {}
    groups = {name.split(".")[0] for name in fields() if "." in name} | {"task"}
    for key, value in tree.items():
        if key not in groups:
            flat[key] = value
        elif isinstance(value, dict):
            flat.update({f"{key}.{inner}": leaf for inner, leaf in value.items()})
        else:
            raise Refused(f"{source}{key} is a group of fields, not a value; write a table [{key}]")
    return flat


def layer(
    flat: dict[str, Any], settings: type | None, source: str, below: dict[str, Any], replaces: bool = True
) -> dict[str, Any]:
    """The fields of `flat` (dotted names) laid over those of `below`; steps and epochs replace each other.

    Args:
        settings: the task's Settings, whose fields are known as task.NAME.
        source: where the values come from, for messages.

    Raises:
        Refused: a name is unknown, or both steps and epochs are in this layer.
    """
    own = {f"task.{field.name}" for field in dataclasses.fields(settings)} if settings else set()
    known = set(fields()) | own
    for name in flat:
        if name not in known:
            raise Refused(f"{source}unknown field {name}{nearest(name, known, '; train run --help lists all fields')}")
    if flat.get("steps") is not None and flat.get("epochs") is not None:
        raise Refused(f"{source}steps and epochs replace each other; give one of them")
    merged = dict(below)
    if replaces:
        for name, other in (("steps", "epochs"), ("epochs", "steps")):
            if flat.get(name) is not None:
                merged[other] = None
    return merged | flat


def build(flat: dict[str, Any], settings: type | None = None, source: str = "", partial: bool = False) -> Config:
    """The configuration that these values (dotted names) make, every one checked; strict about types.

    Args:
        partial: settings without a default may still be missing; `task` is None then.

    Raises:
        Refused: a value has the wrong type or is out of range.
    """
    tree: dict[str, Any] = {}
    task: dict[str, Any] = {}
    for name, value in flat.items():
        group, _, inner = name.rpartition(".")
        if group == "task":
            task[inner] = value
        elif group:
            tree.setdefault(group, {})[inner] = value
        else:
            tree[name] = value
    config = _checked(Config, tree, source)
    if config.epochs is None and config.steps is None:
        raise Refused(f"{source}neither epochs nor steps is given; give one of them")
    if config.steps is not None:
        config.epochs = None
    if settings:
        config.task = _checked(settings, _defaults(settings) | task, source, "task.", partial)
    return config


def _defaults(settings: type) -> dict[str, Any]:
    """The values a task's Settings begin with: nobody but us checks that they are of their own types."""
    missing = dataclasses.MISSING
    values = {
        field.name: field.default_factory() if field.default_factory is not missing else field.default
        for field in dataclasses.fields(settings)
        if field.init
    }
    return {
        name: pydantic_core.to_jsonable_python(value, fallback=str)
        for name, value in values.items()
        if value is not missing
    }


def _checked(owner: Any, tree: dict[str, Any], source: str, prefix: str = "", partial: bool = False) -> Any:
    for name, value in tree.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"{source}{prefix}{name} = {value}: should be a finite number")
    try:
        # JSON, for there strict means what a TOML reader expects: tables become dataclasses, 3 may be a float, but
        # "3" is no number and 1 is not true.
        text = json.dumps(tree, default=lambda value: f"{value} (a {type(value).__name__})")
        return TypeAdapter(owner).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        errors = [one for one in error.errors() if not (partial and one["type"] == "missing")]
        if not errors:
            return None
        first = errors[0]
        parts = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
        # a union adds the name of its member to the place of an error
        name = ".".join(parts[: 2 if parts and parts[0] in tree and isinstance(tree[parts[0]], dict) else 1])
        if first["type"] == "missing":
            raise Refused(f"{source}{prefix}{name} has no default; give it with --{prefix}{name}") from None
        known = fields().get(prefix + name)
        reason = _reason(error, known.annotation if known else None)
        raise Refused(f"{source}{prefix}{name} = {first['input']!r}: {reason}") from None
    except pydantic.errors.PydanticSchemaGenerationError as error:
        raise Refused(
            f"{source}Settings has a field of a type that no flag can carry: {one_line(error)[:200]}"
        ) from None


def to_flat(config: Config) -> dict[str, Any]:
    """Every field by its dotted name, the task's settings as task.NAME; values as JSON has them."""
    tree = dataclasses.asdict(config)
    tree["task"] = tree["task"] or {}
    return dict(json.loads(json.dumps(flatten(pydantic_core.to_jsonable_python(tree)))))


def to_toml(config: Config) -> str:
    """The configuration as TOML. TOML knows no null: fields that are None are left out."""
    import tomli_w

    tree = copy.deepcopy(dataclasses.asdict(config))
    tree["task"] = tree["task"] or {}

    def without_none(value: Any) -> Any:
        return {k: without_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    return tomli_w.dumps(without_none(pydantic_core.to_jsonable_python(tree)))


def from_toml(path: Path, settings: type | None) -> Config:
    """The resolved configuration of a run folder. What is left out there was None.

    Raises:
        Refused: somebody edited it into something invalid.
    """
    source = f"{path}: "
    blank = {name: None for name, info in fields().items() if is_optional(info.annotation)}
    for field in dataclasses.fields(settings) if settings else ():
        if field.default is None:
            blank[f"task.{field.name}"] = None
    flat = layer(flatten(read_toml(path), source), settings, source, blank, replaces=False)
    return build(flat, settings, source)


def forbidden_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The dotted names of fields that differ and that a resume may not change.

    A field that was not there yet when `before` was written had its default.
    """
    defaults = {name: info.default for name, info in fields().items()}

    def may(name: str) -> bool:
        return name in MAY_CHANGE or name.startswith(MAY_CHANGE_GROUPS)

    names = [name for name in sorted(before.keys() | after.keys()) if not may(name)]
    return [name for name in names if before.get(name, defaults.get(name)) != after.get(name)]
