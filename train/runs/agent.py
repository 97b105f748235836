"""The process inside tmux: checks the request, hosts torchrun's elastic agent, restarts what died.

The elastic agent runs in a thread of this process, so that signals are ours: torchrun alone would give ranks 30
seconds to save and report a stop as a failure. Each attempt has a rendezvous of its own and no restarts inside, so
that no attempt reads another's keys, and restarts are counted here, against progress.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import tomllib
import traceback
import uuid
from pathlib import Path
from typing import Any

from train.engine import uneven
from train.errors import FAILED, Refused, one_line
from train.record import environment, heartbeat, store
from train.record.heartbeat import Beat
from train.record.store import Lock, Run
from train.runs import control, memory, scripts
from train.runs.cause import is_busy
from train.runs.follow import CODES, View
from train.runs.idle import MINUTES, Idle, end, seats
from train.runs.launch import Order, session_of
from train.runs.verdict import Verdict, explain, last_lines
from train.runs.watch import Watch, stack_of
from train.signals import StopRequest

MAX_RESTARTS = 3
"""Default of --max-restarts: deaths in a row without a new checkpoint after which a run is not started again."""

_LONGEST_WAIT = 30.0
"""Seconds, at most, until a run is started again for which the machine had no room."""
_GRACE = 3.0
"""Seconds that ranks have to notice by themselves that one of them is dead."""


def main() -> None:
    """Carry out the order that lies in the folder given as argument."""
    desk = Path(sys.argv[1])
    content = json.loads((desk / "request.json").read_text(encoding="utf-8"))
    if "--ready" not in sys.argv:
        environ = content["env"] | {k: os.environ[k] for k in ("TMUX", "TMUX_PANE", "TERM") if k in os.environ}
        os.chdir(content["cwd"])
        # anew, so that what is read at a process's start (LD_LIBRARY_PATH, PYTHON…) is the caller's too
        os.execve(sys.executable, [sys.executable, "-m", "train.runs.agent", str(desk), "--ready"], environ)
    stop = StopRequest()
    order = Order(**content["order"])
    try:
        run, lock, ranks, warnings = _open(order, environment.keep(content["env"]))
    except Refused as error:
        _answer(desk, {"refused": str(error)})
        sys.exit(2)
    except OSError as error:
        _answer(desk, {"refused": one_line(f"{error.strerror or error}: {error.filename}; look at its owner and mode")})
        raise
    except BaseException as error:
        _answer(desk, {"refused": one_line(f"unexpected {type(error).__name__}: {error}")})
        raise
    if not _answer(desk, {"warnings": warnings}):
        _undo(order, run, lock)
        sys.exit(2)
    agent = Agent(run, lock, order, ranks, stop)
    try:
        sys.exit(agent.supervise())
    except (OSError, Refused) as error:  # its disk fails or its folder is gone
        agent.say(f"{run.name} cannot go on: {one_line(error)}")
        sys.exit(FAILED)


def _answer(desk: Path, answer: dict[str, Any]) -> bool:
    """Report to the caller. False if the order has been withdrawn; a caller who was killed has not done so."""
    try:
        store.write_atomically(desk / "answer.json", json.dumps(answer), durable=False)
    except OSError:
        return False
    return True


def _undo(order: Order, run: Run, lock: Lock) -> None:
    """Clear away a run whose launch was withdrawn; rest one whose resume was."""
    if order.kind == "resume":
        run.update(state=store.STOPPED, reason="stopped (its resume was interrupted)", ended=store.now())
    lock.release()
    if order.kind != "resume":
        store.remove(run)


def _outlive_terminal() -> None:
    """From here on the terminal may go; the run stays. Before it, ending the session ends a launch that is withdrawn
    while nothing has been created yet."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def count_ranks(nproc: str | None, gpus: str | None, cpu_only: bool = False) -> tuple[int, str | None]:
    """Ranks on this machine and the GPU ids they may see (None: as they are).

    A bare number of GPUs is a count; ids contain a comma (`2,` is id 2).

    Raises:
        Refused: not a number, not so many GPUs here, or no such GPU.
    """
    import torch

    here = 0 if cpu_only else torch.cuda.device_count()
    visible: str | None = None
    if gpus is not None:
        if "," in gpus:
            ids = [part.strip() for part in gpus.strip().rstrip(",").split(",")]
            if not ids or not all(part.isdecimal() for part in ids) or len(set(ids)) < len(ids):
                raise Refused(f"--gpus {gpus}: give a count (2) or different ids with a comma (0,1 or 2,)")
            missing = [part for part in ids if int(part) >= here]
            if missing:
                raise Refused(f"--gpus {gpus}: there is no GPU {missing[0]} here; {_gpus_here(here)}")
            chosen = [str(int(part)) for part in ids]
        else:
            if not gpus.strip().isdecimal() or int(gpus) < 1:
                raise Refused(f"--gpus {gpus}: give a count of at least 1, or ids with a comma (0,1 or 2,)")
            if int(gpus) > here:
                raise Refused(
                    f"--gpus {gpus}: {_gpus_here(here)}; leave out --gpus" + (" to run on the CPU" if not here else "")
                )
            chosen = [str(index) for index in range(int(gpus))]
        # ids count among the GPUs that this process may see
        outer = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = ",".join(outer.split(",")[int(i)] if outer else i for i in chosen)
        here = len(chosen)
    if nproc is None:
        return (here if gpus is not None else 1), visible
    if nproc == "auto":
        return max(here, 1), visible
    if not nproc.isdecimal() or int(nproc) < 1:
        raise Refused(f"--nproc {nproc}: give a number of ranks of at least 1, or auto for one per GPU")
    if int(nproc) > 4096:
        raise Refused(f"--nproc {nproc}: more ranks than any machine runs; give at most 4096")
    return int(nproc), visible


