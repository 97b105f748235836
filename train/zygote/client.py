"""The client side of the zygote: acquire one, send it requests, read its answers.

A zygote is a fork of the lender that `train keeper` or `train launch` holds. Without a lender `acquire` starts a new
process.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import doing, hash_seed, helper
from ..errors import Refused, of_encoding, of_system, one_line
from . import server
from .server import LIBRARIES, OFF, SIGNALS, called, lender_socket, receive, send

__all__ = ["CHECKS", "ENDING", "OFF", "RANKS", "SCRIPT", "Zygote", "acquire", "lives", "start_lender"]

CHECKS = ("torch", "train.launcher.resume")
"""Imports for the check of a task, without torch's compiler."""
RANKS = (
    "torch.distributed.nn.jit.instantiator", "torch._dynamo", "torch.distributed.checkpoint",
    "torch.utils.tensorboard", "train.trainer.train", "train.trainer.conclude", "train.trainer.setup",
    "train.parallel.preload", "threadpoolctl", "setproctitle", "train.supervise.worker",
)  # fmt: skip
"""More imports for the ranks of a task. The last one is imported after all others."""
SCRIPT = ("torch.distributed",)
"""Imports for the store at which the ranks of a script connect."""
_EARLY = (CHECKS[0], RANKS[0])
"""Imports of a launch's own lender. Its fork imports the rest while the request is checked."""
_IMPORTING = 120.0
"""Seconds a lender gets to answer: it may still be importing."""
_LOOK_EVERY = 0.2
"""Seconds between two calls of what a caller does while it waits."""
ENDING = 2.0
"""Seconds a zygote gets to end by itself, and killed processes get to vanish."""


class ZygoteLost(OSError):
    """The zygote has ended, and so its forks are dead too."""


class Zygote:
    """The connection to a zygote, for the one process that it serves.

    The zygote takes over this process's current folder and package.

    Args:
        environ: Environment of its forks.
        imports: Modules that it imports, in order.
        patience: Seconds it gets to answer; None: unlimited.
        process: The zygote's process, if it was started for this one and not lent.

    Raises:
        ZygoteLost: the zygote is gone, or does not answer in time.
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
        served = self._read_answer(patience)
        self._pid = int((served or {})["serves"])

    def again(self) -> Zygote:
        """Acquire a new zygote like this one, after its loss."""
        return acquire(self._environ, self._imports)

    def fork(
        self,
        function: str,
        arguments: Sequence[Any],
        *,
        files: Sequence[int],
        environ: Mapping[str, str] | None = None,
        after: str = "",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> int:
        """Fork a process that calls `function(*arguments, files)`. Returns its process id.

        The process leads a new session, dies with the zygote, and starts with the stop signals blocked.

        Args:
            function: `module:name`.
            arguments: Values that JSON can represent.
            files: Its standard input, output and error, and more files, which get other numbers there.
            environ: Environment of the fork; None: that of all forks.
            after: The import to wait for; the zygote continues its imports afterwards.
            meanwhile: Called several times a second until the process exists.

        Raises:
            ZygoteLost: the zygote is gone.
            BlockingIOError: the machine has no resources for a process.
        """
        environ = self._environ if environ is None else dict(environ)
        self._ask({"call": function, "arguments": [*arguments], "environ": environ, "after": after}, files)
        while (answer := self._next_answer(meanwhile)) is None:
            pass
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        if "problem" in answer:
            raise Refused(answer["problem"])
        self._alive.add(answer["pid"])
        return int(answer["pid"])

    def call(
        self, function: str, *arguments: Any, after: str = "", meanwhile: Callable[[], None] = lambda: None
    ) -> Any:
        """Call `module:name` in a temporary fork with this process's standard files. Returns its result.

        Args:
            meanwhile: Called several times a second until the fork ends. May raise.

        Raises:
            Refused: raised there; or the fork died; or another exception, whose traceback has been printed there.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        notes = doing.file()
        with os.fdopen(os.memfd_create("answer"), "w+b") as file:
            given = [function, [*arguments]]
            files = [0, 1, 2, file.fileno(), *([] if notes is None else [notes])]
            pid = self.fork("train.zygote.client:answer", given, files=files, after=after, meanwhile=meanwhile)
            while pid in self._alive:
                self._next_answer(meanwhile)
            if code := self._codes.pop(pid):
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                way = "see why with train run and the same arguments"
                raise Refused(f"the process that checks the request died of {how}; {way}")
            file.seek(0)
            found = pickle.load(file)
        if isinstance(found, Refused):
            raise found
        return found

    def ended(self, seconds: float) -> dict[int, int]:
        """Return the exit codes, by process id, of forks that have ended since the last call; negative: a signal.

        Args:
            seconds: Maximum number of seconds to wait for one.
        """
        while not self.is_lost and select.select([self._line], [], [], 0 if self._codes else seconds)[0]:
            with contextlib.suppress(ZygoteLost):
                self._read_answer(None)
        if self.is_lost:  # the kernel kills the forks with their zygote
            self._codes |= dict.fromkeys(self._alive, -signal.SIGKILL)
            _wait_for_death(self._alive)
            self._alive.clear()
        codes, self._codes = self._codes, {}
        return codes

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a running fork, through the zygote, because the process id of an ended one may be reused."""
        with contextlib.suppress(ZygoteLost):
            self._ask({"signal": pid, "number": int(number)})

    def adopt_orphans(self) -> None:
        """Make processes that ended forks leave behind children of the zygote, so that `end_orphans` finds them."""
        self._ask({"adopt": True})

    def end_orphans(self) -> list[int]:
        """Kill the processes that ended forks have left behind, in whatever group or session they are. Returns them."""
        with contextlib.suppress(ZygoteLost):
            self._ask({"end_orphans": True})
            while (answer := self._read_answer(None)) is None:
                pass
            return [*answer["orphans"]]
        return []

    def close(self) -> None:
        """End the zygote and all its forks, even if they wait for something."""
        self._line.close()
        for pid in self._alive:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        if self._process is not None:
            helper.end(self._process, ENDING)  # by itself, so that torch removes its temporary folders
        _wait_for_death({*self._alive, self._pid})
        if not self.is_lost and lives(self._pid):  # in the middle of an import
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)

    def _ask(self, message: Any, files: Sequence[int] = ()) -> None:
        try:
            send(self._line, message, files)
        except ConnectionError:
            raise self._lost() from None

    def _next_answer(self, meanwhile: Callable[[], None]) -> dict[str, Any] | None:
        while not select.select([self._line], [], [], _LOOK_EVERY)[0]:
            meanwhile()
        return self._read_answer(None)

    def _read_answer(self, seconds: float | None) -> dict[str, Any] | None:
        """Return the next answer. None: it reported the end of a fork, whose exit code is noted."""
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


def lives(pid: int) -> bool:
    """Whether this process is still running. A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _wait_for_death(pids: set[int]) -> None:
    """Wait a moment for these killed processes to end."""
    deadline = time.monotonic() + ENDING
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)


