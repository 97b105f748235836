"""`train run`: trains in the foreground. This process starts and awaits the ranks, or is one rank of a torchrun."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import doing, gpus, screen
from ..code import imports
from ..errors import EXIT_REFUSED, Refused, one_line
from ..parallel.rank_env import RankEnv, is_under_torchrun, meeting_port, read_rank_env
from ..programs import TASK
from ..run import environment, folders, outcome
from ..run.outcome import Kind, Outcome
from ..run.run_folder import Lock, Run
from ..run.spec import Spec, read_spec
from ..signals import POLITE, StopRequest, leave
from ..supervise import diagnose, last_words
from ..supervise.attempts import Supervisor, supervise_alone
from ..supervise.decide import CODES, LaunchMode
from ..supervise.ranks import TaskRanks
from . import leasing, mirrored, notices, ranks_and_gpus
from .create_run import check_in_fork
from .launches import NewRun
from .request import ALONE, Plan

_PATIENCE = 10.0
"""Seconds the other ranks get to read that the run is refused, or to end."""
_LEFT = "left"
"""Counts the other ranks that write no more into the run folder."""


def run(new: NewRun, is_spawned: bool) -> int:
    """Train in the foreground. Returns the exit code.

    Args:
        new: The run. Its name may be '': then a fresh one is chosen.
        is_spawned: Whether the user gave a number of ranks.

    Raises:
        Refused: the launch is not possible; nothing has been created.
    """
    if is_under_torchrun():
        if is_spawned:
            raise Refused("torchrun has started the ranks already; leave out --spawn")
        return _under_torchrun(new)
    held = leasing.reserve(new)
    with doing.noted() as notes:
        zygote, plan = check_in_fork(new, meanwhile=doing.Waiting(new.name, notes, screen.remark).look)
    leasing.adapt(new, held, plan)
    for line in held.said:
        screen.remark(f"warning: {line}")
    _, where = notices.of_launch(None, os.environ)
    made = _create(new, plan, plan.record | where).held()
    lock = made.acquire()
    assert lock is not None  # the folder is new
    lock.leases = held.fds
    ranks_and_gpus.see(plan.visible)
    stop = StopRequest((*POLITE, signal.SIGHUP))
    spec, first = read_spec(made), made.name
    ranks = TaskRanks(made, spec, lock=lock, count=plan.ranks, zygote=zygote, is_foreground=True)
    supervisor = Supervisor(
        run=made, spec=spec, program=TASK, ranks=ranks, mode=LaunchMode.FOREGROUND, stop=stop, is_for_look=not new.name
    )
    code = supervisor.keep()
    zygote.close()
    notices.begin(made)
    if not new.name and not made.newest_checkpoint:
        _show_lost(made, ranks)
        _remove_look(made, first, spec.task_source)
    return code


def _remove_look(run: Run, name: str, source: str) -> None:
    """Remove a run without a given name that ended before its first checkpoint. The caller holds its lock.

    Args:
        name: Its name at the start: a user may have renamed the folder meanwhile.
        source: The file that the user launched. Messages have named its copy in the run folder.
    """
    has_memory = any(run.folder.glob("logs/*/*.memory.pickle"))  # the last line names this file
    if run.newest_checkpoint or has_memory or run.name != name:
        return
    with contextlib.suppress(Refused, OSError):
        folders.delete_locked(run)
        of = f" (its task.py was a copy of {source})" if source else ""
        screen.remark(f"{name} ended before its first checkpoint and is removed{of}; to keep such a run: --name NAME")


def _show_lost(run: Run, ranks: TaskRanks) -> None:
    """Print the end of the log of each rank that ended without a report. Rank 0 has printed on the terminal."""
    logs = run.logs(1)
    for rank in sorted(ranks.exits.keys() - outcome.read_all(logs).keys() - {0}):
        for line in diagnose.last_lines(last_words.tail(logs, rank)):
            screen.remark(f"rank {rank}: {line}")


def _create(new: NewRun, plan: Plan, record: dict[str, Any]) -> Run:
    runs = Path(new.runs)
    saved = environment.keep(os.environ, imports.python_files(record))
    record = record | {"command_line": new.command_line}
    files = plan.files | {environment.FILE: environment.to_json(saved)}
    return folders.create(runs, new.name or folders.fresh_name(runs, Path(new.task).stem), files=files, record=record)


def _under_torchrun(new: NewRun) -> int:
    """Train as one rank of a torchrun.

    Exits with 0 whenever a restart would not help, because torchrun restarts ranks with any other exit code. run.json
    and the last line say how the run really ended.
    """
    import torch.distributed as dist

    from ..supervise.worker import log_to

    log_to(sys.stderr)
    # torchrun would restart a rank that exits with another code than 0; srun does not
    refused = 0 if "TORCHELASTIC_RUN_ID" in os.environ else EXIT_REFUSED
    rank_env = read_rank_env()
    meeting_port()
    meeting, _, _ = next(dist.rendezvous("env://", rank_env.rank, rank_env.size))
    store = dist.PrefixStore(f"train/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", meeting)
    rank_env = dataclasses.replace(rank_env, init=dist.PrefixStore("train/group", store))
    if rank_env.rank:
        if rank_env.size > rank_env.local_size:
            tell_cards(store, rank_env.rank, gpus.of_ranks(rank_env.local_size))
        received = json.loads(store.get("run"))
        if "refused" in received:
            with contextlib.suppress(RuntimeError):  # rank 0, which may serve the store, exits when all have read
                store.add("heard", 1)
            leave(refused)
        made, spec = Run(Path(received["folder"])).held(), Spec.from_json(received["spec"])
        code = _rank_of_torchrun(made, spec, received["attempt"], rank_env, StopRequest())[1]
        with contextlib.suppress(RuntimeError):
            store.add(_LEFT, 1)
        leave(code)
    code = 1
    try:
        ranks, nodes = shape(rank_env)
        is_elsewhere = rank_env.size > rank_env.local_size
        elsewhere = functools.partial(cards_of, store, rank_env.size) if is_elsewhere else list
        made, _held = open_under_torchrun(new, ranks=ranks, nodes=nodes, elsewhere=elsewhere)
        spec, stop, first = read_spec(made), StopRequest(), made.name

        def rank(attempt: int) -> Outcome:
            nonlocal code
            store.set("run", json.dumps({"folder": str(made.path), "attempt": attempt, "spec": spec.to_json()}))
            end, code = _rank_of_torchrun(made, spec, attempt, rank_env, stop)
            return end

        supervise_alone(made, spec, program=TASK, ranks=rank_env.size, train=rank, stop=stop)
        if not new.name and not made.newest_checkpoint and (_is_last_try() or made.read()["state"] in CODES):
            _wait_for(store, _LEFT, rank_env.size - 1)  # they write their logs
            _remove_look(made, first, spec.task_source)
    except Refused as error:
        _refuse(store, rank_env.size - 1, error)
        with contextlib.suppress(OSError):
            screen.remark(str(error))
        code = refused
    except BaseException as error:
        _refuse(store, rank_env.size - 1, error)
        traceback.print_exc()
    finally:
        leave(code)


def tell_cards(store: Any, rank: int, cards: list[gpus.Card]) -> None:
    """Tell the first rank the GPUs of this machine's ranks."""
    store.set(f"cards/{rank}", json.dumps([*map(dataclasses.astuple, cards)]))


