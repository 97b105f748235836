"""mirror.json in the run folder: which run and folder writes to the mirror, and how far the mirror is."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from typing import Any

from .. import format
from ..run import durable, states
from ..run.record import Record
from ..run.run_folder import Run

FILE = "mirror.json"
LOCK = ".mirror.lock"
"""Locked by the process that copies, so that there is one."""
FIELD = "checkpoint.mirror"


@dataclasses.dataclass
class State:
    """The content of mirror.json. Times are in seconds since the epoch."""

    id: str = ""
    """Id of the run for its mirror. A copy of the run folder has the same one; a fork has none."""
    writer: str = ""
    """Id of this run folder as the writer; '': it has never written."""
    inode: int = 0
    """Inode of the run folder of `writer`: in a copy of the folder, `writer` is another's."""
    url: str = ""
    files: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Maps files that were copied to their size and time of change (ns). Without checkpoints."""
    step: int = 0
    """Step of the newest checkpoint in the mirror."""
    at: float = 0.0
    """When all that there was had been copied."""
    copying: int = 0
    """Step of the checkpoint that is being copied; 0: none."""
    done: int = 0
    total: int = 0
    """Bytes of that checkpoint: sent, and in all."""
    error: str = ""
    """Why the last try failed; '' if it did not."""
    error_since: float = 0.0
    error_at: float = 0.0
    is_complete: bool = False
    """Whether the run has ended and all of it is copied."""
    is_lost: bool = False
    """Whether another folder of the same run has taken the mirror over."""


def read(run: Run) -> State:
    """Read mirror.json; an empty state if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        content = json.loads(durable.read_bytes(run.folder / FILE))
        known = {one.name for one in dataclasses.fields(State)}
        return State(**{name: value for name, value in content.items() if name in known})
    return State()


def write(run: Run, state: State, is_durable: bool = False) -> None:
    """Write mirror.json. Raises OSError if the run folder is gone or the disk fails."""
    durable.write_atomically(run.folder / FILE, json.dumps(dataclasses.asdict(state)) + "\n", is_durable)


def lock(run: Run) -> int | None:
    """Become the process that copies this run. Returns an open descriptor to keep; None: another process copies."""
    return durable.try_lock(run.folder / LOCK, 0o600)


def wake(run: Run) -> None:
    """Make the process that copies this run look at once, if it waits."""
    with contextlib.suppress(OSError):
        os.utime(run.folder / LOCK)


def mark(run: Run) -> int:
    """Return a number that changes with `wake`."""
    with contextlib.suppress(OSError):
        return (run.folder / LOCK).stat().st_mtime_ns
    return 0


def is_copying(run: Run) -> bool:
    """Whether a process copies this run now."""
    return durable.is_locked(run.folder / LOCK)


def facts(run: Run, record: Record, url: str) -> dict[str, Any]:
    """Return how far the mirror is, for `train show --json`; {} without a mirror."""
    if not url:
        return {}
    state = read(run)
    if state.url != url:
        state = State(url=url)
    found = dataclasses.asdict(state)
    for name in ("files", "inode", "writer", "id"):
        del found[name]
    return {"mirror": found | {"process": is_copying(run), "text": text(run, record, url)}}


def text(run: Run, record: Record, url: str) -> str:
    """Return how far the mirror at this URL is, as a line; '' without a URL.

    Args:
        record: run.json with the effective state.
    """
    if not url:
        return ""
    state, newest, now = read(run), run.newest_checkpoint, time.time()
    if state.id and not state.writer:
        return f"{url}: this run was fetched; once it is resumed, it copies there again"
    if state.url != url:
        state = State()
    has_ended = record["state"] not in (states.CREATED, states.QUEUED, states.RUNNING)
    lives = is_copying(run)
    parts = [f"{url}: step {state.step} copied" if state.step else f"{url}: no checkpoint copied yet"]
    if state.is_lost:
        return f"{parts[0]}; {state.error}"
    if state.is_complete and state.step == newest:
        return f"{url}: complete{f', step {state.step}' if state.step else ''}"
    if state.copying and lives:
        share = f", {state.done / state.total:.0%}" if state.total else ""
        parts.append(f"copying step {state.copying}{share}")
    elif newest > state.step:
        parts.append(f"the run has step {newest}")
    if state.error:
        first, last = format.ago(now - state.error_since), format.ago(now - state.error_at)
        parts.append(f"fails (first {first}, last {last}): {state.error}")
    if has_ended and not lives:
        parts.append(f"to copy the rest: train mirror {record['name']}")
    return "; ".join(parts)
