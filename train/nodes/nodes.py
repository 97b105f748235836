"""The nodes of a run as one node sees them, for the loop that supervises its ranks.

All nodes start and end an attempt together. Each node publishes how its ranks ended. Node 0 decides what happens to the
run (decide.py), and the others carry out its decision. For how nodes find each other see rendezvous.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, cast

from .. import infiniband, screen
from ..errors import Refused, shortened
from ..parallel.rank_env import RankEnv
from ..run.durable import write_atomically
from ..run.record import Record
from ..run.run_folder import Run
from ..run.spec import Spec
from ..supervise.decide import Decision, Facts, StopCause, decide
from ..supervise.timeouts import JOINING, LINGER, SHARED_FOLDER, WAIT_MINUTES
from . import address, node_checks
from .address import Place
from .node_checks import name_of
from .node_reports import decision_of, is_bad, merged, of_rank_0, report_of
from .rendezvous import Public, Rendezvous, Round


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A node's place in its run, stored in run.json under `cluster`."""

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


class Nodes:
    """The nodes of a run, as one of them sees them.

    Args:
        nproc: Number of ranks on this node.
        listening: On node 0, the socket to which the other nodes connect.
    """

    def __init__(
        self, run: Run, spec: Spec, *, nproc: int, settings: Settings, listening: socket.socket | None
    ) -> None:
        self.run, self.settings, self._id = run, settings, uuid.uuid4().hex
        attempts = run.attempts()
        self._has_ended = bool(attempts and attempts[-1]["end"])
        """Whether the end of the last attempt on this node was recorded."""
        self._hello = node_checks.hello(
            run, spec, node=settings.node, nproc=nproc, least=settings.least, most=settings.most
        )
        if listening is not None and node_checks.needs_shared_disk(self._hello):
            (run.folder / node_checks.SHARED).write_text(self._id, encoding="utf-8")
        self._rendezvous = self._reach(listening)
        self._from_step, self._began, self._remark = 0, 0.0, ""
        self.round: Round | None = None
        """The current attempt, or the one about to start."""
        self.remarks: list[str] = []
        """Lines for the terminal."""

    def _reach(self, listening: socket.socket | None = None) -> Rendezvous:
        return Rendezvous(self.settings.place, self._hello, listening, self._problem_with, self._id)

    def _problem_with(self, zero: Public) -> str:
        """Return why this node cannot join node 0's run. Called in a thread of the rendezvous."""
        if zero.get("end") and self._has_ended:
            raise ConnectionError("node 0 is about to leave")  # it publishes an end that this node knows
        problem = node_checks.difference(zero["hello"], self._hello)
        if problem or not node_checks.needs_shared_disk(self._hello):
            return problem
        until = time.monotonic() + SHARED_FOLDER
        while not node_checks.sees_folder(self.run.folder, zero["id"]):
            if time.monotonic() > until:
                return (
                    f"{name_of(self._hello)} does not see {zero['hello']['home']} of {name_of(zero['hello'])}; share "
                    "one --runs among all machines (fsdp and hsdp need it), or use --parallel.strategy ddp"
                )
            time.sleep(0.2)
        return ""

    @property
    def _others(self) -> dict[int, Public]:
        """What the other nodes publish, as a copy: a thread updates the original."""
        return dict(self._rendezvous.others)

    @property
    def _zero(self) -> Public:
        """What node 0 publishes, as seen by the other nodes."""
        return self._others.get(0, {})

    def join(self, from_step: int) -> None:
        """Start to wait for the next attempt; `round` is set when all nodes have started it.

        Args:
            from_step: On node 0, the step after which the attempt continues.
        """
        self.round, self._from_step = None, from_step
        self._rendezvous.join(from_step)

    def look(self) -> None:
        """Read what the other nodes publish. Call this several times per second."""
        self._rendezvous.look()
        if self.round is None and self._rendezvous.is_lost:
            if not self.settings.node:
                raise Refused(f"the rendezvous at {self.settings.rendezvous} has failed: {self._rendezvous.problem}")
            self._rendezvous.close()
            time.sleep(0.5)
            self._rendezvous = self._reach()
            self._rendezvous.join(self._from_step)
        if self._rendezvous.remark != self._remark:
            self._remark = self._rendezvous.remark
            self.remarks.append(self._refused_other)
        if self.round is None and self._rendezvous.round is not None:
            self.round, self._began = self._rendezvous.round, time.monotonic()
        if self.round is None and not self.settings.node:
            self._rendezvous.publish(missing=self._missing())  # sent only if it has changed

    @property
    def refused(self) -> str:
        """Why this node cannot join the run; '' if it can."""
        return _printable(self._rendezvous.refused)

    def waiting_for(self) -> str:
        """Return a line about the nodes for which this node waits."""
        where, most = self.settings.rendezvous, self.settings.most
        if self.settings.node and not self._zero:
            return f"waiting for node 0 of {most} at {where} ({self._rendezvous.problem or 'connected'})"
        missing = self._missing() if not self.settings.node else self._zero.get("missing", [])
        numbers = (
            f"waiting for node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {most} at {where}"
        )
        line = numbers if missing else f"waiting for the other nodes to be ready at {where}"
        return "; ".join(filter(None, [line, self._refused_other]))

    @property
    def _refused_other(self) -> str:
        """On node 0: a line about a node that was refused, and why; '' if none was."""
        return _printable(f"{self._remark}; it was refused") if self._remark else ""

    def _missing(self) -> list[int]:
        return [node for node in range(1, self.settings.most) if node not in self._living()]

    # --- during an attempt

    @property
    def _current(self) -> Round:
        """The current attempt; only valid during one."""
        assert self.round is not None
        return self.round

    def rank_envs(self) -> list[RankEnv]:
        """Return the rank environments of this node's ranks in the attempt."""
        counts = [node["ranks"] for node in self._current.nodes]
        first = list(itertools.accumulate(counts[:-1], initial=0))
        mine = next(place for place, node in enumerate(self._current.nodes) if node["node"] == self.settings.node)
        return [
            RankEnv(
                rank=first[mine] + local, size=sum(counts), local_rank=local, local_size=counts[mine], nodes=len(counts)
            )
            for local in range(counts[mine])
        ]

    @property
    def from_step(self) -> int:
        """The step after which the attempt continues."""
        return self._current.from_step

    @property
    def meeting(self) -> dict[str, Any]:
        """The address at which the ranks connect: `host` and `port`."""
        return {"host": self._rendezvous.address, "port": self._current.port}

    def take_store(self) -> socket.socket | None:
        """On node 0: return the listening socket for rank 0, once."""
        taken, self._rendezvous.rank_socket = self._rendezvous.rank_socket, None
        return taken

    def environment(self) -> dict[str, str]:
        """Return more environment variables for the ranks of this node."""
        _, wanted = self._interfaces(os.environ)
        return wanted | {"GROUP_RANK": str(self.settings.node)}

    @property
    def interface(self) -> str:
        """The network interface that leads to the other nodes."""
        return self._interfaces({})[0]

    @functools.cached_property
    def infiniband(self) -> list[str]:
        """The ports of this machine that NCCL uses."""
        return infiniband.usable(os.environ)

    def _interfaces(self, environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        others = self._current.nodes[1:] if self.round is not None and not self.settings.node else []
        reached = address.reached_by(one["to"] for one in others if address.is_mine(one["to"]))
        return address.interfaces(
            self._rendezvous.address, self.settings.place.port, environ=environ, reached=reached,
            infiniband=self.infiniband,
        )  # fmt: skip

    def names(self) -> list[str]:
        """Return the names of the nodes of the attempt."""
        return [name_of(node) for node in self._current.nodes] if self.round is not None else []

    def take_over(self, spec: Spec) -> Spec:
        """Take config fields that no user has set from node 0, so that all nodes compute alike.

        Returns what the ranks run now; config.toml says the same.
        """
        if not self.settings.node:
            return spec
        chosen = {name: int(value) for name, value in self._zero["hello"]["chosen"].items()}
        path = self.run.folder / "config.toml"
        text = before = path.read_text(encoding="utf-8")
        for name, value in chosen.items():
            text = re.sub(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        if text != before:
            write_atomically(path, text)
            self.run.update(lambda record: record.update(cast(Record, self.run.signature(record))))
        return dataclasses.replace(spec, config={**spec.config, **chosen})

    def report_death(self) -> None:
        """Tell the other nodes that a rank here is dead, so that they need not find out themselves."""
        if not self._rendezvous.own.get("bad"):
            self._rendezvous.publish(bad=True)

    @property
    def is_over(self) -> bool:
        """Whether the attempt has ended on another node: a rank is dead there, or the node is gone."""
        if self.round is None:
            return False
        for node in self._current.nodes[:1] if self.settings.node else self._current.nodes[1:]:
            public = self._others.get(node["node"], {})
            if self._is_gone(node) or (public.get("round") == self._current.id and public.get("bad")):
                return True
        return False

    def _is_gone(self, node: Mapping[str, Any]) -> bool:
        """Whether a node has left the attempt, as far as this node sees."""
        public, has_joined = self._others.get(node["node"], {}), time.monotonic() - self._began > JOINING
        if self.settings.node and self._rendezvous.is_lost:
            return True
        if not self._rendezvous.lives(node["node"], node["id"]):
            return bool(self.settings.node) or has_joined or public.get("id") != node["id"]
        # node 0 too: it may have dropped this node while this one was suspended, and the ranks would wait for ever
        return has_joined and public.get("round") != self._current.id

    @property
    def newcomers(self) -> str:
        """On node 0 of an elastic run: names of the nodes that wait to join; '' if there are none."""
        if not (self.settings.is_elastic and self._rendezvous.waiting) or self.round is None:
            return ""
        inside = {node["node"] for node in self._current.nodes}
        return " and ".join(
            name_of(public["hello"]) for node, public in sorted(self._living().items()) if node not in inside
        )

    # --- a stop

    @property
    def stop(self) -> StopCause | None:
        """A stop of the whole run that another node was asked for; None: no stop."""
        known = self._others if self.settings.node else self._living()
        return next((StopCause(**public["stop"]) for public in known.values() if public.get("stop")), None)

    def ask_stop(self, asked: StopCause) -> None:
        """Ask all nodes to stop."""
        if not self._rendezvous.own.get("stop"):
            self._rendezvous.publish(stop={"by": asked.by, "text": asked.text})

    # --- the end of an attempt, and of the run

    def decide_end(self, facts: Facts, look: Callable[[], StopCause | None]) -> Decision:
        """Decide what happens to the run: node 0 decides by the reports of all nodes, the others follow.

        Args:
            facts: The facts of this node.
            look: called repeatedly while waiting. Returns a request to stop at once, which waits for no other node.
        """
        at_once = facts.asked if facts.asked is not None and facts.asked.now else None
        if at_once is None and is_bad(facts):
            self.report_death()
        if self.settings.node:
            report = None if at_once is not None else report_of(facts, self._why_it_leaves(facts))
            self._rendezvous.publish(report=report, round=self._current.id if report is not None else "")
            return self._carried_out(facts, at_once, look)
        while at_once is None and not self._all_have_reported():
            at_once = look()
            time.sleep(0.02)
        if at_once is not None:
            return decide(dataclasses.replace(facts, asked=at_once))
        facts = self._merged(facts)
        decision = public = decide(facts)
        if facts.leaves and decision.end == "stopped":
            why = self._why_it_leaves(facts)
            public = Decision(end="stopped", state=None, why=why, again=True, message=why)
        self._publish(public)
        return decision

    def _all_have_reported(self) -> bool:
        """Whether each node of the attempt has reported how its ranks ended, or is gone."""
        return all(self._report_of(node["node"]) is not None or self._is_gone(node) for node in self._current.nodes[1:])

    def _report_of(self, node: int) -> Public | None:
        public = self._others.get(node, {})
        return public.get("report") if public.get("round") == self._current.id else None

    def _publish(self, decision: Decision) -> None:
        plain = dataclasses.asdict(decision)
        self._rendezvous.publish(decision={"round": self._current.id, **plain}, end=None if decision.again else plain)

    @property
    def _decided(self) -> Decision | None:
        """On the other nodes: node 0's decision about the end of the attempt; None: not decided yet."""
        decided = self._zero.get("decision") or {}
        return decision_of(decided) if decided.get("round") == self._current.id else None

    def _carried_out(self, facts: Facts, at_once: StopCause | None, look: Callable[[], StopCause | None]) -> Decision:
        """On the other nodes: wait for node 0's decision and return this node's."""
        while self._decided is None and at_once is None and not self._is_gone(self._current.nodes[0]):
            at_once = look()
            time.sleep(0.02)
        decision = self._decided
        if at_once is not None:
            return decide(dataclasses.replace(facts, asked=at_once))
        if facts.leaves and (decision is None or decision.again):
            return decide(dataclasses.replace(facts, outcomes=of_rank_0(facts)))
        return decision or decide(dataclasses.replace(facts, outcomes={}, lost=self.names()[0]))

    def _why_it_leaves(self, facts: Facts) -> str:
        """Return the reason for the nodes that continue without this one; '' if this node stays, or all stop."""
        if facts.asked is None or not facts.leaves:
            return ""
        return f"{name_of(self._hello)} leaves ({facts.asked.text})"

    def _merged(self, facts: Facts) -> Facts:
        """Return node 0's facts, merged with the reports of the other nodes of the attempt."""
        reports = {name_of(node): self._report_of(node["node"]) for node in self._current.nodes[1:]}
        lost = [name for name, report in reports.items() if report is None]
        return merged(facts, [report for report in reports.values() if report is not None], lost)

    @property
    def end(self) -> Decision | None:
        """How the run has ended, as published by node 0; None: it has not ended."""
        return decision_of(self._zero["end"]) if self._zero.get("end") else None

    def end_waiting(self, decision: Decision) -> None:
        """End the run outside of an attempt. Node 0 publishes the decision to the others."""
        if self.settings.node:
            self._rendezvous.flush()
        else:
            self._rendezvous.publish(end=dataclasses.asdict(decision))

    def leave(self) -> None:
        """Leave after recording how the run ended. Node 0 stays until all other living nodes know it too."""
        self._rendezvous.publish(knows=True)
        until = time.monotonic() + LINGER
        while not self.settings.node and self._rendezvous.own.get("end") and time.monotonic() < until:
            if all(public.get("knows") for public in self._living().values()):
                break
            self._rendezvous.look()
            time.sleep(0.05)
        self._rendezvous.flush()
        self._rendezvous.close()
        with contextlib.suppress(OSError):
            (self.run.folder / node_checks.SHARED).unlink(missing_ok=True)

    def _living(self) -> dict[int, Public]:
        return {node: public for node, public in self._others.items() if self._rendezvous.lives(node, public["id"])}


def _printable(line: str) -> str:
    """Return a line that is safe for terminals and run.json, whatever another node has sent."""
    return screen.printable(shortened(line)) if line else ""
