"""InfiniBand and RoCE: the ports of this machine, and whether NCCL can use them. Also runs on Python 3.8.

NCCL loads libibverbs, opens the device file of each card and uses its active ports. If this fails, NCCL uses TCP and
says so only with NCCL_DEBUG=INFO.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

LIBRARIES = ("libibverbs.so", "libibverbs.so.1")
"""The names under which NCCL looks for the library, in its order (misc/ibvsymbols.cc)."""
DISABLE = "NCCL_IB_DISABLE"
_CARDS = "sys/class/infiniband"
DEVICES = "/dev/infiniband"


@dataclasses.dataclass(frozen=True)
class Port:
    """A port of a card, as the kernel describes it (sysfs-class-infiniband)."""

    card: str
    number: str
    state: str
    """For example `4: ACTIVE`."""
    rate: str
    device: Path
    """The file that a program opens to use the card."""

    @property
    def name(self) -> str:
        return f"{self.card}:{self.number}"

    @property
    def is_active(self) -> bool:
        return self.state.startswith("4:")

    @property
    def is_open_to_us(self) -> bool:
        """Whether this user may use the card."""
        return os.access(self.device, os.R_OK | os.W_OK)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(str(folder)))
    return []


def ports(root: Path = Path("/")) -> list[Port]:
    """Return all ports of this machine.

    Args:
        root: Folder below which the machine's files are.
    """
    found = []
    for card in _names(root / _CARDS):
        folder = root / _CARDS / card
        verbs = next(iter(_names(folder / "device" / "infiniband_verbs")), "uverbs?")
        device = root / DEVICES.lstrip("/") / verbs
        for number in _names(folder / "ports"):
            port = folder / "ports" / number
            found.append(Port(card, number, _read(port / "state"), _read(port / "rate"), device))
    return found


def cards_of_library() -> tuple[list[str], str]:
    """Return the cards that libibverbs finds a driver for, and why it cannot be loaded ('': it can)."""
    library, problem = None, ""
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            break
        except OSError as error:
            problem = str(error)
    if library is None:
        return [], problem
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_name.restype, library.ibv_get_device_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    count = ctypes.c_int()
    devices = library.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        return [], ""
    found = [library.ibv_get_device_name(devices[number]).decode(errors="replace") for number in range(count.value)]
    library.ibv_free_device_list(devices)
    return found, ""


def usable(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Return the names of the ports that NCCL uses here; []: it uses TCP."""
    if environ.get(DISABLE, "0") != "0":
        return []
    found = [port for port in ports(root) if port.is_active and port.is_open_to_us]
    known = cards_of_library()[0] if found else []
    return [port.name for port in found if port.card in known]
