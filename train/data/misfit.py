"""Which of some items it is that cannot become a batch with the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def misfit(join: Callable[[list[Any]], Any], items: Sequence[Any]) -> tuple[int, Exception] | None:
    """Its place among the items, and what is wrong with it; None where it is no single one's fault.

    Args:
        join: makes a batch of items, and has failed of these.
    """
    alone = [_problem(join, [item]) for item in items]
    failed = [place for place, error in enumerate(alone) if error is not None]
    if failed and (len(failed) < len(items) or len(items) == 1):
        return failed[0], _said("cannot be put into a batch", alone[failed[0]])
    if failed:
        return None
    paired = [_of_two(join, items[0], item) for item in items]
    failed = [place for place, error in enumerate(paired) if error is not None]
    if not failed:
        return None
    if len(failed) == len(items) - 1 > 1:  # nothing goes with the first one
        return 0, _said("cannot be put into one batch with the others", paired[1])
    return failed[0], _said("cannot be put into one batch with the others", paired[failed[0]])


def _problem(join: Callable[[list[Any]], Any], items: list[Any]) -> Exception | None:
    try:
        join(items)
    except Exception as error:
        return error
    return None


def _of_two(join: Callable[[list[Any]], Any], one: Any, other: Any) -> Exception | None:
    error = _problem(join, [one, other])
    if error is not None and "not resizable" in str(error):  # torch's, in a worker, where the first one is larger
        return _problem(join, [other, one]) or error
    return error


def _said(what: str, error: Exception | None) -> Exception:
    """An error that says it, of the same place in the code."""
    assert error is not None
    made = ValueError(f"{what}: {type(error).__name__}: {error}").with_traceback(error.__traceback__)
    made.__cause__ = error
    return made