def _gpus_here(here: int) -> str:
    return f"{here} are usable here" if here != 1 else "1 is usable here"


def _open(order: Order, kept: environment.Kept) -> tuple[Run, Lock, int, list[str]]:
    """Check the order, create or find its run, take the lock."""
    runs = Path(order.runs)
    if order.kind == "resume":
        return _reopen(order, store.find(runs, order.name), kept)
    on_cpu = order.request.get("flags", {}).get("device") == "cpu"
    ranks, visible = count_ranks(order.nproc, order.gpus, on_cpu)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    extra = {
        "tmux_session": session_of(order.name),
        "world_size": ranks,
        "gpus": visible,
        "max_restarts": MAX_RESTARTS if order.max_restarts is None else order.max_restarts,
    }
    if order.kind == "script":
        from train.runs.admit import versions

        text, record = scripts.taken(Path(order.script[0]))
        record |= {"script_arguments": order.script[1:], "cwd": os.getcwd(), "versions": versions()}
        record["watch"] = _watch_flags(order.flags)
        files: dict[str, str | bytes] = {scripts.COPY: text, environment.FILE: environment.to_json(kept)}
        _outlive_terminal()
        run = store.create(runs, order.name, files, record | extra)
    else:
        from train.runs.admit import Request, prepare

        prepared = prepare(Request(**order.request, ranks=ranks))
        _outlive_terminal()
        files = prepared.files | {environment.FILE: environment.to_json(kept)}
        run = store.create(runs, order.name, files, prepared.record | extra)
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is running already")
    return run, lock, ranks, kept.said


def _watch_flags(flags: dict[str, str]) -> dict[str, Any]:
    """The limits of a script's run, as `--watch.NAME VALUE` gives them.

    Raises:
        Refused: another field, or no such value.
    """
    from train import config

    for name in flags:
        if not name.startswith("watch."):
            raise Refused(f"--{name}: a script has no configuration fields but watch.*")
    known = config.fields()
    return {
        name.removeprefix("watch."): config.parse_value(name, known[name].annotation, text)
        for name, text in flags.items()
    }


