"""Checks of several ranks together: all present, same versions, clocks agree, an all-reduce is right and how fast.

This is the only part of the doctor that imports torch. Ranks first talk through a store. Each answer has a deadline, so
that a missing or failing rank is named. Only then do they form a process group as in training.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .. import causes, format, module_runner, variables
from ..errors import one_line
from ..gpus import number_by_bus
from ..nodes.node_checks import code_digest
from ..parallel.devices import prepare_nccl
from ..parallel.rank_env import is_under_torchrun, meeting_port, read_rank_env
from ..supervise.memory import refused_at
from . import finding, peers
from .finding import Finding, ok, problem, warning

DEADLINE = 30.0
"""Seconds a rank may take to start, to answer and to reduce. Default of --timeout."""
_SIZES = (4, 1 << 20, 1 << 26)
"""Sizes of the tensors that are reduced, in bytes."""
_SKEW = 1.0
"""Seconds between the clocks of two machines above which a problem is reported."""
_SAME = ("torch", "nccl", "python", "code")
"""Versions that must be equal on all ranks. `code` is the digest of train/."""
Facts = dict[int, dict[str, Any]]
"""Maps a rank to its report about itself."""


@dataclasses.dataclass(frozen=True)
class JobRank:
    """A rank and its place among the others, from torchrun's environment."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    agent_serves: bool
    """Whether torchrun serves the store, so that rank 0 need not."""
    deadline: float
    """Seconds each rank may take to start, to answer and to reduce."""


