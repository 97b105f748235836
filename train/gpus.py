"""The GPUs of this machine, by NVML (nvidia-ml-py); no GPUs if the library or its package is missing.

For the GPUs on which a run may compute, parallel/devices asks torch. The doctor, which runs on a plain Python 3.8,
reads nvidia-smi.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
_IDLE = 0.5e9
"""Bytes of memory that a GPU may use while nobody computes on it."""
_AGAIN = 60.0
"""Seconds between two restarts of NVML, if a GPU does not answer or none is found."""
_PATIENCE = 5.0
"""Seconds the GPUs get to answer: a driver whose GPU fell off the bus may never answer."""
REASONS = {
    "gpu_idle": 0x1, "application_clocks": 0x2, "power_cap": 0x4, "hardware": 0x8, "sync_boost": 0x10,
    "thermal": 0x20, "hardware_thermal": 0x40, "power_brake": 0x80, "display_clocks": 0x100,
}  # fmt: skip
"""Maps reasons for reduced GPU clocks to NVML's bits (nvmlClocksEventReasons)."""
_NO_ANSWER = frozenset({1, 2, 9, 10, 11, 15, 16, 18, 28, 999})
"""Values of nvmlReturn_t for a GPU that is lost, needs a reset, or has no driver: uninitialized, invalid handle, driver
not loaded, timeout, interrupt, lost, reset required, version mismatch, not found, unknown. Others count as answers."""
ECC = {"corrected": 0, "uncorrected": 1}
"""Maps kinds of memory errors to nvmlMemoryErrorType_t."""


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU: its name, its compute capability as (major, minor), and its UUID, if known."""

    name: str
    capability: tuple[int, int]
    uuid: str = ""
    number: int = dataclasses.field(default=-1, compare=False, repr=False, kw_only=True)
    """NVML's, which also counts GPUs that do not answer."""


@dataclasses.dataclass
class GpuState:
    """The state of a GPU at one moment. Unknown values are None."""

    number: int
    uuid: str
    name: str
    answers: bool = False
    """False: the GPU is gone, or does not answer."""
    use: float | None = None
    """Utilisation, from 0 to 1."""
    memory_used: float | None = None
    """Bytes."""
    memory_size: float | None = None
    """Bytes."""
    celsius: float | None = None
    celsius_slowdown: float | None = None
    """Temperature at which the GPU slows itself down."""
    watts: float | None = None
    watts_limit: float | None = None
    ecc: dict[str, float] = dataclasses.field(default_factory=dict)
    """Maps kinds of memory errors to their number over the life of the GPU."""
    reasons: int | None = None
    """Bits of REASONS."""
    processes: dict[int, float] = dataclasses.field(default_factory=dict)
    """Maps process ids of the host to the bytes of GPU memory that they use."""


def number_by_bus() -> None:
    """Make CUDA number the GPUs as NVML does, unless CUDA_DEVICE_ORDER is set.

    By default CUDA starts with the fastest GPU (CUDA C++ Programming Guide, "CUDA Environment Variables"). The variable
    is read when the driver is opened.
    """
    os.environ.setdefault(ORDER, BY_BUS)


def cards() -> list[Card]:
    """Return all GPUs of this machine that answer, in NVML's order. The process may still fork afterwards."""
    found = []
    with contextlib.suppress(Exception):  # NVML raises its own errors
        import pynvml

        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # it fell off the bus
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                name, uuid = _text(pynvml.nvmlDeviceGetName(handle)), _text(pynvml.nvmlDeviceGetUUID(handle))
                found.append(Card(name, tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)), uuid, number=number))
        pynvml.nvmlShutdown()
    return found


def seen_here() -> list[Card]:
    """Return the GPUs that `named_here` finds; all GPUs if it finds none, or not all."""
    every = cards()
    with contextlib.suppress(LookupError):
        return named_here(every) or every
    return every


def of_ranks(count: int) -> list[Card]:
    """Return the GPUs on which this many ranks of this machine compute: the first ones that this process sees.

    Returns all GPUs of the machine if it is not known which ones these are, and [] if NVML knows fewer than `count`.
    """
    every, first = cards(), list[Card]()
    if VISIBLE in os.environ or numbers_as_nvml():
        with contextlib.suppress(LookupError):
            first = named_here(every)[:count]
    return [] if len(every) < count else first if len(first) == count else every


def numbers_as_nvml() -> bool:
    """Whether CUDA numbers the GPUs of this process as NVML does."""
    return os.environ.get(ORDER, BY_BUS) == BY_BUS


def named_here(every: list[Card]) -> list[Card]:
    """Return those of these GPUs that CUDA_VISIBLE_DEVICES names by number or by the start of a UUID; all if it is not
    set.

    The UUID of a MIG slice (MIG-…) does not identify its GPU. Numbers do so only in NVML's order.

    Raises:
        LookupError: it names something else, such as a MIG slice. The text says what.
    """
    if VISIBLE not in os.environ or not every:
        return every
    found = list[Card]()
    for name in filter(None, os.environ[VISIBLE].replace(" ", "").split(",")):
        if name == "-1":  # CUDA stops here
            break
        matches = [card for card in every if name.startswith("GPU-") and card.uuid.startswith(name)]
        if name.isdecimal() and numbers_as_nvml():
            matches = [card for card in every if card.number == int(name)]
        if len(matches) != 1:
            raise LookupError(name)
        found += matches
    return found


