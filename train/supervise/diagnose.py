"""What a process died of, by its exception or its log: does it recur, and which check of `train doctor` finds it?

Pure functions, but for `failure_of`, which is called where an exception is handled. A script is any program, and its
output is all there is to judge by. Its own exceptions recur; what the network, a device, another rank's death or a
busy machine did to it may not. Messages are those of torch, NCCL, CUDA, the kernel and this package.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train import variables
from train.errors import one_line
from train.supervise import memory

NO_GPU = "No CUDA GPUs are available"
"""torch's words, and ours: the GPUs are gone, for one after a daemon-reload on the host of a container."""
OF_OTHERS = (
    "gloo", "Gloo", "NCCL", "Connection", "CUDA error", "Socket", "Wait timeout", "DataLoader worker (pid",
    "cuDNN error", NO_GPU, "CUDA driver initialization failed", "cudaGetDeviceCount", "CUDA unknown error",
    "CUDA driver error", "Triton Error [CUDA]",  # who starts a compiled kernel is told what one before it has met
)  # fmt: skip
"""What torch's RuntimeErrors about networks, devices and other processes have in their texts."""
_OF_PROGRAM = (
    "device-side assert", "no kernel image", "invalid device function", "invalid configuration argument",
    "CUDNN_STATUS_NOT_SUPPORTED", "CUDNN_STATUS_BAD_PARAM", "CUBLAS_STATUS_INVALID_VALUE", "kernel image is invalid",
    "PTX was compiled with an unsupported toolchain",
)  # fmt: skip
"""What errors of a device have in their texts that come again: an index out of range, code for another card."""
_BUSY = re.compile(
    r"Resource temporarily unavailable|can't start new thread|[Tt]hread creation failed|BlockingIOError|\bEAGAIN\b"
)
"""A fork or a thread that the machine had no room for at this moment (EAGAIN), in the words of Python, libgomp, C."""
_PASSING_TYPES = re.compile(
    r"(Connection\w*Error|BrokenPipeError|Timeout\w*|\w*TimeoutError|BlockingIOError|InterruptedError|EOFError"
    r"|Dist\w*Error|AcceleratorError|KeyboardInterrupt)$"
)
_PASSING_ERRNO = re.compile(
    r"\[Errno \d+\] (Input/output error|Stale file handle|Remote I/O error|Resource temporarily unavailable"
    r"|Connection|Network is|No route to host|Host is down|Transport endpoint|Broken pipe|Interrupted system call"
    r"|Too many open files in system|Device or resource busy)"
)

_REMEDIES = {
    "Expected to mark a variable ready only once": (
        "ddp was given one gradient twice in a backward: give each torch.utils.checkpoint.checkpoint "
        "use_reentrant=False (of transformers: gradient_checkpointing_kwargs={'use_reentrant': False}), or use "
        "--parallel.recompute"
    ),
    "Expected more than 1 value per channel when training": (
        "BatchNorm cannot train on a batch of one: in a new run, or a fork, leave out the short batch "
        "(--data.drop_last true), or give another --batch_size or --micro_batch_size"
    ),
}
"""What to do about messages of torch in tasks, by words of theirs; what follows these is left out."""

_HEADER = "Traceback (most recent call last)"
_PREFIX = re.compile(r"^(\[rank\d+\]: ?| *[|+] ?)")
"""What torch (for each rank) and exception groups put before each line of a traceback."""
_RAISED = re.compile(r"([A-Za-z_][\w.]*)(?:: ?(.*))?$")
_SYNTAX = re.compile(r"(SyntaxError|IndentationError|TabError): ")
_LINKED = ("During handling of the above exception", "The above exception was the direct cause")
_SURVIVED = ("Exception in thread", "Exception ignored in")
_NOISE = 40
"""So many lines may follow the last traceback: what libraries say at the end. With more, the process went on."""
_LAST = 20
"""So many of the last lines are looked at for a cause where there is no traceback."""


@dataclass(frozen=True)
class Cause:
    """Why a process ended, in one line, and whether it would end so again."""

    reason: str
    recurs: bool


def is_busy(text: str) -> bool:
    """Whether a message says that the machine had no room for one more process or thread."""
    return bool(_BUSY.search(text))


def is_of_others(text: str) -> bool:
    """Whether a RuntimeError's text is about networks, devices or other processes, and no fault of the program."""
    return any(word in text for word in OF_OTHERS) and not any(word in text for word in _OF_PROGRAM)


