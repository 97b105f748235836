"""How long training stands still for want of data: on a GPU that is not how long the host waits."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from train.trainer.prefetch import DataWait
from train.trainer.timing import Timing, WaitAdvice


@dataclasses.dataclass
class Machine:
    """A host and the stream of a GPU, by a clock that goes on only as the test says."""

    clock: float = 0.0
    """Of the host."""
    free: float = 0.0
    """When the GPU will have made all that it has been asked for."""
    events: int = 0

    def ask(self, seconds: float) -> None:
        """For work that takes the GPU so long, and the host no time."""
        self.free = max(self.clock, self.free) + seconds

    def step_of(self, wait: DataWait, fetch: float, compute: float) -> None:
        """As the loop makes them: the host waits for the GPU's step before the last one."""
        before = self.free
        wait.begin()
        self.clock += fetch
        wait.arrived()
        self.ask(0.001)  # the copy
        self.ask(compute)
        self.clock = max(self.clock, before)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    here = Machine()

    class Event:
        """torch.cuda.Event, as far as it is used."""

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            here.events += 1

        def record(self) -> None:
            self.at = max(here.clock, here.free)

        def query(self) -> bool:
            return here.clock >= self.at

        def elapsed_time(self, other: Event) -> float:
            assert self.query() and other.query(), "nobody may wait for an event"
            return 1000 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return here


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("fetch", "compute", "still"),
    [
        (0.04, 0.06, 0.0),  # the host waits for two thirds of the time, and the GPU never does
        (0.06, 0.02, 0.039),
        (0.06, 0.0, 0.059),
        (0.00001, 0.06, 0.0),
    ],
)
def test_only_what_a_gpu_does_not_compute_meanwhile_counts(
    machine: Machine, fetch: float, compute: float, still: float
) -> None:
    wait = DataWait(CUDA, lambda: machine.clock)
    machine.step_of(wait, 5.0, compute)  # a first batch, for which loader processes are started
    began = wait.seconds()
    assert began == pytest.approx(5.0)
    for _ in range(100):
        machine.step_of(wait, fetch, compute)
    machine.clock += 1.0
    assert wait.seconds() - began == pytest.approx(100 * still, abs=1e-6)
    assert wait.host == pytest.approx(5.0 + 100 * fetch)
    assert machine.events < 10, "events are to be used again"


def test_what_an_evaluation_waits_for_is_not_counted(machine: Machine) -> None:
    wait = DataWait(CUDA, lambda: machine.clock)
    machine.step_of(wait, 1.0, 0.0)
    for _ in range(3):
        machine.clock += 10.0
        wait.arrived()
    machine.step_of(wait, 1.0, 0.0)
    machine.clock += 1.0
    assert wait.seconds() == pytest.approx(2.0)
    assert wait.host == pytest.approx(2.0)


def test_on_a_cpu_it_is_all_until_the_batch_is_there() -> None:
    clock = iter(range(100))
    wait = DataWait(torch.device("cpu"), lambda: float(next(clock)))
    for _ in range(3):
        wait.begin()
        wait.arrived()
    wait.arrived()  # of an evaluation
    assert wait.seconds() == wait.host == 3.0


@pytest.mark.parametrize(("fetch", "compute", "said"), [(0.4, 0.6, ""), (0.6, 0.3, "training waits 50% for data")])
def test_the_advice_is_about_what_the_gpu_waits_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, fetch: float, compute: float, said: str
) -> None:
    now: Callable[[], float] = lambda: machine.clock  # noqa: E731
    monkeypatch.setattr(time, "perf_counter", now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 0)
    timing = Timing(DataWait(CUDA, now), WaitAdvice("a", 0, 1), CUDA)
    figures: Any = {}
    for _ in range(10):
        for _ in range(10):
            machine.step_of(timing.wait, fetch, compute)
            timing.step(1)
        figures = timing.speed()
    assert figures["data_wait"] == pytest.approx(max(fetch - compute - 0.001, 0.0), abs=1e-3)
    assert timing.advice.text(is_last=True)[: len(said) or 1] == said
