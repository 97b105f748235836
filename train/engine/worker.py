"""What every rank executes, from meeting the others to the last line.

Run as a module it is one rank of a launched run: `python -m train.engine.worker RUN_FOLDER`, with the environment of
torchrun. `train run` calls `run_rank` in its own process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from train.engine import fault
from train.engine.stop import StopRequest
from train.errors import FAILED, FINISHED, REFUSED, STOPPED, Refused, TrainingFailed, one_line
from train.runs import cause, heartbeat, memory, store
from train.runs.heartbeat import Heart
from train.runs.store import Run

if TYPE_CHECKING:
    from train.engine.loop import Done, Job

log = logging.getLogger("train")

_PATIENCE = 5.0
"""Seconds in which rank 0 will have recorded a failure that all ranks have met."""


@dataclasses.dataclass(frozen=True)
class Seat:
    """Which rank this process is, and where it meets the others."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    init: Any = "env://"
    """An init_method of torch.distributed, or a store."""


def seat_of_environment() -> Seat:
    """The seat that torchrun gave this process; rank 0 of 1 without it.

    Raises:
        Refused: the variables are not numbers.
    """
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return Seat(rank, size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    except ValueError as error:
        raise Refused(f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers: {one_line(error)}") from None


def run_rank(run: Run, seat: Seat, attempt: int, stop: StopRequest, bar: bool) -> int:
    """Train one rank of a run to its end. Returns its exit code; rank 0 records the outcome in run.json.

    An exception that is not the run's own fault for certain is left to the caller: see `failure_of`.
    """
    fault.arm(os.environ.get("TRAIN_FAULT"), seat.rank)
    heart = Heart(run.logs(attempt) / f"rank{seat.rank}.beat")
    with contextlib.ExitStack() as held:
        try:
            job, done = _set_up(run, seat, attempt, stop, bar, heart, held)
            from train.engine.loop import train

            outcome = train(job, done)
            return _conclude(job, outcome)
        except (Refused, TrainingFailed) as error:
            heart.beat(heartbeat.ENDING, heart.step)
            refused = isinstance(error, Refused)
            if seat.rank == 0:
                run.note(state=store.FAILED, reason=str(error), ended=store.now())
            else:
                leave_failure(run, seat, attempt, error)
            if seat.rank == 0 or not _is_recorded(run):
                with contextlib.suppress(OSError):  # the terminal may be gone
                    print(f"train: {error}", file=sys.stderr, flush=True)
            return REFUSED if refused else FAILED


def _set_up(
    run: Run, seat: Seat, attempt: int, stop: StopRequest, bar: bool, heart: Heart, held: contextlib.ExitStack
) -> tuple[Job, int]:
    """Everything to train with, and the step to continue after. What must be closed at the end goes to `held`."""
    import torch

    from train.data.loader import Loader
    from train.engine import build, checkpoint, parallel, prepare, report, uneven
    from train.engine.loop import Job
    from train.engine.precision import Precision
    from train.engine.skipped import Skipped
    from train.runs import best

    task = prepare.task_of(run)
    config = prepare.config_of(run, task)
    assert config.cpu_threads is not None
    torch.set_num_threads(config.cpu_threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
    device = parallel.take_device(config, seat.local_size, seat.local_rank)
    precision = Precision(config.precision, device)

    train_set, eval_set = build.make_datasets(task, config)
    plan = build.plan_of(config, len(train_set))
    # before the others are met: their connections have threads, and the loader forks
    skipped = Skipped(run) if config.data.on_error == "skip" else None
    loader = Loader(train_set, eval_set, task.collate, config.data.workers, device, precision.inputs, skipped)
    held.callback(loader.close)
    world = parallel.join(config, seat.rank, seat.size, seat.local_rank, seat.local_size, device, seat.init)
    total = build.total_steps(config, plan)
    model = build.make_model(task, config, precision.weights)
    if (run.folder / "init.safetensors").exists():
        build.set_weights(model, build.read_weights(run.folder / "init.safetensors"), "init.safetensors")
    if config.sync_batchnorm and world.size > 1:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(world.device)
    optimizer = build.make_optimizer(task, model, config)
    rates = [group["lr"] for group in optimizer.param_groups]

    fault.here("start")
    step, manifest = world.on_first(lambda: _begin(run))
    if manifest:
        checkpoint.load(run.checkpoint(step), model, optimizer)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # the schedule starts from the configured rates, not from the saved one
        if precision.scaler is not None and manifest.get("scaler"):
            precision.scaler.load_state_dict(manifest["scaler"])
    fault.here("loaded")
    if config.compile:
        model.compile()
    replica = parallel.Replica(model, world, config, precision)
    evaluation = world.on_first(lambda: best.last_evaluation(run))
    told = report.Report(run, world, config, total, step, bar and world.is_first)
    held.callback(told.close)

    def saved(at: int) -> None:
        told.say(f"saved {run.checkpoint(at).name}")
        run.note(saved_step=at)

    job = Job(
        run, task, config, world, precision, replica, optimizer, loader,
        plan, None if eval_set is None else build.evaluation_plan(config, len(eval_set)), total,
        checkpoint.Saver(run, world, config, attempt, saved),
        told, stop, heart,
        evaluation["step"] if evaluation else -1,
    )  # fmt: skip
    if world.is_first:
        run.note(
            lambda record: record["attempts"][-1].update(from_step=step, ready=store.now()),
            step=step, epoch=plan.epoch(step - 1) + 1 if step else 0, total_steps=total, samples=plan.length,
            steps_per_epoch=plan.steps_per_epoch, device=str(world.device.type), data_wait="",
            without_data=uneven.survey(plan, job.evaluation, world.size),
        )  # fmt: skip
        per_rank = f"{config.batch_size} = up to {plan.micro_batches(0)} x {config.micro_batch_size}"
        job.report.say(
            f"{run.name}: {plan.length} samples, {total} steps, global batch {per_rank}, "
            f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}, {config.precision}"
            + (f", continuing after step {step}" if step else "")
        )
        reason = run.read().get("cpu_threads_reason")
        if attempt == 1 and reason:
            job.report.say(f"{config.cpu_threads} CPU thread{'s' if config.cpu_threads > 1 else ''} a rank ({reason})")
        if uneven.survey(plan, job.evaluation, world.size):
            job.report.say(uneven.sentence(plan, job.evaluation, world.size))
    return job, step


def _begin(run: Run) -> tuple[int, dict[str, Any]]:
    """On rank 0: clear away what a kill left, choose the checkpoint to continue from, cut the records to it."""
    from train.engine import manifest as manifests
    from train.engine.report import cut

    manifests.clean(run)
    found = manifests.newest_valid(run)
    step, manifest, unused = found or (0, {}, [])
    for newer, line in zip(run.steps_saved(), unused, strict=False):  # the newest ones, in the same order
        log.warning("warning: %s", line)
        manifests.set_aside(run, newer, line.prefix)
    cut(run, step)
    return step, manifest


def _conclude(job: Job, outcome: Done) -> int:
    """Record how training ended. On rank 0; the other ranks have nothing to say.

    Raises:
        TrainingFailed: it cannot be recorded; a resume will find the last checkpoint and do so.
    """
    from train.engine import checkpoint
    from train.runs.best import facts, last_evaluation

    job.report.sync()
    job.heart.beat(heartbeat.ENDING, outcome.step)
    if not job.world.is_first:
        return STOPPED if outcome.stopped else FINISHED
    epoch = job.plan.epoch(outcome.step - 1) + 1 if outcome.step else 0
    record: dict[str, Any] = {"step": outcome.step, "epoch": epoch, "ended": store.now(), **facts(job.run)}
    if outcome.stopped:
        reason = job.stop.reason or "another rank was asked to"
        _record_end(job, state=store.STOPPED, reason=f"stopped after step {outcome.step} ({reason})", **record)
        job.report.say(
            f"stopped after step {outcome.step} of {job.total_steps}; continue with: train resume {job.run.name}"
        )
        return STOPPED
    evaluation = last_evaluation(job.run)
    figures = dict(evaluation["eval"]) if evaluation else {}
    fault.here("finish")
    digest = checkpoint.weights_sha256(checkpoint.weights(job.replica.module))
    _record_end(job, state=store.FINISHED, reason="", weights_sha256=digest, metrics=figures, **record)
    fault.here("finished")
    job.report.say(f"finished after {outcome.step} steps; weights {digest[:16]}…")
    return FINISHED


def _record_end(job: Job, **values: Any) -> None:
    try:
        job.run.update(**values)
    except (OSError, Refused) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TrainingFailed(
            f"the last checkpoint is saved, but that the run is {values['state']} cannot be recorded ({reason}); "
            f"continue with: train resume {job.run.name}"
        ) from error


def failure_of(error: BaseException, task_file: Path | None) -> dict[str, Any]:
    """What a rank leaves behind about the exception it dies of.

    `recurs` says whether it would fail again in the same way: randomness is a function here, so an exception of the
    task does, while one of the network, the machine or another rank's death may not.
    """
    import torch
    import torch.distributed as dist

    from train.tasks import where

    if isinstance(error, (Refused, TrainingFailed)):
        return {"time": time.time(), "reason": str(error)[:600], "recurs": True, "traceback": traceback.format_exc()}
    text = one_line(f"{type(error).__name__}: {error}")
    of_sample = getattr(error, "sample", "")
    passing = isinstance(error, (dist.DistError, OSError, EOFError))
    if of_sample:  # and of nothing that may pass: see data/fetch.py
        passing = False
        text = f"{of_sample}: {text}"
    elif isinstance(error, torch.OutOfMemoryError):
        passing = not memory.device_is_too_small(text)
    elif isinstance(error, RuntimeError) and "Original Traceback" not in text:  # that is a data set's own, in a worker
        passing |= cause.is_of_others(text)
    passing |= isinstance(error, RuntimeError) and not of_sample and cause.is_busy(text)
    line = where(error, task_file) if task_file is not None else text
    if isinstance(error, (MemoryError, OSError, RuntimeError)) and memory.is_refused(text):
        line, passing = f"out of memory ({line[:300]}): {memory.refused_at()}; {memory.ADVICE}", False
    return {"time": time.time(), "reason": line[:600], "recurs": not passing, "traceback": traceback.format_exc()}


def log_to(stream: Any) -> None:
    """Plain lines for people; warnings of libraries pass through."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def main() -> None:
    """One rank of a launched run. Exits 0 for every end that a restart would not change (see run.json for it)."""
    stop = StopRequest()
    run = Run(Path(sys.argv[1]))
    attempt = int(os.environ.get("TRAIN_ATTEMPT", "1"))
    log_to(sys.stderr)
    seat = seat_of_environment()
    # what the agent asks for when nothing moves; works also while this process waits inside a C function
    stacks = (run.logs(attempt) / f"rank{seat.rank}.stack.txt").open("a")
    faulthandler.register(signal.SIGQUIT, file=stacks, all_threads=True)
    code = 1
    try:
        code = exit_code(run, seat, run_rank(run, seat, attempt, stop, bar=False))
    except BaseException as error:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        leave_failure(run, seat, attempt, error)
    finally:
        leave(code)


def exit_code(run: Run, seat: Seat, end: int) -> int:
    """What a rank under an agent exits with: 0 for every end that is recorded and that a restart would not change.

    Not 0 either where the others do not notice the end: they have not met this rank yet, and wait for it.
    """
    if end not in (FAILED, REFUSED) or seat.size == 1:
        return 0
    import torch.distributed as dist

    return 1 if not dist.is_initialized() or (seat.rank and _is_running(run)) else 0


def _is_recorded(run: Run) -> bool:
    """Most failures meet all ranks at the same step, and rank 0 records them; of one rank's alone it knows nothing."""
    deadline = time.monotonic() + _PATIENCE
    while _is_running(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_running(run: Run) -> bool:
    try:
        return bool(run.read()["state"] == store.RUNNING)
    except Refused:  # its folder is gone: rank 0 has met that too
        return False


def leave_failure(run: Run, seat: Seat, attempt: int, error: BaseException) -> dict[str, Any]:
    """Write down, beside the log of this rank, what it dies of, where the disk takes it."""
    file = run.folder / "task.py"
    failure = failure_of(error, file if file.exists() else None) | {"rank": seat.rank}
    path = run.logs(attempt) / f"rank{seat.rank}.error.json"
    with contextlib.suppress(OSError):
        store.write_atomically(path, json.dumps(failure) + "\n", durable=False)
    return failure


def leave(code: int) -> NoReturn:
    """End this process at once.

    Not sys.exit: a process group whose peers are gone can hang in its destructor, and loader workers ignore the
    SIGTERM of Python's own clean-up. They die with us.
    """
    with contextlib.suppress(OSError, ValueError):  # a log on a disk that fails
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
