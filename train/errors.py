"""The ends of a command: exit codes for scripts, the two exceptions behind them, and helpers for messages."""

from __future__ import annotations

import builtins
import contextlib
import difflib
import errno
import os
import re
import socket
import traceback
from collections.abc import Iterable

EXIT_FINISHED = 0
EXIT_REFUSED = 2
"""The request is wrong: one line says what is wrong and what to type, and nothing is left behind."""
EXIT_FAILED = 3
"""Training failed; the reason is in the last line and in run.json."""
EXIT_STOPPED = 75
"""Stopped early with a checkpoint (EX_TEMPFAIL of sysexits.h): resume to continue."""
EXIT_INTERRUPTED = 130
"""Ended by Ctrl-C without saving: 128 plus the number of SIGINT, as in shells."""

_PASSING = {
    errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNABORTED,
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.EINTR, errno.EBUSY, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, socket.EAI_AGAIN,
}  # fmt: skip
"""Errors of a disk, a network or a name server that may be gone at the next try."""

_LONGEST_WORD, _LONGEST_LINE = 160, 1200
"""Maximum number of characters of a word and of a message, which may quote a value of any length."""


def shortened(text: str, longest: int = _LONGEST_LINE) -> str:
    """Return the text with too long words, and then a too long text, cut in the middle."""
    words = (_cut(word, min(_LONGEST_WORD, longest)) for word in _by_path(text).split(" "))
    return _cut(" ".join(words), longest)


def _by_path(text: str) -> str:
    """Return the text with real paths in place of /proc/self/fd/N, which Run.folder uses."""
    return re.sub(r"/proc/self/fd/\d+", lambda found: os.path.realpath(found[0]), text)


def _cut(text: str, longest: int) -> str:
    tail = longest // 3
    return text if len(text) <= longest else f"{text[: longest - tail - 1]}…{text[-tail:]}"


def _plain(text: str) -> str:
    """Return the text as one line: escapes, as Python does, line breaks and control characters of terminals."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


class Refused(Exception):
    """The request is wrong. The message is one line that names the remedy.

    Args:
        passes: Whether another process raised it because of an error that `may_pass`.
    """

    def __init__(self, message: object, passes: bool = False) -> None:
        super().__init__(shortened(_plain(str(message))))
        self.passes = passes

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints in place of a traceback."""
        return [f"Refused: {self}"]

    def __reduce__(self) -> tuple[type[Refused], tuple[str, bool]]:
        """Pickle without the cause, for sending between processes."""
        return type(self), (str(self), may_pass(self))


def may_pass(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is a system error that may be gone at the next try."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        if isinstance(error, Refused) and error.passes:
            return True
        error = error.__cause__ or error.__context__
    return False


class TrainingFailed(Exception):
    """Training cannot continue and would fail again in the same way."""

    def __init__(self, message: object) -> None:
        super().__init__(shortened(str(message)))


def is_whole(text: str) -> bool:
    """Whether a text consists of ASCII digits. Digits of other scripts, which Python also reads, are not accepted."""
    return text.isascii() and text.isdecimal()


def whole(digits: str) -> int:
    """Return the number of these decimal digits, at most 10**18.

    Python raises ValueError for thousands of digits (sys.set_int_max_str_digits).
    """
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= 18 else 10**18


def one_line(text: object) -> str:
    """Return the text with all white space, including line ends, replaced by single spaces."""
    return " ".join(_by_path(str(text)).split())


_REMEDIES = {
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "free space, or ask for a larger quota",
}
"""Maps an errno to what to do."""


def of_system(error: OSError) -> str:
    """Return what is wrong and what to do, for an error that no command expects."""
    where = f": {error.filename}" if error.filename else ""
    problem = shortened(f"{error.strerror or one_line(error)}{where}")
    # without an errno it is a library's error about the content of the file
    return f"{problem}; {_REMEDIES.get(error.errno, 'check its owner and mode')}" if error.errno else problem


def of_encoding(error: UnicodeEncodeError) -> str:
    """Return what is wrong with a name that the locale cannot encode."""
    return f"{shortened(ascii(error.object), 100)} has characters that this locale lacks; set LC_ALL=C.UTF-8"


def described(error: BaseException) -> str:
    """Return type and message of an error. For a name that does not exist, also the names nearest to it."""
    known: Iterable[str] = ()
    if isinstance(error, AttributeError) and error.name is not None:
        with contextlib.suppress(Exception):  # of a user's own class
            known = dir(error.obj)
    elif isinstance(error, NameError) and error.__traceback__ is not None:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        known = {*frame.f_locals, *frame.f_globals, *dir(builtins)}
    name = getattr(error, "name", None) or ""
    near = nearest(name, (one for one in known if one.startswith("_") == name.startswith("_"))) if name else ""
    return f"{type(error).__name__}: {error}{near}"


def nearest(word: str, known: Iterable[str], *, otherwise: str = "", dashes: str = "") -> str:
    """Return a hint `; did you mean a, b?` with the names nearest to `word`, or `otherwise` if none is near."""
    candidates = sorted(known)
    # if one name is very near, less similar ones would distract
    found = next(filter(None, (difflib.get_close_matches(word, candidates, 3, cutoff) for cutoff in (0.8, 0.6))), [])
    if not found:  # a field's last part is often remembered without its group: lr for optim.lr
        last = word.rsplit(".", 1)[-1]
        found = [name for name in candidates if name.rsplit(".", 1)[-1] == last][:3]
    return f"; did you mean {', '.join(dashes + name for name in found)}?" if found else otherwise
