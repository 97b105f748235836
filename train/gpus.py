"""The GPUs of this machine, by NVML (nvidia-ml-py); none where the library or its package is missing.

torch is asked for what it may compute on (parallel/devices), and the doctor, which runs on a bare Python 3.8, reads
nvidia-smi.
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
_AGAIN = 60.0
"""Seconds between two times that NVML is begun anew, because a GPU does not answer or there is none."""
_PATIENCE = 5.0
"""Seconds that the GPUs have to answer: a driver whose card fell off the bus may never."""
REASONS = {
    "gpu_idle": 0x1, "application_clocks": 0x2, "power_cap": 0x4, "hardware": 0x8, "sync_boost": 0x10,
    "thermal": 0x20, "hardware_thermal": 0x40, "power_brake": 0x80, "display_clocks": 0x100,
}  # fmt: skip
"""Why a GPU's clocks are lower than they could be: names, and NVML's bits (nvmlClocksEventReasons)."""
_NO_ANSWER = frozenset({1, 2, 9, 10, 11, 15, 16, 18, 28, 999})
"""nvmlReturn_t of a GPU that is lost, needs a reset, or whose driver has gone: uninitialized, invalid handle, driver
not loaded, timeout, interrupt, lost, reset required, version mismatch, not found, unknown. Any other is an answer."""
ECC = {"corrected": 0, "uncorrected": 1}
"""nvmlMemoryErrorType_t."""


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU as a program for it is compiled: its compute capability as (major, minor), and its UUID, where known."""

    name: str
    capability: tuple[int, int]
    uuid: str = ""


@dataclasses.dataclass
class GpuState:
    """A GPU at one moment. What it does not tell is None."""

    number: int
    uuid: str
    name: str
    answers: bool = False
    """False: it was there before, and is gone, or gives no answer."""
    use: float | None = None
    """From 0 to 1."""
    memory_used: float | None = None
    """Bytes, as the next."""
    memory_size: float | None = None
    celsius: float | None = None
    celsius_slowdown: float | None = None
    """Where it begins to slow itself down."""
    watts: float | None = None
    watts_limit: float | None = None
    ecc: dict[str, float] = dataclasses.field(default_factory=dict)
    """Errors of its memory since it was made, by kind."""
    reasons: int | None = None
    """Bits of REASONS."""
    processes: dict[int, float] = dataclasses.field(default_factory=dict)
    """Bytes that processes have there, by the host's process ids."""


def number_by_bus() -> None:
    """Let CUDA number the GPUs as NVML does, unless CUDA_DEVICE_ORDER is set.

    By itself CUDA begins with the fastest (CUDA C++ Programming Guide, "CUDA Environment Variables"). Read when the
    driver is opened.
    """
    os.environ.setdefault(ORDER, BY_BUS)


def cards() -> list[Card]:
    """All GPUs of this machine, in NVML's order. A process may fork after it."""
    found = []
    with contextlib.suppress(Exception):  # NVML has errors of its own for everything
        import pynvml

        pynvml.nvmlInit()
        with contextlib.suppress(pynvml.NVMLError):
            for number in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                name, uuid = _text(pynvml.nvmlDeviceGetName(handle)), _text(pynvml.nvmlDeviceGetUUID(handle))
                found.append(Card(name, tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)), uuid))
        pynvml.nvmlShutdown()
    return found


def seen_here() -> list[Card]:
    """The cards that CUDA_VISIBLE_DEVICES names, in its order, by number or UUID; all of them where it names none.

    A slice's UUID (MIG-…) does not name its card, and in another order than NVML's no number does.
    """
    every, names = cards(), os.environ.get(VISIBLE, "").replace(" ", "").split(",")
    by_number = os.environ.get(ORDER, BY_BUS) == BY_BUS
    known = {card.uuid: card for card in every} | {str(n): card for n, card in enumerate(every) if by_number}
    return [known[name] for name in names if name in known] or every


def process_of(number: int, lock: Path, processes: dict[int, float]) -> int | None:
    """Which of the processes on a GPU a rank is; None where that cannot be seen from here.

    NVML has the host's process ids, which mean nothing inside a container. Seen from the host, the id that a rank in a
    container knows is the last of its `NSpid` (proc(5)); processes of other containers may have the same, and the ranks
    of a run alone hold its lock open.

    Args:
        number: the process id of the rank, as the rank knows it.
        lock: the file `lock` of its run.
        processes: by process ids of the host.
    """
    for pid in processes if sees_host_ids() else ():
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            folder = Path("/proc") / str(pid)
            is_its = re.search(rf"^NSpid:.*\s{number}$", (folder / "status").read_text(errors="replace"), re.MULTILINE)
            if is_its and any(file.samefile(lock) for file in (folder / "fd").iterdir()):
                return pid
    return None


def sees_host_ids() -> bool:
    """Whether process ids here are the host's: its namespace has a number of its own (PROC_PID_INIT_INO)."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino == 0xEFFFFFFC
    return False


class Gpus:
    """Looks at the GPUs again and again. One that is gone stays in the list, without an answer."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._seen: dict[str, GpuState] = {}
        self._begun = -math.inf
        self._last: list[GpuState] = []
        self._asking: threading.Thread | None = None

    def read(self) -> list[GpuState]:
        """All that have been seen, in their order; those that answer, with their figures.

        Those that were seen before count as gone where the driver does not come back. It is waited for once.
        """
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask, daemon=True)
            self._asking.start()
            self._asking.join(_PATIENCE)
        if self._asking.is_alive():
            self._last = [GpuState(gpu.number, gpu.uuid, gpu.name) for gpu in self._last]
        return self._last

    def _ask(self) -> None:
        """In a thread of its own: every call of NVML may be one that does not return."""
        found = self._read()
        if (not found or not all(gpu.answers for gpu in found)) and time.monotonic() - self._begun >= _AGAIN:
            self._begin()
            found = self._read()
        self._last = found

    def _begin(self) -> None:
        self._begun, self._handles = time.monotonic(), {}
        with contextlib.suppress(Exception):  # NVML has errors of its own for everything
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
        except Exception as error:  # one without a number is not NVML's: the library itself does not work
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
            # 1: since it was made (nvmlEccCounterType_t)
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
    """The answer; None where this GPU has no such thing."""
    with contextlib.suppress(Exception):
        return float(ask())
    return None


def _text(answer: str | bytes) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
