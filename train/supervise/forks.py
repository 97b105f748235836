"""Processes that a zygote forks for this one: how a zygote is had, asked, and heard.

There are three ways to get one (`acquire`): a fork of the lender that `train keeper` holds; the one that `train launch`
has started before it read its arguments (`EarlyZygote`); one of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train import hashing
from train.errors import Refused, one_line
from train.supervise import zygote as server
from train.supervise.zygote import LIBRARIES, SIGNALS, called, digest, lender_socket, peer, receive, send

OFF = "TRAIN_WARM"
"""A variable: set to `off`, nothing is borrowed from a lender, and the keeper holds none."""
CHECKS = ("torch", "train.launcher.checks")
"""What a task is checked with, and none of torch's compiler."""
RANKS = (
    "torch.distributed.nn.jit.instantiator", "torch._dynamo", "torch.distributed.checkpoint",
    "torch.utils.tensorboard", "train.trainer.finish", "train.trainer.train", "train.trainer.setup",
    "train.parallel.ddp", "train.parallel.fsdp", "train.parallel.ordered", "train.parallel.single",
    "threadpoolctl", "setproctitle", "train.supervise.worker",
)  # fmt: skip
"""What ranks of a task need besides; the last of them when all others are there."""
SCRIPT = ("torch.distributed",)
"""What the ranks of a script meet at needs."""
_PATIENCE = 5.0
"""Seconds within which a lender answers."""
_IMPORTING = 60.0
"""The same of one that still imports."""


class ZygoteLost(OSError):
    """The zygote has ended: its forks are dead, too."""


class CheckFailed(Exception):
    """A function in a fork has raised what is no refusal; its traceback has been printed there."""