def foreign_use(uuid: str) -> str:
    """Return what uses a GPU, as the end of a message: processes that compute there, or memory that is in use; '' if it
    is free, or does not say.

    Programs that draw do not count, nor does the memory of a GPU with a screen. In a container NVML may list no
    process.
    """
    with contextlib.suppress(Exception):  # NVML raises its own errors
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            computing = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            drawing, has_screen = set[int](), False
            with contextlib.suppress(Exception):
                drawing = {process.pid for process in pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)}
                has_screen = bool(pynvml.nvmlDeviceGetDisplayActive(handle))
            if strangers := computing - drawing:
                return f"process {', '.join(map(str, sorted(strangers)))}"
            used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
            if used > _IDLE and not computing and not drawing and not has_screen:
                return f"something outside ({used / 1e9:.1f} GB)"
        finally:
            pynvml.nvmlShutdown()
    return ""


def process_of(number: int, lock: Path, processes: dict[int, float]) -> int | None:
    """Return the host's process id of a rank that uses a GPU; None if it cannot be found from here.

    NVML reports process ids of the host, which differ inside a container. On the host, the last value of a process's
    `NSpid` (proc(5)) is its id in its container. Processes of other containers may have the same value, but only the
    ranks of a run hold its lock open.

    Args:
        number: Process id of the rank in its own namespace.
        lock: The file `lock` of its run.
        processes: Processes on the GPU, by process ids of the host.
    """
    for pid in processes if sees_host_ids() else ():
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to another user
            folder = Path("/proc") / str(pid)
            is_its = re.search(rf"^NSpid:.*\s{number}$", (folder / "status").read_text(errors="replace"), re.MULTILINE)
            if is_its and any(file.samefile(lock) for file in (folder / "fd").iterdir()):
                return pid
    return None


def sees_host_ids() -> bool:
    """Whether process ids here are those of the host, whose namespace has a fixed inode (PROC_PID_INIT_INO)."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino == 0xEFFFFFFC
    return False


class Gpus:
    """Reads the GPUs repeatedly. A GPU that is gone stays in the list with `answers` False."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._seen: dict[str, GpuState] = {}
        self._begun = -math.inf
        self._last: list[GpuState] = []
        self._asking: threading.Thread | None = None

    def read(self) -> list[GpuState]:
        """Return all GPUs seen so far, in order, with values for those that answer.

        If the driver does not return in time, all GPUs count as gone. Later calls do not wait for it again.
        """
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask, daemon=True)
            self._asking.start()
            self._asking.join(_PATIENCE)
        if self._asking.is_alive():
            self._last = [GpuState(gpu.number, gpu.uuid, gpu.name) for gpu in self._last]
        return self._last

    def _ask(self) -> None:
        """Read the GPUs. Runs in a separate thread, because a call of NVML may never return."""
        found = self._read()
        if (not found or not all(gpu.answers for gpu in found)) and time.monotonic() - self._begun >= _AGAIN:
            self._begin()
            found = self._read()
        self._last = found

    def _begin(self) -> None:
        self._begun, self._handles = time.monotonic(), {}
        with contextlib.suppress(Exception):  # NVML raises its own errors
            import pynvml

            if self._nvml is not None:
                pynvml.nvmlShutdown()
                self._nvml = None
            pynvml.nvmlInit()
            self._nvml = pynvml
            for number in range(pynvml.nvmlDeviceGetCount()):
                with contextlib.suppress(pynvml.NVMLError):
                    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                    uuid, name = _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle))
                    self._handles[uuid] = handle
                    self._seen[uuid] = GpuState(number, uuid, name)

    def _read(self) -> list[GpuState]:
        found = [self._look(gpu, self._handles.get(uuid)) for uuid, gpu in self._seen.items()]
        return sorted(found, key=lambda gpu: (gpu.number, gpu.uuid))

    def _look(self, seen: GpuState, handle: Any) -> GpuState:
        nvml, gpu = self._nvml, GpuState(seen.number, seen.uuid, seen.name)
        if nvml is None or handle is None:
            return gpu
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            gpu.memory_used, gpu.memory_size = float(memory.used), float(memory.total)
        except Exception as error:  # an error without a value is not from NVML: the library does not work
            if getattr(error, "value", 999) in _NO_ANSWER:
                return gpu
        gpu.answers = True
        gpu.use = _asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        gpu.celsius = _asked(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        gpu.celsius_slowdown = _asked(
            lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        )
        gpu.watts = _asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        gpu.watts_limit = _asked(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
        for kind, number in ECC.items():
            # 1: over the life of the GPU (nvmlEccCounterType_t)
            count = _asked(functools.partial(nvml.nvmlDeviceGetTotalEccErrors, handle, number, 1))
            if count is not None:
                gpu.ecc[kind] = count
        reasons = _asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))  # EventReasons from 535 on
        gpu.reasons = None if reasons is None else int(reasons)
        with contextlib.suppress(Exception):
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.usedGpuMemory:
                    gpu.processes[int(process.pid)] = float(process.usedGpuMemory)
        return gpu


def _asked(ask: Callable[[], Any]) -> float | None:
    """Return the answer; None if this GPU does not support the question."""
    with contextlib.suppress(Exception):
        return float(ask())
    return None


def _text(answer: str | bytes) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
