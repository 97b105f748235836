"""The table of causes: what is behind a message, whether it would recur, what to do, and which doctor check finds it.

Knows messages of torch, NCCL, CUDA, the kernel, C libraries and this package. The exceptions of a task, the log of a
script and the ranks of `train doctor --job` are all looked up here. Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from . import variables
from .format import UNITS

_LONGEST = 300
"""Maximum number of characters of a message that a reason quotes."""


class _Words(dict[str, str]):
    """What the text of a row may quote. Any other name is that of an environment variable."""

    def __missing__(self, name: str) -> str:
        return os.environ.get(name) or "not set"


@dataclass(frozen=True)
class Cause:
    """A row: what is behind a message.

    `reason` and `remedy` may quote environment variables by name, groups of the pattern, `{said}` (the message),
    `{start}` (the message up to the end of the pattern), `{limit}` (the memory limit that applies), `{value}` (of the
    variable in the group `name`) and `{interface}` (a network interface with an address).
    """

    pattern: str
    """Regular expression for its messages."""
    reason: str = ""
    """'': the message names it."""
    recurs: bool | Callable[[str], bool] | None = None
    """Whether a restart would fail in the same way, or a function of the message that says so. None: the cause is only
    likely. Such a cause is told behind the message, and another row or the type of an exception decides."""
    remedy: str = ""
    """What to do about it; '': nothing is known."""
    checks: tuple[str, ...] | None = None
    """Names of doctor checks; (): those of `--job`, which start ranks; None: no check finds it."""

    def matches(self, text: str) -> bool:
        """Whether this is a message of this cause."""
        return re.search(self.pattern, text) is not None

    def would_recur(self, text: str) -> bool:
        """Whether a restart after this message would fail in the same way."""
        return self.recurs(text) if callable(self.recurs) else bool(self.recurs)

    @property
    def has_words(self) -> bool:
        """Whether the row says something about a message. Otherwise it only decides whether it recurs."""
        return bool(self.reason or self.remedy)

    def told(self, text: str, line: str = "", limit: str = "") -> str:
        """Return reason and remedy for a message; '' for a message that is not of this cause.

        Args:
            line: The message as the reason quotes it, for example with a line of the task's file. Default: `text`.
            limit: Text of the memory limit that applies.
        """
        found = re.search(self.pattern, text)
        if found is None:
            return ""
        line, groups = line or text, found.groupdict("")
        source = line if found[0] in line else text
        words = _Words(
            groups,
            said=line[:_LONGEST],
            start=source.partition(found[0])[0] + found[0],
            limit=limit,
            value=os.environ.get(groups.get("name", "")) or "not set",
            interface=next(iter(variables.interfaces()), "lo"),
        )
        return "; ".join(part.format_map(words) for part in (self.reason or "{said}", self.remedy) if part)

    @property
    def hint(self) -> str:
        """What to write behind a message of this cause, or behind what was told of it; '': nothing."""
        check = "train doctor --job" if self.checks == () else ""
        if self.checks:
            check = f"train doctor --only '{','.join(self.checks)}'"
        if self.recurs is None and self.reason:
            return "likely " + ": ".join(filter(None, [self.reason, self.remedy, check]))
        return check and f"see: {check}"


_GPU_SIZES = re.compile(
    r"Tried to allocate ([\d.]+) (\w+)\. GPU \d+ has a total capacity of ([\d.]+) (\w+).*"
    r"Of the allocated memory ([\d.]+) (\w+) is allocated by PyTorch, .*?and ([\d.]+) (\w+) is reserved by PyTorch"
)


def _gpu_is_too_small(text: str) -> bool:
    """Whether torch's message about a full GPU means that the GPU is too small.

    It is if the request would not fit beside torch's own memory even with all other processes gone.
    """
    found = _GPU_SIZES.search(text)
    if found is None:
        return False
    pairs = zip(found.groups()[::2], found.groups()[1::2], strict=True)
    asked, total, allocated, reserved = (float(number) * 2 ** UNITS.get(unit, 0) for number, unit in pairs)
    return asked > total - allocated - reserved


NO_GPU = "No CUDA GPUs are available"
"""Message of torch and of this package if the GPUs are gone, for example after a daemon-reload on the host."""
_RESOURCE = r"(?s)^(?!(?:Value|Type|Key|Index|Lookup|Attribute|Assertion|Name|NotImplemented|ZeroDivision)Error\b)"
"""Start of a pattern for a lack of resources. Exceptions of these types have another reason, whatever they say."""

BATCH_NORM = Cause(
    r"Expected more than 1 value per channel when training",
    "{start}: BatchNorm cannot train on one sample",
    True,
    "drop the short batch, or change the size of the batches (of a task: --data.drop_last true, --batch_size or "
    "--micro_batch_size in a new run or a fork)",
)
DETERMINISM = Cause(
    r"(?P<what>\S[^\n.]*?) does not have a deterministic implementation",
    "{what} has no deterministic implementation on this device",
    True,
    "use another operation, or allow this one (of a task: start the run with --deterministic false; a resume then "
    "ends with other bits)",
)
GPU_MEMORY = Cause(
    r"out of memory\. Tried to allocate|(?i:CUDA)\W.{0,40}out of memory|_ALLOC_FAILED",
    "out of memory ({said})",
    _gpu_is_too_small,
    "halve the micro batch (of a task: --micro_batch_size in a new run, or resume with --parallel.recompute auto)",
    ("GPU memory",),
)
NO_ENGINE = Cause(
    r"unable to find an engine to execute this computation",  # no other reason is given: Conv_v8.cpp
    "too little GPU memory for cuDNN, or bf16 on a GPU before Ampere (8.0), where fp16 works",
    checks=("GPU memory", "compute capability"),
)
MEMORY = Cause(
    _RESOURCE + r"(?!.*(?:CUDA|in static TLS block))"
    r".*(?:MemoryError|std::bad_alloc|[Cc]annot allocate memory|can't allocate memory|\bENOMEM\b"
    r"|Unable to allocate .+ for an array)",
    "out of memory ({said}): {limit}",
    True,
    "halve the micro batch (of a task: --micro_batch_size in a new run), use fewer data workers or ranks, "
    "or raise the limit",
    ("memory",),
)
"""Messages of Python, C++, the C library, torch's CPU allocator and NumPy if an allocation fails."""
BUSY = Cause(
    _RESOURCE + r".*(?:Resource temporarily unavailable|can't start new thread|[Tt]hread creation failed"
    r"|BlockingIOError|\bEAGAIN\b)",
    "{said}",
    False,
)
"""Messages of Python, libgomp and C if the machine has no resources for a process or thread right now (EAGAIN)."""
OF_OTHERS = Cause(
    r"gloo|Gloo|NCCL|Connection|CUDA error|Socket|Wait timeout|DataLoader worker \(pid|cuDNN error"
    rf"|{NO_GPU}|CUDA driver initialization failed|cudaGetDeviceCount|CUDA unknown error|CUDA driver error"
    r"|Triton Error \[CUDA\]",  # a compiled kernel reports the errors of earlier kernels
    recurs=False,
)
"""Words of torch about networks, devices and other processes. They count only in messages that torch has written."""

