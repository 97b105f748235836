"""A node's seat at the table, as its agent has it: what reaches it, and what it makes of that."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from train.cluster import address
from train.record import store
from train.runs.nodes import Nodes, Settings

CONFIG = "seed = 0\ncpu_threads = 1\n"


class Seats:
    """Agents of the nodes of a run, all in this process and without ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rendezvous = folder, f"localhost:{free_port()}"
        self.nodes: list[Nodes] = []

    def come(self, node: int, config: str = CONFIG, least: int = 2, most: int = 2) -> Nodes:
        """A node comes."""
        settings = Settings(least, most, node, self.rendezvous)
        files: dict[str, str | bytes] = {"config.toml": config}
        run = store.create(self.folder / f"node{node}", "a", files, {"world_size": 2, "chosen": ["cpu_threads"]})
        listening = None if node else address.listen(settings.place)
        self.nodes.append(Nodes(run, 1, settings, listening))
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
