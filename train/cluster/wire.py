"""Messages over a connection: a line of JSON each, and nothing that waits."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

_LONGEST = 1 << 24
"""Bytes of a line: more is none of ours."""

Message = dict[str, Any]
"""What it says is under `is`."""


class Wire:
    """One side of a connection."""

    def __init__(self, one: socket.socket) -> None:
        one.setblocking(False)
        with contextlib.suppress(OSError):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._in, self._out = one, b"", b""
        self.is_open = True

    def send(self, message: Message) -> None:
        """Send it, as soon as it can be."""
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is left."""
        while self._out and self.is_open:
            try:
                self._out = self._out[self._socket.send(self._out) :]
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.close()

    def receive(self) -> list[Message]:
        """What has come. The other side may be gone then: see `is_open`."""
        self.flush()
        while self.is_open:
            try:
                text = self._socket.recv(1 << 16)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                text = b""
            self._in += text
            if not text or len(self._in) > _LONGEST:
                self.close()
        *lines, self._in = self._in.split(b"\n")
        found = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict) or not isinstance(message.get("is"), str):
                self.close()  # somebody else's business
                break
            found.append(message)
        return found

    def forget(self) -> None:
        """Close it here; in the process that this one was forked from it stays open."""
        self._socket.close()

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(OSError):
            self._socket.close()