def examine_job(json_: bool, ranks: int | None, deadline: float) -> int:
    """Check the job of which this process is a rank; outside a job, start so many ranks on this machine.

    Rank 0 prints. Return the exit code: 1 on rank 0 if there is a problem.
    """
    environ = os.environ
    variables.check_torch(environ)
    if is_under_torchrun():
        own = read_rank_env()
        job = JobRank(
            rank=own.rank, size=own.size, local_rank=own.local_rank,
            address=environ.get("MASTER_ADDR", "127.0.0.1"), port=meeting_port("29500"),
            agent_serves=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", deadline=deadline,
        )  # fmt: skip
        return _rank(job, json_)
    size = ranks or torch.cuda.device_count() or 2
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = module_runner.command("train", "doctor", "--job", "--timeout", f"{deadline:.0f}")
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command += ["--json"] if json_ else []
    processes = [
        subprocess.Popen(command, env={**environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    codes = [process.wait() for process in processes]
    return codes[0]


def _rank(job: JobRank, json_: bool) -> int:
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a hanging reduction must end by its deadline
    number_by_bus()
    limit = datetime.timedelta(seconds=job.deadline)
    try:
        server = dist.TCPStore(
            job.address, job.port, is_master=job.rank == 0 and not job.agent_serves, wait_for_workers=False,
            timeout=limit, multi_tenant=True,
        )  # fmt: skip
    except (dist.DistError, RuntimeError, OSError) as error:
        if job.rank == 0 or not job.agent_serves:
            where = f"{job.address}:{job.port}"
            line = f"rank {job.rank} on {socket.gethostname()} cannot reach {where}: {one_line(error)[:200]}"
            finding.show([problem("ranks", line, f"train doctor --rendezvous {where}")], json_)
        return finding.EXIT_PROBLEM
    store = dist.PrefixStore("train-doctor", server)
    store.set_timeout(limit)
    store.set(f"facts/{job.rank}", json.dumps(_facts(job)))
    if job.rank:
        return _answer(job, store)
    findings = list(_ask(job, store))
    finding.show(findings, json_)
    store.set("over", "1")
    if job.size > 1 and not job.agent_serves:
        time.sleep(0.5)  # the store ends with this process; let the others read that the check is over
    return finding.exit_code(findings)


def _facts(job: JobRank) -> dict[str, Any]:
    """Return this rank's report about itself."""
    has_gpu = torch.cuda.device_count() > job.local_rank
    return {
        "host": socket.gethostname(),
        "gpu": torch.cuda.get_device_name(job.local_rank) if has_gpu else "",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "code": code_digest(),
        "gloo": _of_gloo(),
    }


def _of_gloo() -> tuple[str, str] | None:
    """Return the problem with gloo's interface here and what to type; None if there is none."""
    text = os.environ.get(variables.GLOO, "")
    unusable = variables.gloo_problem(text)
    return (f"is {text}; {unusable}", variables.remedy(variables.GLOO)) if unusable else None


def _answer(job: JobRank, store: dist.Store) -> int:
    """Run the checks as a rank other than 0."""
    with contextlib.suppress(dist.DistError, RuntimeError):
        backend = store.get("go").decode()
        store.set(f"clock/{job.rank}", repr(time.time()))
        if backend:
            store.set(f"sums/{job.rank}", json.dumps(_reduce(job, store, backend)))
        store.get("over")
    return finding.EXIT_WELL


def _ask(job: JobRank, store: dist.Store) -> Iterator[Finding]:
    """Run the checks as rank 0. Yield all findings in order."""
    facts, missing = _collect(job, store, "facts", json.loads)
    if missing:
        names = ", ".join(map(str, missing))
        seen = f"{len(facts)} of {job.size} ranks answered within {job.deadline:.0f} s; missing: rank {names}"
        store.set("go", "")
        yield problem("ranks", seen, f"train doctor --rendezvous {job.address}:{job.port}  # on their machines")
        return
    hosts = sorted({fact["host"] for fact in facts.values()})
    yield ok("ranks", f"{job.size} on {len(hosts)} machine{'s' if len(hosts) > 1 else ''}: {', '.join(hosts)}")
    yield from _same(facts)
    for host, wrong in {fact["host"]: fact["gloo"] for fact in facts.values() if fact["gloo"]}.items():
        yield problem(variables.GLOO, f"on {host} {wrong[0]}", wrong[1])
    backend = "nccl" if all(fact["gpu"] for fact in facts.values()) else "gloo"
    store.set("go", backend)
    yield _clocks(job, store, facts)
    yield from _sums(job, store, facts, backend)


def _collect(
    job: JobRank, store: dist.Store, what: str, read: Callable[[bytes], Any]
) -> tuple[dict[int, Any], list[int]]:
    """Return the answers that arrive within the common deadline, and the ranks that did not answer."""
    until, found, missing = time.monotonic() + job.deadline, {}, []
    for rank in range(job.size):
        key = f"{what}/{rank}"
        left = max(until - time.monotonic(), 0.01)  # a missing rank must not hide those that answered
        try:
            store.wait([key], datetime.timedelta(seconds=left))
            found[rank] = read(store.get(key))
        except (dist.DistError, RuntimeError):
            missing.append(rank)
    return found, missing


def _same(facts: Facts) -> Iterator[Finding]:
    """Yield findings for versions that differ, with the ranks that have them."""
    different = [key for key in _SAME if len({fact[key] for fact in facts.values()}) > 1]
    for key in different:
        usual = collections.Counter(fact[key] for fact in facts.values()).most_common(1)[0][0]
        odd = [f"rank {rank} ({fact['host']}): {fact[key]}" for rank, fact in facts.items() if fact[key] != usual]
        remedy = "git pull && make setup  # on each" if key == "code" else "make clean setup  # on each"
        yield problem(f"same {key}", f"{'; '.join(odd)}; the others: {usual}", remedy)
    gpus = sorted({fact["gpu"] or "none" for fact in facts.values()})
    if len(gpus) > 1:
        yield warning("same GPUs", f"the slowest GPU sets the pace: {', '.join(gpus)}", "train launch … --gpus IDS")
    if not different:
        yield ok("same everywhere", ", ".join(f"{key} {facts[0][key]}" for key in _SAME))


def _clocks(job: JobRank, store: dist.Store, facts: Facts) -> Finding:
    """Check the clocks. Each rank reads its clock between `go` and its answer; a time outside this interval is off."""
    mine = time.time()
    store.set("clock/0", repr(mine))

    def skew(answer: bytes) -> float:
        clock = float(answer)
        return clock - min(max(clock, mine), time.time())

    skews, missing = _collect(job, store, "clock", skew)
    worst = max(skews, key=lambda rank: abs(skews[rank]))
    if missing:
        seen = f"rank {missing[0]} ({facts[missing[0]]['host']}) does not answer"
        return problem("clocks", seen, "train doctor --job")
    if abs(skews[worst]) > _SKEW:
        seen = f"{facts[worst]['host']} (rank {worst}) is {skews[worst]:+.1f} s from {facts[0]['host']}"
        return problem("clocks", seen, "sudo timedatectl set-ntp true  # on both")
    return ok("clocks", f"within {abs(skews[worst]):.2f} s")


def _sums(job: JobRank, store: dist.Store, facts: Facts, backend: str) -> Iterator[Finding]:
    """Check a real all-reduce over all ranks."""
    mine = _reduce(job, store, backend)
    store.set("sums/0", json.dumps(mine))
    answers, missing = _collect(job, store, "sums", json.loads)
    bad = {rank: each["error"] for rank, each in answers.items() if each["error"]}
    bad.update(dict.fromkeys(missing, "did not answer"))
    if bad:
        who = "; ".join(f"rank {rank} ({facts[rank]['host']}): {error}" for rank, error in sorted(bad.items()))
        remedy = f"train doctor --rendezvous {job.address}:{job.port}  # on each; NCCL_DEBUG=INFO shows more"
        if (
            backend == "nccl"
            and len({fact["host"] for fact in facts.values()}) == 1
            and peers.DISABLE not in os.environ
        ):
            remedy = (
                f"{peers.DISABLE}=1 train doctor --job  # if this passes: train doctor --only 'peer access,IOMMU,ACS'"
            )
        yield problem("all-reduce", f"over {backend}: {who}", remedy)
        return
    for size, seconds in mine["seconds"].items():
        count = int(size)
        rate = count * 2 * (job.size - 1) / job.size / seconds if job.size > 1 else count / seconds
        seen = f"the right sum, {1000 * seconds:.2f} ms, {rate / 1e9:.2f} GB/s over {backend}"
        yield ok(f"all-reduce of {format.size(count)}", seen)


def _reduce(job: JobRank, store: dist.Store, backend: str) -> dict[str, Any]:
    """Sum numbers over all ranks and check the sums. Return the error ('' for none) and the seconds per size."""
    seconds: dict[str, float] = {}
    said = ""
    try:
        device = torch.device("cpu")
        if job.address == "127.0.0.1":  # as for a run
            variables.keep_gloo_at_home(os.environ)
        if backend == "nccl":
            prepare_nccl(deterministic=True)  # as in a run, which could otherwise be slower, or work where this fails
            torch.cuda.set_device(job.local_rank)
            device = torch.device("cuda", job.local_rank)
        limit = datetime.timedelta(seconds=job.deadline)
        group = dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=group, rank=job.rank, world_size=job.size, timeout=limit)
        right = job.size * (job.size + 1) / 2
        for size in _SIZES:
            for _ in range(3):  # the first one includes connecting
                numbers = torch.full((size // 4,), float(job.rank + 1), device=device)
                began = time.perf_counter()
                dist.all_reduce(numbers)
                if backend == "nccl":
                    torch.cuda.synchronize()
                seconds[str(size)] = time.perf_counter() - began
                if not bool((numbers == right).all()):
                    raise ArithmeticError(f"{numbers[numbers != right][0].item()} instead of {right}")
        dist.destroy_process_group()
    except Exception as error:  # any error is a finding
        text = one_line(f"{type(error).__name__}: {error}")
        cause = causes.certain(text)
        said = cause.told(text, limit=refused_at()) if cause is not None else text[:160]
    return {"error": said, "seconds": seconds}
