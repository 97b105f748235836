"""What only several ranks together can tell: are all there, do they run the same, do their clocks agree, does a
reduction over all give the right sum, and how fast.

The only part of the doctor that imports torch. Ranks speak by a store first, whose every answer has a deadline, so that
one that is missing or fails is named; only then do they meet as training does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.cluster.address import interface_of, source_towards
from train.cluster.same import code_digest
from train.doctor import finding
from train.doctor.examine import examine
from train.doctor.finding import Finding, ok, problem, warning
from train.doctor.machine import Machine
from train.errors import one_line
from train.parallel import nccl, numbered

DEADLINE = 30.0
"""Seconds in which a rank has to come, to answer, and to reduce, unless the user gives others."""
_SIZES = (4, 1 << 20, 1 << 26)
"""Bytes that are reduced."""
_SKEW = 1.0
"""Seconds between two hosts' clocks that are told."""
_SAME = {
    "torch": "versions of torch",
    "nccl": "versions of NCCL",
    "python": "versions of Python",
    "code": "copies of train/",
}
"""What must be the same everywhere, and how it is called where it is not."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A rank among the others, as torchrun's environment has it."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    agent_serves: bool
    """Whether the store is torchrun's, so that rank 0 need not serve it."""
    deadline: float
    """Seconds in which each has to come, to answer, and to reduce."""


def place_of_environment(deadline: float) -> Place | None:
    """None outside of a distributed job."""
    environ = os.environ
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return Place(
        int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_RANK", "0")),
        environ.get("MASTER_ADDR", "127.0.0.1"), int(environ.get("MASTER_PORT", "29500")),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", deadline,
    )  # fmt: skip


def examine_job(runs: Path, json_: bool, ranks: int | None, deadline: float) -> int:
    """Check the job that this process is a rank of; outside of one, a job of so many ranks on this machine.

    Rank 0 prints. Returns the exit code: 1 on rank 0 if there is a problem.
    """
    place = place_of_environment(deadline)
    if place is not None:
        return _rank(place, runs, json_)
    import torch.multiprocessing

    size = ranks or torch.cuda.device_count() or 2
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=_spawned, args=(Place(rank, size, rank, "127.0.0.1", port, False, deadline), str(runs), json_)
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int(processes[0].exitcode or 0)


def _spawned(place: Place, runs: str, json_: bool) -> None:
    code = _rank(place, Path(runs), json_)
    sys.stdout.flush()
    os._exit(code)  # a process group whose peer is gone can hang in its destructor


def _rank(place: Place, runs: Path, json_: bool) -> int:
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # so that a reduction that hangs ends by its deadline
    numbered.as_nvidia_smi_does()
    try:
        store = _meet(place)
    except (dist.DistError, RuntimeError, OSError) as error:
        if place.rank == 0 or not place.agent_serves:
            where = f"{place.address}:{place.port}"
            line = f"rank {place.rank} on {socket.gethostname()} cannot reach {where}: {one_line(error)[:200]}"
            finding.show([problem("ranks", line, f"train doctor --rendezvous {where}")], json_)
        return finding.EXIT_PROBLEM
    board = dist.PrefixStore("train-doctor", store)
    board.set_timeout(datetime.timedelta(seconds=place.deadline))
    board.set(f"facts/{place.rank}", json.dumps(_facts(place, runs)))
    if place.rank:
        return _answer(place, board)
    findings = list(_ask(place, board))
    finding.show(findings, json_)
    board.set("over", "1")
    if place.size > 1 and not place.agent_serves:
        time.sleep(0.5)  # the store goes with this process, and the others read that it is over
    return finding.exit_code(findings)


def _meet(place: Place) -> dist.TCPStore:
    """The store that all ranks write to; waits for nobody but its server."""
    return dist.TCPStore(
        place.address, place.port, is_master=place.rank == 0 and not place.agent_serves, wait_for_workers=False,
        timeout=datetime.timedelta(seconds=place.deadline), multi_tenant=True,
    )  # fmt: skip


def _facts(place: Place, runs: Path) -> dict[str, Any]:
    """What a rank tells of itself."""
    has_gpu = torch.cuda.device_count() > place.local_rank
    library = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    own = examine(Machine(), runs) if place.local_rank == 0 else []
    return {
        "host": socket.gethostname(),
        "gpu": torch.cuda.get_device_name(place.local_rank) if has_gpu else "",
        "torch": torch.__version__,
        "nccl": library,
        "python": platform.python_version(),
        "code": code_digest(),
        "findings": [dataclasses.asdict(each) for each in own if each.remedy],
        "checks": len(own),
    }


