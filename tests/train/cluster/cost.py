"""What the table of a run costs with many machines: docs/clusters.md has its figures.

    python -m tests.train.cluster.cost [NODES …]

One process is node 0, as its agent is; another one is all others. Both look after their connections 50 times a second,
as a supervisor does. A report has the outcomes of 8 ranks, as the one of a node does whose ranks have stopped.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ports import free_port
from train.cluster import address, same
from train.cluster.address import Place
from train.cluster.host import Host
from train.cluster.member import Member
from train.record.outcome import Kind, Outcome

RANKS, STEADY, MUST = 8, 10.0, {"torch": "2.7.1", "config": {f"field{number}": number for number in range(60)}}


def hello(node: int, nodes: int) -> dict[str, Any]:
    return same.hello("a", node, RANKS, nodes, nodes, Path("/runs/a"), MUST, {}, False) | {"host": f"host{node}"}


def report(node: int) -> dict[str, Any]:
    outcomes = [dataclasses.asdict(Outcome(rank=RANKS * node + one, kind=Kind.STOPPED)) for one in range(RANKS)]
    return {"bad": False, "outcomes": outcomes, "exits": {}, "logs": {}, "saved": 100, "regroup": ""}


def until(members: list[Member], heard: Callable[[list[str]], bool]) -> float:
    """Look after them until each has heard it. Returns the seconds that took."""
    began, said = time.perf_counter(), {id(member): [] for member in members}  # type: ignore[var-annotated]
    while not all(heard(said[id(member)]) for member in members):
        for member in members:
            member.tick()
            while member.heard:
                said[id(member)].append(member.heard.popleft()["is"])
        time.sleep(0.02)
        assert time.perf_counter() - began < 120, said
    return time.perf_counter() - began


def life(members: list[Member]) -> tuple[float, float, float]:
    """Meet, sit there for a while, end the round. Returns seconds to meet, of processor a second, and to end."""
    meet = until(members, lambda said: "begin" in said)
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < STEADY:
        for member in members:
            member.tick()
        time.sleep(0.02)
    cpu = (time.process_time() - cpu) / (time.perf_counter() - began)
    for member in members:
        member.say({"is": "over", "round": 1, "report": report(member.hello["node"])})
    return meet, cpu, until(members, lambda said: "reports" in said)


def others(place: Place, nodes: int) -> None:
    life([Member(place, hello(node, nodes), None) for node in range(1, nodes)])


def main() -> None:
    print("nodes  to meet, s  node 0's processor, % of a core  to end a round, s")
    for nodes in map(int, sys.argv[1:] or ("2", "8", "16", "32", "64")):
        place = Place("127.0.0.1", free_port())
        host = Host(address.listen(place), hello(0, nodes))
        process = multiprocessing.get_context("spawn").Process(target=others, args=(place, nodes))
        process.start()
        meet, cpu, end = life([Member(place, hello(0, nodes), host)])
        print(f"{nodes:5}  {meet:10.2f}  {100 * cpu:31.1f}  {end:17.2f}", flush=True)
        for _ in range(20):
            host.tick()
            time.sleep(0.02)
        process.join()
        host.close()


if __name__ == "__main__":
    main()
