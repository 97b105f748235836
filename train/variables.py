"""Environment variables of libraries, read as those libraries read them. For Python 3.8 too; imports no torch.

gloo and NCCL both take names of interfaces, each in a language of its own: torch's ProcessGroupGloo and gloo's
tcp/device.cc, NCCL's misc/socket.cc and misc/utils.cc.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import struct
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from train.errors import Refused

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
"""Asks for the address of an interface (netdevice(7))."""
_LONGEST = 15
"""Bytes of the name of an interface."""
_LEVELS = ("OFF", "INFO", "DETAIL")
"""What TORCH_DISTRIBUTED_DEBUG takes."""


def gloo_names(text: str) -> list[str]:
    """The interfaces that gloo looks for: whole names. A value of one character is ignored."""
    names = text.split(",")
    return [] if len(text) < 2 else names[:-1] if not names[-1] else names


def gloo_problem(text: str) -> str:
    """Why gloo cannot use this value, as the end of a sentence; '' where it can."""
    wrong = [name for name in gloo_names(text) if not has_address(name)]
    if not wrong:
        return ""
    if any(sign in text for sign in "^= "):
        return "gloo takes whole names with commas, no ^, = or prefix (those are NCCL's)"
    return f"gloo takes whole names, and no interface here is called {wrong[0]!r} and has an address"


def nccl_takes(text: str, interface: str) -> bool:
    """Whether NCCL takes this interface: beginnings of names with commas; `^` before all: none of them; `=`: whole
    names. A port after a colon concerns other connections. A value of one character is ignored."""
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
    """Why NCCL cannot use this value, as the end of a sentence; '' where it can."""
    if any(nccl_takes(text, name) for name in interfaces()):
        return ""
    return "NCCL takes beginnings of names, =NAME for a whole one and ^NAME for all others, and here that leaves none"


def interfaces() -> list[str]:
    """The interfaces of this machine that have an address, those of other machines' networks first."""
    names = [name for _, name in socket.if_nameindex() if has_address(name)]
    return sorted(names, key=lambda name: name == "lo")


def has_address(name: str) -> bool:
    """Whether there is an interface of exactly this name with an address."""
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
    """Let the ranks of one machine meet over its loopback where no other interface is named that gloo can use.

    A host whose own name resolves to nothing reachable is common; its loopback always is. Returns a warning where the
    user has named another one; else ''.
    """
    text = environ.get(GLOO, "")
    problem = gloo_problem(text)
    if (gloo_names(text) and not problem) or not has_address("lo"):
        return ""
    environ[GLOO] = "lo"
    return f"{GLOO} is {text}; {problem}; the ranks are on one machine, and meet over lo" if problem else ""


def check_gloo(environ: Mapping[str, str], interface: str = "") -> None:
    """Refuse a value with which no run on several machines can begin.

    Args:
        interface: the one that leads to the others; '': it is not known.

    Raises:
        Refused: there is one.
    """
    if problem := gloo_problem(environ.get(GLOO, "")):
        raise Refused(f"{GLOO} is {environ[GLOO]}; {problem}; try: {remedy(GLOO, interface)}")


def check_torch(environ: Mapping[str, str]) -> None:
    """Refuse a value with which torch cannot be imported.

    Raises:
        Refused: there is one.
    """
    level = environ.get("TORCH_DISTRIBUTED_DEBUG", "")
    if level and level.upper() not in _LEVELS:
        raise Refused(f"TORCH_DISTRIBUTED_DEBUG is {level}, and torch takes {', '.join(_LEVELS)}; set one, or unset it")


def remedy(variable: str, interface: str = "") -> str:
    """What to type instead."""
    name = interface or next(iter(interfaces()), "lo")
    return f"export {variable}={'=' if variable == NCCL else ''}{name}"


_OF_SETTINGS = (
    (r"Unable to find address for: ", GLOO, "gloo takes whole names with commas, no ^, = or prefix"),
    (r"[Nn]o socket interface found|Bootstrap : no .*interface", NCCL, "NCCL finds no such interface"),
    (r"unsupported gloo device", "GLOO_DEVICE_TRANSPORT", "this torch has no such transport; unset it"),
    (
        r"CachingAllocator option|Error parsing CachingAllocator",
        "PYTORCH_CUDA_ALLOC_CONF",
        "torch knows no such option",
    ),
    (r"nvalid value for (?:the )?environment variable:? *(?P<name>[A-Z][A-Z0-9_]+)", "", "torch cannot read that"),
    (r"environment variable (?P<name>[A-Z_]+) expected, but not set", "", "torchrun sets it"),
)
"""What messages have in them that follow from a variable alone, its name, and what is wrong with it."""


def behind(message: str, environ: Mapping[str, str] = os.environ) -> str:
    """Which variable an error follows from, and what to set; '' where it follows from none."""
    for pattern, variable, why in _OF_SETTINGS:
        if found := re.search(pattern, message):
            name = variable or found["name"]
            way = f"; try: {remedy(name)}" if name in (GLOO, NCCL) else ""
            return f"{name} is {environ.get(name) or 'not set'}: {why}{way}"
    return ""
