"""Checks of GPUs: driver, kernels, errors, heat, memory in use, persistence mode. Read from nvidia-smi."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as xml
from collections.abc import Iterator

from . import packages, peers
from .finding import Finding, not_applicable, ok, problem, warning
from .machine import Machine, Output

DRIVER = 525
"""The oldest driver that runs PyTorch's CUDA 12 libraries (CUDA compatibility guide, minor version compatibility). The
image requires it, too (NVIDIA_REQUIRE_CUDA)."""
_TOO_FULL = 0.1
"""Share of a GPU's memory in use above which a warning is given."""
_PENDING = ("remapped_rows/remapped_row_pending", "retired_pages/pending_retirement")
"""Where a card reports memory that will be retired at the next reset."""
_AGAIN = "docker compose up -d --force-recreate"


@dataclasses.dataclass(frozen=True)
class SmiGpu:
    """One GPU, as `nvidia-smi -q -x` describes it."""

    number: int
    node: xml.Element

    def text(self, path: str) -> str:
        return (self.node.findtext(path) or "").strip()

    def number_of(self, path: str) -> float | None:
        """Return a value without its unit; None if the card does not report it."""
        return _figure(self.node.find(path))

    @property
    def label(self) -> str:
        return f"GPU {self.number}"

    @property
    def as_peer(self) -> peers.Gpu:
        address = self.node.get("id", "").lower()  # with a domain of eight digits; the kernel writes four
        return peers.Gpu(self.number, self.text("product_name"), re.sub(r"^0{4}(?=[0-9a-f]{4}:)", "", address))


def _figure(node: xml.Element | None) -> float | None:
    """Return the number in an element, without its unit."""
    found = None if node is None else re.match(r"\d+(\.\d+)?", (node.text or "").strip(), re.ASCII)
    return float(found.group()) if found else None


def checks(machine: Machine) -> Iterator[Finding]:
    """Yield all checks of GPUs."""
    if not machine.wants_gpus():
        why = "STATION_GPUS is none" if machine.is_station else "this machine has no NVIDIA GPU"
        yield not_applicable("GPUs", why)
        return
    output = machine.run("nvidia-smi", "-q", "-x")
    if output is None or output.code != 0:
        yield _no_answer(machine, output)
        return
    try:
        tree = xml.fromstring(output.out)
    except xml.ParseError:
        yield problem("GPUs", f"nvidia-smi printed no XML: {output.first_line[:80]}", "nvidia-smi -q -x | head")
        return
    gpus = [SmiGpu(number, node) for number, node in enumerate(tree.iter("gpu"))]
    yield _count(machine, gpus)
    yield _driver(tree)
    yield from _kernels(machine, gpus)
    yield _memory_errors(gpus)
    yield _heat(gpus)
    yield _others(gpus)
    yield _persistence(machine, gpus)
    yield from peers.checks(machine, [gpu.as_peer for gpu in gpus])


def _no_answer(machine: Machine, output: Output | None) -> Finding:
    """Find out why nvidia-smi fails, from its exit code and message."""
    name = "GPUs"
    if output is None:
        if machine.is_container:
            return problem(name, "this container has no GPU: nvidia-smi is missing", _AGAIN)
        return problem(name, "there is a card, but its driver is not installed", "sudo apt-get install nvidia-driver")
    message = output.first_line
    if "Unknown Error" in message and machine.is_container:
        # a daemon-reload of systemd on the host does this: NVIDIA/nvidia-container-toolkit#48
        seen = f"the running container lost its GPUs (a systemctl daemon-reload on the host does this): {message}"
        return problem(name, seen, f"{_AGAIN}  # on the host; to prevent it: make doctor")
    if "version mismatch" in message:
        return problem(name, f"the driver was upgraded, but the old kernel module still runs: {message}", "sudo reboot")
    if "communicate with the NVIDIA driver" in message or (output.code == 9 and not message):  # codes: nvidia-smi(1)
        return problem(
            name, f"the driver is not loaded: {message or 'nvidia-smi exits with 9'}", "sudo modprobe nvidia"
        )
    # for example a card that has fallen off the bus, or a driver that hangs: the kernel's log says more
    seen = f"nvidia-smi fails ({output.code}): {message or 'no message'}"
    return problem(name, seen, "sudo dmesg | grep -i -e xid -e nvrm")


def _count(machine: Machine, gpus: list[SmiGpu]) -> Finding:
    wanted = machine.environ.get("STATION_GPUS", "all")
    expected = 1 if wanted in ("all", "none") else len(wanted.split(","))
    kinds: dict[str, int] = {}
    for gpu in gpus:
        kinds[gpu.text("product_name")] = kinds.get(gpu.text("product_name"), 0) + 1
    seen = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if len(gpus) < expected:
        return problem("GPUs", f"GPUs requested: {wanted}; found: {len(gpus)} ({seen or 'none'})", _AGAIN)
    return ok("GPUs", seen)


def _driver(tree: xml.Element) -> Finding:
    version, cuda = _version(tree, "kmd_version", "driver_version"), _version(tree, "cuda_umd_version", "cuda_version")
    found = re.match(r"\d+", version)
    if not found:
        return warning("driver", f"unreadable version: {version}", "nvidia-smi")
    if int(found.group()) < DRIVER:
        seen = f"{version} is too old: CUDA 12 needs {DRIVER} or newer"
        return problem("driver", seen, "sudo apt-get install nvidia-driver && sudo reboot")
    return ok("driver", f"{version}, for CUDA up to {cuda} (PyTorch and the 12.1 compiler need {DRIVER} or newer)")


