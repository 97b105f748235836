"""Finds out why a process died, whether that would recur, and which check of `train doctor` finds the cause.

Judges by the exception that a rank of a task has raised, or by the last lines of a log, which show for certain only a
lack of memory or of another resource. All functions are pure except `failure_of`, which needs an exception that is
being handled. Knows messages of torch, NCCL, CUDA, the kernel and this package.
"""

from __future__ import annotations

import dis
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import variables
from ..errors import described, one_line
from . import memory

NO_GPU = "No CUDA GPUs are available"
"""Message of torch and of this package if the GPUs are gone, for example after a daemon-reload on the host."""
OF_OTHERS = (
    "gloo", "Gloo", "NCCL", "Connection", "CUDA error", "Socket", "Wait timeout", "DataLoader worker (pid",
    "cuDNN error", NO_GPU, "CUDA driver initialization failed", "cudaGetDeviceCount", "CUDA unknown error",
    "CUDA driver error", "Triton Error [CUDA]",  # a compiled kernel reports the errors of earlier kernels
)  # fmt: skip
"""Parts of torch's RuntimeErrors about networks, devices and other processes."""
_OF_PROGRAM = (
    "device-side assert", "no kernel image", "invalid device function", "invalid configuration argument",
    "CUDNN_STATUS_NOT_SUPPORTED", "CUDNN_STATUS_BAD_PARAM", "CUBLAS_STATUS_INVALID_VALUE", "kernel image is invalid",
    "PTX was compiled with an unsupported toolchain",
)  # fmt: skip
"""Parts of device errors that recur, such as an index out of range or code for another GPU."""
_OF_MACHINE = ("distributed", "cuda", "utils/data", "_inductor")
"""Parts of torch that write messages about networks, devices and other processes in Python."""
_BUSY = re.compile(
    r"Resource temporarily unavailable|can't start new thread|[Tt]hread creation failed|BlockingIOError|\bEAGAIN\b"
)
"""Messages of Python, libgomp and C if the machine has no resources for a process or thread right now (EAGAIN)."""

_REMEDIES = {
    "Expected to mark a variable ready only once": (
        "ddp got one gradient twice in a backward pass: call torch.utils.checkpoint.checkpoint with "
        "use_reentrant=False (in transformers: gradient_checkpointing_kwargs={'use_reentrant': False}), or use "
        "--parallel.recompute"
    ),
    "Expected more than 1 value per channel when training": (
        "BatchNorm cannot train on one sample: in a new run or a fork, drop the short batch "
        "(--data.drop_last true), or change --batch_size or --micro_batch_size"
    ),
}
"""Maps a part of a torch message to advice. The advice replaces the rest of the message."""

LAST_LINES = 8
"""Number of lines of a dead rank's log that run.json keeps."""
_LAST = 20
"""Number of last lines of a log to search for a cause."""
_TAKEN = re.compile(r"port: (\d+), .*EADDRINUSE")
"""torch's message if the port of its store is in use."""
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""Prefix of torch's lines about an exception."""


_OWN = re.compile(r"(Value|Type|Key|Index|Lookup|Attribute|Assertion|Name|NotImplemented|ZeroDivision)Error\b")
"""Begins the last line of an exception that no lack of a resource raises, whatever its message says."""


@dataclass(frozen=True)
class Cause:
    """Why a process ended, in one line, and whether that would recur."""

    reason: str
    recurs: bool


def without_prefix(line: str) -> str:
    """Return a line of a log without what torch writes before it."""
    return _PREFIX.sub("", line)


def is_busy(text: str) -> bool:
    """Whether a message says that the machine had no resources for another process or thread."""
    return bool(_BUSY.search(text))


def is_of_others(text: str) -> bool:
    """Whether a RuntimeError is about networks, devices or other processes, and not a fault of the program."""
    return any(word in text for word in OF_OTHERS) and not any(word in text for word in _OF_PROGRAM)


def _raised_in(error: BaseException) -> str:
    """Return the file whose `raise` made an exception; '': C code made it, or it was never raised."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return ""
    code = place.tb_frame.f_code
    return code.co_filename if dis.opname[code.co_code[place.tb_lasti]] == "RAISE_VARARGS" else ""


def _speaker(error: BaseException, folders: tuple[Path, ...]) -> BaseException | None:
    """Return the exception whose message was written by C code or in these folders: this one, or one behind it. None:
    the message is in the task's own words, which say nothing about the machine."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        file = _raised_in(now)
        if not file or any(Path(file).is_relative_to(folder) for folder in folders):
            return now if now is error or isinstance(now, RuntimeError) else None
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)
    return None


