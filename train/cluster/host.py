"""Node 0's side of the table: takes in who comes to HOST:PORT, and passes on what the table says. Waits for nothing."""

from __future__ import annotations

import contextlib
import socket
import time

from train.cluster.address import own_side, reached_by
from train.cluster.table import Out, Table
from train.cluster.wire import LONGEST, Message, Wire

_EVERY = 1.0
"""Seconds between two signs of life."""
_STRANGERS = 20.0
"""Seconds in which who has come must have said who it is."""
_MOST_STRANGERS = 256
"""Of them at a time. The one that came first goes for the next: a node says at once who it is, and comes again."""
_OF_STRANGERS = 1 << 20
"""Bytes of a line of theirs."""


class Host:
    """Serves a table.

    Args:
        listening: where the others come to.
        first: what node 0 says of itself.
    """

    def __init__(self, listening: socket.socket, first: Message) -> None:
        self._listening, self._now = listening, time.monotonic
        self.table = Table(first, self._now())
        self._wires: dict[int, Wire] = {}
        self._strangers: dict[int, float] = {}
        """Who is none of the nodes (yet): since when."""
        self._answered: set[int] = set()
        """Strangers that have been told what they came for, and have nothing more to say."""
        self._next, self._signed = 0, 0.0
        self._store: socket.socket | None = None

    @property
    def address(self) -> str:
        """Where this machine itself reaches it."""
        return own_side(self._listening)

    @property
    def reached(self) -> str:
        """The address by which another machine has come to this one; '' where none has."""
        return reached_by(wire.here for key, wire in self._wires.items() if self.table.knows(key))

    def tick(self) -> None:
        """Take in what has come. To be called several times a second."""
        now = self._now()
        if self._store is None:
            self._offer_store()
        self._accept(now)
        for key, wire in list(self._wires.items()):
            for message in wire.receive():
                self._hear(key, message, now)
            if not wire.is_open:
                self._drop(key, now)
        for key, since in list(self._strangers.items()):
            if now - since > _STRANGERS:
                self._drop(key, now)
        self._post(self.table.tick(now))
        if now - self._signed > _EVERY:
            self._signed = now
            for wire in self._wires.values():
                wire.send({"is": "alive"})

    def _accept(self, now: float) -> None:
        with contextlib.suppress(OSError):
            for _ in range(_MOST_STRANGERS):
                one, _ = self._listening.accept()
                self._next += 1
                self._wires[self._next], self._strangers[self._next] = Wire(one, _OF_STRANGERS), now
                if len(self._strangers) > _MOST_STRANGERS:
                    self._drop(next(iter(self._strangers)), now)

    def _hear(self, key: int, message: Message, now: float) -> None:
        try:
            if key in self._strangers:
                self._meet(key, message, now)
            else:
                self._post(self.table.heard(key, message, now))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):  # what no node of this release says
            self._drop(key, now)

    def _meet(self, key: int, message: Message, now: float) -> None:
        """What a stranger says first. One that is no node after that goes when it has heard."""
        if key in self._answered or message["is"] != "hello":
            self._drop(key, now)
            return
        self._answered.add(key)
        self._post(self.table.hello(key, message, now))
        if self.table.knows(key):
            del self._strangers[key]
            self._wires[key].longest = LONGEST

    def _drop(self, key: int, now: float) -> None:
        self._strangers.pop(key, None)
        self._answered.discard(key)
        wire = self._wires.pop(key, None)
        if wire is not None:
            wire.close()
        self._post(self.table.gone(key, now))

    def _post(self, out: Out) -> None:
        for key, message in list(out):
            wire = self._wires.get(key)
            if wire is not None:
                wire.send(message)

    def take_store(self) -> socket.socket:
        """Where the ranks of the round that has just begun meet: node 0's rank 0 serves it."""
        assert self._store is not None
        taken, self._store = self._store, None
        return taken

    def _offer_store(self) -> None:
        """Listen where the ranks of the next round will meet: before they are told, so that it is not taken."""
        self._store = socket.socket(self._listening.family, socket.SOCK_STREAM)
        self._store.bind((self._listening.getsockname()[0], 0))
        self._store.listen(2048)
        self.table.port = int(self._store.getsockname()[1])

    def dismiss(self, line: str) -> None:
        """Tell who waits that nothing comes any more."""
        self._post(self.table.dismiss(line))

    def close(self) -> None:
        """Nobody can come any more."""
        if self._store is not None:
            self._store.close()
        for wire in self._wires.values():
            wire.flush()
            wire.close()
        self._listening.close()
