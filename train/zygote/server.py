"""A process that has made the imports of the ranks and forks them, so that a start or restart need not import torch.

    python -P …/train/zygote/server.py PLAN         a server; PLAN is JSON: see `main`

The agent of a run asks the zygote over a socket to fork a process that calls a function, and is notified when that
process ends. The zygote computes nothing, starts no thread and uses no GPU, so its forks are clean processes. It ends
when the other end of its socket is closed, and then kills its forks: no rank outlives its agent.

A lender has imported the libraries. For each process that connects, a fork of the lender becomes its zygote. `train
keeper` holds a lender, and `train launch` holds one while it starts a run. A lender serves only processes that equal it
in everything that matters when libraries are loaded (`digest`).

A lender imports nothing of this package, because the checkout may be edited while it runs: each fork imports the
package of the process that it serves. For the client side see client.py.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = (
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.utils.tensorboard", "torch.utils.flop_counter",
    "numpy", "pydantic", "tomli_w", "safetensors.torch", "psutil", "threadpoolctl",
)  # fmt: skip
"""Imports of a lender."""
READ_AT_LOADING = (
    "PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "NPY_", "NUMPY_", "ATEN_",
    "TORCH", "PYTORCH", "TRITON_", "MALLOC_", "GLIBC_", "LANG", "LC_", "HOME",
)  # fmt: skip
"""Prefixes of variables that Python and libraries read when they are loaded."""
OFF = "TRAIN_WARM"
"""Environment variable. If it is `off`, launches do not borrow from a lender, and the keeper holds none."""
_BLAS = "OPENBLAS_NUM_THREADS"
"""Variable that NumPy's OpenBLAS reads when loaded. Without it OpenBLAS starts one thread per core, in every rank."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_MOST_FILES = 80
_ENDING = 2.0
"""Seconds that killed orphans get to vanish."""
_TMUX = "tmux: server"
"""Name of a tmux server's process."""
_FEED = "train.trainer.loggers.wandb"
"""Module whose process sends curves to Weights & Biases: the last ones after the ranks have ended."""
_failed: list[str] = []
"""Why torch could not be imported, for example because of a wrong value in a variable."""