class Zygote:
    """The socket to a zygote, for the one process that it serves."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._line, self._process = line, process
        self._events: deque[dict[str, Any]] = deque()
        self._alive: set[int] = set()
        self.is_lost = False

    def enter(self, environ: Mapping[str, str], imports: Sequence[str], patience: float | None) -> None:
        """Give it this process's folder and package, an environment for its forks, and modules to import.

        Raises:
            ZygoteLost: it is gone, or does not answer for `patience` seconds.
        """
        umask = os.umask(0)
        os.umask(umask)
        root = str(Path(__file__).parents[2])
        content = {"environ": dict(environ), "cwd": os.getcwd(), "umask": umask, "root": root, "imports": [*imports]}
        self._again = (dict(environ), [*imports])
        self._ask(content)
        self._hear(patience)

    def again(self) -> Zygote:
        """Another one like this, which is lost."""
        return acquire(*self._again)

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
            environ: of the fork; None: what `enter` was given.
            after: the import that is needed; the zygote continues to import afterwards.

        Raises:
            ZygoteLost: it is gone.
            BlockingIOError: the machine has no room for a process.
        """
        given = dict(environ) if environ is not None else None
        self._ask({"call": function, "arguments": [*arguments], "environ": given, "after": after}, files)
        while True:
            answer = self._hear(None)
            if "pid" in answer:
                self._alive.add(answer["pid"])
                return int(answer["pid"])
            if "errno" in answer:
                raise OSError(answer["errno"], os.strerror(answer["errno"]))
            if "problem" in answer:
                raise Refused(answer["problem"])
            self._events.append(answer)

    def call(self, function: str, *arguments: Any, after: str = "") -> Any:
        """What `module:name` returns in a fork that is thrown away, with this process's standard files.

        Raises:
            Refused: raised there, or the fork died.
            CheckFailed: anything else that was raised there; its traceback has been printed.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        with os.fdopen(reader, "rb", buffering=0) as answers:
            try:
                given = [function, [*arguments]]
                pid = self.fork("train.supervise.forks:answer", given, [0, 1, 2, writer], after=after)
            finally:
                os.close(writer)
            answer, code = self._answer(answers, pid)
        if answer is None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise Refused(f"the process that checks the request died of {how}; train run, with the same, shows why")
        kind, value = pickle.loads(answer)
        if kind == "failed":
            raise CheckFailed(value)
        if kind == "refused":
            raise value
        return value

    def _answer(self, answers: Any, pid: int) -> tuple[bytes | None, int]:
        """All that the fork writes, or None and its exit code: a process that it has started holds the pipe open."""
        found, code = b"", None
        while True:
            part = answers.read(1 << 20)  # None: nothing yet
            if part:
                found += part
                if len(found) >= 8 and len(found) - 8 == struct.unpack("<q", found[:8])[0]:
                    return found[8:], 0
            elif code is not None:
                return None, code
            else:
                watched = [self._line] if part == b"" else [self._line, answers]
                if self._line in select.select(watched, [], [])[0]:
                    event = self._hear(None)
                    if event["ended"] == pid:
                        code = event["code"]
                        self._alive.discard(pid)
                    else:
                        self._events.append(event)

    def ended(self, seconds: float) -> dict[int, int]:
        """Exit codes, by process, of forks that have ended since the last call; of a signal: negative.

        Args:
            seconds: to wait for one, at most.
        """
        codes = {event["ended"]: event["code"] for event in self._events}
        self._events.clear()
        while not self.is_lost and select.select([self._line], [], [], 0 if codes else seconds)[0]:
            try:
                event = self._hear(None)
                codes[event["ended"]] = event["code"]
            except ZygoteLost:
                break
        if self.is_lost:  # the kernel kills its forks with it
            codes |= dict.fromkeys(self._alive - codes.keys(), -signal.SIGKILL)
            _wait_for_death(self._alive)
        self._alive -= codes.keys()
        return codes

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a fork, if it lives: by the zygote, for the id of one that has ended may be another's."""
        with contextlib.suppress(ZygoteLost):
            self._ask({"signal": pid, "number": int(number)})

    def close(self) -> None:
        """Let it end, with all that it has forked, and wait for that."""
        self._line.close()
        if self._process is not None:
            self._process.wait()

    def kill(self) -> None:
        """End all that it has forked, whatever the zygote itself waits for."""
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

    def _hear(self, seconds: float | None) -> dict[str, Any]:
        self._line.settimeout(seconds)
        heard = None
        with contextlib.suppress(TimeoutError):
            heard = receive(self._line)
        if heard is None:
            raise self._lost()
        return dict(heard[0])

    def _lost(self) -> ZygoteLost:
        self.is_lost, how = True, "is gone"
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1.0)
                how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return ZygoteLost(f"the process that imports torch and forks the ranks {how}; try: python -c 'import torch'")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a zygote whose socket is closed: by itself if it can, for then torch clears away its temporary folders."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for_death(pids: set[int]) -> None:
    """Wait a moment until these, which were killed, are dead."""
    deadline = time.monotonic() + _PATIENCE
    while any(map(_lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def described(error: BaseException) -> str:
    """What is not foreseen, in a line."""
    message = f"unexpected {type(error).__name__}: {error}"
    if isinstance(error, ZygoteLost):
        message = str(error)
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"{error.strerror or error}: {error.filename}; look at its owner and mode"
    return one_line(message)


def answer(function: str, arguments: list[Any], files: list[int]) -> None:
    """Be a fork that calls a function and writes what it returns, or raises, into the fourth file (`Zygote.call`)."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        found: tuple[str, Any] = ("returned", called(function)(*arguments))
    except Refused as error:
        found = ("refused", error)
    except BaseException as error:
        found = ("failed", described(error))
        traceback.print_exception(error)
    content = pickle.dumps(found)
    with os.fdopen(files[3], "wb") as stream:
        stream.write(struct.pack("<q", len(content)) + content)


def acquire(
    environ: Mapping[str, str],
    imports: Sequence[str],
    early: Mapping[str, str] | None = None,
    patience: float = _PATIENCE,
) -> Zygote:
    """A zygote for this process: the lender's, the one that was started early for it, or a new one.

    Args:
        environ: of its forks.
        imports: modules, in order.
        early: what `EarlyZygote.as_json` gives.
        patience: seconds within which a lender answers.
    """
    own = digest(environ)
    lender = None if environ.get(OFF) == "off" else lender_socket(environ)
    ahead = Path(early["path"]) if early is not None and early["digest"] == own else None
    for path, seconds in ((lender, patience), (ahead, _IMPORTING)):
        line = _connected(path) if path is not None else None
        if line is not None:
            zygote = Zygote(line)
            with contextlib.suppress(ZygoteLost):
                zygote.enter(environ, imports, seconds)
                return zygote
            line.close()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        zygote = Zygote(ours, _start(environ, theirs.fileno(), subprocess.DEVNULL))
    zygote.enter(environ, imports, None)
    return zygote


def _connected(path: Path) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.settimeout(_PATIENCE)
        line.connect(str(path))
        if peer(line) == os.getuid():
            return line
    except OSError:
        pass
    line.close()
    return None


def _start(environ: Mapping[str, str], fd: int, guard: int, **plan: Any) -> subprocess.Popen[bytes]:
    """Start a server on this socket: connected, or listening and then guarded by a pipe as its standard input."""
    command = [sys.executable, "-P", server.__file__, json.dumps({"fd": fd, **plan})]
    return subprocess.Popen(
        command, env=dict(environ), pass_fds=[fd], stdin=guard, stdout=subprocess.DEVNULL,
        stderr=None if plan.get("lends") else subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


class EarlyZygote:
    """A zygote that imports while `train launch` still reads its arguments, for an agent that is yet to come."""

    def __init__(self, folder: Path, environ: Mapping[str, str], imports: Sequence[str]) -> None:
        """
        Raises:
            OSError: the machine has no room for it.
        """
        self.path, self._digest = folder / "zygote", digest(environ)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.bind(str(self.path))
            door.listen(1)
            root = str(Path(__file__).parents[2])
            self._process = _start(environ, door.fileno(), subprocess.PIPE, imports=[*imports], root=root)

    def as_json(self) -> dict[str, str]:
        """What an agent has to know of it."""
        return {"path": str(self.path), "digest": self._digest}

    def end(self) -> None:
        """Let it end, unless it serves an agent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.returncode = 0  # it may outlive this process: no warning


_early: list[EarlyZygote] = []
"""The zygote that imports for the first launch, if there is one."""


@contextlib.contextmanager
def starting_early() -> Iterator[None]:
    """Let a zygote import meanwhile for the first launch; not where one can be borrowed."""
    environ = hashing.fixed(os.environ)
    path = None if environ.get(OFF) == "off" else lender_socket(environ)
    one = None
    if path is None or not path.exists():
        folder = Path(tempfile.mkdtemp(prefix="train-launch-"))
        try:
            one = EarlyZygote(folder, environ, [*CHECKS, *RANKS])
            _early.append(one)
        except OSError:  # no room for it: the launch says so, or needs none
            shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    finally:
        if one is not None and one in _early:
            _early.remove(one)
            one.end()
            shutil.rmtree(one.path.parent, ignore_errors=True)


def take_early_zygote() -> EarlyZygote | None:
    """The zygote that imports for the launch at hand: the caller's to end, and its folder to remove."""
    return _early.pop() if _early else None


def start_lender(
    environ: Mapping[str, str], imports: Sequence[str] = LIBRARIES, root: Path | None = None
) -> subprocess.Popen[bytes] | None:
    """Start a lender. None: there is one for such processes already, or no safe place for it.

    It ends with this process: when the standard input of what is returned is closed.

    Args:
        root: the checkout that it imports this package from; None: what is asked for by each process.
    """
    path = lender_socket(environ, make=True)
    if path is None or _is_served(path):
        return None
    plan = {"imports": [*imports], "lends": str(path)} | ({"root": str(root)} if root is not None else {})
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        path.unlink(missing_ok=True)  # of one that was killed
        door.bind(str(path))
        door.listen(64)
        return _start(environ, door.fileno(), subprocess.PIPE, **plan)


def _is_served(path: Path) -> bool:
    line = _connected(path)
    if line is not None:
        line.close()
    return line is not None