def _answer(place: Place, board: dist.Store) -> int:
    """What ranks other than the first do."""
    with contextlib.suppress(dist.DistError, RuntimeError):
        board.get("go")
        board.set(f"clock/{place.rank}", repr(time.time()))
        backend = board.get("backend").decode()
        if backend:
            board.set(f"sums/{place.rank}", json.dumps(_reduce(place, board, backend)))
        board.get("over")
    return finding.EXIT_WELL


def _ask(place: Place, board: dist.Store) -> Any:
    """What rank 0 does: all findings, in order."""
    facts, missing = _collect(place, board, "facts", json.loads)
    if missing:
        names = ", ".join(map(str, missing))
        seen = f"{len(facts)} of {place.size} have come in {place.deadline:.0f} s; missing: rank {names}"
        board.set("go", "1")
        board.set("backend", "")
        yield problem("ranks", seen, f"train doctor --rendezvous {place.address}:{place.port}  # on their machines")
        return
    hosts = sorted({fact["host"] for fact in facts.values()})
    yield ok("ranks", f"{place.size} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}: {', '.join(hosts)}")
    yield from _of_hosts(facts)
    yield from _same(facts)
    yield _clocks(place, board, facts)
    yield from _sums(place, board, facts)


def _collect(
    place: Place, board: dist.Store, what: str, read: Callable[[bytes], Any]
) -> tuple[dict[int, Any], list[int]]:
    """What each rank answers within the deadline for all of them, and who does not.

    Past the deadline each that is left is still looked for: time that one who does not come has taken is not theirs.
    """
    until, found, missing = time.monotonic() + place.deadline, {}, []
    for rank in range(place.size):
        key, left = f"{what}/{rank}", until - time.monotonic()
        try:
            if left > 0.01:  # to the store a time that rounds to no millisecond is no limit
                board.wait([key], datetime.timedelta(seconds=left))
            elif not board.check([key]):  # type: ignore[attr-defined]  # torch's stub lacks it
                raise dist.DistStoreError
            found[rank] = read(board.get(key))
        except (dist.DistError, RuntimeError):
            missing.append(rank)
    return found, missing


def _of_hosts(facts: dict[int, Any]) -> Any:
    """What each host's own checks have found."""
    for fact in facts.values():
        for each in fact["findings"]:
            yield Finding(f"{each['check']} on {fact['host']}", each["verdict"], each["seen"], each["remedy"])
    checked = {fact["host"]: fact["checks"] for fact in facts.values() if fact["checks"]}
    well = [host for host in checked if not any(fact["findings"] for fact in facts.values() if fact["host"] == host)]
    if well:
        yield ok("hosts", f"all is well on {', '.join(sorted(well))}")


def _same(facts: dict[int, Any]) -> Any:
    for key, what in _SAME.items():
        kinds: dict[str, list[int]] = {}
        for rank, fact in facts.items():
            kinds.setdefault(fact[key], []).append(rank)
        if len(kinds) > 1:
            most = max(kinds, key=lambda kind: len(kinds[kind]))
            odd = "; ".join(f"{_where(facts, ranks)}: {kind}" for kind, ranks in kinds.items() if kind != most)
            remedy = "git pull && make setup  # on each" if key == "code" else "make clean setup  # on each"
            yield problem(f"same {key}", f"different {what}: {odd}; the others: {most}", remedy)
    gpus = sorted({fact["gpu"] for fact in facts.values()})
    if len(gpus) > 1:
        yield warning(
            "same GPUs", f"the slowest decides: {', '.join(gpu or 'none' for gpu in gpus)}", "train launch … --gpus IDS"
        )
    if all(len({fact[key] for fact in facts.values()}) == 1 for key in _SAME):
        first = facts[0]
        yield ok(
            "same everywhere",
            f"torch {first['torch']}, Python {first['python']}, NCCL {first['nccl']}, code {first['code']}",
        )


def _where(facts: dict[int, Any], ranks: list[int]) -> str:
    hosts = sorted({facts[rank]["host"] for rank in ranks})
    return f"rank {', '.join(map(str, ranks))} ({', '.join(hosts)})"


def _clocks(place: Place, board: dist.Store, facts: dict[int, Any]) -> Finding:
    """Every rank reads its clock when it sees `go`, so before its answer is here: no clock is off that lies between."""
    board.set("go", "1")
    mine = time.time()

    board.set("clock/0", repr(mine))

    def skew(told: bytes) -> float:
        clock = float(told)
        return clock - min(max(clock, mine), time.time())

    skews, missing = _collect(place, board, "clock", skew)
    worst = max(skews, key=lambda rank: abs(skews[rank]))
    if missing:
        return problem(
            "clocks", f"rank {missing[0]} ({facts[missing[0]]['host']}) does not answer", "train doctor --job"
        )
    if abs(skews[worst]) > _SKEW:
        seen = f"{facts[worst]['host']} (rank {worst}) is {skews[worst]:+.1f} s from {facts[0]['host']}"
        return problem("clocks", seen, "sudo timedatectl set-ntp true  # on both")
    return ok("clocks", f"within {max(abs(skew) for skew in skews.values()):.2f} s")


