"""A node's seat at the table, as its agent has it: what reaches it, and what it makes of that."""

from __future__ import annotations

import dataclasses
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.ports import free_port
from train.cluster import address
from train.record import folders, station
from train.signals import StopRequest
from train.supervise.attempts import Supervisor
from train.supervise.decide import Facts, LaunchMode
from train.supervise.nodes import Nodes, Settings, _report

CONFIG = "seed = 0\ncpu_threads = 1\n"


class Seats:
    """Agents of the nodes of a run, all in this process and without ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rendezvous = folder, f"localhost:{free_port()}"
        self.nodes: list[Nodes] = []

    def come(self, node: int, config: str = CONFIG, **settings: Any) -> Nodes:
        """A node comes."""
        given = dataclasses.replace(Settings(2, 2, node, self.rendezvous), **settings)
        files: dict[str, str | bytes] = {"config.toml": config}
        run = folders.create(self.folder / f"node{node}", "a", files, {"world_size": 2, "chosen": ["cpu_threads"]})
        listening = None if node else address.listen(given.place)
        self.nodes.append(Nodes(run, 1, given, listening))
        self.nodes[-1].ready()
        return self.nodes[-1]

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Look after all until it holds."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}"
            for one in self.nodes:
                one.tick()
            time.sleep(0.01)

    def begin(self) -> None:
        self.until(lambda: all(one.begun is not None for one in self.nodes), "a round")

    def close(self) -> None:
        for one in reversed(self.nodes):
            one._member.close()


@pytest.fixture
def seats(tmp_path: Path) -> Iterator[Seats]:
    made = Seats(tmp_path)
    yield made
    made.close()


def test_the_ranks_of_a_round_find_each_other_while_no_name_resolves(
    seats: Seats, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [seats.come(0), seats.come(1)]
    seats.begin()

    def away(*_: object, **__: object) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    for node, one in enumerate(both):
        assert [seat.rank for seat in one.seats()] == [node]
        assert one.interface == "lo"
        assert one.environment()["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_node_that_is_told_late_that_a_round_begins_again_waits_no_longer_than_it_may(
    seats: Seats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off when its ranks had ended, and is back before those of the others have."""
    zero, one = seats.come(0), seats.come(1, wait_minutes=0.02)
    seats.begin()
    report = _report(Facts("a", LaunchMode.LAUNCHED, exits={1: -signal.SIGKILL}), "")
    over = {"is": "over", "round": 1, "report": report}
    one._member.say(over)
    seats.until(lambda: zero.ended, "the end of the round")
    one._member.close()
    seats.until(lambda: one.told, "that the table is gone")
    one.ready()
    seats.until(lambda: one._is_seated, "its seat")
    zero._member.say(over)

    deadline = time.monotonic() + 60

    def look() -> None:
        zero.tick()
        assert time.monotonic() < deadline, "it waits without end"

    monkeypatch.setattr(one, "ready", lambda: None)  # as it has said
    supervisor = Supervisor(one.run, MagicMock(), LaunchMode.LAUNCHED, StopRequest(()), look, lambda _: None, one)
    decision = supervisor._gather()
    assert decision is not None and decision.state is None and "gave up" in decision.why


@pytest.mark.minutes
def test_an_agent_that_waits_for_a_disk_is_there_and_one_that_never_comes_back_is_given_up(
    seats: Seats, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("table", "member"):
        monkeypatch.setattr(f"train.cluster.{module}.LOST", 5.0)
    zero, one = seats.come(0), seats.come(1)
    seats.begin()
    seats.nodes.remove(one)  # nobody looks after it any more
    until = time.monotonic() + 10.0
    seats.until(lambda: time.monotonic() > until, "twice the time after which one is lost that says nothing")
    assert not zero.ended
    monkeypatch.setattr("train.cluster.member.HUNG", 1.0)
    seats.until(lambda: zero.ended, "that it is given up")
    seats.nodes.append(one)
    seats.until(lambda: one.told, "that it finds out")


def test_a_run_whose_node_takes_over_what_was_chosen_stays_one_that_was_started_there(seats: Seats) -> None:
    seats.come(0)
    second = seats.come(1, CONFIG.replace("cpu_threads = 1", "cpu_threads = 2"))
    seats.begin()
    second.take_over()
    assert (second.run.folder / "config.toml").read_text() == CONFIG
    assert station.has_started(second.run.folder, second.run.read())
