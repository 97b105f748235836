"""What a forked process is called in lists of processes."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path


def show(*arguments: str) -> None:
    """Let ps, pgrep and psutil show these as the arguments of this process, cut to the room that its own had.

    The kernel shows the memory that a program's arguments were put in when it was started; where that is, it says in
    /proc/self/stat (proc(5), arg_start and arg_end). Where it does not, nothing is changed.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])
        room = end - begin - 1
        if begin and room > 0:
            ctypes.memmove(begin, "\0".join(arguments).encode()[:room].ljust(room) + b"\0", room + 1)
