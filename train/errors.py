"""How a command ends: the exit codes that scripts rely on and the two exceptions behind them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

FINISHED = 0
REFUSED = 2
"""The request is wrong: one line says what and what to do, nothing is left behind."""
FAILED = 3
"""Training failed; the reason is in the last line and in run.json."""
STOPPED = 75
"""Stopped early with a checkpoint (EX_TEMPFAIL of sysexits.h): resume to continue."""


class Refused(Exception):
    """The request is wrong. The message is one line that names the remedy."""


class TrainingFailed(Exception):
    """Training cannot go on and would fail again in the same way."""


def one_line(text: object) -> str:
    """The text with every run of white space, line ends included, made one blank."""
    return " ".join(str(text).split())


def nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint `; did you mean a, b?` with the names nearest to `word`, or `otherwise` when none is near."""
    candidates = sorted(known)
    found = difflib.get_close_matches(word, candidates, n=3, cutoff=0.6)
    if not found:  # a field's last part is often remembered without its group: lr for optim.lr
        last = word.rsplit(".", 1)[-1]
        found = [name for name in candidates if name.rsplit(".", 1)[-1] == last][:3]
    return f"; did you mean {', '.join(found)}?" if found else otherwise
