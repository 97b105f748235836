"""`micro_batch_size auto`: tries steps with the full micro batch, and halves its size until they fit in memory.

Each size is tried in new processes, one per rank. They load the task, spread the model as the run will, make two steps
and exit. The second step holds the optimizer's state beside the gradients. On a GPU 1/20 of the free memory is left
unused. The size found is written into the run's configuration.

    python -P …/train/module_runner.py train.launcher.batch_size REQUEST RANK
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Any

from .. import causes, module_runner
from ..errors import Refused, one_line
from ..signals import end_with_parent, leave
from ..supervise import memory

if TYPE_CHECKING:
    from ..config import Config
    from .request import Request

_FULL = 4
"""Exit code of a rank that ran out of memory."""
_LIMIT = 900.0
"""Seconds the two steps of one size may take."""
_OTHERS = 5.0
"""Seconds the other ranks get to end after one has failed: the cause may be in another rank."""
_SPARE = 0.05
"""Share of a GPU's free memory that a try leaves unused."""
_SLOTS = 2
"""Micro batches per rank and step: the second one adds to existing gradients."""


def find(request: Request, config: Config, ranks: int) -> tuple[int, str]:
    """Return the configured micro batch size, halved until it fits in memory on all ranks of this machine, and why.

    Raises:
        Refused: no size fits, or a step fails for another reason.
    """
    from .. import config as configuration

    flat = configuration.to_flat(config)
    if config.parallel.shard_size is not None:  # only the ranks of this machine take part
        flat["parallel.shard_size"] = math.gcd(config.parallel.shard_size, ranks)
    attempt = {"task": request.task, "copy": request.copy, "ranks": ranks}
    size, reason = flat["micro_batch_size"], "batch_size / ranks fits"
    while why := _try(attempt | {"config": flat | {"micro_batch_size": size}}):
        if size == 1:
            raise Refused(
                f"--micro_batch_size auto: not even 1 sample fits in memory ({why}); try --parallel.recompute auto, "
                "a smaller model, or (on several ranks) --parallel.strategy fsdp"
            )
        reason, size = f"halved until it fits; {size} did not: {why}", size // 2
    return size, reason


def _try(request: dict[str, Any]) -> str:
    """Make two steps on all ranks. Returns '' if they fit in memory, else why not.

    Raises:
        Refused: a step fails for another reason.
    """
    with tempfile.TemporaryDirectory(prefix="train-batch-size-") as name:
        folder = Path(name)
        file = folder / "request.json"
        file.write_text(json.dumps(request | {"parent": os.getpid(), "store": str(folder / "store")}))
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(request["ranks"]):
                command = module_runner.command("train.launcher.batch_size", str(file), str(number))
                with (folder / f"rank{number}").open("wb") as log:  # no pipe: the task's processes would hold it open
                    ranks.append(
                        subprocess.Popen(command, stdin=DEVNULL, stdout=DEVNULL, stderr=log, start_new_session=True)
                    )
            deadline = time.monotonic() + _LIMIT
            while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < deadline:
                if any(codes):
                    deadline = min(deadline, time.monotonic() + _OTHERS)
                time.sleep(0.05)
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)  # with every process that the task has started
                rank.wait()
        texts = [(folder / f"rank{number}").read_text(errors="replace") for number in range(len(codes))]
    messages = [one_line((text.strip().splitlines() or [""])[-1])[:300] for text in texts]
    for code, message in zip(codes, messages, strict=True):
        if code == -signal.SIGKILL:
            return f"a rank was killed; the memory limit is {memory.refused_at()}"
        if code == _FULL or (code and causes.MEMORY.matches(message)):
            return message
    for code, message in zip(codes, messages, strict=True):
        if code != 0:
            how = "took more than 15 minutes" if code is None else f"failed: {message or f'exit code {code}'}"
            size = request["config"]["micro_batch_size"]
            raise Refused(f"--micro_batch_size auto: a step with micro batches of {size} {how}; give a number")
    return ""


def main() -> None:
    """Run one rank. If it fails, its last line says why."""
    request, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    end_with_parent(request["parent"])
    memory.lower_than_agent()
    import torch

    from .. import config as configuration
    from ..tasks import where
    from .request import load_task

    task = load_task(request["task"], request["copy"])  # loads without error: the calling process has loaded it
    code, message = 0, ""
    try:
        _steps(task, configuration.build(request["config"], task.Settings), rank, request["ranks"], request["store"])
    except Exception as error:
        code, message = 1, where(error, task.file)
        text = one_line(f"{type(error).__name__}: {error}")
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or causes.MEMORY.matches(text) or is_full(text):
            code, message = _FULL, text
    print(message, file=sys.stderr)
    leave(code)  # other ranks may be gone, and an orderly exit would wait for them


def is_full(text: str) -> bool:
    """Whether a library's message means that a GPU is full.

    NCCL, cuBLAS and Triton have messages that differ from torch's. For cuDNN torch tries one engine after the other,
    skips those whose workspace it cannot allocate, and reports that no engine was found (Conv_v8.cpp).
    """
    return causes.GPU_MEMORY.matches(text) or causes.NO_ENGINE.matches(text)


def _steps(task: Any, config: Any, rank: int, ranks: int, store: str) -> None:
    """Make two steps on the first samples, as the run will make them."""
    import torch

    from ..build import determinism, objects
    from ..build.freeze import set_training
    from ..build.hooks import Hooks
    from ..build.updates import spread_updates
    from ..parallel.devices import pick_device, take_device
    from ..parallel.precision import Precision
    from ..parallel.rank_env import RankEnv
    from ..parallel.world import join
    from ..trainer import setup

    config.cpu_threads = config.cpu_threads or 1
    determinism.set_determinism(config)
    device = pick_device(config, ranks, rank)
    train_set, _ = objects.make_datasets(task, config)
    take_device(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction((1 - _SPARE) * free / total, device)
    precision = Precision(config.precision, device)
    batch = objects.first_samples(task, config, precision=precision, dataset=train_set)
    world = join(
        config, RankEnv(rank=rank, size=ranks, local_rank=rank, local_size=ranks, init=f"file://{store}"), device
    )
    model = setup.arrange(objects.make_model(task, config, precision.weights), config, ranks=ranks, compiles=False)
    updates, _ = spread_updates(task, model, config=config, world=world, precision=precision)
    _hooks = Hooks(task, updates[0].strategy, config)  # an average of the weights takes memory too
    set_training(updates[0].strategy.module, config.freeze)
    for update in updates:
        update.activate()
        update.strategy.start()
    size = config.micro_batch_size
    slots = min(_SLOTS, math.ceil(math.ceil(config.batch_size / size) / ranks))
    for update in 2 * updates:
        update.make_alone(batch, size, slots)


if __name__ == "__main__":
    main()