def _reopen(order: Order, run: Run, kept: environment.Kept) -> tuple[Run, Lock, int, list[str]]:
    lock = run.acquire(patience=10.0 if run.read().get("state") in CODES else 1.0)
    if lock is None:
        raise Refused(f"{run.name} is running; see: train show {run.name}")
    try:
        record = run.read()
        if order.by_keeper:
            _check_still_wanted(run, record)
        gpus = order.gpus if order.gpus is not None else None
        nproc = order.nproc or (str(record["world_size"]) if gpus is None else None)
        ranks, visible = count_ranks(nproc, gpus)
        if visible is None and order.gpus is None and record.get("gpus") and order.nproc is None:
            visible = record["gpus"]
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        here = Path.cwd()
        if record.get("cwd") and Path(record["cwd"]).is_dir():
            os.chdir(record["cwd"])
        changes: dict[str, Any] = {"world_size": ranks, "gpus": visible, "tmux_session": session_of(run.name)}
        warnings: list[str] = []
        if not record.get("script"):
            from train.runs.admit import apply_resume, prepare_resume

            if order.script:
                raise Refused(
                    f"--script is for runs of scripts; {run.name} trains a task, and goes on with its own copy"
                )
            _, config, warnings = prepare_resume(run, order.flags, ranks)
        else:
            changes["watch"] = (record.get("watch") or {}) | _watch_flags(order.flags)
        _outlive_terminal()
        if record.get("script") and order.script:
            changes |= scripts.replace(run, here / order.script[0])
        elif record.get("script"):
            warnings += scripts.warnings(run, record)
        elif order.flags:
            apply_resume(run, config)
        if not order.by_keeper:  # what holds from now on, for the keeper too
            kept = environment.after(environment.read(run.folder), kept)
            store.write_atomically(run.folder / environment.FILE, environment.to_json(kept))
        changes["kept"] = control.count_of(run, record) if order.by_keeper else None
        if order.max_restarts is not None:
            changes["max_restarts"] = order.max_restarts
        run.update(**changes, reason="", ended=None, state=store.CREATED)
        return run, lock, ranks, warnings
    except BaseException:
        lock.release()
        raise


def _check_still_wanted(run: Run, record: dict[str, Any]) -> None:
    """What the keeper saw may have changed until the lock was held: stopped by its user, resumed and finished."""
    if record["state"] in (store.FINISHED, store.FAILED):
        raise Refused(f"{run.name} is {record['state']}")
    if record["state"] == store.STOPPED and not control.rests_by_itself(record):
        raise Refused(f"{run.name} was stopped by its user")