UNUSED = Cause(
    r"finished reduction in the prior iteration",
    "ddp needs a gradient of every parameter in every step, but the last backward of a step gave a parameter none "
    "({said})",
    True,
    "use find_unused_parameters=True (of a task: --parallel.find_unused_parameters true, also in a resume), remove "
    "what the loss does not use, or give an activation checkpoint around it use_reentrant=False",
)
KILLED_WORKER = Cause(
    r"DataLoader worker \(pid.*(killed by signal: Killed|exited unexpectedly)",
    "a data worker that was killed, mostly for lack of memory",
    checks=("memory", "shared memory"),
)

TABLE = (
    # the program, or a setting
    BATCH_NORM,
    DETERMINISM,
    UNUSED,
    Cause(
        r"Expected to mark a variable ready only once",
        "{start}: ddp got one gradient twice in a backward pass",
        True,
        "call torch.utils.checkpoint.checkpoint with use_reentrant=False (in transformers: "
        "gradient_checkpointing_kwargs={{'use_reentrant': False}}; in a task also: --parallel.recompute)",
    ),
    Cause(
        r"required.*--?local[-_]rank|Missing option .*--local[-_]rank|no attribute 'local_rank'",
        recurs=True,
        remedy='like torchrun, the launcher passes no --local_rank; read int(os.environ["LOCAL_RANK"])',
    ),
    Cause(
        r"attempted relative import|'__main__' is not a package",
        recurs=True,
        remedy="start it as a module, from the folder above its package: train launch --module PACKAGE.NAME",
    ),
    Cause(
        r"attempt has been made to start a new process before the|in a process of multiprocessing",
        recurs=True,
        remedy="put what the script does below: if __name__ == '__main__':",
    ),
    Cause(
        r"port: (?P<port>\d+), .*EADDRINUSE",
        "port {port} is in use by another process",
        False,
        "do not set MASTER_PORT in the code",
    ),
    Cause(
        r"Unable to find address for: ",
        "GLOO_SOCKET_IFNAME is {GLOO_SOCKET_IFNAME}: gloo takes whole names separated by commas, without ^, = or "
        "prefixes ({said})",
        True,
        "try: export GLOO_SOCKET_IFNAME={interface}",
        ("GLOO_SOCKET_IFNAME",),
    ),
    Cause(
        r"[Nn]o socket interface found|Bootstrap : no .*interface",
        "NCCL_SOCKET_IFNAME is {NCCL_SOCKET_IFNAME}: NCCL finds no such interface ({said})",
        True,
        "try: export NCCL_SOCKET_IFNAME=={interface}",
        ("NCCL_SOCKET_IFNAME",),
    ),
    Cause(
        r"unsupported gloo device",
        "GLOO_DEVICE_TRANSPORT is {GLOO_DEVICE_TRANSPORT}: this torch has no such transport ({said})",
        True,
        "unset it",
    ),
    Cause(
        r"CachingAllocator option|Error parsing CachingAllocator",
        "PYTORCH_CUDA_ALLOC_CONF is {PYTORCH_CUDA_ALLOC_CONF}: torch knows no such option ({said})",
        True,
    ),
    Cause(
        r"nvalid value for (?:the )?environment variable:? *(?P<name>[A-Z][A-Z0-9_]+)",
        "{name} is {value}: torch cannot read that ({said})",
        True,
    ),
    Cause(
        r"environment variable (?P<name>[A-Z_]+) expected, but not set",
        "{name} is {value}: torchrun sets it ({said})",
        True,
    ),
    # files and data workers
    Cause(r"Too many open files|EMFILE|ulimit -n", checks=("open files",)),
    Cause(
        r"/dev/shm.*(No space|[Bb]us error|[Aa]llocat)|(No space|[Bb]us error|[Aa]llocat).*/dev/shm"  # alone: a path
        r"|insufficient shared memory|shared memory ?\(shm\)|Unexpected bus error"
        r"|killed by signal: Bus error|died of SIGBUS"
        r"|[Ss]hared memory object|shared memory .*(No space|too small)|</?torch_\d+_\d+_\d+>",
        "too little shared memory",
        checks=("shared memory",),
    ),
    Cause(
        r"No space left on device|ENOSPC|no space left|Disk quota exceeded|File too large|database or disk is full",
        "a full disk, or a limit of it",
        checks=("room on disk", "folder of runs"),
    ),
    Cause(r"(ibv_reg_mr|ibv_create|RLIMIT_MEMLOCK|memlock)", "too little locked memory", checks=("locked memory",)),
    Cause(
        r"exited unexpectedly with exit code \d", "an error of a data worker, which has printed it into the log"
    ),
    KILLED_WORKER,
    # GPUs
    Cause(
        r"driver version is insufficient|driver on your system is too old|driver too old|forward compatibility"
        r"|system has unsupported display driver|PTX was compiled with an unsupported toolchain",
        "a driver too old for this torch",
        checks=("driver",),
    ),
    Cause(
        r"no kernel image|invalid device function",
        "a GPU for which this torch has no kernels",
        checks=("compute capability",),
    ),
    GPU_MEMORY,
    NO_ENGINE,
    Cause(
        r"[Uu]ncorrectable ECC|ECC error|hardware stack error",
        "a GPU with memory errors",
        checks=("GPU memory errors", "GPUs"),
    ),
    Cause(
        rf"{NO_GPU}|fallen off the bus|Unable to determine the device handle|GPU is lost|NVRM: Xid"
        r"|CUDA unknown error|CUDA driver initialization failed|NVML: (Unknown|GPU)|devices? .*busy or unavailable",
        "a GPU that has vanished from this machine or container",
        checks=("GPUs", "GPUs stay", "GPU memory errors"),
    ),
    Cause(
        r"Cannot re-initialize CUDA in forked subprocess",
        "a dataset that uses a GPU in a data worker",
        remedy="keep its data on the CPU, or use no data workers (of a task: --data.workers 0)",
    ),
    Cause(
        r"undefined symbol|version `[\w.]+' not found|CUDNN_STATUS_(NOT_INITIALIZED|VERSION|SUBLIBRARY)\w*"
        r"|cuDNN version (incompat|mismatch)\w*|libcud\w+\.so.*cannot open",
        "libraries of different versions",
        checks=("torch", "LD_LIBRARY_PATH"),
    ),
    # other ranks, networks, memory and disks
    Cause(
        r"NCCL error|NCCL WARN|ncclSystemError|ncclInternalError|ncclRemoteError|unhandled (system|cuda) error"
        r"|Watchdog caught collective|no (socket )?interface found|Bootstrap : no",
        "the NCCL connection between the ranks",
        checks=(),
    ),
    Cause(
        r"(urllib\.error|urllib3|requests|httpx|aiohttp|huggingface_hub)\S*: ",
        "the internet, or a proxy on the way there",
    ),
    Cause(r"no progress for \d+ s", "ranks that wait for each other, or data that never arrive", checks=()),
    MEMORY,
    Cause(r"out of memory", checks=("memory",)),  # as this package says of a process that the kernel killed
    Cause(
        r"connectFullMesh|Connection (refused|reset|timed out|closed by peer)|No route to host|Network is unreachable"
        r"|Broken pipe|Timed out waiting for clients|store.*timed out|Wait timeout",
        "another rank that is gone, or the network between the ranks",
        checks=(),
    ),
    Cause(
        r"Stale file handle|No locks available|Transport endpoint",
        "a network file system",
        checks=("file system", "file locks"),
    ),
    Cause(
        r"Read-only file system|Input/output error|Remote I/O error",
        "a failing disk",
        checks=("file system", "write speed"),
    ),
    BUSY,
    # what only decides: an index out of range, or code for another GPU, and then all other errors of devices
    Cause(
        r"device-side assert|no kernel image|invalid device function|invalid configuration argument"
        r"|CUDNN_STATUS_NOT_SUPPORTED|CUDNN_STATUS_BAD_PARAM|CUBLAS_STATUS_INVALID_VALUE|kernel image is invalid"
        r"|PTX was compiled with an unsupported toolchain",
        recurs=True,
    ),
    OF_OTHERS,
)  # fmt: skip
"""All causes, the most specific first. The first row that matches and decides is certain. The first row that matches at
all gives the hint."""


def certain(text: str) -> Cause | None:
    """Return the cause that a message shows for certain; None: there is none."""
    return next((cause for cause in TABLE if cause.recurs is not None and cause.matches(text)), None)


def is_of_others(text: str) -> bool:
    """Whether a message of torch is about networks, devices and other processes, and not a fault of the program."""
    return certain(text) is OF_OTHERS


def hint(reason: str) -> str:
    """Return what to add to the reason of a failed run; '': there is nothing to add, or it is there already."""
    found = next((cause for cause in TABLE if (cause.has_words or cause.checks) and cause.matches(reason)), None)
    return found.hint if found is not None and "train doctor" not in reason else ""
