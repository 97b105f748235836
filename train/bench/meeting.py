"""Machines that measure together: node 0 says what, all do the same in rounds, and all show the same.

Node 0 serves a store where the others come to. The ranks of each round meet in it, under a name of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from train.cluster import address
from train.cluster.address import Place
from train.errors import Refused
from train.parallel.seat import Seat

_MEET = datetime.timedelta(minutes=5)
"""In which the ranks of a round have come, once their machines have begun it."""
_LONGEST = datetime.timedelta(days=1)
"""Of a round, and of what node 0 measures alone. A machine that dies is noticed by its connection, or by its ranks'."""


@dataclasses.dataclass(frozen=True)
class Round:
    """What the ranks of a machine are to know to meet those of the others."""

    node: int
    nodes: int
    host: str
    port: int
    number: int
    environment: dict[str, str]

    def seat(self, local_rank: int, local_size: int) -> Seat:
        """Of a rank; every machine has as many."""
        os.environ.update(self.environment)
        size = local_size * self.nodes
        come = functools.partial(_come, self.host, self.port, f"round{self.number}")
        leads = tuple(range(0, size, local_size))
        return Seat(local_size * self.node + local_rank, size, local_rank, local_size, come, leads)


class Meeting:
    """The seat of this machine.

    Args:
        wait_minutes: how long to wait for the others.

    Raises:
        Refused: they do not come, or the port is taken.
    """

    def __init__(self, node: int, nodes: int, rendezvous: str, wait_minutes: float) -> None:
        self.node, self.nodes, self._number = node, nodes, 0
        self._place = place = address.parse(rendezvous)
        self.host, self.port = address.resolve(place), place.port
        self._wait = wait = datetime.timedelta(minutes=wait_minutes)
        if node == 0:
            listening = address.listen(place)
            self.host = address.own_side(listening)
            listening.setblocking(True)
            self._store = dist.TCPStore(
                self.host, self.port, is_master=True, timeout=wait, wait_for_workers=False, use_libuv=False,
                master_listen_fd=listening.detach(),
            )  # fmt: skip
        else:
            _wait_for_node_0(place, nodes, wait.total_seconds())
            self._store = _store(self.host, self.port, wait)
            self._store.set(f"reached{node}", self.host)

    def everybody(self, own: Any) -> list[Any]:
        """What every machine says of itself, on all of them; plain values. The first thing that they do.

        Raises:
            Refused: some have not come in time.
        """
        self._store.set(f"here{self.node}", json.dumps(own))
        keys, until = [f"here{node}" for node in range(self.nodes)], time.monotonic() + self._wait.total_seconds()
        while missing := [str(node) for node, key in enumerate(keys) if not self._is_there(key)]:
            if time.monotonic() > until:
                which = f"node{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {self.nodes}"
                raise Refused(f"{which} never came to {self._place}; start the same command there")
            time.sleep(0.2)
        self._store.set_timeout(_LONGEST)
        return [json.loads(self._store.get(key)) for key in keys]

    def _reached(self) -> str:
        """On node 0, by which address another machine has come; '' on the others."""
        others = range(1, self.nodes) if self.node == 0 else ()
        return address.reached_by(self._store.get(f"reached{node}").decode() for node in others)

    def _is_there(self, key: str) -> bool:
        with self._told():
            found = self._store.check([key])  # type: ignore[attr-defined]
        return bool(found)

    def share(self, name: str, value: str | None) -> str:
        """What node 0 says, on every machine.

        Raises:
            Refused: node 0 is gone.
        """
        if self.node == 0:
            assert value is not None
            self._store.set(name, value)
            return value
        with self._told():
            text = self._store.get(name).decode()
        return str(text)

    def begin(self) -> Round:
        """The next round, once all machines are ready for it.

        Raises:
            Refused: node 0 is gone.
        """
        self._number += 1
        with self._told():
            self._store.set(f"ready{self._number}.{self.node}", "")
            self._store.wait([f"ready{self._number}.{node}" for node in range(self.nodes)])
        _, environment = address.interfaces(self.host, self.port, os.environ, self._reached())
        return Round(self.node, self.nodes, self.host, self.port, self._number, environment)

    def close(self) -> None:
        """Leave; node 0 serves until all others have left."""
        self._store.set(f"left{self.node}", "")
        if self.node == 0:
            self._store.wait([f"left{node}" for node in range(self.nodes)], _MEET)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """That node 0 is gone, in words."""
        try:
            yield
        except dist.DistError:
            raise Refused(f"node 0 at {self.host}:{self.port} is gone; start the same command on all again") from None


def _wait_for_node_0(place: Place, nodes: int, seconds: float) -> None:
    """Wait until somebody serves there. torch would wait as well, and fill the terminal with warnings."""
    until, to = time.monotonic() + seconds, (address.resolve(place), place.port)
    while True:
        try:
            with socket.create_connection(to, timeout=5):
                return
        except OSError as error:
            if time.monotonic() > until:
                raise Refused(
                    f"node 0 of {nodes} never came to {place} ({error.strerror or error}); start the same command there"
                ) from None
        time.sleep(0.2)


def _store(host: str, port: int, timeout: datetime.timedelta) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False, use_libuv=False)


def _come(host: str, port: int, name: str) -> dist.Store:
    """Where the ranks of a round meet, in a rank."""
    return dist.PrefixStore(name, _store(host, port, _MEET))
