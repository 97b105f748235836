"""A command in a terminal of its own, as a user has it: keys are typed into it, and it has a width."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.train.conftest import Station

OWN = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execv(sys.argv[1], sys.argv[1:])"
"""Take the terminal as one's own, then be the command."""


class Terminal:
    """A command in a terminal of its own."""

    def __init__(
        self, station: Station, *arguments: str, environment: dict[str, str] | None = None, columns: int = 160
    ) -> None:
        self.output = ""
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 48, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN, sys.executable, "-m", "train", *arguments], cwd=station.folder,
            env=station.environment(arguments[0]) | (environment or {}), stdin=inner, stdout=inner, stderr=inner,
            start_new_session=True,
        )  # fmt: skip
        os.close(inner)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                text = os.read(self._fd, 4096)
            except OSError:
                return
            self.output += text.decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def ctrl_c(self) -> None:
        os.write(self._fd, b"\x03")

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in self.output:
            assert time.monotonic() < deadline and self.process.poll() is None, self.output
            time.sleep(0.02)

    def end(self) -> int:
        """Wait for its end. Its exit code."""
        code = self.process.wait(60)
        self._reader.join(5)
        return code
