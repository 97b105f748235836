"""Ports for tests that name one before somebody listens there.

Not one that the system would give: it gives the same to whoever asks for any, a rank for example, before it is used.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import socket
import tempfile
from pathlib import Path

_RANGE = range(12_000, 20_000)
"""Below what the system gives (net.ipv4.ip_local_port_range), what the tests of Slurm use, and what make up chooses."""
_CLAIMED = Path(tempfile.gettempdir()) / "train-test-ports"
"""A file for each port that a test process has taken: the id of the process."""
_own: set[Path] = set()


def free_port() -> int:
    """A port where nobody listens, and that no other caller on this machine is given while this process lives."""
    _CLAIMED.mkdir(exist_ok=True)
    draw = random.SystemRandom()
    while True:
        port = draw.choice(_RANGE)
        if _claim(_CLAIMED / str(port)):
            with contextlib.suppress(OSError), socket.socket() as one:
                one.bind(("0.0.0.0", port))
                return port


def _claim(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        with contextlib.suppress(OSError, ValueError):
            if not Path(f"/proc/{int(path.read_text())}").exists():  # its tests have ended: for the next one
                path.unlink()
        return False
    with os.fdopen(fd, "w") as file:
        file.write(str(os.getpid()))
    _own.add(path)
    return True


@atexit.register
def _leave() -> None:
    for path in _own:
        path.unlink(missing_ok=True)
