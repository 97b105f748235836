"""A process that has imported torch, and forks the agents of launches and resumes: they need not import it again.

    python -P …/train/runs/warm.py          started by `train keeper`, see there

It has nothing of the checkout in it, which may be edited while it lives: the fork imports `train` as any process does.
So nothing of this package may be imported here. What it serves is a socket in a folder that is its user's alone. The
socket's name is a digest of all that a process is the sum of when it has imported its libraries: interpreter, packages,
variables that libraries read when they are loaded, user, groups, limits, control group and namespaces. Who differs in
one of them finds no such socket, and starts cold.

An agent that is forked here has the pane's files, so that what it shows is in the run's terminal; the pane's own
process waits for it and passes signals on. It is a child of this process and outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

_LIBRARIES = (
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.utils.tensorboard", "torch.utils.flop_counter",
    "numpy", "pydantic", "tomli_w", "safetensors.torch", "psutil", "threadpoolctl",
)  # fmt: skip
READ_AT_LOADING = (
    "PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "NPY_", "NUMPY_", "ATEN_",
    "TORCH", "PYTORCH", "TRITON_", "MALLOC_", "GLIBC_", "LANG", "LC_", "HOME",
)  # fmt: skip
"""How variables begin that Python and libraries read when they are loaded."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PATIENCE = 5.0
"""Seconds within which a request must have arrived whole."""
_LEAVING = 20
"""Seconds that an agent has to clear away and leave once its session has been ended; others outlive it."""
_MOST = 1 << 20
ROOM = "for the names of forks ".ljust(200, "-")
"""An argument that nothing reads: see runs/title.py."""
OFF = "TRAIN_WARM"
"""A variable: set to `off`, a launch or resume starts cold, and the keeper keeps no such process."""


def socket_of(environ: Mapping[str, str], make: bool = False) -> Path | None:
    """Where processes like this one, in this environment, are served; None: that place is not this user's alone.

    Args:
        make: the folder, where there is none. Who only looks for a server leaves nothing behind.
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
    return hashlib.sha256("\n".join(_identity(environ)).encode()).hexdigest()[:24]


def _identity(environ: Mapping[str, str]) -> list[str]:
    """All in which two processes that have imported the same libraries may differ."""
    parts = [sys.executable, sys.version, sys.prefix, str(os.getuid()), str(os.getgid()), str(sorted(os.getgroups()))]
    parts += [f"{key}={value}" for key, value in sorted(environ.items()) if key.startswith(READ_AT_LOADING)]
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
    return [part.encode(errors="replace").decode() for part in parts]


def enter(desk: str, environ: dict[str, str], cwd: str) -> None:
    """Let the agent of this order be forked by a warm process, and end with it. Returns where there is none.

    Args:
        environ: the environment that the agent gets.
    """
    path = None if environ.get(OFF) == "off" else socket_of(environ)
    if path is not None:
        ask(path, desk, environ, cwd, _PATIENCE)


def ask(path: Path, desk: str, environ: dict[str, str], cwd: str, patience: float) -> None:
    """Let the agent of this order be forked by the process that this socket is of, and end with it. Returns where it
    does not do so within `patience` seconds."""
    umask = os.umask(0)
    os.umask(umask)
    own = str(Path(__file__).parents[1] / "own.py")  # the package is the caller's, not the keeper's
    content = {"own": own, "desk": desk, "environ": environ, "cwd": cwd, "umask": umask}
    order = json.dumps(content).encode()
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(patience)
        try:
            line.connect(str(path))
            if _peer(line) != os.getuid():
                return
            socket.send_fds(line, [struct.pack("<q", len(order))], [0, 1, 2])
            line.sendall(order)
            answer = line.recv(8)
            if len(answer) != 8:
                return
            line.sendall(b"!")  # without it the agent does not begin: one that answers too late is no second one
        except OSError:
            return
        _accompany(line, struct.unpack("<q", answer)[0])


def _accompany(line: socket.socket, agent: int) -> NoReturn:
    """Pass signals on to the agent until it has ended, and end."""
    try:
        held = os.pidfd_open(agent)
    except OSError:  # it has ended already, or the kernel knows no such thing: then ids must do
        held = -1

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):
            if held >= 0:
                signal.pidfd_send_signal(held, number)
            else:
                os.kill(agent, number)
        if number == signal.SIGHUP:  # the terminal is gone; who ended the session waits for an agent that leaves
            signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
            signal.alarm(_LEAVING)

    for number in _SIGNALS:
        signal.signal(number, forward)
    line.settimeout(None)
    with contextlib.suppress(OSError):
        while line.recv(1):
            pass
    os._exit(0)


def _peer(line: socket.socket) -> int:
    """The user at the other end."""
    return int(struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1])


def start(environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start such a process, in this environment. It ends with the one that calls this."""
    command = [sys.executable, "-P", __file__, ROOM]
    return subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, start_new_session=True)


