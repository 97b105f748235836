"""Messages over a connection: a line of JSON each, and nothing that waits."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

LONGEST = 1 << 24
"""Bytes of a line: more is none of ours."""
_AT_ONCE = 1 << 20
"""Bytes that are taken in at a time: who sends without end keeps nobody else waiting."""
_UNREAD = 1 << 26
"""Bytes that wait for a side which does not read; then it is given up."""

Message = dict[str, Any]
"""What it says is under `is`."""


class Wire:
    """One side of a connection.

    Args:
        longest: bytes of a line that the other side may say.
    """

    def __init__(self, one: socket.socket, longest: int = LONGEST) -> None:
        one.setblocking(False)
        with contextlib.suppress(OSError):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._in, self._out = one, bytearray(), bytearray()
        self.longest, self.is_open = longest, True

    @property
    def here(self) -> str:
        """The address of this side; '' where it is closed."""
        with contextlib.suppress(OSError):
            return str(self._socket.getsockname()[0]).removeprefix("::ffff:")  # of IPv4, taken in by a socket of IPv6
        return ""

    def send(self, message: Message) -> None:
        """Send it, as soon as it can be."""
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is left."""
        while self._out and self.is_open:
            try:
                del self._out[: self._socket.send(self._out)]
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.close()
        if len(self._out) > _UNREAD:
            self.close()

    def receive(self) -> list[Message]:
        """What has come. The other side may be gone then: see `is_open`."""
        self.flush()
        self._take_in()
        *lines, self._in = self._in.split(b"\n")
        if len(self._in) > self.longest:
            self.close()
        found = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict) or not isinstance(message.get("is"), str):
                self.close()  # somebody else's business
                break
            found.append(message)
        return found

    def _take_in(self) -> None:
        """Read what there is, up to a limit."""
        taken = 0
        while self.is_open and taken < _AT_ONCE:
            try:
                text = self._socket.recv(1 << 16)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                text = b""
            self._in += text
            taken += len(text)
            if not text:
                self.close()

    def close(self) -> None:
        self.is_open = False
        self._out.clear()
        with contextlib.suppress(OSError):
            self._socket.close()