def _worker_behind(error: BaseException) -> BaseException:
    """Return the death of a data worker that torch has turned into another exception, else the exception itself.

    torch raises it in a signal handler, between any two lines. If these are in torch.ops (torch/_ops.py,
    OpOverloadPacket.__getattr__), each RuntimeError becomes an AttributeError.
    """
    behind = error.__context__
    is_turned = isinstance(error, AttributeError) and "has no overload name" in str(error)
    is_death = isinstance(behind, RuntimeError) and str(behind).startswith("DataLoader worker (pid")
    return behind if is_turned and is_death and behind is not None else error


def failure_of(error: BaseException, task_file: Path | None, snapshot: Path | None = None) -> dict[str, Any]:
    """Return `reason`, `recurs`, `traceback` and `is_own` of the exception that ends a rank, for its outcome.

    `recurs` says whether a new attempt would fail in the same way. Randomness is deterministic here, so an exception of
    the task recurs. An error of the network, of the machine, or from another rank's death may not.

    Args:
        snapshot: File for a record of the memory in use, if a GPU is full.
    """
    import torch
    import torch.distributed as dist

    from ..parallel.torch_private import dump_gpu_memory
    from ..tasks import where

    error = _worker_behind(error)
    text = one_line(described(error))
    of_sample = getattr(error, "sample", "")
    passing = isinstance(error, (dist.DistError, OSError, EOFError))
    library, package = Path(torch.__file__).parent, Path(__file__).parents[1]
    machine = _speaker(error, (*(library / name for name in _OF_MACHINE), package))
    is_own = _speaker(error, (library, package)) is None
    if of_sample:  # and the error is not temporary: see data/fetch.py
        passing = False
        text = f"{of_sample}: {text}"
    elif isinstance(error, torch.OutOfMemoryError):
        passing = not memory.device_is_too_small(text)
    elif (
        isinstance(error, RuntimeError) and "Original Traceback" not in text
    ):  # that means an error of the dataset in a data worker
        passing |= machine is not None and is_of_others(str(machine))
    passing |= isinstance(error, RuntimeError) and not of_sample and machine is not None and is_busy(str(machine))
    setting = "" if of_sample or is_own else variables.behind(text)
    line = where(error, task_file) if task_file is not None else text
    line = line if is_own else _with_remedy(line)
    if isinstance(error, torch.OutOfMemoryError):
        line = f"out of memory ({line[:300]}): {memory.ADVICE_ON_GPU}"
        if snapshot is not None and dump_gpu_memory(snapshot):
            where_to = f"{snapshot.parent.name}/{snapshot.name}, for https://pytorch.org/memory_viz"
            line += f"; memory in use: {where_to}"
    elif isinstance(error, (MemoryError, OSError, RuntimeError)[: 1 if is_own else 3]) and memory.is_refused(text):
        line = f"out of memory ({line[:300]}): {memory.refused_at()}; {memory.ADVICE}"
        passing = False
    elif setting:
        line, passing = f"{setting} ({line[:300]})", False
    return {"reason": line[:900], "recurs": not passing, "traceback": traceback.format_exc(), "is_own": is_own}


def _with_remedy(line: str) -> str:
    for words, remedy in _REMEDIES.items():
        if words in line:
            return f"{line.partition(words)[0]}{words}: {remedy}"
    return line


def in_log(text: str, limit: str = "") -> Cause | None:
    """Return the cause that the end of a log shows for the death of its process; None: no certain cause.

    Args:
        text: End of its output, with carriage returns resolved.
        limit: Text of the memory limit that applied to it; '': that of this process.
    """
    lines = [_PREFIX.sub("", line) for line in text.splitlines() if line.strip()][-_LAST:]
    lines = [line for line in lines if not _OWN.match(line)]
    for line in reversed(lines):
        if memory.is_refused(line):
            return Cause(
                f"out of memory ({one_line(line)[:400]}): {limit or memory.refused_at()}; {memory.ADVICE}", True
            )
        if memory.device_is_too_small(line):
            return Cause(f"out of memory ({one_line(line)[:400]}): {memory.ADVICE}", True)
        if taken := _TAKEN.search(line):
            return Cause(f"port {taken[1]} is in use by another process; do not set MASTER_PORT in the code", False)
    busy = next((line for line in reversed(lines) if is_busy(line)), None)
    return None if busy is None else Cause(one_line(busy)[:400], False)


def last_lines(log: str) -> list[str]:
    """Return the last lines of a rank's log, for `train show`."""
    return [line.rstrip()[:1000] for line in log.splitlines() if line.strip()][-LAST_LINES:]


