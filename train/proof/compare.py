"""Compares what two runs have left: digests of the state after each update, figures, samples."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..run import metrics, proving, states
from ..run.run_folder import Run

FIGURES, SAMPLES, END, VALUES = "metrics", "samples", "the weights at the end", "values."
"""Names of what is compared beside registered objects. VALUES begins the name of a value of `session.values`."""
STEP, LINES = "step", "number of lines"
"""Figures that differ if lines are written after other updates."""
_OF_TIME = frozenset(
    {"samples_per_s", "data_wait", "step_time", "memory", "counted_per_s", "mfu", "wall_time", "total_steps"}
)
"""What stands in a line beside figures, and figures that differ in each run."""
_MOST, _MOST_PLAIN = 10, 3
"""Maximum number of tensors in a list, and of plain values before them."""
_WIDE = 40
"""Maximum length of a plain value in a list."""
Point = tuple[int, int, int]
"""A border: updates, epoch and batch."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a run has left."""

    digests: list[dict[Point, list[dict[str, str]]]]
    """For each rank, the digests of the objects at each border, one for each attempt that was there."""
    figures: list[dict[str, Any]]
    """The lines of metrics.jsonl without what depends on the time."""
    samples: list[list[str]]
    """For each rank, the lines of its sample log."""
    end: tuple[Any, ...] = ()
    """The state of the run, its last step and the digest of its weights, which a run has that finished."""
    starts: frozenset[int] = frozenset()
    """The updates after which attempts continued. A rank may have died there before it wrote its digest: what another
    rank holds in memory is enough to continue from."""

    @property
    def last(self) -> dict[str, str]:
        """The digests of rank 0's objects at the last border."""
        of_rank_0 = self.digests[0] if self.digests else {}
        return of_rank_0[max(of_rank_0)][-1] if of_rank_0 else {}

    @property
    def updates(self) -> int:
        """Number of updates at the last border."""
        return max((point[0] for point in (self.digests[0] if self.digests else {})), default=0)

    @property
    def is_in_first_epoch(self) -> bool:
        """Whether a loop over epochs has reached the end of none."""
        points = self.digests[0] if self.digests and any(self.samples) else {}
        return any(batch for _, _, batch in points) and not any(epoch for _, epoch, _ in points)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two runs differ first."""

    update: int
    """Number of updates at the first border that differs; 0: only what is in `names` differs, no border does."""
    names: tuple[str, ...]
    """The objects that differ there, and FIGURES and SAMPLES."""
    same: tuple[str, ...]
    """What does not differ there."""
    figures: tuple[str, ...] = ()
    """Names of the figures that differ anywhere."""
    logged: int = 0
    """Number of updates at the first line of metrics.jsonl that differs; 0: none does, or one before all updates."""


def read(run: Run, ranks: int) -> Seen:
    """Read what a run has left."""
    digests = []
    for rank in range(ranks):
        found: dict[Point, list[dict[str, str]]] = {}
        path = proving.digests_file(run, rank)
        for text in path.read_text().splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except ValueError:  # a kill has cut it
                continue
            found.setdefault((line["updates"], line["epoch"], line["batch"]), []).append(line["objects"])
        digests.append(found)
    samples = []
    for rank in range(ranks):
        path = metrics.samples_file(run, rank)
        samples.append(path.read_text().splitlines() if path.exists() else [])
    lines: Iterable[Mapping[str, Any]] = metrics.each(run) if run.metrics.exists() else ()
    record = run.read()
    end = record["state"], record["step"], record.get("weights_sha256")
    starts = frozenset(attempt["from_step"] or 0 for attempt in record["attempts"])
    return Seen(digests, [_timeless(line) for line in lines], samples, end, starts)


def _timeless(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in _OF_TIME}


def difference(calm: Seen, other: Seen, *, but: Iterable[str] = ()) -> Difference | None:
    """Return where a run differs first from a calm one; None: nowhere.

    Args:
        but: names of figures, and of values of the session, that are not compared.
    """
    figures, logged = _figures_that_differ(calm, other, {*but})
    is_other = {FIGURES: bool(figures), SAMPLES: _samples_differ(calm, other), END: calm.end != other.end}
    beside = [name for name, differs in is_other.items() if differs]
    first: tuple[Point, set[str], set[str]] | None = None
    for ours, theirs in zip(calm.digests, other.digests, strict=True):
        for point in sorted(ours.keys() | theirs.keys()):
            if first is not None and point > first[0]:
                break
            wanted, found = ours.get(point, []), theirs.get(point, [])
            if not found and point[0] in other.starts:
                continue
            names = _names_that_differ(wanted, found) - {*but}
            if names:
                rest = set(wanted[-1] if wanted else found[-1]) - names
                if first is not None and first[0] == point:
                    names, rest = names | first[1], rest & first[2]
                first = point, names, rest
                break
    if first is None and not beside:
        return None
    point, names, rest = first or ((0, 0, 0), set[str](), set(calm.last))
    same = [*sorted(rest), *(name for name in (FIGURES, SAMPLES) if not is_other[name])]
    return Difference(point[0], (*sorted(names), *beside), tuple(same), tuple(figures), logged)


def changes_by_itself(found: Difference) -> tuple[str, ...] | None:
    """Return the figures and values that differ between two calm runs, such as a time, if nothing else differs there;
    None: something else does."""
    if any(name != FIGURES and not name.startswith(VALUES) for name in found.names):
        return None
    return (*found.figures, *(name for name in found.names if name != FIGURES))


def _names_that_differ(wanted: list[dict[str, str]], found: list[dict[str, str]]) -> set[str]:
    """Return the objects that differ at a border, in any attempt that was there."""
    if not wanted or not found:
        return set((wanted or found)[-1])
    first = wanted[-1]
    return {name for one in (*wanted, *found) for name in first.keys() | one.keys() if first.get(name) != one.get(name)}


def _samples_differ(calm: Seen, other: Seen) -> bool:
    """Whether the sample logs differ. Those of a run that was stopped may end with a batch that was only fetched."""
    pairs = zip(calm.samples, other.samples, strict=True)
    if calm.end[:1] == (states.FINISHED,):
        return calm.samples != other.samples
    return any(one != two for mine, its in pairs for one, two in zip(mine, its, strict=False))


def _figures_that_differ(calm: Seen, other: Seen, but: set[str]) -> tuple[list[str], int]:
    """Return the names of the figures that differ, and the number of updates at the first line that does."""
    found: dict[str, None] = {}
    logged = 0
    for one, two in zip(calm.figures, other.figures, strict=False):
        names = sorted(name for name in (one.keys() | two.keys()) - but if one.get(name) != two.get(name))
        if names and not found:
            logged = min(one["step"], two["step"])
        found |= dict.fromkeys(names)
    if len(calm.figures) != len(other.figures) and LINES not in but:
        shorter, longer = sorted((calm.figures, other.figures), key=len)
        logged = logged if found else longer[len(shorter)]["step"]
        found[LINES] = None
    return [*found], logged


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that differs, or a plain value."""

    name: str
    differing: int
    """Number of elements that differ; 0: it is no tensor, or of another shape."""
    elements: int
    distance: float
    """Largest absolute distance of two elements."""

    def __str__(self) -> str:
        if not self.elements:
            return self.name
        return f"{self.name} ({self.differing} of {self.elements} elements, largest distance {self.distance:.1e})"


