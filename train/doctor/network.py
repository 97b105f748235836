"""Checks of the network to other machines: name, address and port of the rendezvous; interfaces; InfiniBand."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator

from .. import infiniband, variables
from ..nodes.address import Place, interface_of, is_mine, source_towards
from .finding import Finding, ok, problem, warning
from .machine import Machine

_PATIENCE = 3.0
"""Seconds a connection may take. If it takes longer, a firewall drops it."""


def checks(machine: Machine, place: Place) -> Iterator[Finding]:
    """Yield all checks of the network to the address where machines meet."""
    try:
        address = _address(place.host)
    except OSError as error:
        seen = f"{place.host} does not resolve: {error.strerror}"
        yield problem(
            "rendezvous name", seen, f"echo 'ADDRESS {place.host}' | sudo tee -a /etc/hosts  # on every machine"
        )
        return
    except UnicodeError:
        yield problem("rendezvous name", f"{place.host} is not a valid host name", "hostname  # on node 0")
        return
    yield ok("rendezvous name", f"{place.host} is {address}")
    here = is_mine(address)
    yield _loopback(place, address, here)
    code = _knock(address, place.port)
    yield _port(place, address, here, code)
    source = source_towards(address, place.port)
    if source is None:
        yield problem("interface", f"no route leads to {address}", "ip route")
        return
    interface = interface_of(source, machine.read)
    yield _interface(machine, interface, source, address)
    yield from names_of_interfaces(machine, interface)
    yield _infiniband(machine)


def _address(host: str) -> str:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _loopback(place: Place, address: str, here: bool) -> Finding:
    """Check for a loopback address. Debian's /etc/hosts maps the own name to 127.0.1.1, which others cannot reach."""
    name = "rendezvous address"
    is_loop = ipaddress.ip_address(address.split("%")[0]).is_loopback
    if is_loop and place.host not in ("localhost", "127.0.0.1", "::1"):
        seen = f"{place.host} is {address} here, which no other machine can reach"
        return problem(
            name, seen, f"getent hosts {place.host}; sudo sed -i '/{place.host}/s/^127[.0-9]*/ADDRESS/' /etc/hosts"
        )
    if is_loop:
        return warning(
            name, f"only this machine can reach {address}", "hostname -I  # give an address that others reach"
        )
    return ok(name, f"{address} is {'this machine' if here else 'another machine'}")


def _knock(address: str, port: int) -> int:
    """Try to connect. Return the errno; 0: accepted."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(_PATIENCE)
        return one.connect_ex((address, port))


def _port(place: Place, address: str, here: bool, code: int) -> Finding:
    """Check the port. `code` is the errno of a connection to it."""
    name = "rendezvous port"
    if code == 0 and here:
        seen = f"{place.port} on this machine is in use, by node 0 of the run or another program"
        return warning(name, seen, f"sudo ss -ltnp sport = :{place.port}")
    if code == 0:
        return ok(name, f"{place.port} answers")
    if code == errno.ECONNREFUSED and here:
        return ok(name, f"{place.port} is free for node 0")
    if code == errno.ECONNREFUSED:
        seen = f"{place.port} at {address} refuses connections: node 0 has not started, or its firewall rejects them"
        return warning(name, seen, f"ssh {place.host} ss -ltn sport = :{place.port}")
    words = (
        f"no answer in {_PATIENCE:.0f} s"
        if code in (errno.EAGAIN, errno.ETIMEDOUT)
        else errno.errorcode.get(code, code)
    )
    seen = f"{place.port} at {address}: {words}; a firewall drops the connection, or the machine is down"
    return problem(name, seen, f"sudo iptables -I INPUT -p tcp --dport {place.port} -j ACCEPT  # on {place.host}")


def _interface(machine: Machine, interface: str, source: str, address: str) -> Finding:
    if not interface:
        return warning("interface", f"no interface has {source}, from which {address} is reached", "ip addr")
    speed = machine.read(f"/sys/class/net/{interface}/speed").strip()
    rate = f", {int(speed) / 1000:g} Gb/s" if speed.isdigit() else ""
    return ok("interface", f"{interface} ({source}{rate}) leads to {address}")


def names_of_interfaces(machine: Machine, interface: str = "") -> Iterator[Finding]:
    """Check that gloo and NCCL can use the interfaces in their variables.

    Args:
        interface: the interface that leads to the rendezvous; '': unknown.
    """
    for variable in (variables.NCCL, variables.GLOO):
        wish = machine.environ.get(variable, "")
        fitting = variables.remedy(variable, interface)
        is_nccl = variable == variables.NCCL
        unusable = variables.nccl_problem(wish) if is_nccl else variables.gloo_problem(wish)
        names = variables.gloo_names(wish)
        leads = variables.nccl_takes(wish, interface) if is_nccl else not names or interface in names
        if unusable:
            yield problem(variable, f"is {wish}; {unusable}", fitting)
        elif interface and not leads:
            yield problem(variable, f"is {wish}, but {interface} leads to the rendezvous", fitting)
        elif wish:
            yield ok(variable, wish)
        elif interface and is_nccl and (ports := infiniband.usable(machine.environ, machine.root)):
            yield ok(variable, f"not set, because NCCL uses {', '.join(ports)}")
        elif interface:
            yield ok(variable, f"not set; to choose {interface}: {fitting}")


def _infiniband(machine: Machine) -> Finding:
    """Check whether NCCL can use the ports of InfiniBand or RoCE."""
    name, remedy = "InfiniBand", "docker run --device /dev/infiniband --ulimit memlock=-1 …"
    if machine.is_station:
        remedy = "make up  # on the host"
    ports = infiniband.ports(machine.root)
    active = [port for port in ports if port.is_active]
    everyone = ", ".join(f"{port.name} ({port.rate or port.state})" for port in active or ports)
    if not ports:
        return ok(name, "none; NCCL uses TCP")
    if machine.environ.get(infiniband.DISABLE, "0") != "0":
        return warning(name, f"{infiniband.DISABLE} switches off {everyone}", f"unset {infiniband.DISABLE}")
    if not active:
        return problem(name, f"no port is active: {everyone}", "ibstat; sudo systemctl restart opensm")
    if not machine.list(infiniband.DEVICES):
        where = "this container has" if machine.is_container else "there is"
        seen = f"{everyone}, but {where} no /dev/infiniband; NCCL uses TCP"
        return problem(name, seen, remedy if machine.is_container else "sudo modprobe ib_uverbs")
    known, lacking = infiniband.cards_of_library()
    if lacking or not all(port.card in known for port in active):
        what = lacking or f"libibverbs knows only {', '.join(known) or 'no card'}"
        install = "sudo apt-get install libibverbs1 ibverbs-providers"
        return problem(
            name,
            f"{everyone}, but NCCL uses TCP: {what}",
            "make rebuild  # on the host" if machine.is_station else install,
        )
    if shut := [port for port in active if not port.is_open_to_us]:
        seen = f"this user cannot open {', '.join(sorted({str(port.device) for port in shut}))}; NCCL uses TCP"
        return problem(name, seen, "sudo chmod 666 /dev/infiniband/uverbs*  # on the host")
    return ok(name, f"NCCL uses {everyone}")