def send(line: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    fd = os.memfd_create("message")
    try:
        with os.fdopen(os.dup(fd), "w", encoding="utf-8") as file:
            json.dump(message, file)
        socket.send_fds(line, [b"m"], [fd, *files])
    finally:
        os.close(fd)


def receive(line: socket.socket) -> tuple[Any, list[int]] | None:
    """Return a message and its open files; None: the other end is closed."""
    try:
        head, (fd, *files), _, _ = socket.recv_fds(line, 1, _MOST_FILES)
    except (ConnectionError, ValueError):  # no file means no message: the connection is closed
        return None
    with os.fdopen(fd, encoding="utf-8") as file:
        file.seek(0)
        return (json.load(file), files) if head else None


def lender_socket(environ: Mapping[str, str], make: bool = False) -> Path | None:
    """Return the socket of the lender for processes like this one; None: its folder is not private to this user.

    Args:
        make: Whether to create the folder if it does not exist.
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
    """Return a digest that is equal for two processes with equal conditions for the loading of libraries."""
    parts = [sys.executable, sys.version, sys.prefix, str(os.getuid()), str(os.getgid()), str(sorted(os.getgroups()))]
    parts += [f"{key}={value}" for key, value in sorted(environ.items()) if key.startswith(READ_AT_LOADING)]
    parts.append(f"{OFF} {environ.get(OFF) == 'off'}")
    for folder in sys.path:
        if folder.endswith(
            ("site-packages", "dist-packages")
        ):  # its time changes when packages are installed or removed
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
    """Be a lender until stdin is closed or its forks would differ from new processes. Returns None at the end.

    In a fork, for each process that connects, returns the socket to that process.
    """
    environ, place = dict(os.environ), Path(door.getsockname())
    own, inode = digest(environ), place.stat().st_ino
    os.environ.setdefault(_BLAS, "1")
    for name in imports:  # before any fork, so that each fork has all of them
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
    with contextlib.suppress(OSError):  # another lender may have replaced it
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
        self._adopts = False
        self._left: set[int] = set()
        """Processes that ended forks have left behind."""
        self._woken = _wake_on_death()

    def serve(self) -> None:
        """Serve until the other end is closed."""
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
        elif "adopt" in message:
            called("train.signals:adopt_orphans")()
            self._adopts = True
        elif "end_orphans" in message:
            self._end_orphans()
            send(self._line, {"orphans": sorted(self._left)})
            self._left.clear()
        else:
            while message["after"] in self._imports:
                _import(self._imports.popleft())
            made = self._fork(message, files)
            for fd in files:
                os.close(fd)
            send(self._line, made)

    def _enter(self, message: dict[str, Any]) -> None:
        """Take over environment, umask, folder and package of the other process."""
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
            return {"problem": f"{unclean}, which forks cannot inherit; find what Python imports at its start"}
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
        """In a fork: call the function, with the stop signals blocked until it handles them."""
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
        """Report ended forks, and kill the remaining processes of their groups."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 1 << 12)
        while (pid := _dead_child()) is not None:
            if pid in self._forks:
                self._left |= {one for one in _of_group(pid) if one != pid and _is_at_work(one)}
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if pid in self._forks:  # else an orphan
                self._forks.discard(pid)
                with contextlib.suppress(OSError):
                    send(self._line, {"ended": pid, "code": code})

    def _end_orphans(self) -> None:
        """Kill the processes that ended forks have left behind, in whatever group or session they are.

        A tmux server stays: it holds the runs that a script has launched. So does the process that sends curves.
        """
        import psutil

        deadline = time.monotonic() + _ENDING
        while time.monotonic() < deadline:
            orphans = [one for one in psutil.Process().children() if one.pid not in self._forks]
            for one in orphans[:]:
                with contextlib.suppress(psutil.Error):
                    if one.name() == _TMUX or _FEED in one.cmdline():
                        orphans.remove(one)
                    else:
                        self._left |= {one.pid} if _is_at_work(one.pid) else set()
                        one.kill()
            if not orphans:
                return
            self._reap()
            time.sleep(0.002)

    def end(self) -> None:
        """Kill all forks, and what they have left behind."""
        for pid in self._forks:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        if self._adopts:
            self._forks.clear()
            self._end_orphans()


def _dead_child() -> int | None:
    """Return a child that has ended and was not waited for; None: there is none."""
    with contextlib.suppress(ChildProcessError):  # no child at all
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if found is None else found.si_pid
    return None


def _of_group(group: int) -> Iterator[int]:
    """Yield the processes of a process group."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(name)) == group:
                yield int(name)


def _is_at_work(pid: int) -> bool:
    """Whether a process still runs and is not one that Python ends a moment after its parent."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()  # of a zombie: nothing
        return bool(words) and b"resource_tracker" not in words
    return False


def _wake_on_death() -> int:
    """Return a file descriptor that becomes readable when a child of this process has ended."""
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return woken


def _import(name: str) -> None:
    """Import a module. If that fails, the fork that needs it tries again and reports why.

    Garbage collection would take a sixth of the time of imports and find nothing. Frozen objects are not visited again,
    so forks do not copy their memory.
    """
    gc.disable()
    try:
        importlib.import_module(name)
    except ImportError:
        pass
    except Exception as error:
        if name == "torch":  # a second import would report another error
            _failed.append(" ".join(f"{type(error).__name__}: {error}".split())[:300])
    gc.freeze()
    gc.enable()


def _take_package(root: str) -> dict[str, Any]:
    """Import this package from the caller's checkout. Returns the contents of module_runner.py there."""
    runner = runpy.run_path(str(Path(root) / "train" / "module_runner.py"))
    runner["take_package"]()
    return runner


def _unclean() -> str:
    """Return why forks of this process would differ from new processes, as the start of a message; '': they do not."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"the process that forks the ranks has other threads ({', '.join(others)})"
    torch = sys.modules.get("torch")
    return "the process that forks the ranks uses a GPU" if torch is not None and torch.cuda.is_initialized() else ""


def _take_standard_files(files: list[int]) -> None:
    """Make the first three files standard input, output and error."""
    for target, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(files[target], target)
        os.close(files[target])
        files[target] = target
        # a log is UTF-8 in any locale; a terminal gets its own encoding
        encoding = "utf-8" if stat.S_ISREG(os.fstat(target).st_mode) else None
        stream = open(target, "w" if target else "r", 1, encoding, "replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _name_process() -> None:
    """Name this process for process lists; forks set other names (worker.py)."""
    os.environ["SPT_NOENV"] = "1"  # do not overwrite the environment that /proc shows
    with contextlib.suppress(ImportError):  # in a checkout that was not installed: tests/gpu/README.md
        from setproctitle import setproctitle

        setproctitle("train-zygote")
    del os.environ["SPT_NOENV"]


def main() -> None:
    """Run the server that the first argument describes, as JSON.

    `fd` is a socket, connected for a zygote or listening for a lender. `lends` lists the imports of a lender; null: a
    zygote.
    """
    for number in SIGNALS:  # meant for ranks: Slurm sends them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    _name_process()  # before the environment changes: setproctitle needs it to find the place of the name
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
        if plan["lends"] is not None:  # libraries' exit handlers belong to the lender
            os._exit(0)


if __name__ == "__main__":
    main()
