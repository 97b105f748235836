"""Format bytes, times and metrics for people."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

UNITS = {"bytes": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
"""Maps a unit of bytes to its power of two."""
_TIMES = (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))


def size(count: float) -> str:
    """Format bytes: 512 MiB, 1.5 GiB."""
    unit = next((unit for unit in UNITS if count < 1024 * 2 ** UNITS[unit]), "TiB")
    return f"{round(count / 2 ** UNITS[unit], 1):g} {unit}"


def duration(seconds: float) -> str:
    """Format a duration: 95 ms, 12.3 s, 4 min 10 s, 3 h 20 min, 2 d 4 h."""
    if seconds < 0.9995:
        return f"{1000 * max(seconds, 0):.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    large, factor, small, rest = next(row for row in _TIMES if whole >= row[1])
    more = whole % factor // rest
    return f"{whole // factor} {large}" + (f" {more} {small}" if more else "")


def ago(seconds: float) -> str:
    """Format an age, in the largest unit only: 3 h ago."""
    unit, factor = next(((row[0], row[1]) for row in _TIMES if seconds >= row[1]), ("s", 1))
    return f"{max(seconds, 0) / factor:.0f} {unit} ago"


def ended(code: int) -> str:
    """Format how a process has ended: died of SIGKILL, exited with code 1."""
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def figure(value: float) -> str:
    """Format a loss or a metric: 0.1234, or 5.65e-05 if four decimals are too few."""
    return f"{value:.4f}" if 0.001 <= abs(value) < 1e9 or not value else f"{value:.3g}"


def figures(values: Mapping[str, float | None], text: Callable[[float], str] = figure) -> str:
    """Format the metrics of an evaluation: `loss 0.1234  accuracy 0.9876`. None (not finite) is skipped."""
    return "  ".join(f"{name} {text(value)}" for name, value in values.items() if value is not None)
