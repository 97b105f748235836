"""A launch of a task while it is checked: what is known of it, what the checks have built, and the plan so far."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import config as configuration
from .. import gpus
from ..build import initial_weights, objects, sampling
from ..build.objects import make_objects
from ..build.updates import read_updates
from ..code.source import Source
from ..config import Config, strategies
from ..data import fingerprint, threads
from ..data.plan import Plan as EpochPlan
from ..data.progress import set_total
from ..errors import Refused
from ..parallel import choose
from ..parallel.precision import Precision
from ..parallel.torch_private import without_compiler
from ..parallel.wrap_units import recompute, wrapped
from ..run import provenance
from ..run.record import Record
from ..run.run_folder import Run
from ..run.spec import Spec
from ..tasks import Task
from .request import ALONE, Plan, Request
from .unused_fields import Reader, of_no_use


class Kind(enum.Flag):
    """The launches of a task, and an evaluation with other fields."""

    NEW = enum.auto()
    RESUME = enum.auto()
    FORK = enum.auto()
    EVAL = enum.auto()


@dataclasses.dataclass
class Past:
    """The run that a resume or a fork continues."""

    run: Run
    spec: Spec
    record: Record
    step: int
    """Step of the checkpoint; 0: there is none."""
    before: Config
    """The configuration of the run; for edited code, with the settings of that code."""
    flags: dict[str, str]
    """The fields that change, as text."""


@dataclasses.dataclass(kw_only=True)
class Case:
    """A launch that is checked. The checks fill in what the user left open, and what the plan needs."""

    kind: Kind
    task: Task
    config: Config
    asked: Mapping[str, str]
    """Maps the fields that the user sets to their text in messages."""
    local: int = 1
    """Number of ranks on each machine."""
    nodes: range = ALONE
    """Possible numbers of machines."""
    source: Source | None = None
    """The source of code that the run does not have yet."""
    given: Path | None = None
    """The file of that code, as the user named it."""
    request: Request | None = None
    """That of a new run."""
    runs: Path = Path()
    """The folder of the runs."""
    elsewhere: Callable[[], list[list[gpus.Card]]] = list
    """Under torchrun: returns the GPUs of each other rank's machine; an empty list: unknown."""
    past: Past | None = None
    is_searched: bool = False
    """Whether the size of the micro batches is found by trying."""

    reads: Reader
    """Returns whether the task reads a field, by its source or its run's record. `checks.run` adds what it records."""
    edited: list[str] = dataclasses.field(default_factory=list)
    """Names of files of a fork's code that the forked run does not have so."""
    precision: Precision | None = None
    """Also holds the device of the first rank."""
    cards: list[gpus.Card] = dataclasses.field(default_factory=list)
    """GPUs that this process sees; empty on the CPU."""
    initial: initial_weights.Fitted | None = None
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: dict[str, str | bytes] = dataclasses.field(default_factory=dict)
    copies: dict[str, Path] = dataclasses.field(default_factory=dict)
    """Fields of run.json, files, and files to copy, of the plan."""
    warnings: list[str] = dataclasses.field(default_factory=list)

    def keep_initial_weights(self) -> None:
        """Add the weights with which the task lets the model start to the plan, if it does."""
        self.initial = initial_weights.fitted(self.task, self.config, self.model)
        if self.initial is not None:
            self.record["init"], self.files[initial_weights.FILE] = self.initial.table(), self.initial.file()

    def keep_facts(self) -> dict[str, Any]:
        """Add the facts about the data, which a resume compares, to the plan. Returns them."""
        facts = objects.fingerprint(self.task, self.config, **self.sets)
        self.files[fingerprint.FACTS] = json.dumps(facts, indent=1) + "\n"
        return facts

    def to_plan(self) -> Plan:
        """Return the plan of a new run or a fork that has passed every check."""
        facts = {
            "total_steps": self.total, "samples": self.cut.length, "sampler": self.task.sampler,
            "unused_fields": of_no_use(self.task, self.config, self.reads), "warnings": self.warnings,
            **provenance.facts(self.cards),
        }  # fmt: skip
        return Plan(
            files=self.files | {"config.toml": configuration.to_toml(self.config)}, record=self.record | facts,
            copies=self.copies, warnings=self.warnings, ranks=self.local, task=self.task, config=self.config,
            has_evaluation=bool(self.eval_sets),
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        """Number of ranks on all machines, at most."""
        return self.local * self.nodes[-1]

    @property
    def of(self) -> Past:
        """The run that a resume or a fork continues."""
        assert self.past is not None
        return self.past

    @property
    def step(self) -> int:
        """The step after which the run starts."""
        return self.past.step if self.past is not None else 0

    @property
    def device(self) -> torch.device:
        """That of the first rank."""
        assert self.precision is not None
        return self.precision.device

    @functools.cached_property
    def _sets(self) -> tuple[Any, dict[str, Any]]:
        return objects.make_datasets(self.task, self.config)

    @property
    def train_set(self) -> Any:
        return self._sets[0]

    @property
    def eval_sets(self) -> dict[str, Any]:
        return self._sets[1]

    @property
    def sets(self) -> dict[str, Any]:
        """The datasets, as keyword arguments of a fingerprint."""
        return {"train_set": self.train_set, "eval_sets": self.eval_sets}

    @functools.cached_property
    def threads(self) -> str:
        """Why data workers cannot be forked after `datasets()`; '' if they can."""
        assert self._sets
        return threads.problem() if self.config.data.workers != 0 else ""  # ranks fork them now, before model()

    @functools.cached_property
    def samples(self) -> int:
        """Number of samples of an epoch; with `overfit`, of the training set."""
        if self.kind is Kind.RESUME:
            return sampling.samples_of(self.of.spec, self.train_set)
        return sampling.first_samples(self.task, self.config, len(self.train_set))

    @property
    def cut(self) -> EpochPlan:
        """How an epoch is cut into batches."""
        return objects.plan_of(self.config, self.samples)

    @functools.cached_property
    def total(self) -> int:
        """Steps of the whole run."""
        total = objects.total_steps(self.config, self.cut)
        set_total(total)
        return total

    @functools.cached_property
    def model(self) -> torch.nn.Module:
        """The model, after checking that this many ranks can train it with the `parallel` settings.

        The checks include sharding, recomputation and the optimizer.
        """
        task, config, precision = self.task, self.config, self.precision
        assert precision is not None
        model = objects.make_model(task, config, precision.weights)
        objects.check_forward(task, model)
        if task.inference_model is not None and strategies.of(config.parallel.strategy, self.ranks).splits_parameters:
            how = config.parallel.strategy
            raise Refused(f"{how} cannot run inference_model() of {task.file}; remove it, or use ddp")
        choose.check_model(model, config=config, size=self.ranks, device=precision.device)
        objects.inference_model(task, model)
        if config.compile == "blocks":
            wrapped(model, config)
        recompute(model, config.parallel.recompute)
        with without_compiler():
            read_updates(task, model, config)
        make_objects(task, model, config=config, device=torch.device("cpu"))
        return model
