"""What the logs of a script's ranks say about its end: the exception of a rank, and which rank was the first to fail.

A script reports nothing itself, and a rank that loses its connections often ends before the rank that is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from .. import causes
from ..errors import one_line
from ..run import durable
from ..run.progress_lines import fold

_TRACE = re.compile(r"^(Original )?Traceback \(most recent call last\):")
_REFUSED = re.compile(r"^\S+: error: |^train: |^Error: ")
"""Lines of argparse, of this package and of click about a wrong request."""
_STOPPED = ("KeyboardInterrupt", "SystemExit")
"""Exceptions that say how a process was ended, not why."""
_TAIL = 1 << 16
"""Bytes to read at the end of a log: progress bars fill much of it."""
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""Prefix of torch's lines about an exception."""


def tail(logs: Path, rank: int) -> str:
    """Return the end of a rank's log, with progress bars folded; '' if nothing can be read."""
    try:
        return fold(durable.read_tail(logs / f"rank{rank}.log", _TAIL)).decode(errors="replace")
    except OSError:
        return ""


def without_prefix(line: str) -> str:
    """Return a line of a log without what torch writes before it."""
    return _PREFIX.sub("", line)


def raised(log: str) -> str:
    """Return the last exception in a log that has ended its process, in one line; '': there is none.

    An exception that only says that another process is gone counts only if there is no other.
    """
    found = [text for text in _exceptions(log) if not text.startswith(_STOPPED)]
    return next(iter(reversed(own(log) or found)), "")


def own(log: str) -> list[str]:
    """Return the exceptions in a log that have another reason than that another process is gone."""
    return [text for text in _exceptions(log) if not (text.startswith(_STOPPED) or is_of_peer(text))]


def _exceptions(log: str) -> Iterable[str]:
    """Yield each exception or refusal in a log: its line, with the indented ones below it."""
    lines = [without_prefix(line).rstrip() for line in log.splitlines()]
    in_trace = False
    for number, line in enumerate(lines):
        if _TRACE.match(line):
            in_trace = True
        elif (in_trace and line and not line[0].isspace()) or _REFUSED.match(line):
            in_trace, rest = False, lines[number + 1 :]
            below = next((at for at, text in enumerate(rest) if not text[:1].isspace()), len(rest))
            yield one_line(" ".join([line, *map(str.strip, rest[:below])]))


def is_of_peer(text: str) -> bool:
    """Whether an exception tells only that another process is gone."""
    return causes.is_of_others(text) and not is_of_internet(text)


def is_of_internet(text: str) -> bool:
    """Whether an exception is about a server on the internet."""
    return re.match(r"(urllib\.error|urllib3|requests|httpx|aiohttp|huggingface_hub|http\.client)\b", text) is not None


def first_to_fail(exits: Mapping[int, int], logs: Mapping[int, str], order: Iterable[int]) -> int:
    """Return the rank whose error has ended the others.

    Args:
        exits: Maps the ranks that were seen to fail first to their exit codes.
        logs: Maps the ranks of this machine to the end of their logs.
        order: The ranks of `exits`, the likeliest first.
    """
    first, *others = order
    if own(logs.get(first, "")):
        return first
    others += [rank for rank in sorted(logs) if rank not in exits] if raised(logs.get(first, "")) else []
    return next((rank for rank in others if own(logs.get(rank, ""))), first)
