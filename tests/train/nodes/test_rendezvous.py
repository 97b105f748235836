"""Nodes meet by torch's rendezvous, all in this process and without ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ports import free_port
from tests.waiting import eventually
from train.nodes import address, rendezvous
from train.nodes.address import Place
from train.nodes.rendezvous import Rendezvous


class Meeting:
    """Nodes that come to a port of the loopback."""

    def __init__(self) -> None:
        self.place, self.came = Place("127.0.0.1", free_port()), list[Rendezvous]()

    def come(self, node: int, id: str = "", least: int = 2, problem: Callable[[Any], str] = lambda _: "") -> Rendezvous:
        hello = {"run": "a", "node": node, "nproc": node + 1, "least": least, "most": 2, "host": "h", "home": "/a"}
        listening = None if node else address.listen(self.place)
        self.came.append(Rendezvous(self.place, hello, listening, problem, id or f"id{node}"))
        return self.came[-1]

    def close(self) -> None:
        for one in reversed(self.came):
            one.close()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.close()


def looked_at(*nodes: Rendezvous, until: Callable[[], Any], what: str) -> None:
    def look() -> bool:
        for one in nodes:
            one.looked = time.monotonic()
        return bool(until())

    eventually(what, look)


def test_nodes_are_in_the_order_of_their_ranks_whoever_came_first(meeting: Meeting) -> None:
    one = meeting.come(1)
    one.join(0)
    looked_at(one, until=lambda: one.problem == "Connection refused", what="a try")
    zero = meeting.come(0)
    zero.join(7)
    looked_at(zero, one, until=lambda: zero.round and one.round, what="a round")
    assert zero.round is not None and zero.round == one.round and zero.round.from_step == 7
    assert [(node["node"], node["id"], node["ranks"]) for node in zero.round.nodes] == [(0, "id0", 1), (1, "id1", 2)]
    assert zero.rank_socket is not None and zero.rank_socket.getsockname()[1] == zero.round.port
    one.publish(bad=True)
    looked_at(zero, one, until=lambda: zero.others[1].get("bad"), what="what the other one publishes")
    before = zero.round.id
    for node in (zero, one):
        node.join(9)
    looked_at(zero, one, until=lambda: zero.round and one.round, what="another round")
    assert zero.round is not None and zero.round.id != before and not zero.others[1].get("bad")


@pytest.mark.minutes
def test_a_node_that_ends_is_noticed_and_another_one_takes_its_place(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LOST", 2.0)
    zero, one = meeting.come(0), meeting.come(1)
    for node in (zero, one):
        node.join(0)
    looked_at(zero, one, until=lambda: zero.round and one.round and zero.lives(1, "id1"), what="a round")
    one.close()
    looked_at(zero, until=lambda: not zero.lives(1, "id1"), what="that it is gone")
    again = meeting.come(1, id="another")
    for node in (zero, again):
        node.join(0)
    looked_at(zero, again, until=lambda: zero.round and again.round, what="a round with another one")
    assert zero.round is not None and zero.round.nodes[1]["id"] == "another"


def test_a_rank_that_is_taken_and_a_node_that_differs_are_refused(meeting: Meeting) -> None:
    zero, one = meeting.come(0), meeting.come(1)
    looked_at(zero, one, until=lambda: zero.lives(1, "id1"), what="that node 1 is there")
    twin = meeting.come(1, id="twin")
    looked_at(zero, one, twin, until=lambda: twin.refused, what="a refusal")
    assert "give it another --node-rank" in twin.refused
    looked_at(zero, one, until=lambda: zero.remark == twin.refused, what="that node 0 hears of it")
    other = meeting.come(1, id="other", problem=lambda zero: f"differs from {zero['id']}")
    looked_at(zero, one, other, until=lambda: other.refused, what="a refusal")
    assert other.refused == "differs from id0" and zero.lives(1, "id1")


def test_clocks_that_differ_are_refused(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting.come(0)
    monkeypatch.setattr(rendezvous, "CLOCK_SKEW", -1.0)
    one = meeting.come(1)
    looked_at(*meeting.came, until=lambda: one.refused, what="a refusal")
    assert "the clock of node 1 (h) is" in one.refused


ENDING = """
import datetime, socket, threading, time
import torch.distributed as dist
from train.signals import leave

with socket.create_server(("127.0.0.1", 0)) as listening:
    port, fd = listening.getsockname()[1], listening.detach()
store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=False, master_listen_fd=fd)

def ask():
    while True:
        store.set("key", "value")

for _ in range(3):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(0.5)
leave(75)
"""


def test_an_agent_whose_threads_are_busy_with_the_store_ends_with_its_own_code() -> None:
    assert subprocess.run([sys.executable, "-c", ENDING], check=False, timeout=60).returncode == 75