def failure_of(error: BaseException, task_file: Path | None, snapshot: Path | None = None) -> dict[str, Any]:
    """Why a rank dies of an exception: `reason`, `recurs`, `traceback`, for its outcome.

    `recurs` says whether it would fail again in the same way: randomness is a function here, so an exception of the
    task does, while one of the network, the machine or another rank's death may not.

    Args:
        snapshot: where to write what holds the memory of a GPU that has too little.
    """
    import torch
    import torch.distributed as dist

    from train.parallel.torch_private import dump_gpu_memory
    from train.tasks import where

    text = one_line(f"{type(error).__name__}: {error}")
    of_sample = getattr(error, "sample", "")
    passing = isinstance(error, (dist.DistError, OSError, EOFError))
    if of_sample:  # and of nothing that may pass: see data/fetch.py
        passing = False
        text = f"{of_sample}: {text}"
    elif isinstance(error, torch.OutOfMemoryError):
        passing = not memory.device_is_too_small(text)
    elif isinstance(error, RuntimeError) and "Original Traceback" not in text:  # that is a data set's own, in a worker
        passing |= is_of_others(text)
    passing |= isinstance(error, RuntimeError) and not of_sample and is_busy(text)
    setting = "" if of_sample else variables.behind(text)
    line = _with_remedy(where(error, task_file) if task_file is not None else text)
    if isinstance(error, torch.OutOfMemoryError):
        line = f"out of memory ({line[:300]}): {memory.ADVICE_ON_GPU}"
        if snapshot is not None and dump_gpu_memory(snapshot):
            line += f"; what was in it: {snapshot.parent.name}/{snapshot.name}, for https://pytorch.org/memory_viz"
    elif isinstance(error, (MemoryError, OSError, RuntimeError)) and memory.is_refused(text):
        line = f"out of memory ({line[:300]}): {memory.refused_at()}; {memory.ADVICE}"
        passing = False
    elif setting:
        line, passing = f"{setting} ({line[:300]})", False
    return {"reason": line[:900], "recurs": not passing, "traceback": traceback.format_exc()}


def _with_remedy(line: str) -> str:
    for words, remedy in _REMEDIES.items():
        if words in line:
            return f"{line.partition(words)[0]}{words}: {remedy}"
    return line


def of_log(text: str, code: int, noise: int = _NOISE, limit: str = "") -> Cause | None:
    """What the end of a log says about a process that exited with this code; None: nothing that is certain.

    Args:
        text: the end of its output; lines as they stand after carriage returns.
        code: its exit code; of a signal: negative.
        noise: so many lines may follow a traceback that ended it.
        limit: the one at which memory can have been refused to it, as text; '': that of this process.
    """
    lines = [_PREFIX.sub("", line.rstrip()) for line in text.splitlines()]
    lines = [line for line in lines if line.strip()]
    if not lines:
        return None
    chain = _uncaught(lines, noise) if code > 0 else []
    message = "\n".join(chain) if chain else "\n".join(lines[-_LAST:])
    telling = chain or [line for line in lines[-_LAST:] if is_busy(line) or memory.is_refused(line)] or lines
    what = one_line(telling[-1])[:400]
    if memory.is_refused(message):
        return Cause(f"out of memory ({what}): {limit or memory.refused_at()}; {memory.ADVICE}", True)
    if is_busy(message):
        return Cause(what, False)
    if chain:
        setting = variables.behind(message)
        return Cause(f"{setting} ({what})" if setting else what, bool(setting) or not any(map(_is_passing, chain)))
    is_argparse = any(line.startswith("usage:") for line in lines[-_LAST:])
    return Cause(what, True) if code == 2 and (is_argparse or "can't open file" in lines[-1]) else None


def _is_passing(raised: str) -> bool:
    """Whether an exception, as its traceback's last line has it, is no fault of the program."""
    kind, _, message = raised.partition(":")
    name = kind.rpartition(".")[2]
    if name == "OutOfMemoryError":  # of a device: another process may have had its memory
        return not memory.device_is_too_small(raised)
    if _PASSING_TYPES.match(name):
        return not any(word in message for word in _OF_PROGRAM)
    if name in ("OSError", "IOError"):
        return bool(_PASSING_ERRNO.search(message))
    return name in ("RuntimeError", "ChildFailedError", "ProcessExitedException") and is_of_others(message)


def _uncaught(lines: list[str], noise: int) -> list[str]:
    """The exception that ended a program and those it came from, the last one last; [] if none did."""
    chain: list[str] = []
    linked = skipped = inside = False
    after = 0
    for number, line in enumerate(lines):
        before = lines[number - 1] if number else ""
        if _HEADER in line:
            if not linked:
                chain = []
            skipped, inside, linked = before.startswith(_SURVIVED), True, False
        elif line.startswith(_LINKED):
            linked = True
        elif inside and not line[0].isspace() and line[0] not in "╭│╰┌└":
            found = _RAISED.match(line)
            inside = False
            if found and not skipped:
                chain.append(line)
                after = 0
        elif _SYNTAX.match(line) and before.startswith(" "):
            chain.append(line)
            after = 0
        else:
            after += 1
    return chain if after <= noise else []


@dataclass(frozen=True)
class Likely:
    """A cause that a machine, not a program, is behind."""

    pattern: str
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


def hint(reason: str) -> str:
    """What to add to the reason of a run that failed; '' where there is nothing, or it is there already."""
    found = next((one for one in TABLE if re.search(one.pattern, reason)), None)
    if found is None or "train doctor" in reason:
        return ""
    return f"likely {found.cause}: {found.command}" if found.cause else f"see: {found.command}"
