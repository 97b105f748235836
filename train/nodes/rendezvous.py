"""The rendezvous of several machines: torch's c10d rendezvous, and what each node publishes in its store.

Node 0 hosts the store at --rendezvous. torch's handler decides which nodes take part in a round, which is one attempt
on all of them. Each node also has one key in the store with everything that it publishes. Node 0 reads the keys of all
nodes, the others read node 0's. torch's calls block on the network, so threads make them and the supervisor need not
wait.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import math
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from ..errors import Refused, one_line
from ..supervise.timeouts import (
    BEAT,
    CLOCK_SKEW,
    HUNG,
    KEEP_ALIVE,
    KEEP_ALIVE_MISSED,
    LAST_CALL,
    LOST,
    MEETING,
    PROOF_OF_LIFE,
)
from .address import Place, own_side, resolve
from .node_checks import name_of

_EVERY = 0.2
"""Seconds between two looks at what the other nodes publish."""
_AGAIN = 0.5
"""Seconds between two tries to reach node 0."""

_left: list[Any] = []
"""torch's handlers of closed connections."""

Public = dict[str, Any]
"""What a node publishes: maps names to plain values."""


@dataclasses.dataclass(frozen=True)
class Round:
    """The nodes that start an attempt together."""

    id: str
    nodes: list[dict[str, Any]]
    """Ordered by --node-rank: `node`, `id`, `host`, `ranks`, and `to`, the address at which it reaches node 0."""
    port: int
    """Port on node 0 at which the ranks connect."""
    from_step: int


