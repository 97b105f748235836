"""Checks of limits: shared memory, memory, locked memory, open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from ..format import size
from ..supervise.memory import limits
from .finding import Finding, ok, problem
from .machine import Machine

MB, GB = 2**20, 2**30
_LEAST_SHARED = 256 * MB
"""Bytes. Docker's default is 64 MB, which a few batches of pictures fill."""
_LEAST_MEMORY = 2 * GB
"""Bytes. torch alone needs a few hundred MB per rank."""
_LEAST_ADDRESSES = 8 * GB
"""Bytes of address space. A rank maps 4.5 GB, mostly libraries that it never touches. CUDA maps all memory."""
_LEAST_FILES = 1024
"""Number of open files. Every tensor that a data worker sends is an open file for a moment."""


def checks(machine: Machine) -> Iterator[Finding]:
    """Yield all checks of limits."""
    yield _shared_memory(machine)
    yield _memory(machine)
    yield _locked_memory(machine)
    yield _open_files()


def _shared_memory(machine: Machine) -> Finding:
    """Check /dev/shm, through which data workers and NCCL send tensors."""
    name, path = "shared memory", str(machine.path("/dev/shm"))
    remedy = "docker run --shm-size=16g …" if machine.is_container else "sudo mount -o remount,size=50% /dev/shm"
    if machine.is_station:
        remedy = "SHM_SIZE=16g make up  # on the host"
    try:
        place = os.statvfs(path)
    except OSError as error:
        return problem(name, f"{path}: {error.strerror}", remedy)
    total, free = place.f_frsize * place.f_blocks, place.f_frsize * place.f_bavail
    if total < _LEAST_SHARED:
        return problem(
            name, f"{size(total)} at {path}: data workers and NCCL crash or hang with less than 256 MiB", remedy
        )
    if free < _LEAST_SHARED:
        return problem(
            name, f"{size(free)} free of {size(total)} at {path}", f"ls -lS {path} | head  # who left these?"
        )
    if not os.access(path, os.W_OK):
        return problem(name, f"{path} is not writable", f"sudo chmod 1777 {path}")
    return ok(name, f"{size(free)} free of {size(total)}")


def _memory(machine: Machine) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and (machine.wants_gpus() or soft < _LEAST_ADDRESSES):
        need = "CUDA needs it unlimited" if machine.wants_gpus() else "a rank needs more"
        is_mine = hard == resource.RLIM_INFINITY  # else only root can raise it
        remedy = "ulimit -v unlimited" if is_mine else "sudo prlimit --as=unlimited --pid $$"
        return problem("memory", f"{size(soft)} of address space per process (ulimit -v): {need}", remedy)
    limit = min(limits().values(), default=None)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = min(limit or total, total)
    where = "in this container or control group" if most < total else "in this machine"
    if most < _LEAST_MEMORY:
        seen = f"{size(most)} {where}: a rank and its data workers need more than {size(_LEAST_MEMORY)}"
        remedy = "docker update --memory 16g --memory-swap 16g CONTAINER  # on the host"
        if not machine.is_container:
            remedy = "cat /proc/self/cgroup  # who sets the limit; in a Slurm job: --mem" if most < total else "free -h"
        return problem("memory", seen, remedy)
    return ok("memory", f"{size(most)} {where}")


def _locked_memory(machine: Machine) -> Finding:
    """Check locked memory. InfiniBand needs it for its buffers. Memory pinned by CUDA does not count."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    if machine.list("/sys/class/infiniband"):
        remedy = "MEMLOCK=-1 make up  # on the host" if machine.is_station else "ulimit -l unlimited"
        return problem("locked memory", f"{size(soft)}: InfiniBand cannot register its buffers", remedy)
    return ok("locked memory", f"{size(soft)}; enough without InfiniBand")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _LEAST_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        seen = f"{soft}: too few for data workers, which need {_LEAST_FILES}"
        remedy = f"ulimit -n {most}" if hard > soft else "sudo prlimit --nofile=65536 --pid $$"
        return problem("open files", seen, remedy)
    return ok("open files", str(soft))