def _version(tree: xml.Element, *names: str) -> str:
    """Return the first of these fields with a version. Drivers from 610 on have new names."""
    found = ((tree.findtext(name) or "").strip() for name in names)
    return next((text for text in found if text[:1].isdigit()), tree.findtext(names[-1]) or "?")


def _kernels(machine: Machine, gpus: list[SmiGpu]) -> Iterator[Finding]:
    """Check that the wheel of torch has machine code for the cards."""
    output = machine.run("nvidia-smi", "--query-gpu=index,compute_cap", "--format=csv,noheader")
    torch = packages.torch_of()
    if output is None or output.code != 0 or torch is None or torch.cuda is None:
        return
    low, high = packages.capabilities(torch.cuda)
    pairs = re.findall(r"(\d+), *(\d+)\.(\d+)", output.out)
    caps: list[tuple[str, tuple[int, int]]] = [(number, (int(major), int(minor))) for number, major, minor in pairs]
    bad = [f"GPU {number} ({major}.{minor})" for number, (major, minor) in caps if not low <= (major, minor) <= high]
    known = f"{torch.version} for CUDA {torch.cuda} has kernels for {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    if bad:
        remedy = "train launch … --gpus IDS" if len(bad) < len(gpus) else "pip install --upgrade torch torchvision"
        yield problem("compute capability", f"torch {known}, but not for {', '.join(bad)}", remedy)
    elif caps:
        mine = ", ".join(sorted({f"{major}.{minor}" for _, (major, minor) in caps}))
        yield ok("compute capability", f"{mine}; torch {known}")


def _memory_errors(gpus: list[SmiGpu]) -> Finding:
    bad: list[str] = []
    waiting: list[str] = []
    for gpu in gpus:
        errors = _uncorrectable(gpu)
        if errors or gpu.text("remapped_rows/remapped_row_failure") == "Yes":
            bad.append(f"{gpu.label}: {errors} uncorrectable errors")
        action = gpu.text("gpu_recovery_action")  # since driver 565
        if action not in ("", "None", "N/A"):
            bad.append(f"{gpu.label}: the driver requests: {action}")
        elif gpu.text("gpu_reset_status/reset_required") == "Yes":  # older drivers
            bad.append(f"{gpu.label}: the driver requests a reset")
        if "Yes" in map(gpu.text, _PENDING):
            waiting.append(gpu.label)
    if bad:
        return problem("GPU memory errors", "; ".join(bad), "sudo nvidia-smi --gpu-reset")
    if waiting:
        seen = f"{', '.join(waiting)}: faulty memory will be retired at the next reset"
        return warning("GPU memory errors", seen, "sudo nvidia-smi --gpu-reset")
    is_on = any(gpu.text("ecc_mode/current_ecc") == "Enabled" for gpu in gpus)
    return ok("GPU memory errors", "none uncorrected" if is_on else "not counted: ECC is off, or these cards have none")


def _uncorrectable(gpu: SmiGpu) -> int:
    """Return the number of errors since the driver was loaded that ECC could not correct."""
    counts = gpu.node.find("ecc_errors/volatile")
    return int(sum(_figure(count) or 0.0 for count in counts or () if "uncorrectable" in count.tag))


def _heat(gpus: list[SmiGpu]) -> Finding:
    """Check whether heat or power slows a card. nvidia-smi has `clocks_event_reasons`; before 535, `…throttle…`."""
    slow = []
    for gpu in gpus:
        for node in gpu.node.iter():
            is_reason = node.tag.startswith(("clocks_event_reason_", "clocks_throttle_reason_"))
            is_heat = any(word in node.tag for word in ("thermal", "hw_slowdown", "power_brake"))
            if is_reason and is_heat and (node.text or "").strip() == "Active":
                slow.append(f"{gpu.label}: {node.tag.split('_reason_')[1].replace('_', ' ')}")
    temperatures = [gpu.number_of("temperature/gpu_temp") for gpu in gpus]
    known = [degrees for degrees in temperatures if degrees is not None]
    hot = f"at most {max(known):.0f} C" if known else "temperatures are not reported"
    if slow:
        return warning("GPU heat", f"slowed down: {'; '.join(slow)}; {hot}", "nvidia-smi -q -d PERFORMANCE,TEMPERATURE")
    return ok("GPU heat", hot)


def _others(gpus: list[SmiGpu]) -> Finding:
    """Check the memory in use. A container sees the memory of processes outside, but not the processes."""
    busy = []
    for gpu in gpus:
        used, total = (gpu.number_of(f"fb_memory_usage/{which}") for which in ("used", "total"))
        if used and total and used > _TOO_FULL * total:
            names = {(node.text or "?").strip().rsplit("/", 1)[-1] for node in gpu.node.iter("process_name")}
            by = f" by {', '.join(sorted(names))}" if names else ""
            busy.append(f"{gpu.label}: {used / 1024:.1f} of {total / 1024:.1f} GiB{by}")
    if busy:
        return warning("GPU memory", f"in use: {'; '.join(busy)}", "nvidia-smi")
    return ok("GPU memory", "free")


def _persistence(machine: Machine, gpus: list[SmiGpu]) -> Finding:
    """Check whether the driver stays loaded while no process uses a card."""
    off = [gpu.label for gpu in gpus if gpu.text("persistence_mode") == "Disabled"]
    if off:
        seen = f"off for {', '.join(off)}: each start waits until the driver has set up the card again"
        where = "on the host, " if machine.is_container else ""
        return warning("persistence mode", seen, f"sudo nvidia-smi -pm 1  # {where}until the next boot")
    return ok("persistence mode", "on" if any(gpu.text("persistence_mode") for gpu in gpus) else "not reported")
