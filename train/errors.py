"""How a command ends: exit codes that scripts rely on, the two exceptions behind them, and texts of messages."""

from __future__ import annotations

import difflib
import errno
import os
import re
import socket
from collections.abc import Iterable

EXIT_FINISHED = 0
EXIT_REFUSED = 2
"""The request is wrong: one line says what and what to do, nothing is left behind."""
EXIT_FAILED = 3
"""Training failed; the reason is in the last line and in run.json."""
EXIT_STOPPED = 75
"""Stopped early with a checkpoint (EX_TEMPFAIL of sysexits.h): resume to continue."""
EXIT_INTERRUPTED = 130
"""Ended by Ctrl-C, nothing saved: 128 and the number of SIGINT, as shells have it."""

_PASSING = {
    errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNABORTED,
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.EINTR, errno.EBUSY, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, socket.EAI_AGAIN,
}  # fmt: skip
"""Errors of a disk, a network or a name server that may be gone when the same is tried again."""

_LONGEST_WORD, _LONGEST_LINE = 160, 1200
"""Characters of a message that are shown: it may quote what a user gave, which may be of any length."""


def shortened(text: str, longest: int = _LONGEST_LINE) -> str:
    """The text with every word, and then the whole, cut in its middle where it is too long."""
    words = (_cut(word, min(_LONGEST_WORD, longest)) for word in _by_path(text).split(" "))
    return _cut(" ".join(words), longest)


def _by_path(text: str) -> str:
    """The text with the path of each folder that this process names by its descriptor, as Run.folder does."""
    return re.sub(r"/proc/self/fd/\d+", lambda found: os.path.realpath(found[0]), text)


def _cut(text: str, longest: int) -> str:
    tail = longest // 3
    return text if len(text) <= longest else f"{text[: longest - tail - 1]}…{text[-tail:]}"


def _plain(text: str) -> str:
    """The text as one line: characters that would break it, or move a terminal's cursor, are escaped as in Python."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


class Refused(Exception):
    """The request is wrong. The message is one line that names the remedy.

    Args:
        passes: whether another process raised it because of an error that `may_pass`.
    """

    def __init__(self, message: object, passes: bool = False) -> None:
        super().__init__(shortened(_plain(str(message))))
        self.passes = passes

    def __reduce__(self) -> tuple[type[Refused], tuple[str, bool]]:
        """It is sent between ranks; its cause is not."""
        return type(self), (str(self), may_pass(self))


def may_pass(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is the system's and may be gone when the same is tried again."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        if isinstance(error, Refused) and error.passes:
            return True
        error = error.__cause__ or error.__context__
    return False


class TrainingFailed(Exception):
    """Training cannot go on and would fail again in the same way."""

    def __init__(self, message: object) -> None:
        super().__init__(shortened(str(message)))


def is_whole(text: str) -> bool:
    """Whether a text is decimal digits; those of other scripts, which Python reads too, are refused as in fields."""
    return text.isascii() and text.isdecimal()


def whole(digits: str) -> int:
    """The number that decimal digits stand for; of more than anything here can count to, just a larger one.

    Python refuses to read thousands of digits (sys.set_int_max_str_digits), with a ValueError.
    """
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= 18 else 10**18


def one_line(text: object) -> str:
    """The text with every run of white space, line ends included, made one blank."""
    return " ".join(_by_path(str(text)).split())


_REMEDIES = {
    errno.ENAMETOOLONG: "give a shorter one",
    errno.ENOSPC: "free some room on the disk that it goes to",
    errno.EDQUOT: "free some room, or ask for a larger quota",
}
"""Maps the number of an error to what to do."""


def of_system(error: OSError) -> str:
    """What is wrong, and what to do about it, where no command has foreseen it."""
    where = f": {error.filename}" if error.filename else ""
    problem = shortened(f"{error.strerror or one_line(error)}{where}")
    # a library's own, without a number, is about what is in the file
    return f"{problem}; {_REMEDIES.get(error.errno, 'look at its owner and mode')}" if error.errno else problem


def of_encoding(error: UnicodeEncodeError) -> str:
    """What is wrong with a name that the locale has no bytes for."""
    return f"{shortened(ascii(error.object), 100)} has letters that this locale has not; use another: LC_ALL=C.UTF-8"


def nearest(word: str, known: Iterable[str], otherwise: str = "", dashes: str = "") -> str:
    """A hint `; did you mean a, b?` with the names nearest to `word`, or `otherwise` when none is near."""
    candidates = sorted(known)
    # of one that is very near, others that are only alike would distract
    found = next(filter(None, (difflib.get_close_matches(word, candidates, 3, cutoff) for cutoff in (0.8, 0.6))), [])
    if not found:  # a field's last part is often remembered without its group: lr for optim.lr
        last = word.rsplit(".", 1)[-1]
        found = [name for name in candidates if name.rsplit(".", 1)[-1] == last][:3]
    return f"; did you mean {', '.join(dashes + name for name in found)}?" if found else otherwise
