"""Whoever comes to the table, whatever they say: node 0 goes on, and nobody else waits for them."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ports import free_port
from tests.train.cluster.conftest import wait_until
from tests.train.cluster.test_table import SAME, hello
from train.cluster import address
from train.cluster.address import Place
from train.cluster.host import Host
from train.cluster.member import Member
from train.cluster.table import LOST
from train.cluster.wire import Wire
from train.errors import Refused


class Door:
    """Node 0, where others come to."""

    def __init__(self) -> None:
        self.place = Place("127.0.0.1", free_port())
        self.host = Host(address.listen(self.place), hello(0))
        self.slowest = 0.0
        """Seconds, of one look."""
        self._open: list[socket.socket] = []

    def tick(self) -> None:
        begun = time.monotonic()
        self.host.tick()
        self.slowest = max(self.slowest, time.monotonic() - begun)

    def knock(self) -> socket.socket:
        """Come as a stranger who never waits."""
        one = socket.create_connection((self.place.host, self.place.port))
        one.setblocking(False)
        self._open.append(one)
        return one

    def say(self, text: bytes) -> socket.socket:
        """Say it as a stranger, as long as node 0 listens."""
        one, rest = self.knock(), memoryview(text)
        with contextlib.suppress(ConnectionError):
            for _ in range(3000):
                with contextlib.suppress(BlockingIOError):
                    rest = rest[one.send(rest) :]
                self.tick()
                if not rest:
                    break
        return one

    def is_shut(self, one: socket.socket) -> bool:
        """Whether node 0 has let this stranger go."""
        self.tick()
        with contextlib.suppress(BlockingIOError):
            try:
                return not one.recv(1 << 20)
            except ConnectionError:
                return True
        return False

    def seats(self, node: int = 1) -> bool:
        """Whether a node that comes is seated."""
        member = Member(self.place, hello(node), None)
        until = time.monotonic() + 20
        while not any(said["is"] in ("waiting", "begin") for said in member.heard) and time.monotonic() < until:
            member.tick()
            self.tick()
            time.sleep(0.001)
        found = [said["is"] for said in member.heard]
        member.close()
        return "waiting" in found

    def close(self) -> None:
        for one in self._open:
            one.close()
        self.host.close()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


def line(**changes: Any) -> bytes:
    return json.dumps(hello(1) | changes).encode() + b"\n"


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"5\n", b"{}\n", b'{"is": 5}\n', b'{"is": "begin"}\n',
        b'{"is": "hello"}\n', b'{"is": "alive"}\n', b"x" * (3 << 20), b"[" * 500_000 + b"\n",
        b'{"is":"hello","a":' + b"[" * 500_000 + b"\n", line(same=5), line(same=SAME | {"config": 5}),
        line(same=SAME | {"config": []}), line(same={}), line(node=True), line(nproc=-1), line(chosen=[]),
    ],
)  # fmt: skip
def test_what_no_node_says_is_shown_the_door(door: Door, said: bytes) -> None:
    stranger = door.say(said)
    wait_until(lambda: door.is_shut(stranger), "an end of it")
    assert door.seats()


def test_one_that_is_refused_is_not_answered_again(door: Door) -> None:
    stranger = door.say(line(run="b") * 20_000)
    wait_until(lambda: door.is_shut(stranger), "an end of it")
    assert door.slowest < LOST / 4
    assert door.seats()


def test_who_is_refused_and_goes_on_listening_is_let_go(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.cluster.host._STRANGERS", 0.5)
    for said in (line(run="b"), b'{"is": "hel', b""):
        stranger = door.say(said)
        wait_until(lambda one=stranger: door.is_shut(one), "an end of it")  # type: ignore[misc]


def test_a_crowd_that_says_nothing_keeps_no_node_out(door: Door) -> None:
    for count in range(1000):
        door.knock()
        if count % 50 == 0:
            door.tick()
    assert door.seats()
    assert len(door.host._wires) <= 300


def test_by_which_address_another_machine_has_come(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = door.say(b'{"is": "')
    one = door.say(line())
    wait_until(lambda: not door.is_shut(one) and any(map(door.host.table.knows, range(100))), "its seat")
    assert door.host.reached == "" and not door.is_shut(stranger)  # it is on this machine
    monkeypatch.setattr(Wire, "here", "10.0.0.5")
    assert door.host.reached == "10.0.0.5"


def test_one_that_does_not_read_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    wire = Wire(ours)
    with theirs:
        for _ in range(200):
            if wire.is_open:
                wire.send({"is": "x", "text": "x" * (1 << 20)})
        assert not wire.is_open


def test_a_long_report_arrives_whole_in_many_looks() -> None:
    ours, theirs = socket.socketpair()
    said: list[Any] = []
    sender, taker = Wire(ours), Wire(theirs)
    sender.send({"is": "x", "text": "y" * (5 << 20)})
    wait_until(lambda: bool(said.extend(taker.receive()) or sender.flush() or said), "all of it")
    assert len(said[0]["text"]) == 5 << 20
    sender.close()
    taker.close()


@pytest.mark.parametrize("host", ["a..b", ".", "x" * 70, "ü" * 70])
def test_what_no_host_can_be_called_is_refused(host: str) -> None:
    with pytest.raises(Refused, match="no host can be called"):
        address.resolve(Place(host, 1))
