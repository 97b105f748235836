"""This machine at one moment: who holds its GPUs or cores, its memory and disk. Imports no torch."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

from .. import gpus
from ..build import cores
from ..leases import devices, locks
from ..supervise import memory

_USED = (("cpu.stat", "usage_usec", 1e-6), ("cpuacct/cpuacct.usage", "", 1e-9))
"""Files of the control group with the processor time used: file, line, and seconds of a unit. Version 2, and 1."""


def held() -> list[dict[str, Any]]:
    """Return each GPU of this machine and who holds it; without GPUs the cores. Of all stations and users.

    Raises:
        Unusable: there is no folder for leases.
    """
    locks.folder()
    return _of_gpus(gpus.Gpus()) or _of_cores()


def _of_gpus(seen: gpus.Gpus) -> list[dict[str, Any]]:
    found = []
    for state in seen.read():
        holder = devices.of_gpu(state.uuid, state.number).holder()
        other = gpus.foreign_use(state.uuid) if holder is None and state.answers else ""
        found.append({
            "gpu": state.number, "uuid": state.uuid, "name": state.name, "use": state.use,
            "memory_used": state.memory_used, "memory": state.memory_size, **_who(holder), "other": other,
            "answers": state.answers,
        })  # fmt: skip
    return found


def _of_cores() -> list[dict[str, Any]]:
    every = enumerate(devices.cores_here(cores.usable()))
    return [{"core": number, **_who(device.holder())} for number, device in every]


def _who(holder: locks.Holder | None) -> dict[str, str]:
    one = holder or locks.Holder()
    return {"user": one.who if holder else "", "run": one.run, "since": one.since, "station": one.station}


class Machine:
    """Looks at this machine repeatedly: within the limits of the container, if there is one."""

    def __init__(self, runs: Path) -> None:
        self._runs, self._gpus = runs, gpus.Gpus()
        self._used: tuple[float, float] | None = None

    def devices(self) -> list[dict[str, Any]]:
        """Return the GPUs as `held` does; without GPUs only the cores that are held. [] if that is unknown."""
        with contextlib.suppress(Exception):  # no folder for leases, TRAIN_SLOTS is no number: the commands say it
            return _of_gpus(self._gpus) or [one for one in _of_cores() if one["user"]]
        return []

    def facts(self) -> dict[str, float | None]:
        """Return cores and those in use, bytes of memory, disk and what is free of them. None: unknown."""
        import psutil

        total = min([psutil.virtual_memory().total, *memory.limits().values()])
        disk = shutil.disk_usage(next(place for place in (self._runs, *self._runs.parents) if place.is_dir()))
        return {
            "cores": cores.usable(), "busy": self._busy(), "memory": total, "memory_used": total - memory.left(),
            "disk": disk.total, "disk_free": disk.free,
        }  # fmt: skip

    def _busy(self) -> float | None:
        """Return the cores that were in use since the last call; None at the first."""
        now, before = (time.monotonic(), _processor_time()), self._used
        self._used = now
        if before is None or now[1] < 0 or now[0] - before[0] <= 0:
            return None
        return (now[1] - before[1]) / (now[0] - before[0])


def _processor_time() -> float:
    """Return the seconds that processors have worked for the control groups that are visible here; -1: unknown."""
    for name, line, unit in _USED:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            texts = (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").splitlines()
            return int(next(text for text in texts if text.startswith(line)).split()[-1]) * unit
    return -1.0