def main() -> None:
    """Import, then serve until the process that started this one ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: with the keeper; forks do not inherit it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how an agent ended: it is in the run folder
    environ = dict(os.environ)  # libraries add to it
    path = socket_of(environ, make=True)
    if path is None or _is_served(path):
        return
    # or NumPy's OpenBLAS begins a thread a core, here and again in each rank, which has as many as it is told
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()
    for name in _LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with socket.socket(socket.AF_UNIX) as door:
        path.unlink(missing_ok=True)  # of one that was killed
        door.bind(str(path))
        door.listen(64)
        door.settimeout(5.0)
        try:
            while socket_of(environ) == path:  # until packages change
                with contextlib.suppress(TimeoutError):
                    line, _ = door.accept()
                    with line, contextlib.suppress(OSError, ValueError):
                        serve(line, door, _begin)
        finally:
            path.unlink(missing_ok=True)


def _is_served(path: Path) -> bool:
    """Whether another keeper's process is there already."""
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(str(path))
        except OSError:
            return False
    return True


def serve(
    line: socket.socket, door: socket.socket, begin: Callable[[str, str], None], fork: Callable[[], int] = os.fork
) -> None:
    """Fork an agent for who has called.

    Args:
        begin: becomes the agent, in the fork; gets the path of the package's own.py and the folder of the order.
        fork: as os.fork; one that gives 0 alone makes this process the agent.
    """
    line.settimeout(_PATIENCE)
    if _peer(line) != os.getuid():
        return
    head, files, _, _ = socket.recv_fds(line, 8, 3)
    try:
        length = struct.unpack("<q", head)[0] if len(head) == 8 else -1
        if len(files) != 3 or not 0 < length < _MOST * 16:
            return
        order = b""
        while len(order) < length:
            part = line.recv(min(length - len(order), _MOST))
            if not part:
                return
            order += part
        sys.stdout.flush()
        sys.stderr.flush()
        if fork() == 0:
            _be_agent(json.loads(order), line, door, files, begin)
    finally:
        for fd in files:
            os.close(fd)


def _begin(own: str, desk: str) -> None:
    """Be what `train/own.py train.runs.agent` is, of the checkout that the order comes from."""
    sys.argv = [own, "train.runs.agent", desk]
    runpy.run_path(own, run_name="__main__")


def _be_agent(
    order: dict[str, object],
    line: socket.socket,
    door: socket.socket,
    files: list[int],
    begin: Callable[[str, str], None],
) -> NoReturn:
    """In the fork: an agent, with its libraries imported already."""
    code = 1
    try:
        door.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, fd in enumerate(files):
            os.dup2(fd, target)
            os.close(fd)
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            fd = ("stdin", "stdout", "stderr").index(name)
            stream = open(fd, mode, buffering=1, errors="replace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        environ, cwd = order["environ"], str(order["cwd"])
        assert isinstance(environ, dict)
        os.environ.clear()
        os.environ.update(environ)
        os.umask(int(str(order["umask"])))
        os.chdir(cwd)
        time.tzset()
        tempfile.tempdir = None
        line.sendall(struct.pack("<q", os.getpid()))
        if line.recv(1) != b"!":
            os._exit(1)
        begin(str(order["own"]), str(order["desk"]))
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


if __name__ == "__main__":
    main()
