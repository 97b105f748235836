"""The space of a sweep: which parameters each trial has. Pure functions of what the user has typed.

Space.read(grid=["optim.lr=1e-3,1e-2"], repeat=["seed=0..2"]).cells()
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..errors import Refused, is_whole

MOST = 1000
"""Maximum number of trials of a sweep."""
Parameters = dict[str, str]
"""Maps the parameters of a trial to their values, as text."""
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_DIGITS = 4
"""Number of significant digits of a value that is drawn."""
_TRIES = 20_000
"""Maximum number of draws until one is new: enough to find the last one of MOST."""
_GIVE = {
    "grid": "--grid optim.lr=1e-3,1e-2", "search": "--search optim.lr=log:1e-5..1e-2", "repeat": "--repeat seed=0..2",
    "add": "--add optim.lr=3e-3",
}  # fmt: skip
"""Maps an option to an example of it."""


@dataclasses.dataclass(frozen=True)
class Space:
    """What the user has asked for. Mappings keep the order in which it was typed."""

    grid: Mapping[str, Sequence[str]]
    """Maps parameters to their values. Each value is tried with each value of the others."""
    search: Mapping[str, str]
    """Maps parameters to what their values are drawn from: `log:1e-5..1e-2`, `0..0.5` or `32,64`."""
    repeat: Mapping[str, Sequence[str]]
    """Maps parameters over which the table takes the mean to their values."""
    draws: int = 0
    """Number of draws of a search."""
    seed: int = 0
    """Seed of a search."""

    @classmethod
    def read(
        cls, *, grid: Iterable[str] = (), search: Iterable[str] = (), repeat: Iterable[str] = (),
        draws: int | None = None, seed: int | None = None,
    ) -> Space:  # fmt: skip
        """Return the space that the options say, each written as `NAME=VALUES`.

        Raises:
            Refused: an option is wrong, options exclude each other, or there are no or too many trials.
        """
        found = [_by_name(option, texts) for option, texts in (("grid", grid), ("search", search), ("repeat", repeat))]
        grids, searches, repeats = found
        if bool(grids) == bool(searches):
            both = "--grid and --search exclude each other" if grids else "the sweep has no trials"
            raise Refused(f"{both}; give {_GIVE['grid']}, or {_GIVE['search']} --trials 20")
        if searches and draws is None:
            raise Refused("--search needs the number of draws too; give --trials 20")
        if not searches and (draws is not None or seed is not None):
            raise Refused(
                f"--{'trials' if draws is not None else 'search-seed'} is for --search; a grid has all trials"
            )
        names = [name for part in found for name in part]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise Refused(f"{twice} is given twice; give each parameter once, with all its values")
        made = cls(
            {name: values_of("grid", name, text) for name, text in grids.items()}, searches,
            {name: values_of("repeat", name, text) for name, text in repeats.items()}, draws or 0, seed or 0,
        )  # fmt: skip
        made.check()
        return made

    def check(self) -> None:
        """Check the number of trials and what values are drawn from. Raises Refused."""
        repeats = math.prod(map(len, self.repeat.values()))
        count = repeats * (self.draws if self.search else math.prod(map(len, self.grid.values())))
        if count > MOST:
            raise Refused(f"{count} trials; a sweep has at most {MOST}: give fewer values")
        kinds = [_Drawn.read(name, text) for name, text in self.search.items()]
        if self.search and all(one.values for one in kinds):
            there = math.prod(len(one.values) for one in kinds)
            if there < self.draws:
                raise Refused(f"--trials {self.draws}: there are only {there} different ones; use --grid for all")

    def cells(self) -> list[Parameters]:
        """Return the parameters of all trials, in the order of their numbers. Those that repeat a cell are together.

        Raises:
            Refused: a search has too few different ones.
        """
        if self.search:
            firsts: Iterable[Parameters] = self._drawn()
        else:
            firsts = _product(self.grid)
        return [first | more for first in firsts for more in _product(self.repeat)]

    def _drawn(self) -> list[Parameters]:
        """Return what is drawn, each cell once: number n, from 1, is a function of the seed and n alone.

        Raises:
            Refused: there are too few different ones.
        """
        found: list[Parameters] = []
        for number in range(1, self.draws + 1):
            again = (self._draw(f"{number}" if not tries else f"{number}-{tries}") for tries in range(_TRIES))
            cell = next((cell for cell in again if cell not in found), None)
            if cell is None:
                few = f"only {len(found)} different ones were found, as values have {_DIGITS} digits"
                raise Refused(f"--trials {self.draws}: {few}; use --grid")
            found.append(cell)
        return found

    def _draw(self, number: str) -> Parameters:
        """Return what is drawn under this number."""
        chance = random.Random(f"{self.seed}-{number}")
        drawn = {name: _Drawn.read(name, self.search[name]).draw(chance) for name in sorted(self.search)}
        return {name: drawn[name] for name in self.search}

    def extended(self, more: Iterable[str], draws: int | None = None) -> Space:
        """Return the space with more values, each written as `NAME=VALUES`, or with more draws.

        Raises:
            Refused: the space has no such parameter, or has the value already.
        """
        grid, repeat = dict(self.grid), dict(self.repeat)
        for name, text in _by_name("add", more).items():
            part = next((part for part in (grid, repeat) if name in part), None)
            if part is None:
                way = "a search gets more trials by --trials N" if self.search else f"it has {', '.join(grid | repeat)}"
                raise Refused(f"--add {name}: the sweep has no such values; {way}")
            part[name] = values_of("add", name, text, part[name])
        if draws is not None and (not self.search or draws <= self.draws):
            why = f"the sweep has {self.draws} already; give more" if self.search else "a grid gets more by --add"
            raise Refused(f"--trials {draws}: {why}")
        made = dataclasses.replace(self, grid=grid, repeat=repeat, draws=draws or self.draws)
        made.check()
        return made


def _product(values: Mapping[str, Sequence[str]]) -> Iterator[Parameters]:
    for one in itertools.product(*values.values()):
        yield dict(zip(values, one, strict=True))


def _by_name(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Return the values of an option by the name of the parameter."""
    found: dict[str, str] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not sign or not values.strip() or not _NAME.fullmatch(name):
            raise Refused(f"--{option} {text}: give NAME=VALUES, as in {_GIVE[option]}")
        if name in found:
            raise Refused(f"--{option} {name} is given twice; give each parameter once, with all its values")
        found[name] = values.strip()
    return found