def described(error: BaseException) -> str:
    """Return an unexpected error as one line."""
    message = f"unexpected {type(error).__name__}: {error}"
    if isinstance(error, ZygoteLost):
        message = str(error)
    elif isinstance(error, OSError) and error.filename is not None:
        message = of_system(error)
    elif isinstance(error, UnicodeEncodeError):
        message = of_encoding(error)
    return one_line(message)


def answer(function: str, arguments: list[Any], files: list[int]) -> None:
    """In a fork for `Zygote.call`: call a function and write its result or exception into the fourth file."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    found: Any
    if len(files) > 4:
        doing.note_in(files[4])
    try:
        found = called(function)(*arguments)
    except Refused as error:
        found = error
    except BaseException as error:
        traceback.print_exception(error)
        found = Refused(described(error), passes=True)  # a cluster retries after an unexpected error
    with os.fdopen(files[3], "wb") as file:
        pickle.dump(found, file)


def acquire(environ: Mapping[str, str], imports: Sequence[str]) -> Zygote:
    """Return a zygote for this process: from a lender, else a new one."""
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
    """Connect to the lender at this socket, if there is one. Its folder ensures that it belongs to this user."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.settimeout(ENDING)
        line.connect(str(path))
    except OSError:
        line.close()
        return None
    return line


def _start(environ: Mapping[str, str], line: socket.socket, lends: Sequence[str] | None) -> subprocess.Popen[bytes]:
    """Start a server on this socket: a zygote on a connected one, or a lender, which ends when its stdin is closed."""
    plan = {"fd": line.fileno(), "lends": lends}
    return subprocess.Popen(
        [sys.executable, "-P", server.__file__, json.dumps(plan)], env=dict(environ), pass_fds=[line.fileno()],
        stdin=subprocess.DEVNULL if lends is None else subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def start_lender(environ: Mapping[str, str], imports: Sequence[str] = LIBRARIES) -> subprocess.Popen[bytes] | None:
    """Start a lender. Returns None if there is one for such processes already, or no safe place for its socket.

    The lender ends with this process, or when the returned process's stdin is closed.

    Raises:
        OSError: the machine has no resources for a process.
    """
    path = lender_socket(environ, make=True)
    if path is None:
        return None
    if (line := _connected(path)) is not None:
        line.close()
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        path.unlink(missing_ok=True)  # left by a killed lender
        door.bind(str(path))
        door.listen(64)
        return _start(environ, door, [*imports])


_early: list[subprocess.Popen[bytes]] = []
"""The lender that imports for the current launch, if any."""


@contextlib.contextmanager
def starting_early() -> Iterator[None]:
    """Context manager that starts a lender, unless there is one, while a launch still reads its arguments."""
    with contextlib.suppress(OSError):  # no resources: the launch reports it, or needs no lender
        process = start_lender(hash_seed.with_seed(os.environ), _EARLY)
        if process is not None:
            _early.append(process)
    try:
        yield
    finally:
        end_early()


def end_early() -> None:
    """End the lender of this launch: the agent has a zygote, or needs none."""
    while _early:
        helper.leave(_early.pop())
