"""Environment variables of libraries, parsed as the libraries do. Also runs on Python 3.8; imports no torch.

gloo and NCCL both take names of interfaces, each with its own syntax: see torch's ProcessGroupGloo and gloo's
tcp/device.cc, and NCCL's misc/socket.cc and misc/utils.cc.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from .errors import Refused

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
"""The ioctl that returns the address of an interface (netdevice(7))."""
_LONGEST = 15
"""Maximum number of bytes of an interface's name."""
_LEVELS = ("OFF", "INFO", "DETAIL")
"""Values of TORCH_DISTRIBUTED_DEBUG."""


def gloo_names(text: str) -> list[str]:
    """Return the interfaces that gloo looks for, by whole names. gloo ignores a value of one character."""
    names = text.split(",")
    return [] if len(text) < 2 else names[:-1] if not names[-1] else names


def gloo_problem(text: str) -> str:
    """Return why gloo cannot use this value, as the end of a message; '' if it can."""
    wrong = [name for name in gloo_names(text) if not has_address(name)]
    if not wrong:
        return ""
    if any(sign in text for sign in "^= "):
        return "gloo takes whole names separated by commas, without ^, = or prefixes (only NCCL takes those)"
    return f"gloo takes whole names, but no interface {wrong[0]!r} with an address exists here"


def nccl_takes(text: str, interface: str) -> bool:
    """Whether NCCL uses this interface.

    The value has prefixes of names, separated by commas. A leading `^` excludes them, `=` means whole names. A port
    after a colon matters only for other connections. NCCL ignores a value of one character.
    """
    if len(text) < 2:
        return True
    is_inverted = text.startswith("^")
    rest = text[is_inverted:]
    is_exact = rest.startswith("=")
    names = [name.partition(":")[0] for name in rest[is_exact:].split(",")]
    names = [name for name in names if name]
    hit = not names or any(interface == name if is_exact else interface.startswith(name) for name in names)
    return hit != is_inverted


def nccl_problem(text: str) -> str:
    """Return why NCCL cannot use this value, as the end of a message; '' if it can."""
    if any(nccl_takes(text, name) for name in interfaces()):
        return ""
    return "NCCL takes prefixes of names, =NAME (a whole name) or ^NAME (all others), but no interface here matches"


def interfaces() -> list[str]:
    """Return the interfaces of this machine that have an address, the loopback last."""
    names = [name for _, name in socket.if_nameindex() if has_address(name)]
    return sorted(names, key=lambda name: name == "lo")


def has_address(name: str) -> bool:
    """Whether an interface of exactly this name exists and has an address."""
    if not 0 < len(name.encode()) <= _LONGEST:
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
        return True
    with contextlib.suppress(OSError):
        rows = Path("/proc/net/if_inet6").read_text(encoding="ascii", errors="replace").splitlines()
        return any(row.split()[-1:] == [name] for row in rows)
    return False


def keep_gloo_at_home(environ: MutableMapping[str, str]) -> str:
    """Make the ranks of one machine connect over its loopback, unless the user has set an interface that gloo can use.

    Many machines cannot reach the address of their own name, but all reach their loopback. Returns a warning if the
    user has set an unusable interface; else ''.
    """
    text = environ.get(GLOO, "")
    problem = gloo_problem(text)
    if (gloo_names(text) and not problem) or not has_address("lo"):
        return ""
    environ[GLOO] = "lo"
    return f"{GLOO} is {text}; {problem}; the ranks of this machine connect over lo" if problem else ""


def check_gloo(environ: Mapping[str, str], interface: str = "") -> None:
    """Refuse a value with which no run on several machines can start.

    Args:
        interface: The interface that leads to the other machines; '': unknown.

    Raises:
        Refused: GLOO_SOCKET_IFNAME has such a value.
    """
    if problem := gloo_problem(environ.get(GLOO, "")):
        raise Refused(f"{GLOO} is {environ[GLOO]}; {problem}; try: {remedy(GLOO, interface)}")


def check_torch(environ: Mapping[str, str]) -> None:
    """Refuse a value with which torch cannot be imported.

    Raises:
        Refused: TORCH_DISTRIBUTED_DEBUG has such a value.
    """
    level = environ.get("TORCH_DISTRIBUTED_DEBUG", "")
    if level and level.upper() not in _LEVELS:
        raise Refused(f"TORCH_DISTRIBUTED_DEBUG is {level}; set it to one of {', '.join(_LEVELS)}, or unset it")


def remedy(variable: str, interface: str = "") -> str:
    """Return the command that sets a usable value."""
    name = interface or next(iter(interfaces()), "lo")
    return f"export {variable}={'=' if variable == NCCL else ''}{name}"
