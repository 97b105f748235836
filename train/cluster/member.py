"""A node's side of the table: comes to HOST:PORT, comes again when the way was cut, and hears what is said there.

Who looks after it may wait for a disk: signs of life are given by a thread, for a while.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

from train.cluster.address import Place, resolve
from train.cluster.host import Host
from train.cluster.table import LOST
from train.cluster.wire import Message, Wire
from train.errors import Refused

_AGAIN = 0.5
"""Seconds between two tries to reach the table."""
_EVERY = 1.0
"""Seconds between two signs of life."""
HUNG = 120.0
"""Seconds for which the thread goes on where nobody looks after this: a server of files that another one takes over
from takes less. What has not come back then hangs, and the others are not to wait for it."""


class Member:
    """One node of a run.

    Args:
        place: where the table is.
        hello: what this node says of itself.
        host: on node 0, which serves the table; served whenever this is looked after.
    """

    def __init__(self, place: Place, hello: Message, host: Host | None) -> None:
        self.place, self.hello, self.host = place, hello, host
        self.is_away = False
        """Whether it does not come again yet: it has not come to terms with what it lost."""
        self.problem = "nobody has answered yet"
        """Why the table cannot be reached; '' where it can."""
        self.address = ""
        """Where the table was reached last; '' while it never was. Its name may not resolve at the moment."""
        self.heard: collections.deque[Message] = collections.deque()
        """What was said, to be taken from the left. `lost`: the table is gone, and the round with it."""
        # held by whoever touches a socket; by the same thread more than once, also after a fork that it has made
        self._lock = threading.RLock()
        self._looked, self._is_closed = time.monotonic(), False
        self._thread: threading.Thread | None = None
        self._wire: Wire | None = None
        self._trying: socket.socket | None = None
        self._to = ""
        self._tried, self._signed, self._last = 0.0, 0.0, 0.0

    def tick(self) -> None:
        """Look after the connection. To be called several times a second."""
        with self._lock:
            self._looked = time.monotonic()
            if self._wire is None and not self.is_away and not self.heard:  # that it was lost, for one
                self._come(self._looked)
            self._serve()

    def keep_signing(self) -> None:
        """From now on a thread gives the signs of life that are due, also while `tick` is not called for a while. It
        takes in what comes, and decides nothing: a connection that is lost is only made again by `tick`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._sign, daemon=True, name="signs-of-life")
            self._thread.start()

    def _sign(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for who waits
        while not self._is_closed:
            time.sleep(_EVERY / 2)
            with self._lock, contextlib.suppress(OSError):  # `tick` meets it, too
                if not self._is_closed and time.monotonic() - self._looked < HUNG:
                    self._serve()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """While this process looks at what the thread changes."""
        with self._lock:
            yield

    def serve(self) -> None:
        """On node 0: look after the table alone."""
        with self._lock:
            if self.host is not None:
                self.host.tick()

    def _serve(self) -> None:
        """Take in what has come, and give the signs of life that are due."""
        self.serve()
        now = time.monotonic()
        if self._wire is None:
            return
        for message in self._wire.receive():
            self._last = now
            if message["is"] == "bye":
                self._wire.close()
            elif message["is"] != "alive":
                self.heard.append(message)
        if now - self._last > LOST:
            self._wire.close()
        if not self._wire.is_open:
            self._wire, self._tried, self.problem = None, now, "the connection was lost"
            self.heard.append({"is": "lost"})
        elif now - self._signed > _EVERY:
            self._signed = now
            self.say({"is": "alive"})

    def say(self, message: Message) -> None:
        """Say something at the table; of a node that is not there nobody hears."""
        with self._lock:
            if self._wire is not None:
                self._wire.send(message)
            self.serve()

    def _come(self, now: float) -> None:
        """Connect, without waiting."""
        if self._trying is None:
            if now - self._tried < _AGAIN:
                return
            self._tried = now
            try:
                self._to = self._address()
            except Refused as error:
                self.problem = str(error)
                return
            self._trying = socket.socket(socket.AF_INET6 if ":" in self._to else socket.AF_INET, socket.SOCK_STREAM)
            self._trying.setblocking(False)
            code = self._trying.connect_ex((self._to, self.place.port))
            if code not in (0, errno.EINPROGRESS):
                self._give_up(code)
            return
        code = self._trying.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._give_up(code)
            return
        try:
            if self._trying.getpeername() == self._trying.getsockname():  # TCP can connect a free port with itself
                self._give_up(errno.ECONNREFUSED)
                return
        except OSError:
            if now - self._tried > LOST:
                self._give_up(errno.ETIMEDOUT)
            return
        self._wire, self._trying, self._last, self.problem = Wire(self._trying), None, now, ""
        self.address = self._to
        self._wire.send(self.hello)

    def _address(self) -> str:
        if self.host is not None:  # it listens where others come to, or everywhere
            return self.host.address
        return resolve(self.place)

    def _give_up(self, code: int) -> None:
        assert self._trying is not None
        self._trying.close()
        self._trying = None
        self.problem = f"{os.strerror(code)}"
        if code == errno.ETIMEDOUT:
            self.problem = "no answer: a firewall drops it, or the machine is down"

    def close(self) -> None:
        """Leave the table."""
        with self._lock:
            self._is_closed = True
            if self._wire is not None:
                self._wire.flush()
                self._wire.close()
            if self._trying is not None:
                with contextlib.suppress(OSError):
                    self._trying.close()
            if self.host is not None:
                self.host.close()