def cards_of(store: Any, ranks: int) -> list[list[gpus.Card]]:
    """Return what the other ranks tell: the GPUs of their machine's ranks; an empty list: unknown."""
    received = [json.loads(store.get(f"cards/{rank}")) for rank in range(1, ranks)]
    return [
        [gpus.Card(name, (major, minor), uuid, number=number) for name, (major, minor), uuid, number in cards]
        for cards in received
    ]


def _refuse(store: Any, others: int, error: BaseException) -> None:
    """Make the other ranks end too, and wait until they have read it: this rank may serve the store."""
    store.set("run", json.dumps({"refused": one_line(error)}))
    _wait_for(store, "heard", others)


def _wait_for(store: Any, what: str, others: int) -> None:
    """Wait until so many ranks have counted themselves, or some seconds."""
    until = time.monotonic() + _PATIENCE
    with contextlib.suppress(RuntimeError):
        while store.add(what, 0) < others and time.monotonic() < until:
            time.sleep(0.02)


def _is_last_try() -> bool:
    """Whether torchrun would not restart the ranks. Other launchers never do."""
    tries, most = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return int(tries or 0) >= int(most or 0)


def shape(rank_env: RankEnv) -> tuple[int, range]:
    """Return the number of ranks per machine of a torchrun, and the number of machines.

    GPUs, cores and data workers are counted per machine. If machines have different numbers of ranks, all ranks count
    as if they were on this one.
    """
    machines, rest = divmod(rank_env.size, rank_env.local_size)
    return (rank_env.size, ALONE) if rest else (rank_env.local_size, range(machines, machines + 1))


def _rank_of_torchrun(made: Run, spec: Spec, attempt: int, rank_env: RankEnv, stop: StopRequest) -> tuple[Outcome, int]:
    """Train as one rank. Returns its outcome and its exit code."""
    from ..supervise.worker import exit_code, keep_log, refuse_breakpoints, run_rank, show

    if rank_env.rank:
        refuse_breakpoints(spec, rank_env.rank)
    logs = made.logs(attempt)
    keep_log(logs, rank_env.rank)
    has_bar = rank_env.rank == 0 and sys.stderr.isatty()
    end = run_rank(made, spec, rank_env=rank_env, attempt=attempt, stop=stop, bar=has_bar)
    if end.kind is Kind.DIED:
        show(end)
    return end, exit_code(logs, rank_env, end)


def open_under_torchrun(
    new: NewRun,
    *,
    ranks: int = 1,
    nodes: range = ALONE,
    elsewhere: Callable[[], list[list[gpus.Card]]] = list,
) -> tuple[Run, Lock]:
    """Create the run, or find it again after torchrun has restarted this process."""
    from .checks import prepare

    job = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}/{os.getppid()}"
    made: Run | None = None
    runs = Path(new.runs)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        names = [new.name] if new.name else [run.name for run in folders.every(runs)]
        ours = (one for one in names if folders.record_of(runs, one).get("torchelastic") == job)
        made = next((Run(runs / one) for one in ours), None)
    if made is None:
        plan = prepare(new, ranks=ranks, nodes=nodes, runs=runs, elsewhere=elsewhere)
        plan.warnings += mirrored.check(new, plan)
        made = _create(new, plan, plan.record | {"torchelastic": job})
    lock = made.acquire(patience=30.0)  # the ranks of the attempt before may still be ending
    if lock is None:
        raise Refused(f"{made.name} is running; see: train show {made.name}")
    return made.held(), lock