def values_of(option: str, name: str, text: str, before: Sequence[str] = ()) -> list[str]:
    """Return the values in `1,2,3` or `0..4`, after those of before.

    Raises:
        Refused: a value is empty or there twice, or the ends of a range are not whole.
    """
    found = list(before)
    for value in _split(text):
        match = _RANGE.fullmatch(value)
        if match and not (is_whole(match[1].lstrip("-")) and is_whole(match[2].lstrip("-"))):
            raise Refused(
                f"--{option} {name}={value}: a range here has whole ends (0..4); give other values with commas"
            )
        if value.startswith("log:") or not value:
            raise Refused(f"--{option} {name}={text}: give values with commas, as in {_GIVE[option]}")
        found += _range(option, name, match) if match else [value]
    known = set[object]()
    for value in found:
        if same(value) in known:
            raise Refused(f"--{option} {name}={text}: {value} is there twice; give each value once")
        known.add(same(value))
    return found


def _range(option: str, name: str, match: re.Match[str]) -> list[str]:
    first, last = int(match[1]), int(match[2])
    if not first < last <= first + MOST:
        raise Refused(f"--{option} {name}={match[0]}: give the smaller end first, and at most {MOST} values")
    return [str(number) for number in range(first, last + 1)]


def same(value: str) -> object:
    """Return what two spellings of a value have in common: 1e-3 and 0.001 are the same number, [1,2] and [1, 2] the
    same list."""
    with contextlib.suppress(ValueError, RecursionError):
        return repr(json.loads(value)) if value.startswith("[") else float(value)
    return value


def _split(text: str) -> list[str]:
    """Return the parts of a text between commas that stand in no brackets or quotes."""
    return [part.strip() for part in re.split(r""",(?![^\[]*\])(?![^{]*\})(?=(?:[^"]*"[^"]*")*[^"]*$)""", text)]


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """What the values of a parameter are drawn from: some values, or all numbers between two."""

    values: Sequence[str] = ()
    least: float = 0.0
    most: float = 0.0
    is_log: bool = False

    @classmethod
    @functools.cache
    def read(cls, name: str, text: str) -> _Drawn:
        """Parse `log:1e-5..1e-2`, `0..0.5` or `32,64`. Whole ends (1..8) mean whole numbers. Raises Refused."""
        plain, given = text.removeprefix("log:"), f"--search {name}={text}"
        match = _RANGE.fullmatch(plain)
        if match is None:
            if plain != text:
                raise Refused(f"{given}: give two ends after log:, as in {_GIVE['search']}")
            return cls(values_of("search", name, text))
        least, most = float(match[1]), float(match[2])
        if not least < most < math.inf:
            raise Refused(f"{given}: give the smaller end first")
        if plain != text and least <= 0:
            raise Refused(f"{given}: a logarithm needs ends above 0")
        if plain == text and all(is_whole(match[end].lstrip("-")) for end in (1, 2)):
            if most - least < MOST:
                return cls(_range("search", name, match))
            raise Refused(
                f"{given}: at most {MOST} whole numbers; for all numbers between them: {match[1]}.0..{match[2]}"
            )
        return cls((), least, most, plain != text)

    def draw(self, chance: random.Random) -> str:
        if self.values:
            return self.values[chance.randrange(len(self.values))]
        low, high = (math.log(self.least), math.log(self.most)) if self.is_log else (self.least, self.most)
        value = low + (high - low) * chance.random()
        rounded = float(f"{math.exp(value) if self.is_log else value:.{_DIGITS}g}")
        return repr(min(max(rounded, self.least), self.most))


def sweep_name(trial: str) -> str:
    """Return the name of the sweep of a trial: lr of lr-001. Of another run it is that of no sweep, or not its own."""
    return trial.rpartition("-")[0]


def numbered(name: str, count: int) -> list[str]:
    """Return the names of the trials of a sweep: lr-001, lr-002, …"""
    return [f"{name}-{number:03d}" for number in range(1, count + 1)]
