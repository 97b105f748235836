"""The loop of attempts of a run on several machines: each attempt starts and ends on all of them together."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Mapping
from typing import Any

from .. import signals
from ..errors import EXIT_STOPPED, Refused
from ..run import states
from ..supervise import decide, health
from ..supervise.attempts import Supervisor, asked_by, pids, record_decision, record_waiting
from ..supervise.decide import Decision, Facts, StopCause
from .nodes import Nodes


@dataclasses.dataclass(kw_only=True)
class MultiNodeSupervisor(Supervisor):
    """Keeps the ranks of this machine alive, together with the other machines of the run."""

    nodes: Nodes

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_over = False
        """Whether the attempt has ended on another machine first."""
        self._regroups_for = ""
        """Why the ranks were stopped to restart with more nodes."""

    def keep(self) -> int:
        """Run attempts until the run ends, and tell the other nodes how. Returns the exit code."""
        code = super().keep()
        self.nodes.leave()
        return code

    def gather(self) -> Decision | None:
        """Wait for the other nodes. Returns None when all are connected, else how the run ends here without them."""
        nodes, message, until = self.nodes, "", time.monotonic() + 60 * self.nodes.settings.wait_minutes
        nodes.join(self.newest_state())
        while nodes.round is None:
            self.look_at_others()
            self.note_stops()
            waits = nodes.waiting_for()
            decision = self._end_of_waiting(waits, time.monotonic() > until)
            if decision is not None:
                record_decision(self.run, None, decision)
                self.say(decision.reason or f"{self.run.name} has {decision.state}")
                return decision
            if waits != message:
                message = waits
                self.say(waits)
                record_waiting(self.run, waits)
            self.show()
            time.sleep(0.02)
        self.spec = nodes.take_over(self.spec)
        by = f" over {nodes.interface}" if nodes.interface else ""
        by += f" (InfiniBand for NCCL: {', '.join(nodes.infiniband)})" if nodes.infiniband else ""
        self.say(f"all nodes are connected{by}: {', '.join(nodes.names())}")
        return None

    def _end_of_waiting(self, waits: str, is_too_late: bool) -> Decision | None:
        """Return how the run ends here while it waits for other nodes; None: it does not end."""
        nodes, asked = self.nodes, asked_by(self.stop)
        if asked is not None:
            step = self.run.newest_checkpoint
            saved = f"; the last checkpoint is of step {step}" if step else ""
            reason = f"stopped ({asked.text}) while {waits}{saved}"
            decision = Decision(
                end="stopped", state=states.STOPPED, why=reason, reason=reason, stopped_by=asked.by, code=EXIT_STOPPED
            )
            is_users = asked.by == signals.USER or self.stop.interrupts > 0
            if is_users and not asked.now:  # otherwise only this machine leaves
                nodes.ask_stop(asked)
                nodes.end_waiting(decision)
            return decision
        if nodes.refused:
            return decide.refused(nodes.refused)
        if nodes.end is None and is_too_late:
            minutes = f"{nodes.settings.wait_minutes:g} minutes"
            reason = f"gave up after {minutes} of {waits}; continue with: train resume {self.run.name}"
            return Decision(end="died", state=None, why=reason, reason=reason)
        return nodes.end

    def begin(self) -> int:
        """Record a new attempt, which continues after the step that node 0 gives. Returns its number."""
        nodes = self.nodes
        self._is_over, self._regroups_for, self._from_step = False, "", nodes.from_step
        return self.run.begin_attempt(
            nodes.rank_envs()[0].size, self._from_step, pids=pids([]), nodes=nodes.names(), interface=nodes.interface
        )

    def follow(self, watch: health.Health) -> None:
        """Follow the other nodes, and tell them what happens here."""
        nodes, asked = self.nodes, asked_by(self.stop)
        self.look_at_others()
        if watch.is_ending:
            nodes.report_death()
        if not self._is_over and nodes.is_over:
            self._is_over = True
            watch.end()
        if asked is not None:
            if not (asked.now or self.leaves):
                nodes.ask_stop(asked)
        elif not self._regroups_for and (newcomers := nodes.newcomers):
            self._regroups_for = f"{newcomers} joins"
            self.ranks.signal(signal.SIGTERM)  # they save, and end

    def look_at_others(self) -> None:
        """Read what the other nodes publish.

        Raises:
            Refused: this node's run folder is gone. For the other nodes this node is gone too.
        """
        if self.run.is_gone():
            raise Refused(f"{self.run.folder} was removed; the other nodes continue without this one, or wait for it")
        self.nodes.look()
        for line in self.nodes.remarks:
            self.say(line)
        self.nodes.remarks.clear()
        wanted = self.nodes.stop
        if wanted is not None and not self.stop.asked:
            self.stop.ask(wanted.by, wanted.text)

    def decide_end(self, facts: Facts) -> Decision:
        """Decide what happens to the run: node 0 decides by the facts of all nodes."""
        exits = facts.exits
        if self._is_over:  # ranks that were killed after that were killed by this node
            exits = {rank: code for rank, code in exits.items() if code != -signal.SIGKILL}
        logs = {rank: log for rank, log in facts.logs.items() if rank in exits}
        facts = dataclasses.replace(facts, exits=exits, logs=logs, regroup=self._regroups_for)
        return self.nodes.decide_end(facts, self._stop_at_once)

    def _stop_at_once(self) -> StopCause | None:
        """Return a request to stop at once, if one comes while the ranks of other nodes end."""
        self.note_stops()
        self.look_at_others()
        asked = asked_by(self.stop)
        return asked if asked is not None and asked.now else None

    @property
    def leaves(self) -> bool:
        """Whether only this node stops.

        In a run that may continue with fewer nodes, a signal or the end of the keeper means that this machine leaves.
        `train stop` and Ctrl-C stop the whole run, on whichever machine the user gives them.
        """
        nodes, stop = self.nodes, self.stop
        if not nodes.settings.is_elastic or nodes.stop is not None:
            return False
        return stop.by in (signals.SIGNAL, signals.KEEPER) and not (stop.now or stop.interrupts)

    def has_progressed(self, record: Mapping[str, Any]) -> bool:
        """Whether the attempt has trained further. Only node 0 has the checkpoints."""
        if self.nodes.settings.node:
            return int(record.get("step") or 0) > self._from_step
        return super().has_progressed(record)
