"""Starts runs, and breaks one off at chosen updates: by signals from outside, as a user or the kernel would.

Signals go only to processes that run.json of these runs names and that began after the run was created.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from ..checkpoint.manifest import PARTIAL
from ..errors import Refused
from ..launcher import giving_way, stopping, tmux
from ..launcher.launches import NewRun, NewScript, Resume
from ..leases import locks
from ..leases.locks import Holder
from ..leases.tickets import Ticket
from ..run import heartbeat, proving, states
from ..run.proving import Asked
from ..run.run_folder import Run
from . import moments
from .moments import Break

_LOOK = 0.002
"""Seconds between two looks at a run."""
_SAVES = 3
"""Number of updates within which a save that was asked for begins."""
_SEE = r"train logs \S+( --rank \d+)?"
"""A command in the reason of an end."""
_QUIET = {"WANDB_MODE": "disabled", giving_way.EVERY: "0"}
"""Variables of every run of a proof."""


Launch = NewRun | NewScript


class Failed(Exception):
    """A run ended as failed. The text says which run, and why.

    Args:
        last_lines: those of the log of the rank that died first.
    """

    def __init__(self, text: str, last_lines: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.last_lines = [*last_lines]


@dataclasses.dataclass
class Broken:
    """A break that happened."""

    kind: str
    update: int
    """Number of updates the run had made."""
    rank: int | None = None
    back: float = 0.0
    """Seconds until the next attempt had made its first update."""
    repeated: int = 0
    """Number of updates that the next attempt made again."""
    is_in_save: bool = False
    """Whether the checkpoint that was being written was lost."""

    def __str__(self) -> str:
        text = {
            moments.RANK: f"rank {self.rank} killed at {self.update}",
            moments.ALL: f"everything killed at {self.update}",
            moments.STOP: f"stopped at {self.update}",
            moments.WAY: f"gave way at {self.update}",
            moments.AGENT: f"the agent killed at {self.update}",
            moments.SERVER: f"the tmux server killed at {self.update}",
            moments.SAVE: f"rank {self.rank} killed {'while' if self.is_in_save else 'after'} saving at {self.update}",
        }[self.kind]
        again = f", {self.repeated} update{'s' if self.repeated != 1 else ''} repeated" if self.repeated else ""
        return f"{text} (back after {self.back:.1f} s{again})"


@contextlib.contextmanager
def asking(asked: Asked) -> Iterator[None]:
    """Context manager in which runs that start are asked for this."""
    wanted = {**_QUIET, proving.VARIABLE: asked.to_text()}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def calm(launch: Launch, asked: Asked, say: Callable[[list[str]], None]) -> Run:
    """Start a run and wait until it has ended. It is not restarted: a run that dies by itself is not calm.

    Args:
        say: gets the warnings of the launch.

    Raises:
        Refused: the launch is not possible.
        Failed: the run failed.
    """
    launch.max_restarts = 0
    with asking(asked):
        say(launch.start())
    wait(launch.run)
    check(launch.run, "the calm run")
    return launch.run


def wait(run: Run) -> None:
    """Wait until no process of a run is alive."""
    while run.alive():
        time.sleep(0.02)


def check(run: Run, what: str) -> None:
    """Raise Failed unless a run has ended as stopped or finished."""
    if run.read()["state"] not in (states.FINISHED, states.STOPPED):
        record = run.read_effective()
        last_lines = record["attempts"][-1].get("last_lines", ()) if record["attempts"] else ()
        where = f" --runs {run.path.parent}"  # in no folder that `train logs` knows
        reason = re.sub(_SEE, lambda found: found[0] + where, record["reason"] or record["state"])
        raise Failed(f"{what}: {reason}", last_lines)


class Breaker:
    """A run that is broken off."""

    def __init__(self, launch: Launch, asked: Asked) -> None:
        self.run, self._launch, self._asked = launch.run, launch, asked
        self.breaks: list[Broken] = []
        self._began = time.time() - 1  # the clock of processes is coarser
        self._attempts = 0
        """Number of attempts until the last break."""

    def live_through(self, breaks: list[Break]) -> None:
        """Start the run, break it off at these moments, and wait until it has ended.

        Raises:
            Failed: the run failed, or could not continue.
        """
        if self._launch.lease and any(one.kind == moments.WAY for one in breaks):
            self._launch.gives_way = "all"
        with asking(self._asked):
            self._launch.start()
            for one in breaks:
                if not self._reach(one.update):
                    break
                self.breaks.append(self._broken(one))
            wait(self.run)
        check(self.run, f"after {self.breaks[-1]}" if self.breaks else "the run to break off")

    def _reach(self, update: int) -> bool:
        """Wait until the run has made this many updates since the last break. Returns whether it is still alive."""
        while self.run.alive():
            if self._updates() >= update:
                return True
            time.sleep(_LOOK)
        return False

    def _updates(self) -> int:
        """Return the updates that an attempt after the last break has made; 0: there is none yet."""
        number = len(self.run.attempts())
        return heartbeat.reached(self.run.logs(number)) if number > self._attempts else 0

    def _broken(self, one: Break) -> Broken:
        """Break the run off, and wait until it has made an update again or has ended."""
        if one.kind == moments.SAVE:
            self._reach_save(one.update)
        ranks = self._ranks()
        rank = min(one.rank, max(len(ranks) - 1, 0))
        attempts = self.run.attempts()
        made = Broken(one.kind, heartbeat.reached(self.run.logs(len(attempts))))
        self._attempts, began = len(attempts), time.monotonic()
        match one.kind:
            case moments.RANK | moments.SAVE:
                made.rank = rank
                self._kill(ranks[rank : rank + 1])
            case moments.ALL | moments.AGENT:
                agent = (self.run.read().get("pids") or {}).get("agent")
                self._kill([*([agent] if agent else []), *(ranks if one.kind == moments.ALL else [])])
            case moments.SERVER:
                said = subprocess.run(tmux.tmux(self.run.folder.parent, "display", "-p", "#{pid}"),
                                      capture_output=True, text=True, check=False).stdout.strip()  # fmt: skip
                self._kill([int(said)] if said else [])
                self._attempts -= 1  # the attempt goes on
                made.back = time.monotonic() - began
                return made
            case moments.WAY if self._launch.lease:
                self._push_away()
                made.update = self.run.read()["step"]
            case moments.STOP | moments.WAY:
                made.kind = moments.STOP
                stopping.ask_to_stop(self.run, states.POLITE)
                made.update = self.run.read()["step"]
        if made.kind in (moments.ALL, moments.AGENT, moments.STOP):
            wait(self.run)
            self._resume(made)
        if one.kind == moments.SAVE:  # the next attempt saves there again
            while self.run.alive() and len(self.run.attempts()) == self._attempts:
                time.sleep(_LOOK)
            made.is_in_save = not self.run.checkpoint(one.update).exists()
        self._come_back(made, began)
        return made

    def _push_away(self) -> None:
        """Wait in the queue for what the run holds, until it has given way."""
        folder, record = locks.folder(), self.run.read()
        holders = ((file.name, locks.holder(file)) for file in folder.iterdir())
        keys = [name for name, one in holders if one is not None and one.number == f"{record['ticket']:020d}"]
        if not keys:
            raise Failed(f"{self.run.name} holds no GPU or core, so it cannot give way; leave --no-lease out")
        note = Holder.of(f"the proof of {self.run.name}", wants="its turn", count="1", among=" ".join(keys))
        ticket = Ticket(keys[0].partition("-")[0], 0, self.run.path, note=note)
        try:
            while self.run.alive() and self.run.read()["state"] != states.QUEUED:
                ticket.look()
                time.sleep(_LOOK)
        finally:
            ticket.leave()

    def _ranks(self) -> list[int]:
        return list((self.run.read().get("pids") or {}).get("ranks") or [])

    def _reach_save(self, update: int) -> None:
        """Wait until a checkpoint of this update is being written, or should have been."""
        while self.run.alive() and self._updates() <= update + _SAVES:
            if any(self.run.checkpoints.glob(f"{PARTIAL}step-{update:08d}*")):
                return
            time.sleep(_LOOK / 4)

    def _resume(self, made: Broken) -> None:
        """Resume the run, if it has not reached its end meanwhile."""
        record = self.run.read_effective()
        if record["state"] == states.FINISHED or record["step"] >= self._asked.stop:
            return
        try:
            Resume(runs=str(self.run.folder.parent), name=self.run.name, queue=None).start()
        except Refused as error:
            raise Failed(f"after {made}: it cannot be resumed: {error}") from None

    def _come_back(self, made: Broken, began: float) -> None:
        """Wait until the next attempt has made its first update, and note what the break cost."""
        while self.run.alive():
            attempts = self.run.attempts()
            if len(attempts) > self._attempts:
                start = attempts[self._attempts]["from_step"] or 0
                is_ready = attempts[self._attempts].get("ready")
                if is_ready and heartbeat.reached(self.run.logs(self._attempts + 1)) > start:
                    break
            time.sleep(_LOOK)
        made.back = time.monotonic() - began
        attempts = self.run.attempts()
        if len(attempts) > self._attempts:
            made.repeated = max(0, made.update - (attempts[self._attempts]["from_step"] or 0))

    def _kill(self, pids: list[int]) -> None:
        """Send SIGKILL to these processes of the run."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, psutil.Error, OSError):
                fd = os.pidfd_open(pid)
                try:
                    if psutil.Process(pid).create_time() >= self._began:
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                finally:
                    os.close(fd)


def end_all(runs: Path, names: list[str]) -> None:
    """End what still runs of a proof, without saving, and its tmux server."""
    for name in names:
        run = Run(runs / name)
        if (run.folder / "run.json").exists():
            with contextlib.suppress(OSError, Refused):
                stopping.stop_and_wait(run, states.NOW)
    with contextlib.suppress(Refused, OSError):
        subprocess.run(tmux.tmux(runs, "kill-server"), capture_output=True, check=False)
