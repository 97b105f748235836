"""Processes that a zygote forks for this one: how a zygote is had, asked, and heard.

A zygote is a fork of the lender that `train keeper`, or `train launch`, holds for processes like this one; where there
is none it is a process of its own (`acquire`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train import hash_seed
from train.errors import Refused, of_encoding, of_system, one_line
from train.supervise import zygote_server as server
from train.supervise.zygote_server import LIBRARIES, OFF, SIGNALS, called, lender_socket, receive, send

__all__ = ["CHECKS", "OFF", "RANKS", "SCRIPT", "Zygote", "acquire", "lives", "start_lender"]

CHECKS = ("torch", "train.launcher.resume")
"""What a task is checked with, and none of torch's compiler."""
RANKS = (
    "torch.distributed.nn.jit.instantiator", "torch._dynamo", "torch.distributed.checkpoint",
    "torch.utils.tensorboard", "train.trainer.train", "train.trainer.setup",
    "train.parallel.ddp", "train.parallel.fsdp", "train.parallel.ordered",
    "threadpoolctl", "setproctitle", "train.supervise.worker",
)  # fmt: skip
"""What ranks of a task need besides; the last of them when all others are there."""
SCRIPT = ("torch.distributed",)
"""What the ranks of a script meet at needs."""
_EARLY = (CHECKS[0], RANKS[0])
"""What the lender of a launch imports: its fork imports the rest, while it has the request checked."""
_IMPORTING = 120.0
"""Seconds within which a lender answers: it may still import."""
_ENDING = 2.0
"""Seconds within which a zygote ends by itself, and killed processes are gone."""


class ZygoteLost(OSError):
    """The zygote has ended: its forks are dead, too."""


