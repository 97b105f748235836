"""Why an attempt died, and whether it would die so again."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from train.record.store import Run
from train.runs import cause, memory
from train.runs.folding import fold

LAST_LINES = 8
"""Lines of a dead rank's log that run.json keeps."""
_TAIL = 1 << 16
"""Bytes at the end of a log that are read: a progress bar fills much of it."""
_FEW = 5
"""So many lines may follow the traceback of a rank that was still ending when a peer had noticed."""
_KILLED = ("killed by signal: Killed", "exited unexpectedly")
"""What torch says of a loader's process that is gone."""


@dataclass(frozen=True)
class Verdict:
    """Why an attempt died."""

    reason: str
    recurs: bool
    rank: int | None
    """The one that died first, if that is known."""
    is_busy: bool = False
    """Whether the machine had no room for a process or thread: it may have in a while."""


def explain(
    run: Run, attempt: int, failures: dict[int, int], hang: str | None, is_script: bool, out_of_memory: str | None
) -> Verdict:
    """The cause of an attempt's death.

    Args:
        failures: exit codes of the ranks that were seen to fail first; of a signal: negative.
        hang: that it hung, and how.
        out_of_memory: the limit at which the kernel has killed for lack of memory meanwhile.
    """
    first = run.first_failure(attempt)
    logs = {rank: log_of(run, attempt, rank) for rank in failures}
    killed = [rank for rank, code in sorted(failures.items()) if code == -signal.SIGKILL]
    lost = [rank for rank, text in logs.items() if any(word in text[-4000:] for word in _KILLED)]
    if out_of_memory and not hang and (killed or lost):
        rank = (killed or lost)[0]
        whose = f"rank {rank}" if killed else f"a process of rank {rank}"
        return Verdict(f"out of memory: {whose} was killed at {out_of_memory}; {memory.ADVICE}", True, rank)
    if hang:
        return Verdict(hang, False, None)
    if is_script:
        return _of_script(run, attempt, failures, logs)
    # a failure that would recur, of the task for example, may make peers abort by a signal
    for rank, code in sorted(failures.items()) if first is None or not first["recurs"] else ():
        # a rank that agent or peers ended shows SIGTERM; the first cause is another one
        if code < 0 and -code != signal.SIGTERM:
            found = cause.of_log(logs[rank], code)  # an abort tells why
            if found and found.recurs:
                return Verdict(f"rank {rank}: {found.reason}", True, rank)
            return Verdict(f"rank {rank} died of {signal.Signals(-code).name}", False, rank)
    if first is not None:
        reason = f"rank {first['rank']}: {first['reason']}"
        return Verdict(reason, bool(first["recurs"]), first["rank"], cause.is_busy(first["reason"]))
    if failures:
        rank, code = sorted(failures.items())[0]
        found = cause.of_log(logs[rank], code)
        if found and (found.recurs or cause.is_busy(found.reason)):
            return Verdict(f"rank {rank}: {found.reason}", found.recurs, rank, cause.is_busy(found.reason))
        return Verdict(_plainly(run, rank, code), False, rank)
    return Verdict("the ranks ended without saying how", False, 0)


def _of_script(run: Run, attempt: int, failures: dict[int, int], logs: dict[int, str]) -> Verdict:
    if not failures:
        return Verdict("the ranks ended without saying how", False, 0)
    causes = {rank: found for rank, code in failures.items() if (found := cause.of_log(logs[rank], code))}
    # who was killed did not do it itself, and what its peers then met was no fault of theirs
    for rank, code in sorted(failures.items()):
        if code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS):
            return Verdict(f"rank {rank} died of {signal.Signals(-code).name}", False, rank)
    if not any(found.recurs for found in causes.values()):
        # its peers notice a rank that fails by losing it, maybe before it has ended
        for rank in range(int(run.read()["world_size"])):
            found = cause.of_log(log_of(run, attempt, rank), 1, noise=_FEW) if rank not in failures else None
            if found and found.recurs:
                return Verdict(f"rank {rank}: {found.reason}", True, rank)
    for rank, found in sorted(causes.items(), key=lambda item: (not item[1].recurs, item[0])):
        code = failures[rank]
        how = f" (died of {signal.Signals(-code).name})" if code < 0 else f" (exited with code {code})"
        return Verdict(f"rank {rank}: {found.reason}{how}", found.recurs, rank, cause.is_busy(found.reason))
    rank, code = min(failures.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[0]))
    return Verdict(_plainly(run, rank, code), False, rank)


def _plainly(run: Run, rank: int, code: int) -> str:
    what = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"rank {rank} {what}; see: train logs {run.name} --rank {rank}"


def log_of(run: Run, attempt: int, rank: int | None) -> str:
    """The end of what a rank said, progress bars folded; '' if nothing can be read."""
    try:
        with (run.logs(attempt) / f"rank{rank}.log").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            return fold(file.read()).decode(errors="replace")
    except OSError:
        return ""


def last_lines(run: Run, attempt: int, rank: int | None) -> list[str]:
    """What a rank said last, for the story of the run."""
    lines = log_of(run, attempt, rank).splitlines()
    return [line.rstrip()[:1000] for line in lines if line.strip()][-LAST_LINES:]
