"""The advice where training waits for data."""

from __future__ import annotations

import pytest

from train.build import cores
from train.trainer.timing import WaitAdvice, loaders_needed


def advice(monkeypatch: pytest.MonkeyPatch, workers: int, waited: float, host: float, ranks: int, usable: int) -> str:
    """What a rank says that has waited so long in 10 s of training."""
    monkeypatch.setattr(cores, "usable", lambda: usable)
    watch = WaitAdvice("a", workers, ranks)
    for _ in range(2):  # the first stretch does not count
        watch.add(waited, 10.0, host)
    return watch.text(is_last=False)


@pytest.mark.parametrize(
    ("workers", "waited", "elapsed", "expected"),
    [
        (0, 5.0, 10.0, 1),  # fetching takes as long as computing: one process beside it hides it
        (0, 8.0, 10.0, 4),
        (0, 9.0, 10.0, 9),
        (1, 5.0, 10.0, 2),
        (4, 3.7, 10.0, 7),  # 4 were at work for 10 s; computing takes 6.3
        (8, 5.0, 10.0, 16),
        (2, 0.0, 10.0, 2),
        (0, 10.0, 10.0, 1000),  # nothing is computed
    ],
)
def test_so_many_processes_are_needed_that_fetching_is_as_fast_as_computing(
    workers: int, waited: float, elapsed: float, expected: int
) -> None:
    assert loaders_needed(workers, waited, elapsed, waited) == expected


def test_what_fetches_while_a_gpu_computes_counts_for_the_processes_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host fetches for 10 s, in 6 of which the GPU computes: one process would take those 10 s too."""
    assert loaders_needed(0, 4.0, 10.0, 10.0) == 2
    assert "raise data.workers to 2" in advice(monkeypatch, 0, 4.0, 10.0, 1, 16)


@pytest.mark.parametrize(
    ("workers", "waited", "ranks", "cores", "said"),
    [
        (0, 2.9, 1, 16, ""),
        (4, 3.0, 1, 16, ""),
        (0, 8.0, 1, 16, "training waits 80% for data: raise data.workers to 4 (train stop a, then train resume a "
                        "--data.workers 4; the result stays the same)"),
        (5, 3.7, 4, 64, "training waits 37% for data: raise data.workers to 8 (train stop a, then train resume a "
                        "--data.workers 8; the result stays the same)"),
        (0, 9.0, 2, 8, "training waits 90% for data: raise data.workers to 4 (train stop a, then train resume a "
                       "--data.workers 4; the result stays the same; 9 would be enough, on more cores than 8)"),
        (0, 5.0, 4, 2, "training waits 50% for data: raise data.workers to 1 (train stop a, then train resume a "
                       "--data.workers 1; the result stays the same)"),
        (0, 9.999, 1, 256, "training waits 100% for data: raise data.workers to 32 (train stop a, then train resume a "
                           "--data.workers 32; the result stays the same)"),
        (2, 5.0, 1, 2, "training waits 50% for data: each rank has 2 data workers on its share of 2 cores; make "
                       "samples cheaper to read (smaller files, decoded and resized beforehand, a faster disk)"),
        (1, 5.0, 4, 2, "training waits 50% for data: each rank has 1 data worker on its share of 2 cores; make "
                       "samples cheaper to read (smaller files, decoded and resized beforehand, a faster disk)"),
    ],
)  # fmt: skip
def test_the_advice_names_the_number_that_the_machine_has_room_for(
    monkeypatch: pytest.MonkeyPatch, workers: int, waited: float, ranks: int, cores: int, said: str
) -> None:
    assert advice(monkeypatch, workers, waited, waited, ranks, cores) == said


def test_the_word_is_said_once_when_enough_was_seen_and_the_start_does_not_count() -> None:
    wait = WaitAdvice("a", 0, 1)
    wait.add(100.0, 100.0, 100.0)
    assert wait.text(is_last=False) == ""
    wait.add(3.0, 4.0, 3.0)
    assert wait.text(is_last=False) == ""
    wait.add(1.0, 2.0, 1.0)
    assert wait.text(is_last=False).startswith("training waits 67% for data")
    wait.add(3.0, 4.0, 3.0)
    assert wait.text(is_last=True) == ""
    short = WaitAdvice("a", 0, 1)
    short.add(2.0, 3.0, 2.0)
    assert short.text(is_last=True).startswith("training waits 67% for data")
