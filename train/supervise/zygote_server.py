"""A process that has imported what ranks need, and forks them: a start, or a restart, pays no import of torch.

    python -P …/train/supervise/zygote_server.py PLAN         a server; PLAN is JSON: see `main`

The process that supervises a run (the agent) asks it over a socket to fork a function, and hears when a fork has
ended. The zygote computes nothing, starts no thread and touches no GPU, so a fork of it is a clean process. It ends
when the other end of its socket is closed, and kills what it has forked: no rank outlives its agent.

A lender has imported the libraries, and a fork of it becomes the zygote of each process that connects. `train keeper`
holds one, and `train launch` while it starts a run. It serves only those that are like it in all that matters when
libraries are loaded (`digest`).

Nothing of this package is imported here before it is known whose zygote this is: a checkout may be edited while a
lender lives. How one is asked for, and asked, is in zygote.py.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = (
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.utils.tensorboard", "torch.utils.flop_counter",
    "numpy", "pydantic", "tomli_w", "safetensors.torch", "psutil", "threadpoolctl",
)  # fmt: skip
"""What a lender imports."""
READ_AT_LOADING = (
    "PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "NPY_", "NUMPY_", "ATEN_",
    "TORCH", "PYTORCH", "TRITON_", "MALLOC_", "GLIBC_", "LANG", "LC_", "HOME",
)  # fmt: skip
"""How variables begin that Python and libraries read when they are loaded."""
OFF = "TRAIN_WARM"
"""A variable: set to `off`, nothing is borrowed from the keeper's lender, and the keeper holds none."""
_BLAS = "OPENBLAS_NUM_THREADS"
"""What NumPy's OpenBLAS reads as it is loaded: else it starts a thread a core, here and again in each rank."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_MOST_FILES = 16
_failed: list[str] = []
"""Why torch could not be imported: a variable that it reads says what it does not know."""


def send(line: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    fd = os.memfd_create("message")
    try:
        with os.fdopen(os.dup(fd), "w", encoding="utf-8") as file:
            json.dump(message, file)
        socket.send_fds(line, [b"m"], [fd, *files])
    finally:
        os.close(fd)


def receive(line: socket.socket) -> tuple[Any, list[int]] | None:
    """A message and its open files; None: the other end is closed."""
    try:
        head, (fd, *files), _, _ = socket.recv_fds(line, 1, _MOST_FILES)
    except (ConnectionError, ValueError):  # without a file it is no message: the end
        return None
    with os.fdopen(fd, encoding="utf-8") as file:
        file.seek(0)
        return (json.load(file), files) if head else None


def lender_socket(environ: Mapping[str, str], make: bool = False) -> Path | None:
    """Where a lender serves processes like this one, in this environment; None: that place is not this user's alone.

    Args:
        make: the folder, where there is none.
    """
    folder = Path(environ.get("TMPDIR") or "/tmp") / f"train-warm-{os.getuid()}"
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
        found = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        return None
    return folder / digest(environ)


def digest(environ: Mapping[str, str]) -> str:
    """Equal for two processes that are alike in all that matters when libraries are loaded, in these environments."""
    parts = [sys.executable, sys.version, sys.prefix, str(os.getuid()), str(os.getgid()), str(sorted(os.getgroups()))]
    parts += [f"{key}={value}" for key, value in sorted(environ.items()) if key.startswith(READ_AT_LOADING)]
    parts.append(f"{OFF} {environ.get(OFF) == 'off'}")
    for folder in sys.path:
        if folder.endswith(("site-packages", "dist-packages")):  # a package that comes or goes changes it
            with contextlib.suppress(OSError):
                parts.append(f"{folder} {Path(folder).stat().st_mtime_ns}")
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    parts += [f"{name} {resource.getrlimit(getattr(resource, name))}" for name in names]
    parts += [f"nice {os.getpriority(os.PRIO_PROCESS, 0)}", f"cores {sorted(os.sched_getaffinity(0))}"]
    with contextlib.suppress(OSError):
        this = Path("/proc/self")
        parts += [str((this / "ns" / n).readlink()) for n in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")]
        parts.append((this / "cgroup").read_text())
        lines = (this / "status").read_text().splitlines()
        parts += [line for line in lines if line.startswith(("Cap", "NoNewPrivs", "Seccomp:"))]
    return hashlib.sha256("\n".join(parts).encode(errors="replace")).hexdigest()[:24]


def called(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _lend(door: socket.socket, imports: Sequence[str]) -> socket.socket | None:
    """Be a lender until its standard input is closed, or a fork would lack what a new process has; then returns None.

    Returns in a fork, for each process that comes, the socket to serve it by.
    """
    environ, place = dict(os.environ), Path(door.getsockname())
    own, inode = digest(environ), place.stat().st_ino
    os.environ.setdefault(_BLAS, "1")
    for name in imports:  # first: a fork is to have them all
        if select.select([0], [], [], 0)[0]:
            break
        _import(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    while True:
        watched: list[Any] = [0, door]
        ready = select.select(watched, [], [], 5.0)[0]
        if 0 in ready or _unclean() or digest(environ) != own:
            break
        if door in ready:
            line, _ = door.accept()
            if os.fork() == 0:
                door.close()
                os.setsid()
                return line
            line.close()
    with contextlib.suppress(OSError):  # another lender may be there
        if place.stat().st_ino == inode:
            place.unlink()
        place.parent.rmdir()
    return None


class _Server:
    """Serves the process at the other end of a socket."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._imports: deque[str] = deque()
        self._forks: set[int] = set()
        self._woken = _wake_on_death()

    def serve(self) -> None:
        """Until the other end is closed."""
        while True:
            watched: list[Any] = [self._woken, self._line]
            ready = select.select(watched, [], [], 0 if self._imports else None)[0]
            if self._woken in ready:
                self._reap()
            if self._line in ready:
                received = receive(self._line)
                if received is None:
                    return
                self._obey(*received)
            elif not ready:
                _import(self._imports.popleft())

    def _obey(self, message: dict[str, Any], files: list[int]) -> None:
        if "root" in message:
            self._enter(message)
            send(self._line, {"serves": os.getpid()})
        elif "signal" in message:
            if message["signal"] in self._forks:
                os.kill(message["signal"], message["number"])
        else:
            while message["after"] in self._imports:
                _import(self._imports.popleft())
            made = self._fork(message, files)
            for fd in files:
                os.close(fd)
            send(self._line, made)

    def _enter(self, message: dict[str, Any]) -> None:
        """Take over what the other process is like."""
        os.environ.clear()
        os.environ.update({_BLAS: "1", **message["environ"]})
        os.umask(message["umask"])
        os.chdir(message["cwd"])
        time.tzset()
        tempfile.tempdir = None
        _take_package(message["root"])["add_current_folder"]()
        self._imports = deque(name for name in message["imports"] if name not in sys.modules)

    def _fork(self, message: dict[str, Any], files: list[int]) -> dict[str, Any]:
        if unclean := _unclean():
            return {"problem": f"{unclean}, which its forks would lack; what imports it when Python starts?"}
        if _failed:
            return {"problem": f"torch cannot be imported: {_failed[0]}; try: python -c 'import torch'"}
        parent, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                self._become(message, files, parent)
        except OSError as error:
            return {"errno": error.errno}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._forks.add(pid)
        return {"pid": pid}

    def _become(self, message: dict[str, Any], files: list[int], parent: int) -> NoReturn:
        """In a fork: call the function, with the signals that ask for a stop blocked until it listens for them."""
        code = 1
        try:
            called("train.signals:end_with_parent")(parent)
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (*SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for fd in (self._line.detach(), self._woken):
                os.close(fd)
            _take_standard_files(files)
            os.environ.clear()
            os.environ.update(message["environ"])
            called(message["call"])(*message["arguments"], files)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            with contextlib.suppress(BaseException):
                traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Report forks that have ended, and kill what is left in their sessions."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 1 << 12)
        for pid in list(self._forks):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._forks.discard(pid)
            with contextlib.suppress(OSError):
                send(self._line, {"ended": pid, "code": code})

    def end(self) -> None:
        """Kill all that was forked."""
        for pid in self._forks:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


def _wake_on_death() -> int:
    """A file that can be read when a child of this process has ended."""
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return woken


def _import(name: str) -> None:
    """Import a module. One that cannot be imported is again by the fork that needs it, which says why.

    What imports leave is not garbage, and looking for that takes a sixth of their time; frozen, it is not looked at
    again, nor copied by a fork for having been looked at.
    """
    gc.disable()
    try:
        importlib.import_module(name)
    except ImportError:
        pass
    except Exception as error:
        if name == "torch":  # imported again, it says something else
            _failed.append(" ".join(f"{type(error).__name__}: {error}".split())[:300])
    gc.freeze()
    gc.enable()


def _take_package(root: str) -> dict[str, Any]:
    """Import this package from the checkout that it is asked from. Returns what module_runner.py has there."""
    runner = runpy.run_path(str(Path(root) / "train" / "module_runner.py"))
    runner["take_package"]()
    return runner


def _unclean() -> str:
    """What a fork of this process would lack, as the beginning of a sentence; '' if nothing."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"the process that forks the ranks has other threads ({', '.join(others)})"
    torch = sys.modules.get("torch")
    return "the process that forks the ranks uses a GPU" if torch is not None and torch.cuda.is_initialized() else ""


def _take_standard_files(files: list[int]) -> None:
    """Let the first three be standard input, output and error."""
    for target, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(files[target], target)
        os.close(files[target])
        files[target] = target
        # a log is UTF-8 in any locale; a terminal gets what it has letters for
        encoding = "utf-8" if stat.S_ISREG(os.fstat(target).st_mode) else None
        stream = open(target, "w" if target else "r", 1, encoding, "replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _name_process() -> None:
    """Let lists of processes call this one by what it is; forks give themselves other names (worker.py)."""
    os.environ["SPT_NOENV"] = "1"  # what /proc shows of the environment stays
    with contextlib.suppress(ImportError):  # in a checkout that was not installed: docs/gpu.md
        from setproctitle import setproctitle

        setproctitle("train-zygote")
    del os.environ["SPT_NOENV"]


def main() -> None:
    """Be the server that the first argument describes.

    It has `fd`, a socket: connected, or of a lender listening; and `lends`, what a lender imports, else null.
    """
    for number in SIGNALS:  # meant for ranks: Slurm sends them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    _name_process()  # before the environment changes, by which it finds the place of the name
    plan = json.loads(sys.argv[1])
    line: socket.socket | None = socket.socket(fileno=plan["fd"])
    if line is not None and plan["lends"] is not None:
        line = _lend(line, plan["lends"])
    if line is None:
        return
    os.environ.setdefault(_BLAS, "1")
    server = _Server(line)
    try:
        server.serve()
    finally:
        server.end()
        if plan["lends"] is not None:  # what libraries clear away at an exit is the lender's
            os._exit(0)


if __name__ == "__main__":
    main()