@dataclass(frozen=True)
class Likely:
    """A likely cause in the machine, not in the program."""

    pattern: str
    """Regular expression for its messages."""
    cause: str
    """'': the messages name it."""
    checks: tuple[str, ...] | None
    """Names of doctor checks; (): those of `--job`, which start ranks; None: no check finds it."""

    @property
    def command(self) -> str:
        """Return the command to type."""
        if not self.checks:
            return "train doctor --job"
        return f"train doctor --only '{','.join(self.checks)}'"


TABLE = (
    Likely(r"Too many open files|EMFILE|ulimit -n", "", ("open files",)),
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
    Likely(r"(ibv_reg_mr|ibv_create|RLIMIT_MEMLOCK|memlock)", "too little locked memory", ("locked memory",)),
    Likely(
        r"exited unexpectedly with exit code \d",
        "an error of a data worker, which has printed it into the log",
        None,
    ),
    Likely(
        r"DataLoader worker \(pid.*(killed by signal: Killed|exited unexpectedly)",
        "a data worker that was killed, mostly for lack of memory",
        ("memory", "shared memory"),
    ),
    Likely(
        r"driver version is insufficient|driver on your system is too old|driver too old|forward compatibility"
        r"|system has unsupported display driver|PTX was compiled with an unsupported toolchain",
        "a driver too old for this torch",
        ("driver",),
    ),
    Likely(
        r"no kernel image|invalid device function", "a GPU for which this torch has no kernels", ("compute capability",)
    ),
    Likely(
        r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|torch\.OutOfMemoryError",
        "",
        ("GPU memory",),
    ),
    Likely(
        r"unable to find an engine to execute this computation",  # no other reason is given: Conv_v8.cpp
        "too little GPU memory for cuDNN, or bf16 on a GPU before Ampere (8.0), where fp16 works",
        ("GPU memory", "compute capability"),
    ),
    Likely(
        r"[Uu]ncorrectable ECC|ECC error|hardware stack error",
        "a GPU with memory errors",
        ("GPU memory errors", "GPUs"),
    ),
    Likely(
        r"No CUDA GPUs are available|fallen off the bus|Unable to determine the device handle|GPU is lost|NVRM: Xid"
        r"|CUDA unknown error|CUDA driver initialization failed|NVML: (Unknown|GPU)|devices? .*busy or unavailable",
        "a GPU that has vanished from this machine or container",
        ("GPUs", "GPUs stay", "GPU memory errors"),
    ),
    Likely(
        r"Cannot re-initialize CUDA in forked subprocess",
        "a dataset that uses a GPU in a data worker (keep its data on the CPU, or give --data.workers 0)",
        (),
    ),
    Likely(
        r"undefined symbol|version `[\w.]+' not found|CUDNN_STATUS_(NOT_INITIALIZED|VERSION|SUBLIBRARY)\w*"
        r"|cuDNN version (incompat|mismatch)\w*|libcud\w+\.so.*cannot open",
        "libraries of different versions",
        ("torch", "LD_LIBRARY_PATH"),
    ),
    Likely(
        r"NCCL error|NCCL WARN|ncclSystemError|ncclInternalError|ncclRemoteError|unhandled (system|cuda) error"
        r"|Watchdog caught collective|no (socket )?interface found|Bootstrap : no",
        "the NCCL connection between the ranks",
        (),
    ),
    Likely(
        r"(urllib\.error|urllib3|requests|httpx|aiohttp|huggingface_hub)\S*: ",
        "the internet, or a proxy on the way there",
        None,
    ),
    Likely(r"no progress for \d+ s", "ranks that wait for each other, or data that never arrive", ()),
    Likely(
        r"out of memory|MemoryError|[Cc]annot allocate memory|can't allocate memory|std::bad_alloc",
        "",
        ("memory",),
    ),
    Likely(
        r"connectFullMesh|Connection (refused|reset|timed out|closed by peer)|No route to host|Network is unreachable"
        r"|Broken pipe|Timed out waiting for clients|store.*timed out|Wait timeout",
        "another rank that is gone, or the network between the ranks",
        (),
    ),
    Likely(
        r"Stale file handle|No locks available|Transport endpoint",
        "a network file system",
        ("file system", "file locks"),
    ),
    Likely(
        r"Read-only file system|Input/output error|Remote I/O error",
        "a failing disk",
        ("file system", "write speed"),
    ),
)
"""Likely causes, the most specific first. The first match counts."""


def hint(reason: str) -> str:
    """Return what to add to the reason of a failed run; '' if there is nothing to add, or it is there already."""
    found = next((one for one in TABLE if re.search(one.pattern, reason)), None)
    if found is None or "train doctor" in reason:
        return ""
    if found.checks is None:
        return f"likely {found.cause}"
    return f"likely {found.cause}: {found.command}" if found.cause else f"see: {found.command}"
