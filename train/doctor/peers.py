"""Checks of what lies between the GPUs of one machine: peer access, IOMMU, PCI access control.

NCCL lets one GPU read the memory of another over PCI if the driver allows it (peer access, P2P). Where that does not
work, ranks do not fail: they hang in their first collective. Three cases are known:

- RTX 4090: drivers allowed peer access that the card lacks. `NCCL_P2P_DISABLE=1` helps, and switching off the IOMMU
  does not (NVIDIA/nccl-tests issue 117).
- GTX 1080 Ti: the IOMMU translated the transfers. The kernel's option `intel_iommu=off` helped (NVIDIA/nccl issue 257).
- PCI bridges with access control (ACS) send the transfers through the CPU, where they are slow or hang (NCCL user
  guide, "Troubleshooting").

If the driver allows no peer access, NCCL notices by itself and copies through shared memory (NVIDIA/nccl issue 1637).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

from .finding import Finding, not_applicable, ok, warning
from .machine import Machine

DISABLE = "NCCL_P2P_DISABLE"
_STATES = {
    "CNS": "chipset not supported", "GNS": "GPU not supported", "TNS": "topology not supported",
    "NS": "not supported", "DR": "disabled in the driver's settings", "U": "unknown",
}  # fmt: skip
"""Maps the marks of `nvidia-smi topo -p2p` to their legend."""
_WITHOUT = re.compile(r"GeForce RTX (40|50)\d\d")
"""Cards without peer access over PCI."""
_EXTENDED, _ACS = 0x100, 0x000D
"""Where PCI Express keeps its extended capabilities, and the number of access control among them."""
_REDIRECTS = 0b11100
"""Bits of the ACS control register: P2P request redirect, P2P completion redirect, upstream forwarding."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU by its number, name and PCI address, such as 0000:01:00.0."""

    number: int
    name: str
    address: str