def tensors(one: Run, other: Run, ranks: int) -> list[Tensor]:
    """Return what differs in the dumps of two runs: plain values, such as a rate, then the largest distance first."""
    import torch

    found: dict[str, Tensor] = {}
    for rank in range(ranks):
        paths = [proving.dump_file(run, rank) for run in (one, other)]
        if not all(path.exists() for path in paths):
            continue
        ours, theirs = (torch.load(path, weights_only=True) for path in paths)
        for name in ours.keys() | theirs.keys():
            mine, its = ours.get(name, {}), theirs.get(name, {})
            for path in mine.keys() | its.keys():
                tensor = _compared(f"{name}: {path}", mine.get(path), its.get(path))
                if tensor is not None:
                    before = found.get(tensor.name)
                    if before is None or tensor.distance > before.distance:
                        found[tensor.name] = tensor
    return sorted(found.values(), key=lambda one: (one.elements > 0, -one.distance, one.name))


def _compared(name: str, one: Any, other: Any) -> Tensor | None:
    import torch

    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        if isinstance(one, str) and isinstance(other, str):
            return None if one == other else Tensor(f"{name} ({_short(one)}, {_short(other)})", 0, 0, 0.0)
        return Tensor(name, 0, 0, 0.0)
    if one.shape != other.shape or one.dtype != other.dtype:
        return Tensor(f"{name} (another shape or type)", 0, 0, 0.0)
    is_same = (one == other) | (one != one) & (other != other)
    if bool(is_same.all()):
        return None
    kind = torch.complex128 if one.is_complex() else torch.float64
    distance = (one.to(kind) - other.to(kind)).abs().nan_to_num(nan=float("inf"))
    return Tensor(name, int((~is_same).sum()), one.numel(), float(distance[~is_same].max()))


def _short(text: str) -> str:
    return text if len(text) <= _WIDE else f"{text[:_WIDE]}…"


def listed(found: list[Tensor]) -> list[str]:
    """Return lines about what differs: the first ten, of plain values the first three, then the number of the rest."""
    plain = [one for one in found if not one.elements]
    lines = [str(one) for one in [*plain[:_MOST_PLAIN], *(one for one in found if one.elements)][:_MOST]]
    more = len(found) - len(lines)
    return lines + ([f"{more} {'tensors' if more > 1 else 'tensor'} more"] if more > 0 else [])