def _sums(place: Place, board: dist.Store, facts: dict[int, Any]) -> Any:
    backend = "nccl" if all(fact["gpu"] for fact in facts.values()) else "gloo"
    board.set("backend", backend)
    mine = _reduce(place, board, backend)
    board.set("sums/0", json.dumps(mine))
    told, missing = _collect(place, board, "sums", json.loads)
    bad = {rank: each["error"] for rank, each in told.items() if each["error"]}
    bad.update(dict.fromkeys(missing, "has not answered"))
    if bad:
        who = "; ".join(f"rank {rank} ({facts[rank]['host']}): {error[:160]}" for rank, error in sorted(bad.items()))
        where = f"{place.address}:{place.port}"
        yield problem(
            "all-reduce",
            f"over {backend}: {who}",
            f"train doctor --rendezvous {where}  # on each; NCCL_DEBUG=INFO tells more",
        )
        return
    expected = _link()
    for size, seconds in mine["seconds"].items():
        count = int(size)
        rate = count * 2 * (place.size - 1) / place.size / seconds if place.size > 1 else count / seconds
        beside = f"; {expected}" if count == _SIZES[-1] and expected else ""
        yield ok(
            f"all-reduce of {_words(count)}",
            f"the right sum, {1000 * seconds:.2f} ms, {rate / 1e9:.2f} GB/s over {backend}{beside}",
        )


def _reduce(place: Place, board: dist.Store, backend: str) -> dict[str, Any]:
    """Sum numbers over all ranks, check the sums. Returns the error, '' for none, and the seconds by size."""
    seconds: dict[str, float] = {}
    try:
        device = torch.device("cpu")
        if backend == "nccl":
            nccl.prepare(deterministic=True)  # as for a run: without, it may fail where that would not, and be faster
            torch.cuda.set_device(place.local_rank)
            device = torch.device("cuda", place.local_rank)
        limit = datetime.timedelta(seconds=place.deadline)
        group = dist.PrefixStore("group", board)
        dist.init_process_group(backend, store=group, rank=place.rank, world_size=place.size, timeout=limit)
        for size in _SIZES:
            for turn in range(3):  # the first one connects
                numbers = torch.full((size // 4,), float(place.rank + 1), device=device)
                began = time.perf_counter()
                dist.all_reduce(numbers)
                if backend == "nccl":
                    torch.cuda.synchronize()
                seconds[str(size)] = time.perf_counter() - began
                right = place.size * (place.size + 1) / 2
                if not bool((numbers == right).all()):
                    wrong = numbers[numbers != right][0].item()
                    return {"error": f"a wrong sum: {wrong} instead of {right} (turn {turn})", "seconds": seconds}
        dist.destroy_process_group()
    except Exception as error:  # whatever it is, it is what was asked for
        return {"error": one_line(f"{type(error).__name__}: {error}"), "seconds": seconds}
    return {"error": "", "seconds": seconds}


def _link() -> str:
    """What the link to the others should give, in words; '' where nothing tells."""
    machine = Machine()
    if torch.cuda.device_count() > 1:
        said = machine.run("nvidia-smi", "topo", "-m")
        kinds = topology(said.out) if said is not None and said.code == 0 else ""
        if kinds:
            return kinds
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with contextlib.suppress(OSError):
        source = source_towards(socket.gethostbyname(address), 1)
        name = interface_of(source, machine.read) if source else ""
        speed = machine.read(f"/sys/class/net/{name}/speed").strip() if name else ""
        if speed.isdigit():
            return f"{name} gives {int(speed) / 8000:.2f} GB/s"
        if name == "lo":
            return "within this machine"
    return ""


def topology(text: str) -> str:
    """How GPUs are linked, from `nvidia-smi topo -m`: the kinds of links between them, in words."""
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    count = len(rows)
    kinds = sorted({cell for row in rows for cell in row[1 : 1 + count] if cell != "X"})
    if not kinds:
        return ""
    if all(kind.startswith("NV") for kind in kinds):
        return f"NVLink between all GPUs ({', '.join(kinds)})"
    slow = [kind for kind in kinds if kind in ("SYS", "NODE", "PHB")]
    return f"links between GPUs: {', '.join(kinds)}" + ("; some go through the processor" if slow else "")


def _words(count: int) -> str:
    return f"{count} bytes" if count < 1024 else f"{count >> 20} MiB"
