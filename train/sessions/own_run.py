"""The run of a session that nobody has launched: under plain `python FILE`, or under torchrun.

It gets a folder in TRAIN_RUNS or ./runs, as `train run` makes one, so that `train ls`, `show`, `stop` and `resume` know
it. Its process is its own supervisor. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import gpus, programs, screen
from ..code import imports
from ..errors import Refused
from ..run import environment, folders, provenance, states
from ..run.outcome import Kind, Outcome
from ..run.run_folder import Lock, Run
from ..run.spec import read_spec
from ..signals import StopRequest
from ..supervise.attempts import Alone
from ..supervise.decide import LaunchMode

_PATIENCE = 30.0
"""Seconds the ranks of the attempt before get to end after torchrun has restarted them."""


def is_of_torchrun() -> bool:
    """Whether torchrun has started this process. It restarts ranks that exit with another code than 0."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class OwnRun:
    """A run whose rank 0 is this process. Holds its lock until the process ends.

    Raises:
        Refused: there is no script file, or the folder cannot be made.
    """

    def __init__(self, *, ranks: int, stop: StopRequest) -> None:
        program = _program()
        self.run, self._lock = _open(program, ranks)
        self._name, is_torchrun = self.run.name, is_of_torchrun()
        mode = LaunchMode.TORCHRUN if is_torchrun else LaunchMode.FOREGROUND
        self._alone = Alone(
            self.run, read_spec(self.run), program=programs.SESSION, ranks=ranks, stop=stop, mode=mode,
            is_for_look=not is_torchrun,
        )  # fmt: skip
        self.attempt = self._alone.number
        with contextlib.suppress(OSError):
            screen.remark(f"the run of this session is {self.run.path}; see: train show {self._name}")

    def end(self, reported: Outcome | None) -> None:
        """Record the end of the run, as the process ends. Removes a run that ends before its first checkpoint."""
        decision = self._alone.end({0: reported} if reported is not None else {})
        if decision is not None and decision.message:
            with contextlib.suppress(OSError):
                screen.remark(decision.message)
        self._alone.close()
        is_refused = reported is not None and reported.kind is Kind.REFUSED
        will_restart = is_of_torchrun() and not is_refused
        if decision is None or decision.state == states.FINISHED or self.run.newest_checkpoint or will_restart:
            return
        with contextlib.suppress(Refused, OSError):
            if self.run.name == self._name:  # else its user has renamed it, to keep it
                folders.delete_locked(self.run)
                if not is_refused:
                    how = "to keep such a run: train launch --script FILE"
                    screen.remark(f"{self._name} ended before its first checkpoint and is removed; {how}")


def _program() -> dict[str, Any]:
    """Return the fields of run.json about the program of this process.

    Raises:
        Refused: it is no file.
    """
    main: Any = sys.modules["__main__"]
    file = Path(getattr(main, "__file__", None) or "")
    if not file.is_file():
        raise Refused("a session needs a script that a resume can start again; save this code and type: python FILE")
    path = file.absolute()
    module = (getattr(main.__spec__, "name", "") or "").removesuffix(".__main__")
    return {
        "script": str(path), "script_arguments": sys.argv[1:], "script_files": imports.of_script(path),
        "cwd": os.getcwd(), "session": True, **({"script_module": module} if module else {}),
    }  # fmt: skip


def _open(program: Mapping[str, Any], ranks: int) -> tuple[Run, Lock]:
    """Make the run folder, or find it again after torchrun has restarted this process. Takes its lock."""
    runs = Path(os.environ.get("TRAIN_RUNS") or "runs").absolute()
    made, job = None, ""
    if is_of_torchrun():
        job = f"{os.environ['TORCHELASTIC_RUN_ID']}/{os.getppid()}"
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            made = next((run for run in folders.every(runs) if _job_of(run) == job), None)
    if made is None:
        record = {
            **program,
            "nproc": ranks,
            "command_line": environment.shown(["python", *sys.argv]),
            **provenance.facts(gpus.seen_here()),
            **({"torchelastic": job} if job else {}),
        }
        saved = environment.keep(os.environ, imports.python_files(record))
        files: dict[str, str | bytes] = {environment.FILE: environment.to_json(saved)}
        name = folders.fresh_name(runs, Path(program["script"]).stem)
        made = folders.create(runs, name, files=files, record=record)
    made = made.held()
    lock = made.acquire(patience=_PATIENCE)
    if lock is None:
        raise Refused(f"{made.name} is running; see: train show {made.name}")
    return made, lock


def _job_of(run: Run) -> str:
    with contextlib.suppress(OSError, Refused):
        return run.read().get("torchelastic") or ""
    return ""
