"""The likely cause behind a message, and the check of `train doctor` that looks for it. One table; pure.

Messages are those of torch, NCCL, CUDA, the kernel and this package; a message that none of them fits gets no hint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Likely:
    """A cause that a machine, not a program, is behind."""

    words: str
    """What messages of it have in them: a regular expression."""
    cause: str
    """'': the messages say it themselves."""
    checks: tuple[str, ...]
    """Names of checks; (): those of `--job`, for which ranks are needed."""

    @property
    def command(self) -> str:
        """What to type."""
        if not self.checks:
            return "train doctor --job"
        return f"train doctor --only '{','.join(self.checks)}'"


TABLE = (
    Likely(
        r"/dev/shm.*(No space|[Bb]us error|[Aa]llocat)|(No space|[Bb]us error|[Aa]llocat).*/dev/shm"  # alone: a path
        r"|insufficient shared memory|shared memory ?\(shm\)|Unexpected bus error"
        r"|killed by signal: Bus error|died of SIGBUS"
        r"|[Ss]hared memory object|shared memory .*(No space|too small)|</?torch_\d+_\d+_\d+>",
        "too little shared memory",
        ("shared memory",),
    ),
    Likely(
        r"No space left on device|ENOSPC|no space left|Disk quota exceeded|File too large|database or disk is full",
        "a full disk, or a limit of it",
        ("room on disk", "folder of runs"),
    ),
    Likely(r"Too many open files|EMFILE|ulimit -n", "", ("open files",)),
    Likely(r"(ibv_reg_mr|ibv_create|RLIMIT_MEMLOCK|memlock)", "too little locked memory", ("locked memory",)),
    Likely(
        r"DataLoader worker \(pid.*(killed by signal: Killed|exited unexpectedly)",
        "the kernel, or somebody, killed a data worker; mostly for lack of memory",
        ("memory", "shared memory"),
    ),
    Likely(
        r"driver version is insufficient|driver on your system is too old|driver too old|forward compatibility"
        r"|system has unsupported display driver|PTX was compiled with an unsupported toolchain",
        "a driver too old for this torch",
        ("driver",),
    ),
    Likely(r"no kernel image|invalid device function", "a GPU that torch has no kernels for", ("compute capability",)),
    Likely(
        r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|torch\.OutOfMemoryError",
        "",
        ("GPU memory",),
    ),
    Likely(
        r"unable to find an engine to execute this computation",  # torch tells no other reason: Conv_v8.cpp
        "too little memory of the GPU for cuDNN, or bf16 on a card before Ampere (8.0), which takes fp16",
        ("GPU memory", "compute capability"),
    ),
    Likely(
        r"[Uu]ncorrectable ECC|ECC error|hardware stack error",
        "a GPU whose memory fails",
        ("GPU memory errors", "GPUs"),
    ),
    Likely(
        r"No CUDA GPUs are available|fallen off the bus|Unable to determine the device handle|GPU is lost|NVRM: Xid"
        r"|CUDA unknown error|CUDA driver initialization failed|NVML: (Unknown|GPU)|devices? .*busy or unavailable",
        "a GPU that is lost to this machine or container",
        ("GPUs", "GPUs stay", "GPU memory errors"),
    ),
    Likely(
        r"undefined symbol|version `[\w.]+' not found|CUDNN_STATUS_(NOT_INITIALIZED|VERSION|SUBLIBRARY)\w*"
        r"|cuDNN version (incompat|mismatch)\w*|libcud\w+\.so.*cannot open",
        "libraries of several versions",
        ("torch", "LD_LIBRARY_PATH"),
    ),
    Likely(
        r"NCCL error|NCCL WARN|ncclSystemError|ncclInternalError|ncclRemoteError|unhandled (system|cuda) error"
        r"|Watchdog caught collective|no (socket )?interface found|Bootstrap : no",
        "NCCL's way between the ranks",
        (),
    ),
    Likely(r"no progress for \d+ s", "ranks that wait for each other, or data that do not come", ()),
    Likely(
        r"out of memory|MemoryError|[Cc]annot allocate memory|can't allocate memory|std::bad_alloc",
        "",
        ("memory",),
    ),
    Likely(
        r"connectFullMesh|Connection (refused|reset|timed out|closed by peer)|No route to host|Network is unreachable"
        r"|Broken pipe|Timed out waiting for clients|store.*timed out|Wait timeout",
        "another rank that is gone, or the network between them",
        (),
    ),
    Likely(
        r"Stale file handle|No locks available|Transport endpoint",
        "a network file system",
        ("file system", "file locks"),
    ),
    Likely(
        r"Read-only file system|Input/output error|Remote I/O error",
        "a disk that fails",
        ("file system", "write speed"),
    ),
)
"""The most telling first: what a first one fits is not looked at further."""


def of(text: str) -> Likely | None:
    """What is likely behind a message; None: nothing that a check could see."""
    return next((one for one in TABLE if re.search(one.words, text)), None)


def hint(reason: str) -> str:
    """What to add to the reason of a run that failed; '' where there is nothing to say, or it is said."""
    found = of(reason)
    if found is None or "train doctor" in reason:
        return ""
    return f"likely {found.cause}: {found.command}" if found.cause else f"see: {found.command}"
