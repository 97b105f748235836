"""This node among those of its run, for who supervises its ranks: waits for the others, hears how they are, tells how
its own ranks ended. What becomes of the run is decided on every node alike, from what all have said (verdict.py)."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from train.cluster import WAIT_MINUTES, address, same
from train.cluster.address import Place
from train.cluster.host import Host
from train.cluster.member import Member
from train.cluster.table import LOST
from train.cluster.wire import Message
from train.parallel.seat import Seat
from train.record import station
from train.record.durable import write_atomically
from train.record.outcome import Kind, Outcome
from train.record.record import Record
from train.record.store import Run
from train.supervise.decide import Asked, Facts

_LINGER = 60.0
"""Seconds for which node 0, when its run has ended, waits for a node that does not know it yet."""
_LAST_WORDS = 4000
"""Characters of the log of a rank that failed, which travel."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """A node's place in its run, as run.json keeps it under `cluster`."""

    least: int
    most: int
    node: int
    rendezvous: str
    wait_minutes: float = WAIT_MINUTES

    @property
    def place(self) -> Place:
        return address.parse(self.rendezvous)

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most


def settings_of(record: Mapping[str, Any]) -> Settings | None:
    """Of a run's record; None: it is on one machine alone."""
    return Settings(**record["cluster"]) if record.get("cluster") else None


