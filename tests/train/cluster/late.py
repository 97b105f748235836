"""A wire between two network namespaces on which every packet, of whatever connection, is late.

    python -m tests.train.cluster.late HERE NAMESPACE THERE LEAST MOST

Makes the interface HERE in this namespace and THERE in the other one: TUN devices, so what the kernel sends out at one
of them is read here as whole IP packets with their checksums. Each packet is held for LEAST to MOST milliseconds,
evenly spread, and given to the other interface; none overtakes another one. Prints `ready`, and after SIGTERM a line of
JSON: how many packets went each way, over how many TCP connections, and for how long they were held at least.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import json
import os
import random
import select
import signal
import struct
import sys
import time
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""linux/if_tun.h."""
_CLONE_NEWNET = 0x40000000
_LONGEST = 1 << 16


def tun(name: str) -> int:
    """Make an interface in the namespace that this process is in. Returns its packets' file descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def enter(namespace: str) -> None:
    """Go into a network namespace; what was made before stays where it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/var/run/netns/{namespace}").open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


class Way:
    """One direction.

    Args:
        least, most: seconds for which a packet is held.
    """

    def __init__(self, come: int, go: int, least: float, most: float) -> None:
        self.come, self.go, self.least, self.most = come, go, least, most
        self.held: collections.deque[tuple[float, float, bytes]] = collections.deque()
        """When each came, when it is due, itself."""
        self.connections: set[tuple[int, ...]] = set()
        self.count, self.shortest = 0, float("inf")

    def take(self) -> None:
        """Read what has come."""
        while True:
            try:
                packet = os.read(self.come, _LONGEST)
            except BlockingIOError:
                return
            now = time.monotonic()
            due = now + random.uniform(self.least, self.most)
            self.held.append((now, max(due, self.held[-1][1] if self.held else 0.0), packet))
            if packet[0] >> 4 == 4 and packet[9] == 6:  # TCP over IPv4
                self.connections.add(tuple(sorted(struct.unpack_from("!HH", packet, 4 * (packet[0] & 15)))))

    def give(self) -> float:
        """Send what is due. Returns the seconds until something will be."""
        while self.held and self.held[0][1] <= time.monotonic():
            came, _, packet = self.held.popleft()
            try:
                os.write(self.go, packet)
            except OSError:  # the interface is down: lost, as on a wire
                continue
            self.count += 1
            self.shortest = min(self.shortest, time.monotonic() - came)
        return max(0.0, self.held[0][1] - time.monotonic()) if self.held else 1.0


def main() -> None:
    here, namespace, there, least, most = sys.argv[1:]
    first = tun(here)
    enter(namespace)
    second = tun(there)
    limits = int(least) / 1000, int(most) / 1000
    ways = [Way(first, second, *limits), Way(second, first, *limits)]
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: over.append(number))
    print("ready", flush=True)
    while not over:
        wait = min(way.give() for way in ways)
        select.select([first, second], [], [], wait)
        for way in ways:
            way.take()
    connections = len(ways[0].connections | ways[1].connections)
    shortest = min(way.shortest for way in ways)
    print(json.dumps({"packets": [way.count for way in ways], "connections": connections, "held": shortest}))


if __name__ == "__main__":
    main()
