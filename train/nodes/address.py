"""The rendezvous address of several machines, and the network interface that leads to it. Sends nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from .. import variables
from ..errors import Refused

_SIOCGIFADDR = 0x8915
"""The ioctl that returns the address of an interface (netdevice(7))."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The rendezvous address, HOST:PORT."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Place:
    """Parse HOST:PORT or [::1]:29400.

    Raises:
        ValueError: the text has another form.
    """
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\s]+)):(\d{1,5})", text)
    if not found or not 0 < int(found.group(3)) < 65536:
        raise ValueError(f"--rendezvous {text}: give HOST:PORT, such as node0:29400")
    return Place(found.group(1) or found.group(2), int(found.group(3)))


def resolve(place: Place) -> str:
    """Return the address of a place, as this machine resolves it.

    Raises:
        Refused: the name does not resolve.
    """
    try:
        return str(socket.getaddrinfo(place.host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise Refused(
            f"--rendezvous {place}: {place.host} does not resolve here ({error.strerror}); give an address, or: "
            f"echo 'ADDRESS {place.host}' | sudo tee -a /etc/hosts"
        ) from None
    except UnicodeError:  # from IDNA, before any lookup
        raise Refused(f"--rendezvous {place}: {place.host} is no host name; give a name or an address") from None


def is_mine(address: str) -> bool:
    """Whether an address belongs to this machine: only then can a socket bind to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as one:
        one.bind((address, 0))
        return True
    return False


def is_loopback(address: str) -> bool:
    """Whether an address reaches only the machine itself."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def source_towards(address: str, port: int) -> str | None:
    """Return the address from which this machine would send, by the kernel's routes. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as one:
        one.connect((address, port))
        return str(one.getsockname()[0])
    return None


def interface_of(source: str, read: Callable[[str], str] = _read) -> str:
    """Return the name of the interface that has this address; '' if none has.

    Args:
        read: returns the text of a file.
    """
    if ":" in source:
        packed = ipaddress.ip_address(source.split("%")[0]).exploded.replace(":", "")
        rows = (line.split() for line in read("/proc/net/if_inet6").splitlines())
        return next((row[5] for row in rows if row and row[0] == packed), "")
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            asked = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(one.fileno(), _SIOCGIFADDR, asked)
            if socket.inet_ntoa(answer[20:24]) == source:
                return name
    return ""


def listen(place: Place) -> socket.socket:
    """Listen for the other nodes, on node 0.

    Listens only on the address of the name, if it belongs to this machine and others can reach it. Otherwise listens on
    all addresses: a name may resolve to 127.0.1.1 on its own machine, or to the outer address of a private network.

    Raises:
        Refused: the port is in use.
    """
    address = resolve(place)
    is_loop = is_loopback(address)
    is_meant = is_loop and place.host in ("localhost", "127.0.0.1", "::1")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
    here = address if is_meant or (is_mine(address) and not is_loop) else everywhere
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((here, place.port))
        one.listen(128)
    except OSError as error:
        one.close()
        raise Refused(
            f"--rendezvous {place}: node 0 cannot listen there ({error.strerror}); choose another port, or see what "
            f"uses it: ss -ltnp sport = :{place.port}"
        ) from None
    return one


def own_side(listening: socket.socket) -> str:
    """Return the address at which this machine itself reaches a listening socket."""
    address = str(listening.getsockname()[0])
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def reached_by(addresses: Iterable[str]) -> str:
    """Return the first of the addresses used by other machines that is no loopback address; '': none."""
    return next((one for one in addresses if one and not is_loopback(one)), "")


def interfaces(
    to: str, port: int, *, environ: Mapping[str, str], reached: str = "", infiniband: Sequence[str] = ()
) -> tuple[str, dict[str, str]]:
    """Return the interface that leads to the other machines, and the variables to set for it unless the user has.

    Node 0 reaches itself by the loopback. There it is the interface whose address the other machines use. NCCL gets no
    interface if it uses InfiniBand: it then chooses the one for its first messages itself.

    Args:
        to: Address at which this machine reaches node 0.
        reached: On node 0, the address that another machine has used: node 0's own name may resolve to 127.0.1.1.
        infiniband: The ports of this machine that NCCL uses.
    """
    if reached and is_loopback(to):
        to = reached
    source = source_towards(to, port)
    name = interface_of(source) if source else ""
    if not name:
        return "", {}
    wanted = {variables.GLOO: name}
    if not infiniband:
        wanted[variables.NCCL] = f"={name}"
    return name, {key: value for key, value in wanted.items() if not environ.get(key)}