def checks(machine: Machine, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Yield the checks, if there are several GPUs."""
    if len(gpus) < 2:
        return
    pairs = _pairs(machine, "r")
    over_nvlink = _pairs(machine, "n")
    over_pci = sorted(sorted(pair) for pair, mark in pairs.items() if mark == "OK" and over_nvlink.get(pair) != "OK")
    is_off = machine.environ.get(DISABLE, "0") not in ("", "0")
    yield _peer_access(gpus, pairs, over_pci, is_off)
    among = [gpu for gpu in gpus if any(gpu.number in pair for pair in over_pci)]
    if is_off or not among:
        why = "no GPU reads the memory of another over PCI"
        yield not_applicable("IOMMU", why)
        yield not_applicable("ACS", why)
        return
    yield _iommu(machine, among)
    yield _acs(machine, among)


def _pairs(machine: Machine, ability: str) -> dict[frozenset[int], str]:
    """Return the mark that nvidia-smi prints for each two GPUs; {}: it prints none.

    Args:
        ability: `r` for reading over any link, `n` for NVLink.
    """
    output = machine.run("nvidia-smi", "topo", "-p2p", ability)
    found: dict[frozenset[int], str] = {}
    for line in output.out.splitlines() if output is not None and output.code == 0 else []:
        words = re.sub(r"\x1b\[\d*m", "", line).split()
        row = re.fullmatch(r"GPU(\d+)", words[0]) if words else None
        if row and all(re.fullmatch("[A-Z]+", word) for word in words[1:]):
            for column, mark in enumerate(words[1:]):
                if column != int(row[1]):
                    found[frozenset((int(row[1]), column))] = mark
    return found


def _peer_access(
    gpus: Sequence[Gpu], pairs: dict[frozenset[int], str], over_pci: list[list[int]], is_off: bool
) -> Finding:
    name = "peer access"
    if is_off:
        return ok(name, f"{DISABLE} is set: GPUs exchange data through shared memory")
    if not pairs:
        return not_applicable(name, "this nvidia-smi does not say which GPUs reach each other")
    lacking = [gpu for gpu in gpus if _WITHOUT.search(gpu.name) and any(gpu.number in pair for pair in over_pci)]
    if lacking:
        seen = (
            f"the driver allows it for {lacking[0].name}, which lacks it: NCCL can hang (NVIDIA/nccl-tests issue 117)"
        )
        return warning(name, seen, f"train doctor --job  # if the all-reduce hangs: export {DISABLE}=1")
    marks = [mark for mark in pairs.values() if mark != "OK"]
    why = ", ".join(sorted({_STATES.get(mark, mark) for mark in marks}))
    if len(marks) == len(pairs):
        return ok(name, f"the driver allows none ({why}): NCCL copies through shared memory")
    seen = f"{len(pairs) - len(marks)} of {len(pairs)} pairs of GPUs, {len(over_pci)} of them over PCI"
    return ok(name, seen + (f"; the others: {why}" if why else ""))


def _iommu(machine: Machine, gpus: Sequence[Gpu]) -> Finding:
    """Check whether the IOMMU translates the transfers of these GPUs (sysfs-kernel-iommu_groups)."""
    groups = "/sys/kernel/iommu_groups"
    mine = {gpu.address for gpu in gpus}
    passes = bool({"iommu=pt", "iommu.passthrough=1"} & set(machine.read("/proc/cmdline").split()))
    kinds = set()
    for group in machine.list(groups):
        if mine & set(machine.list(f"{groups}/{group}/devices")):
            # kernels before 5.3 do not say
            kinds.add(machine.read(f"{groups}/{group}/type").strip() or ("identity" if passes else "unknown"))
    if not kinds:
        return ok("IOMMU", "off")
    if kinds == {"identity"}:
        return ok("IOMMU", "passes the transfers of GPUs through")
    seen = (
        f"it translates transfers between GPUs (type {', '.join(sorted(kinds))}): NCCL can hang (NVIDIA/nccl issue 257)"
    )
    into = "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub"
    return warning("IOMMU", seen, f"{into} && sudo update-grub && sudo reboot  # or, slower: export {DISABLE}=1")


def _acs(machine: Machine, gpus: Sequence[Gpu]) -> Finding:
    """Check the access control of the PCI bridges above these GPUs."""
    bridges = sorted(set(itertools.chain.from_iterable(_bridges(machine, gpu.address) for gpu in gpus)))
    states = {bridge: _redirects(machine, bridge) for bridge in bridges}
    on = [bridge for bridge, state in states.items() if state]
    if on:
        seen = f"{len(on)} PCI bridges send transfers between GPUs through the CPU: NCCL gets slow or hangs"
        each = f"for b in {' '.join(on)}; do sudo setpci -s $b ECAP_ACS+6.w=0; done"
        return warning("ACS", seen, f"{each}  # until the next boot; for good: switch ACS off in the BIOS")
    if None in states.values():
        return not_applicable("ACS", "unknown, only root can read it: sudo python3 -m train doctor --only ACS")
    return ok("ACS", f"off on the {len(bridges)} PCI bridges above the GPUs")


def _bridges(machine: Machine, address: str) -> list[str]:
    """Return the addresses of the bridges above a device, which are part of its path in sysfs."""
    above = machine.path(f"/sys/bus/pci/devices/{address}").resolve().parent
    return [part for part in above.parts if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", part)]


def _redirects(machine: Machine, bridge: str) -> bool | None:
    """Whether a bridge sends transfers between its devices upwards; None: we may not read that."""
    try:
        config = machine.path(f"/sys/bus/pci/devices/{bridge}/config").read_bytes()
    except OSError:
        return None
    if len(config) <= 64:  # all that the kernel shows to users
        return None
    at = _EXTENDED
    while at and at + 8 <= len(config):
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS:
            return bool(int.from_bytes(config[at + 6 : at + 8], "little") & _REDIRECTS)
        at = header >> 20 if header >> 20 > at else 0
    return False