class Zygote:
    """The socket to a zygote, for the one process that it serves.

    It has this process's folder and package.

    Args:
        environ: of its forks.
        imports: modules that it imports, in order.
        patience: seconds within which it answers; None: any.
        process: that of a zygote of its own.

    Raises:
        ZygoteLost: it is gone, or does not answer in time.
    """

    def __init__(
        self,
        line: socket.socket,
        environ: Mapping[str, str],
        imports: Sequence[str],
        patience: float | None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._line, self._environ, self._imports, self._process = line, dict(environ), [*imports], process
        self._alive: set[int] = set()
        self._codes: dict[int, int] = {}
        self.is_lost = False
        umask = os.umask(0)
        os.umask(umask)
        root = str(Path(__file__).parents[2])
        self._ask({"root": root, "cwd": os.getcwd(), "umask": umask, "environ": environ, "imports": self._imports})
        self._hear(patience)

    def again(self) -> Zygote:
        """Another one like this, which is lost."""
        return acquire(self._environ, self._imports)

    def fork(
        self,
        function: str,
        arguments: Sequence[Any],
        files: Sequence[int],
        environ: Mapping[str, str] | None = None,
        after: str = "",
    ) -> int:
        """Fork a process that calls `function(*arguments, files)`. Returns its id.

        It leads a session of its own, dies with the zygote, and begins with the signals that ask for a stop blocked.

        Args:
            function: `module:name`.
            arguments: as JSON takes them.
            files: its standard input, output and error, and others, which get other numbers there.
            environ: of the fork; None: that of all forks.
            after: the import that is needed; the zygote continues to import afterwards.

        Raises:
            ZygoteLost: it is gone.
            BlockingIOError: the machine has no room for a process.
        """
        environ = self._environ if environ is None else dict(environ)
        self._ask({"call": function, "arguments": [*arguments], "environ": environ, "after": after}, files)
        while (answer := self._hear(None)) is None:
            pass
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        if "problem" in answer:
            raise Refused(answer["problem"])
        self._alive.add(answer["pid"])
        return int(answer["pid"])

    def call(self, function: str, *arguments: Any, after: str = "") -> Any:
        """What `module:name` returns in a fork that is thrown away, with this process's standard files.

        Raises:
            Refused: raised there, or the fork died; or anything else, whose traceback has been printed there.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(os.memfd_create("answer"), "w+b") as file:
            given = [function, [*arguments]]
            pid = self.fork("train.supervise.zygote:answer", given, [0, 1, 2, file.fileno()], after=after)
            while pid in self._alive:
                self._hear(None)
            if code := self._codes.pop(pid):
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise Refused(f"the process that checks the request died of {how}; train run, with the same, shows why")
            file.seek(0)
            found = pickle.load(file)
        if isinstance(found, Refused):
            raise found
        return found

    def ended(self, seconds: float) -> dict[int, int]:
        """Exit codes, by process, of forks that have ended since the last call; of a signal: negative.

        Args:
            seconds: to wait for one, at most.
        """
        while not self.is_lost and select.select([self._line], [], [], 0 if self._codes else seconds)[0]:
            with contextlib.suppress(ZygoteLost):
                self._hear(None)
        if self.is_lost:  # the kernel kills its forks with it
            self._codes |= dict.fromkeys(self._alive, -signal.SIGKILL)
            _wait_for_death(self._alive)
            self._alive.clear()
        codes, self._codes = self._codes, {}
        return codes

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a fork, if it lives: by the zygote, for the id of one that has ended may be another's."""
        with contextlib.suppress(ZygoteLost):
            self._ask({"signal": pid, "number": int(number)})

    def close(self) -> None:
        """End it with all that it has forked, whatever it waits for."""
        self._line.close()
        for pid in self._alive:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        if self._process is not None:
            end(self._process)
        _wait_for_death(self._alive)

    def _ask(self, message: Any, files: Sequence[int] = ()) -> None:
        try:
            send(self._line, message, files)
        except ConnectionError:
            raise self._lost() from None

    def _hear(self, seconds: float | None) -> dict[str, Any] | None:
        """The next answer; None: it is the end of a fork, whose code is noted."""
        self._line.settimeout(seconds)
        received = None
        with contextlib.suppress(TimeoutError):
            received = receive(self._line)
        if received is None:
            raise self._lost()
        message: dict[str, Any] = received[0]
        if "ended" not in message:
            return message
        self._alive.discard(message["ended"])
        self._codes[message["ended"]] = message["code"]
        return None

    def _lost(self) -> ZygoteLost:
        self.is_lost = True
        return ZygoteLost("the process that imports torch and forks the ranks is gone; try: python -c 'import torch'")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a zygote whose socket is closed, or a lender: by itself if it can, for then torch clears away its temporary
    folders."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def lives(pid: int) -> bool:
    """Whether this process has not ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _wait_for_death(pids: set[int]) -> None:
    """Wait a moment until these, which were killed, are dead."""
    deadline = time.monotonic() + _ENDING
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)


def described(error: BaseException) -> str:
    """What is not foreseen, in a line."""
    message = f"unexpected {type(error).__name__}: {error}"
    if isinstance(error, ZygoteLost):
        message = str(error)
    elif isinstance(error, OSError) and error.filename is not None:
        message = of_system(error)
    elif isinstance(error, UnicodeEncodeError):
        message = of_encoding(error)
    return one_line(message)


def answer(function: str, arguments: list[Any], files: list[int]) -> None:
    """Be a fork that calls a function and writes what it returns, or raises, into the fourth file (`Zygote.call`)."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    found: Any
    try:
        found = called(function)(*arguments)
    except Refused as error:
        found = error
    except BaseException as error:
        traceback.print_exception(error)
        found = Refused(described(error), passes=True)  # a cluster tries again what is not foreseen
    with os.fdopen(files[3], "wb") as file:
        pickle.dump(found, file)


def acquire(environ: Mapping[str, str], imports: Sequence[str]) -> Zygote:
    """A zygote for this process, as `Zygote` has it: a lender's, or one of its own."""
    path = lender_socket(environ)
    line = _connected(path) if path is not None else None
    if line is not None:
        with contextlib.suppress(ZygoteLost):
            return Zygote(line, environ, imports, _IMPORTING)
        line.close()
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = _start(environ, theirs, None)
    return Zygote(line, environ, imports, None, process)


def _connected(path: Path) -> socket.socket | None:
    """The lender at this socket, if one is there. It is this user's, as the folder that it lies in."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.settimeout(_ENDING)
        line.connect(str(path))
    except OSError:
        line.close()
        return None
    return line


def _start(environ: Mapping[str, str], line: socket.socket, lends: Sequence[str] | None) -> subprocess.Popen[bytes]:
    """Start a server on this socket: connected, or a lender's, which ends when its standard input is closed."""
    plan = {"fd": line.fileno(), "lends": lends}
    return subprocess.Popen(
        [sys.executable, "-P", server.__file__, json.dumps(plan)], env=dict(environ), pass_fds=[line.fileno()],
        stdin=subprocess.DEVNULL if lends is None else subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def start_lender(environ: Mapping[str, str], imports: Sequence[str] = LIBRARIES) -> subprocess.Popen[bytes] | None:
    """Start a lender. None: there is one for such processes already, or no safe place for it.

    It ends with this process: when the standard input of what is returned is closed.

    Raises:
        OSError: the machine has no room for it.
    """
    path = lender_socket(environ, make=True)
    if path is None:
        return None
    if (line := _connected(path)) is not None:
        line.close()
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        path.unlink(missing_ok=True)  # of one that was killed
        door.bind(str(path))
        door.listen(64)
        return _start(environ, door, [*imports])


_early: list[subprocess.Popen[bytes]] = []
"""The lender that imports for the launch at hand, if there is one."""


@contextlib.contextmanager
def starting_early() -> Iterator[None]:
    """Let a lender import while a launch still reads its arguments, unless one is there."""
    with contextlib.suppress(OSError):  # no room for it: the launch says so, or needs none
        process = start_lender(hash_seed.with_seed(os.environ), _EARLY)
        if process is not None:
            _early.append(process)
    try:
        yield
    finally:
        end_early()


def end_early() -> None:
    """Let the lender of this launch end: its agent has got a zygote, or needs none."""
    while _early:
        process = _early.pop()
        assert process.stdin is not None
        process.stdin.close()
        process.returncode = 0  # it may outlive this process: no warning