class Rendezvous:
    """One node's connection to the others, until it is lost.

    Args:
        hello: What the node publishes about itself; see node_checks.py.
        listening: On node 0, the listening socket for the store.
        problem_with: On the others: given what node 0 publishes, returns why this node cannot join; '': it can.
        id: Id of the supervising process.
    """

    def __init__(
        self, place: Place, hello: Public, listening: socket.socket | None, problem_with: Callable[[Public], str],
        id: str,
    ) -> None:  # fmt: skip
        self.place, self.node, self.id = place, int(hello["node"]), id
        self.address = own_side(listening) if listening is not None else ""
        """Address at which node 0 was reached."""
        self.own: Public = {"hello": hello, "round": ""}
        """What this node publishes."""
        self.others: dict[int, Public] = {}
        """What the other nodes published, as read last."""
        self.problem = "no answer yet"
        """Why node 0 cannot be reached; '' if it can."""
        self.refused = ""
        """Why this node cannot join the run."""
        self.remark = ""
        """On node 0: why another node was refused."""
        self.round: Round | None = None
        self.waiting = 0
        """On node 0: number of nodes that wait for the next round."""
        self.rank_socket: socket.socket | None = None
        """On node 0: listening socket at which the ranks of the round connect."""
        self.looked = time.monotonic()
        """When the supervisor looked last."""
        self._least, self._most, self._listening = int(hello["least"]), int(hello["most"]), listening
        self._bound_to = listening.getsockname()[0] if listening is not None else ""
        self._problem_with, self._has_failed, self._is_closed = problem_with, False, False
        self._seen: dict[int, tuple[tuple[str, float], float]] = {}
        """Maps a node to its last sign of life, and to the time when that was first read."""
        self._lock = threading.Lock()
        self._heard, self._published, self._beat = time.monotonic(), 0, 0.0
        self._sent: Public = {}
        """What this node published last."""
        self._reached = math.inf
        """When a process first answered at node 0's address."""
        self._store: Any = None
        self._handler: Any = None
        threading.Thread(target=self._live, daemon=True, name="rendezvous").start()

    @property
    def is_lost(self) -> bool:
        """Whether node 0 was reached but no longer answers; on node 0: whether its store has failed."""
        if self._has_failed or not self.node:
            return self._has_failed
        since = self._heard if self._handler is not None else self._reached + MEETING
        return time.monotonic() - since > LOST

    def lives(self, node: int, id: str) -> bool:
        """Whether the process with this id gives signs of life as this node. All but node 0 see only node 0's."""
        (seen, _), at = self._seen.get(node, (("", 0.0), 0.0))
        return seen == id and time.monotonic() - at < LOST

    def look(self) -> None:
        """Note that the supervisor is alive; it calls this several times per second.

        After a pause, as on a suspended machine, it has missed signs of life. Then it waits for new ones before it
        counts other nodes as gone.
        """
        now = time.monotonic()
        if now - self.looked > LOST / 2:
            self._heard = now
            self._seen = {node: (mark, now) for node, (mark, _) in list(self._seen.items())}
        self.looked = now

    def publish(self, **values: Any) -> None:
        """Change what this node publishes."""
        with self._lock:
            self.own = {**self.own, **values}

    def join(self, from_step: int) -> None:
        """Start to wait for the next round; `round` is set when it starts.

        Args:
            from_step: On node 0, the step after which the round continues.
        """
        self.round = None
        self.publish(round="", bad=False, report=None)
        threading.Thread(target=self._join, args=(from_step,), daemon=True, name="join").start()

    def flush(self) -> None:
        """Wait a moment until the store has what this node publishes."""
        until, before = time.monotonic() + 2, self._published
        while self._published < before + 2 and not self.is_lost and time.monotonic() < until:
            time.sleep(0.02)

    def close(self) -> None:
        """Close the connection. On node 0 this also closes the store."""
        self._is_closed = True
        _left.append(self._handler)  # else the timer's own thread may drop the last reference and end the timer
        for one in (self.rank_socket, self._listening):
            if one is not None:
                one.close()
        self.rank_socket = self._listening = None

    # --- in background threads

    def _live(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the supervisor
        try:
            self._open()
            if self.node and not self._is_let_in():
                return
            handler = self._make_handler()
            self._heard, self._handler, self.problem = time.monotonic(), handler, ""
            while not self._is_closed:
                self._exchange()
                time.sleep(_EVERY)
        except Exception as error:  # torch raises a dozen types for a lost connection
            if not self.problem:
                self.problem = "the connection was lost"
            elif not self._is_closed:
                self.problem = f"the process that answers there is no node 0: {one_line(error)[:100]}"
            self._has_failed = True

    def _open(self) -> None:
        """Serve the store, or connect to it."""
        dist, wait = _distributed(), datetime.timedelta(seconds=LOST / 2)
        if self._listening is not None:
            port, fd = self._listening.getsockname()[1], self._listening.detach()
            self._store = dist.TCPStore(
                self.address, port, is_master=True, timeout=wait, wait_for_workers=False, use_libuv=False,
                master_listen_fd=fd,
            )  # fmt: skip
            return
        while not self._is_reachable():
            time.sleep(_AGAIN)
            if self._is_closed:
                raise ConnectionError("this node has left")
        self.problem, self._reached = "connected, waiting for its answer", time.monotonic()
        self._store = dist.TCPStore(self.address, self.place.port, timeout=wait, wait_for_workers=False)

    def _is_reachable(self) -> bool:
        """Whether a process answers at node 0's address. Tested without torch, which would print every try."""
        try:
            self.address = resolve(self.place)
            with socket.create_connection((self.address, self.place.port), LOST) as one:
                if one.getpeername() != one.getsockname():  # TCP can connect a free port to itself
                    return True
            self.problem = "Connection refused"
        except Refused as error:
            self.problem = str(error)
        except TimeoutError:
            self.problem = "no answer: a firewall blocks the port, or the machine is down"
        except OSError as error:
            self.problem = error.strerror or str(error)
        return False

    def _is_let_in(self) -> bool:
        """Whether this node can join the run. It has published nothing yet."""
        zero = before = self._wait_for(self._store, "node/0")
        # only a new beat shows node 0's clock; see is_lost
        while zero["beat"] == before["beat"] and not self._is_closed:
            time.sleep(0.05)
            zero = self._wait_for(self._store, "node/0")
        apart = time.time() - zero["beat"]
        if abs(apart) > CLOCK_SKEW:
            how = f"{abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} that of node 0"
            self.refused = f"the clock of {name_of(self.own['hello'])} is {how}; set it right"
        else:
            self.refused = self._problem_with(zero) or self._other_of_this_rank()
        if self.refused:
            self._store.set("refused", self.refused)
        else:
            self._publish(self.own)  # before anything slow: another node may claim the same rank
        self.others = {0: zero}
        return not self.refused

    def _other_of_this_rank(self) -> str:
        """Return why the rank belongs to another living node; '': it belongs to this node now."""
        key, claim, mine = f"node/{self.node}", f"claim/{self.node}", self.own["hello"]
        holder = self._store.compare_set(claim, "", self.id).decode()
        if holder == self.id:
            return ""
        before = self._read(key)
        time.sleep(PROOF_OF_LIFE)
        now = self._read(key)
        if now is None or now == before:
            taken = self._store.compare_set(claim, holder, self.id).decode() == self.id
            return "" if taken else f"{name_of(mine)} has another node's --node-rank; give it another --node-rank"
        other = now["hello"]
        return (
            f"{name_of(mine)} at {mine['home']} has the --node-rank {self.node} of {name_of(other)} at "
            f"{other['home']}; give it another --node-rank"
        )

    def _make_handler(self) -> Any:
        from torch.distributed.elastic.rendezvous import (
            RendezvousConnectionError,
            c10d_rendezvous_backend,
            dynamic_rendezvous,
        )

        dynamic_rendezvous.logger.disabled = True  # it prints a line for each late sign of life
        run, rendezvous = str(self.own["hello"]["run"]), self

        class Backend(c10d_rendezvous_backend.C10dRendezvousBackend):
            """Ends waits and signs of life when this node has left or its supervisor hangs."""

            def get_state(self) -> Any:
                self._check()
                return super().get_state()

            def set_state(self, state: bytes, token: Any = None) -> Any:
                self._check()
                return super().set_state(state, token)

            def _check(self) -> None:
                if rendezvous._is_closed or time.monotonic() - rendezvous.looked > HUNG:
                    raise RendezvousConnectionError("this node has left")

        timeout = dynamic_rendezvous.RendezvousTimeout(
            join=datetime.timedelta(days=365), last_call=datetime.timedelta(seconds=LAST_CALL)
        )  # the supervisor limits the wait
        return dynamic_rendezvous.DynamicRendezvousHandler.from_backend(
            run, self._store, Backend(self._store, run), self._least, self._most,
            local_addr=self.id, timeout=timeout, keep_alive_interval=KEEP_ALIVE,
            keep_alive_max_attempt=KEEP_ALIVE_MISSED,
        )  # fmt: skip

    def _exchange(self) -> None:
        """Publish what is new on this node, and read what the other nodes have published."""
        now = time.monotonic()
        if now - self._beat > BEAT and now - self.looked < HUNG:
            self._beat, self._sent = now, {}
        own = self.own
        if own != self._sent:
            self._publish(own)
        self._published += 1
        for node in (0,) if self.node else range(1, self._most):
            found = self._read(f"node/{node}")
            if found is not None:
                mark = found["id"], found["beat"]
                if node not in self._seen or self._seen[node][0] != mark:
                    self._seen[node] = mark, time.monotonic()
                self.others[node] = found
        if not self.node:
            self.remark = self._store.get("refused").decode() if self._store.check(["refused"]) else ""
            self.waiting = self._handler.num_nodes_waiting() if self.round is not None else 0
        self._heard = time.monotonic()

    def _publish(self, own: Public) -> None:
        self._store.set(f"node/{self.node}", json.dumps({**own, "id": self.id, "beat": time.time()}))
        self._sent = own

    def _join(self, from_step: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while self._handler is None and not (self._is_closed or self._has_failed):
            time.sleep(0.05)
        if self._is_closed or self._has_failed:
            return
        from torch.distributed import DistStoreError

        while self.round is None and not (self._is_closed or self._has_failed):
            try:
                self.round = self._meet(from_step)
            except (TimeoutError, DistStoreError):  # a node left during the rendezvous
                continue
            except Exception:
                self._has_failed = not self._is_closed

    def _meet(self, from_step: int) -> Round:
        """Return the next round of torch's rendezvous, with its nodes in the order of --node-rank.

        Raises:
            TimeoutError: a node does not identify itself.
        """
        info = self._handler.next_rendezvous()
        hello, store = self.own["hello"], info.store
        mine = {"node": self.node, "id": self.id, "host": hello["host"], "ranks": hello["nproc"], "to": self.address}
        store.set(f"member/{info.rank}", json.dumps(mine))
        nodes = [self._wait_for(store, f"member/{number}") for number in range(info.world_size)]
        nodes.sort(key=lambda one: int(one["node"]))
        if len({one["node"] for one in nodes}) < len(nodes):
            raise TimeoutError("two nodes have the same --node-rank")
        if self.node == 0:
            store.set("start", json.dumps(self._make_start(from_step)))
        start = self._wait_for(store, "start")
        self.publish(round=start["id"])
        return Round(start["id"], nodes, start["port"], start["from_step"])

    def _make_start(self, from_step: int) -> Public:
        """Listen for the ranks of a round before they know the port. Returns what the nodes of the round must know."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self.rank_socket = socket.socket(family, socket.SOCK_STREAM)
        self.rank_socket.bind((self._bound_to, 0))
        self.rank_socket.listen(2048)
        return {"id": uuid.uuid4().hex, "port": self.rank_socket.getsockname()[1], "from_step": from_step}

    def _read(self, key: str) -> Public | None:
        return dict(json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _wait_for(self, store: Any, key: str) -> Public:
        """Wait for a value of the store by polling: the store's blocking call would block other threads."""
        until = time.monotonic() + MEETING
        while not store.check([key]):
            if time.monotonic() > until or self._is_closed:
                raise TimeoutError(key)
            time.sleep(0.05)
        return dict(json.loads(store.get(key)))


def _distributed() -> Any:
    """Import torch.distributed without its warnings about lost connections."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else the next round reads stale keys (torch 2.7)
    before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        import torch.distributed as dist
    finally:
        if before is None:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    return dist