class Agent:
    """Keeps the ranks of one run alive until it ends."""

    def __init__(self, run: Run, lock: Lock, order: Order, ranks: int, stop: StopRequest) -> None:
        self.run, self.lock, self.ranks, self.stop = run, lock, ranks, stop
        record = run.read()
        self.is_script = bool(record.get("script"))
        self.max_restarts = int(record.get("max_restarts", MAX_RESTARTS))
        self._hang: str | None = None
        self._problem = ""
        self._kills = memory.Kills()
        self.view = View(run, sys.stderr, show_log=self.is_script)

    def supervise(self) -> int:
        """Run attempts until the run ends or is not to be started again. Returns the exit code of its end."""
        self.run.clear_stop()
        os.dup2(self.lock.fd, 0)  # how ranks inherit the lock: see runs/rank.py
        deaths = 0
        while True:
            saved, began = self._newest(), time.monotonic()
            self._kills = memory.Kills()
            attempt = self.run.begin_attempt(self.ranks, pids={"agent": os.getpid(), "ranks": []})
            failures = self._attempt(attempt)
            record = self.run.read()
            if record["state"] != store.RUNNING:  # rank 0 has recorded how it ended
                if record["state"] == store.STOPPED and self.stop.asked:  # the ranks know a signal, we know whose
                    self.run.update(reason=f"stopped after step {record['step']} ({self.stop.reason})")
                self.run.end_attempt(record["state"], self.run.read()["reason"])
                break
            if not failures and (self.is_script or self.stop.asked):
                self._close(store.STOPPED if self.stop.asked else store.FINISHED)
                break
            death = explain(self.run, attempt, failures, self._hang, self.is_script, self._kills.limit())
            if self._problem and not (self._hang or death.recurs):
                death = Verdict(f"torchrun failed: {self._problem}", False, 0, is_busy(self._problem))
            if self.stop.asked and not (death.recurs and not self.is_script):
                at_once = self.stop.reason == store.WHO[store.NOW]
                started = self.run.read()["attempts"][-1].get("ready")
                # a death while the ranks were saving has cost steps, and its reason must not be lost
                self._close(store.STOPPED, "" if at_once or not started else death.reason, failures)
                break
            self.run.end_attempt("died", death.reason, last_lines=last_lines(self.run, attempt, death.rank))
            progress = self._newest() > saved or (self.is_script and self._ran_well(time.monotonic() - began))
            deaths = 1 if progress else deaths + 1
            if not self._begins_again(death, deaths, progress):
                break
            self.say(f"{death.reason}; starting again ({deaths} of {self.max_restarts} without progress)")
            if death.is_busy:
                self._wait(min(2.0**deaths, _LONGEST_WAIT))
        with contextlib.suppress(OSError):
            self.view.close()
        self.run.clear_stop()
        return CODES.get(self.run.read()["state"], 3)

    def _begins_again(self, death: Verdict, deaths: int, progress: bool) -> bool:
        """Whether a run that died so is started again; what it ends as is recorded."""
        if death.recurs:
            self.run.update(state=store.FAILED, reason=death.reason, ended=store.now())
            return False
        if progress and self.max_restarts == 0:
            self.run.update(reason=f"{death.reason}; no restarts are left", ended=store.now())
            return False  # interrupted: a resume continues
        if deaths > self.max_restarts:
            times = f"{deaths} time{'s' if deaths > 1 else ''}"
            without = f"before it had run {self._healthy():g} minutes" if self.is_script else "without a new checkpoint"
            reason = f"died {times} {without}: {death.reason}"
            self.run.update(state=store.FAILED, ended=store.now(), reason=reason)
            return False
        return True

    def _healthy(self) -> float:
        return control.healthy_minutes(self.run.read())

    def _ran_well(self, seconds: float) -> bool:
        """Whether an attempt of a script ran long enough to count as progress: its own checkpoints nobody knows."""
        return seconds >= 60 * self._healthy()

    def _wait(self, seconds: float) -> None:
        """Let a busy machine come to rest, unless somebody asks for a stop."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop.asked and not self.run.stop_asked():
            time.sleep(0.1)

    def say(self, text: str) -> None:
        """A line on the terminal, if it is still there: tmux may have been killed."""
        with contextlib.suppress(OSError):
            self.view.say(text)

    def _newest(self) -> int:
        return next(iter(self.run.steps_saved()), 0)

    def _close(self, state: str, death: str = "", failures: dict[int, int] | None = None) -> None:
        """End the run without an outcome of rank 0."""
        reason = ""
        if state == store.STOPPED:
            newest = self._newest()
            reason = f"stopped ({self.stop.reason})" + (f", and {death}" if death else "")
            reason += f"; the last checkpoint is of step {newest}" if newest else ""
            reason += f"; {scripts.how_stopped(failures or {})}" if self.is_script else ""
        self.run.end_attempt(state, reason, state)

    def _attempt(self, attempt: int) -> dict[int, int]:
        """Start the ranks and wait for their end. Returns exit codes of those that failed first, by rank."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        self._hang, self._problem = None, ""
        failures: dict[int, int] = {}
        problem: list[BaseException] = []

        def host() -> None:
            try:
                self._elastic(attempt)
            except ChildFailedError as error:
                failures.update({rank: failure.exitcode for rank, failure in error.failures.items()})
            except BaseException as error:
                problem.append(error)
                with contextlib.suppress(OSError):
                    traceback.print_exc()

        logs = self.run.logs(attempt)
        watch = None if self.is_script else Watch(logs, self.ranks, *self._allowances(), self._remark)
        idle = Idle(logs, self._idle_minutes()) if self.is_script else None
        dead_since: float | None = None
        thread = threading.Thread(target=host, name="torchrun")
        try:
            thread.start()
        except RuntimeError as error:  # no room for a thread: the machine is busy
            self._problem = one_line(error)
            return {0: 1}
        forwarded = False
        recorded: list[int] = []
        while thread.is_alive():
            thread.join(0.2)
            # a second Ctrl-C in the attached terminal waits for nothing
            wanted = store.NOW if self.stop.interrupts > 1 else self.run.stop_asked()
            if wanted and not self.stop.asked:
                self.stop.asked, self.stop.reason = True, store.WHO.get(wanted, wanted)
            ranks = recorded or self._ranks()  # an attempt starts its ranks once; looking costs a walk through /proc
            if not recorded and len(ranks) == self.ranks:
                recorded = ranks
                self.run.note(pids={"agent": os.getpid(), "ranks": ranks})
                self._kills.among(ranks)
            if self.stop.asked and (not forwarded or wanted == store.NOW) and ranks:
                self.stop.reason = store.WHO[store.NOW] if wanted == store.NOW else self.stop.reason
                for pid in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if wanted == store.NOW else signal.SIGTERM)
                forwarded = True
            if watch is not None and ranks:
                if dead_since is None and watch.dead(recorded):
                    dead_since = time.monotonic()
                self._hang = self._hang or watch.hangs()
                if self._hang and dead_since is None:
                    watch.dump()
                    dead_since = 0.0
                # torchrun alone would give peers that wait for the dead 30 seconds
                if dead_since is not None and time.monotonic() - dead_since > _GRACE:
                    for pid in ranks:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            if idle is not None:
                heartbeat.sign(logs)
                self._end_if_idle(idle, logs, ranks)
            with contextlib.suppress(OSError, ValueError, Refused):  # the terminal may be gone, or the disk
                self.view.update(self.run.read())
        for path in logs.glob("*.stack.txt"):
            with contextlib.suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()
        if problem and not failures:
            self._problem = one_line(problem[0])
            failures[0] = 1
        return failures

    def _end_if_idle(self, idle: Idle, logs: Path, ranks: list[int]) -> None:
        """End a script that hangs, and write down what it was doing. One that was asked to stop may take its time."""
        if self._hang or self.stop.asked or not ranks:
            return
        self._hang = idle.hangs(ranks)
        if self._hang:
            for rank, pid in seats(ranks).items():
                stack_of(pid, logs / f"rank{rank}.stack.txt")
            end(ranks)

    def _allowances(self) -> tuple[float | None, float]:
        content = tomllib.loads((self.run.folder / "config.toml").read_text(encoding="utf-8"))
        watch = content.get("watch", {})
        return watch.get("hang_minutes"), float(watch.get("start_minutes", 30.0))

    def _remark(self, behind: Beat | None) -> str:
        with contextlib.suppress(OSError, Refused):
            return uneven.remark(self.run.read(), behind)
        return ""

    def _idle_minutes(self) -> float:
        minutes = (self.run.read().get("watch") or {}).get("hang_minutes")
        return MINUTES if minutes is None else float(minutes)

    def _ranks(self) -> list[int]:
        import psutil

        try:
            children = psutil.Process().children()
            return sorted(p.pid for p in children if "train.runs.rank" in p.cmdline() or self.is_script)
        except psutil.Error:
            return []

    def _elastic(self, attempt: int) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        # it misses signal handlers in a thread, for fear of orphans; both are our business (see runs/rank.py)
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
        record_threads(self.run, self.is_script, self.ranks)
        os.environ["TRAIN_AGENT_PID"] = str(os.getpid())
        logs = self.run.logs(attempt)
        # NCCL's flight recorder, under the names of torch 2.7 and of later releases; runs/watch.py asks for its trace
        for size in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"):
            os.environ.setdefault(size, "2000")
        for dump in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT"):
            os.environ.setdefault(dump, "1")
        for file in ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"):
            os.environ[file] = str(logs / "nccl-trace-rank")
        os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = str(logs / "nccl-rank")
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        rest = ["--", *scripts.command(self.run, self.run.read())] if self.is_script else []
        arguments = ["-m", "train.runs.rank", str(self.run.folder), str(attempt), *rest]
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            local_addr="127.0.0.1",
        )
        with tempfile.TemporaryDirectory(prefix="train-torchrun-") as desk:  # torchrun would leave one behind
            config.logs_specs = DefaultLogsSpecs(log_dir=desk)
            elastic_launch(config, sys.executable)(*arguments)


def record_threads(run: Run, is_script: bool, ranks: int) -> None:
    """Set OMP_NUM_THREADS for the ranks: the run's own number, or for a script what torchrun would set."""
    if is_script:
        if ranks > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        return
    threads = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8")).get("cpu_threads", 1)
    os.environ["OMP_NUM_THREADS"] = str(threads)


if __name__ == "__main__":
    main()