class Nodes:
    """The seat of this node.

    Args:
        nproc: ranks of this node.
        listening: on node 0, where the others come to.
    """

    def __init__(self, run: Run, nproc: int, settings: Settings, listening: socket.socket | None) -> None:
        self.run, self.settings = run, settings
        hello = _hello(run, nproc, settings)
        host = Host(listening, hello) if listening is not None else None
        self._member = Member(settings.place, hello, host)
        self._store: socket.socket | None = None
        self._missing: list[int] = []
        self._is_seated = False
        self.begun: Message | None = None
        """The round that this node is in, or is to begin."""
        self.refused = ""
        self.closed = ""
        """That the others have come to an end without this node."""
        self.remarks: list[str] = []
        """Lines for the terminal."""
        self._remark = ""
        """The last of them, while this node waits."""
        self.ended = ""
        """Why the round is over, where this node did not end it."""
        self.regroup = ""
        """Why the round is to stop, to begin anew."""
        self.told: Message | None = None
        """How the ranks of all nodes ended."""
        self.stop: Mapping[str, Any] | None = None
        """What another node says of a stop that it was asked for."""
        self.is_stopping = False
        """Whether all nodes are to stop."""
        self._is_troubled = False

    def tick(self) -> None:
        """Look after the table. To be called several times a second."""
        self._member.tick()
        while self._member.heard:
            self._hear(self._member.heard.popleft())

    def _hear(self, message: Message) -> None:
        said = message["is"]
        if said == "begin":
            self.begun, self.told, self.ended, self.regroup, self._is_troubled = message, None, "", "", False
            self._remark = ""
            if self._member.host is not None:
                with self._member.still():
                    self._store = self._member.host.take_store()
        elif said == "waiting":
            self._missing, self._is_seated = message["missing"], True
        elif said == "refused":
            self.refused = message["line"]
        elif said == "closed":
            self.closed = message["line"]
        elif said == "remark":
            self._remark = message["line"]
            self.remarks.append(self._remark)
        elif said == "end":
            self.ended = message["why"]
        elif said == "regroup":
            self.regroup = message["why"]
        elif said == "reports":
            self.told = message
        elif said == "stop":
            self.stop, self.is_stopping = message, True
        elif said == "lost":
            self._is_seated = False
            self._member.is_away = self.begun is not None  # or a round might begin while its ranks still end
            if self.begun is not None and self.told is None:
                self.ended = self.ended or f"{_names(self.begun)[0]} is gone"
                self.told = {"lost": [_names(self.begun)[0]], "came": [], "reports": {}}

    def waiting_for(self) -> str:
        """Whom this node waits for, in a line."""
        return "; ".join(filter(None, [self._missing_ones(), self._remark]))

    def _missing_ones(self) -> str:
        where, most = self.settings.rendezvous, self.settings.most
        if self.settings.node and not self._is_seated:
            return f"waiting for node 0 of {most} at {where} ({self._member.problem or 'connected'})"
        names = ", ".join(map(str, self._missing))
        if self._missing:
            return f"waiting for node{'s' if len(self._missing) > 1 else ''} {names} of {most} at {where}"
        return f"waiting for the other nodes to be ready at {where}"

    def ready(self) -> None:
        """This node waits for the next round."""
        self.begun, self.told, self.ended, self.regroup = None, None, "", ""
        self._member.is_away = False
        self._member.keep_signing()
        self._member.say({"is": "ready"})

    def seats(self) -> list[Seat]:
        """Of the ranks of this node in the round that has begun."""
        assert self.begun is not None
        counts = [node["ranks"] for node in self.begun["nodes"]]
        leads = tuple(itertools.accumulate(counts[:-1], initial=0))
        mine = next(place for place, node in enumerate(self.begun["nodes"]) if node["node"] == self.settings.node)
        return [
            Seat(leads[mine] + local, sum(counts), local, counts[mine], leads=leads) for local in range(counts[mine])
        ]

    @property
    def meeting(self) -> dict[str, Any]:
        """Where the ranks of the round meet: `host` and `port`."""
        assert self.begun is not None
        return {"host": self._member.address, "port": self.begun["port"]}

    def take_store(self) -> socket.socket | None:
        """On the machine of rank 0: the socket that rank 0 listens with there."""
        store, self._store = self._store, None
        return store

    def environment(self) -> dict[str, str]:
        """What the ranks of this node get besides."""
        _, wanted = self._interfaces(os.environ)
        return wanted | {"GROUP_RANK": str(self.settings.node)}

    @property
    def interface(self) -> str:
        """The one that leads to the others."""
        return self._interfaces({})[0]

    def _interfaces(self, environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        host = self._member.host
        with self._member.still():
            reached = host.reached if host is not None else ""
        return address.interfaces(self._member.address, self.settings.place.port, environ, reached)

    def names(self) -> list[str]:
        """The nodes of the round, in words."""
        return _names(self.begun) if self.begun is not None else []

    def take_over(self) -> None:
        """Take what no user has set of the configuration from where the run has begun, so that all compute alike, and
        as before."""
        assert self.begun is not None
        path = self.run.folder / "config.toml"
        text = before = path.read_text(encoding="utf-8")
        for name, value in self.begun["chosen"].items():
            text = re.sub(rf"(?m)^{name} = .*$", f"{name} = {int(value)}", text)
        if text != before:
            write_atomically(path, text)
            self.run.update(lambda record: record.update(cast(Record, station.mark(self.run.folder, record))))
        self._member.hello |= {"chosen": self.begun["chosen"], "has_begun": True}

    def trouble(self) -> None:
        """A rank of this node is dead, and the others will be: the others need not wait to find out."""
        if not self._is_troubled:
            self._is_troubled = True
            self._member.say({"is": "trouble"})

    def ask_stop(self, asked: Asked) -> None:
        """Tell the others once that a stop is wanted."""
        if not self.is_stopping or asked.now:
            self.is_stopping = True
            self._member.say({"is": "stop", "stop": {"by": asked.by, "words": asked.words, "now": asked.now}})

    def exchange(self, facts: Facts, look: Callable[[], Asked | None]) -> Facts:
        """Tell how the ranks of this node ended, wait for what the others say, and put it together.

        Args:
            look: called meanwhile. Returns a stop that is wanted now, whoever cannot end.
        """
        assert self.begun is not None
        report = _report(facts, self.regroup or self._why_it_leaves(facts))
        self._member.say({"is": "over", "round": self.begun["round"], "report": report})
        at_once, until = None, math.inf
        while self.told is None and time.monotonic() < until:
            at_once = look()
            until = min(until, time.monotonic() + LOST) if at_once is not None else until
            time.sleep(0.02)
        if self.told is None:
            others = [same.name_of(node) for node in self.begun["nodes"] if node["node"] != self.settings.node]
            self.told = {"reports": {}, "lost": others, "came": []}
            facts = dataclasses.replace(facts, asked=at_once)
        reports = self.told["reports"] | {str(self.settings.node): report}
        return merged(facts, reports, self.told["lost"], self.told["came"])

    def _why_it_leaves(self, facts: Facts) -> str:
        """What the others are told, who go on; '' where this node does, too, or all are to stop."""
        if facts.asked is None or not facts.leaves:
            return ""
        return f"{same.name_of(self._member.hello)} leaves ({facts.asked.words})"

    def facts_of_others(self, facts: Facts) -> Facts:
        """What the others say of a round that this node was in, and did not live to see the end of."""
        assert self.told is not None
        return merged(facts, self.told["reports"], self.told["lost"], [])

    def leave(self, goes_on: bool = False) -> None:
        """This node has written down how its run ended. Node 0 stays until all others know it, too.

        Args:
            goes_on: the others do not end: without node 0 they wait for it.
        """
        self._member.say({"is": "leave"})
        host, until = self._member.host, time.monotonic() + _LINGER
        while host is not None and host.table.untold and time.monotonic() < until:
            self._member.serve()
            time.sleep(0.02)
        if host is not None and not goes_on:
            name = self.run.name
            with self._member.still():
                host.dismiss(f"the other nodes have ended {name}; on this one: train resume {name} --nnodes 1")
        self._member.close()


def _names(begun: Message) -> list[str]:
    return [same.name_of(node) for node in begun["nodes"]]


def _hello(run: Run, nproc: int, settings: Settings) -> Message:
    import torch

    must, chosen = same.of_run(run)
    must["torch"] = torch.__version__
    least, most, has_begun = settings.least, settings.most, bool(run.read()["attempts"])
    return same.hello(run.name, settings.node, nproc, least, most, run.folder.resolve(), must, chosen, has_begun)


def _report(facts: Facts, regroup: str) -> Message:
    """What the others are to know of how the ranks of this node ended."""
    outcomes = [dataclasses.asdict(one) for one in facts.outcomes.values()]
    asked = facts.asked
    return {
        "bad": bool(facts.exits or facts.hang or facts.problem or any(o.is_fault for o in facts.outcomes.values())),
        "outcomes": outcomes,
        "exits": {str(rank): code for rank, code in facts.exits.items()},
        "logs": {str(rank): text[-_LAST_WORDS:] for rank, text in facts.logs.items() if rank in facts.exits},
        "hang": facts.hang, "problem": facts.problem, "killed_at": facts.killed_at,
        "asked": {"by": asked.by, "words": asked.words, "now": asked.now} if asked and not facts.leaves else None,
        "saved": facts.saved, "is_ready": facts.is_ready, "progress": facts.progress, "deaths": facts.deaths,
        "regroup": regroup,
    }  # fmt: skip


def merged(facts: Facts, reports: Mapping[str, Message], lost: list[str], came: list[str]) -> Facts:
    """One node's facts with what all nodes say.

    Args:
        lost: nodes that are gone. came: nodes that wait for the next round.
    """
    said = [reports[node] for node in sorted(reports, key=int)]

    def first(key: str) -> Any:
        return next((report[key] for report in said if report[key]), type(said[0][key])() if said else None)

    def by_rank(key: str) -> dict[int, Any]:
        return {int(rank): value for report in said for rank, value in report[key].items()}

    outcomes = [Outcome(**found | {"kind": Kind(found["kind"])}) for report in said for found in report["outcomes"]]
    asked = next((Asked(**report["asked"]) for report in said if report["asked"]), None)
    if facts.asked is not None and not (facts.leaves and asked is not None):  # what all are to do goes before
        asked = facts.asked
    return dataclasses.replace(
        facts,
        outcomes={outcome.rank: outcome for outcome in outcomes},
        exits=by_rank("exits"),
        logs=by_rank("logs"),
        hang=first("hang") or "",
        problem=first("problem") or "",
        killed_at=first("killed_at") or None,
        asked=asked,
        saved=max((report["saved"] for report in said), default=facts.saved),
        is_ready=any(report["is_ready"] for report in said),
        progress=any(report["progress"] for report in said),
        deaths=max((report["deaths"] for report in said), default=facts.deaths),
        regroup=first("regroup") or (f"{' and '.join(came)} came" if came else ""),
        came=" and ".join(came),
        leaves=facts.leaves and asked is facts.asked and len(said) > 1,
        lost=" and ".join(lost),
    )
