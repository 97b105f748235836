"""Who sits at node 0's table: who is there, who is missing, when a round begins and ends. Pure: messages and the clock
go in, messages come out.

A round is one attempt of all its nodes. It begins when all are ready, and ends for all when one of them has trouble
or is gone; each says then how its ranks ended, all are told what all have said, and each comes to the same verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from train import screen
from train.cluster import same
from train.cluster.wire import Message
from train.errors import shortened

LOST = 10.0
"""Seconds without a word after which a node is gone. Of one whose processes end, the connection says so at once."""
LAST_CALL = 8.0
"""Seconds that a round which could begin with fewer nodes waits for others, since one came or went."""
UNENDING = 600.0
"""Seconds after which a node whose ranks have not ended with the round is as good as gone: not even SIGKILL ends who
waits for a disk or driver that hangs. Survivors that leave a state of 100 GB behind take 400."""
_PROOF = 3.0
"""Seconds in which a node whose place another one wants shows that it lives."""

Out = Iterator[tuple[int, Message]]
"""Messages and whom they are for."""


@dataclasses.dataclass
class _Guest:
    """A node that has come."""

    key: int
    hello: Message
    seen: float
    place: str = "waiting"
    """Whether it is waiting for a round, in one (running, over: its ranks have ended), or wants a seat (pending)."""
    since: float = 0.0

    @property
    def node(self) -> int:
        return int(self.hello["node"])


class Table:
    """All nodes of a run, as node 0 knows them.

    Args:
        first: what node 0 says of itself; others must say the same.
    """

    def __init__(self, first: Message, now: float) -> None:
        self._first = first
        self.least, self.most = int(first["least"]), int(first["most"])
        self._guests: dict[int, _Guest] = {}
        self.port = 0
        """Where the ranks of the next round will meet."""
        self._changed = now
        self._number = 0
        self._reports: dict[int, Message | None] = {}
        """Of the round's nodes, by node: how its ranks ended; None while they have not."""
        self._names: dict[int, str] = {}
        """The round's nodes in words."""
        self._lost: set[int] = set()
        self._is_ending = self._is_regrouping = False
        self._ending_since = now
        self._said: dict[int, Any] = {}
        self._last: Message | None = None
        """How the last round ended, for a node that was gone before it could be told."""
        self.untold: set[int] = set()
        """Nodes of the last round that have not said that they know how it ended."""

    def hello(self, key: int, hello: Message, now: float) -> Out:
        """A node has come.

        Raises:
            KeyError, TypeError, ValueError: it does not say what a node has to say.
        """
        for name, value in self._first.items():
            if type(hello[name]) is not type(value):
                raise TypeError(name)
        if hello["nproc"] < 1:
            raise ValueError("nproc")
        if not isinstance(hello["same"]["config"], dict):
            raise TypeError("config")
        problem = _told(same.difference(self._first, hello))
        if problem:
            yield key, {"is": "refused", "line": problem}
            yield from self._tell_all({"is": "remark", "line": f"{problem}; it was refused"})
            return
        guest = _Guest(key, hello, now, "pending", now)
        self._guests[key] = guest
        yield from self._seat(guest, now)

    def _seat(self, guest: _Guest, now: float) -> Out:
        other = next((one for one in self._guests.values() if one.node == guest.node and one is not guest), None)
        if other is None:
            guest.place, self._changed = "waiting", now
            if guest.node in self.untold and self._last is not None:
                yield guest.key, self._last
        elif other.seen > guest.since:
            line = (
                f"{same.name_of(guest.hello)} at {guest.hello['home']} comes as node {guest.node}, which "
                f"{same.name_of(other.hello)} at {other.hello['home']} is already; give it another --node-rank"
            )
            line = _told(line)
            del self._guests[guest.key]
            yield guest.key, {"is": "refused", "line": line}
            yield from self._tell_all({"is": "remark", "line": f"{line}; it was refused"})
        elif now - guest.since > _PROOF:  # its connection is stale: maybe this is the same node, back again
            yield other.key, {"is": "bye"}
            yield from self.gone(other.key, now)

    def knows(self, key: int) -> bool:
        """Whether it is a node that has come."""
        return key in self._guests

    def heard(self, key: int, message: Message, now: float) -> Out:
        """A node says something."""
        guest = self._guests.get(key)
        if guest is None:
            return
        guest.seen, said = now, message["is"]
        if said == "over" and message.get("round") == self._number and guest.place == "running":
            guest.place, self._reports[guest.node] = "over", message["report"]
            if message["report"]["bad"]:
                yield from self._end(f"{self._names[guest.node]} has ended", now)
            yield from self._conclude()
        elif said == "trouble" and guest.place == "running":
            yield from self._end(f"{self._names[guest.node]} has lost a rank", now)
        elif said == "ready":
            self.untold.discard(guest.node)
            guest.place, self._changed = "waiting", now
        elif said == "leave":
            self.untold.discard(guest.node)
            yield from self.gone(key, now)
        elif said == "stop":
            yield from self._tell_all({"is": "stop", **message["stop"]}, but=key)

    def gone(self, key: int, now: float) -> Out:
        """A connection is closed, or has been silent for too long."""
        guest = self._guests.pop(key, None)
        self._said.pop(key, None)
        if guest is None or guest.place == "pending":
            return
        self._changed = now
        if guest.place == "running":
            self._lost.add(guest.node)
            yield from self._end(f"{self._names[guest.node]} is gone", now)
            yield from self._conclude()

    def dismiss(self, line: str) -> Out:
        """Nothing begins any more."""
        for guest in list(self._guests.values()):
            if guest.place == "waiting":
                yield guest.key, {"is": "closed", "line": line}

    def tick(self, now: float) -> Out:
        """Called a few times a second."""
        for guest in list(self._guests.values()):
            is_stuck = guest.place == "running" and self._is_ending and now - self._ending_since > UNENDING
            if is_stuck:
                line = f"the ranks of {self._names[guest.node]} cannot be ended; what do they wait for there?"
                yield from self._tell_all({"is": "remark", "line": line})
            if is_stuck or now - guest.seen > LOST:
                yield guest.key, {"is": "bye"}
                yield from self.gone(guest.key, now)
            elif guest.place == "pending":
                yield from self._seat(guest, now)
        waiting = sorted((one for one in self._guests.values() if one.place == "waiting"), key=lambda one: one.node)
        if self._is_running():
            if waiting and not self._is_ending and not self._is_regrouping and self.least < self.most:
                self._is_regrouping = True
                who = " and ".join(same.name_of(one.hello) for one in waiting)
                yield from self._tell_all({"is": "regroup", "why": f"{who} came"}, places=("running",))
        elif self._is_complete(waiting, now):
            yield from self._begin(waiting)
            return
        yield from self._tell_waiting(waiting)

    def _is_running(self) -> bool:
        return any(one.place in ("running", "over") for one in self._guests.values())

    def _is_complete(self, waiting: list[_Guest], now: float) -> bool:
        if not waiting or waiting[0].node != 0 or len(waiting) < self.least:
            return False
        return len(waiting) >= self.most or now - self._changed >= LAST_CALL

    def _begin(self, waiting: list[_Guest]) -> Out:
        self._number += 1
        self._reports = {one.node: None for one in waiting}
        self._names = {one.node: same.name_of(one.hello) for one in waiting}
        self._lost, self._is_ending, self._is_regrouping, self._last, self.untold = set(), False, False, None, set()
        nodes = [{"node": one.node, "host": one.hello["host"], "ranks": one.hello["nproc"]} for one in waiting]
        # a node 0 that is new has chosen by what it is itself, and the run has begun with what another one chose
        chosen = next((one.hello["chosen"] for one in waiting if one.hello["has_begun"]), self._first["chosen"])
        message = {"is": "begin", "round": self._number, "nodes": nodes, "port": self.port, "chosen": chosen}
        for one in waiting:
            one.place, one.hello = "running", one.hello | {"chosen": chosen, "has_begun": True}
            self._said.pop(one.key, None)
            yield one.key, message

    def _end(self, why: str, now: float) -> Out:
        if not self._is_ending:
            self._is_ending, self._ending_since = True, now
            yield from self._tell_all({"is": "end", "why": why}, places=("running",))

    def _conclude(self) -> Out:
        if any(self._reports[node] is None and node not in self._lost for node in self._reports):
            return
        self.untold = set(self._reports) - self._lost
        waiting = [one for one in self._guests.values() if one.place == "waiting"]
        self._last = {
            "is": "reports", "round": self._number, "lost": [self._names[node] for node in sorted(self._lost)],
            "came": [same.name_of(one.hello) for one in waiting if one.node not in self.untold],
            "reports": {str(node): report for node, report in self._reports.items() if report is not None},
        }  # fmt: skip
        for guest in self._guests.values():
            if guest.place == "over":
                guest.place = "told"
                yield guest.key, self._last
            elif guest in waiting and guest.node in self.untold:  # its ranks had ended, it was cut off, and is back
                yield guest.key, self._last

    def _tell_waiting(self, waiting: list[_Guest]) -> Out:
        """Say who is missing, whenever that has changed."""
        here = {one.node for one in self._guests.values()}
        missing = [node for node in range(self.most) if node not in here]
        said = {"is": "waiting", "missing": missing, "here": len(here), "running": self._is_running()}
        for one in waiting:
            if self._said.get(one.key) != said:
                self._said[one.key] = said
                yield one.key, said

    def _tell_all(self, message: Message, but: int | None = None, places: tuple[str, ...] = ()) -> Out:
        for guest in list(self._guests.values()):
            if guest.key != but and guest.place != "pending" and (not places or guest.place in places):
                yield guest.key, message


def _told(line: str) -> str:
    """A line that terminals and run.json can take, whatever the words are that somebody else gave."""
    return screen.printable(shortened(line))
