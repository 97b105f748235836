"""The stand-in for NCCL itself: collectives between processes move data, and wrong calls are errors that name them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from ctypes import CDLL, POINTER, Structure, byref, c_char, c_char_p, c_float, c_int, c_size_t, c_void_p, cast
from typing import Any

import pytest

from tests.cuda import standin

pytestmark = [pytest.mark.minutes, pytest.mark.skipif(bool(standin.lacks()), reason=standin.lacks())]

FLOAT32, SUM, AVG = 7, 0, 4
MANY = 300_000
"""Numbers that are shown to the other ranks in several chunks."""


class _Id(Structure):
    _fields_ = [("text", c_char * 128)]


class Rank:
    """A process with one GPU and a communicator of all."""

    def __init__(self, library: Any, ident: _Id, rank: int, size: int, device: int) -> None:
        self.library, self.rank, self.size, self.comm = library, rank, size, c_void_p()
        library.cudaSetDevice(device)
        self.code = library.ncclCommInitRank(byref(self.comm), size, ident, rank)

    def memory(self, *values: float, count: int = 1) -> Any:
        """Memory of the device with these values, so often each."""
        place = c_void_p()
        assert self.library.cudaMalloc(byref(place), c_size_t(4 * count * len(values))) == 0
        array = cast(place, POINTER(c_float * (count * len(values)))).contents
        array[:] = [value for value in values for _ in range(count)]
        return array

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function of NCCL with this communicator, on the default stream; floats are its type."""
        return int(getattr(self.library, f"nccl{name}")(*arguments, self.comm, None))

    def all_reduce(self, count: int) -> int:
        both = self.memory(1.0, count=count)
        return self.call("AllReduce", both, both, c_size_t(count), FLOAT32, SUM)


def moves_data(it: Rank) -> None:
    count, own = c_size_t(MANY), it.memory(it.rank + 1.0, count=MANY)
    into, all_of_them = it.memory(0.0, count=MANY), it.memory(*[0.0] * it.size, count=MANY)
    total = it.size * (it.size + 1) / 2
    assert it.call("AllReduce", own, into, count, FLOAT32, SUM) == 0 and set(into) == {total}
    assert it.call("AllReduce", own, into, count, FLOAT32, AVG) == 0 and set(into) == {total / it.size}
    assert it.call("AllGather", own, all_of_them, count, FLOAT32) == 0
    assert [all_of_them[i * MANY + MANY - 1] for i in range(it.size)] == [i + 1.0 for i in range(it.size)]
    mine = it.memory(*(part * (it.rank + 1.0) for part in range(it.size)), count=MANY)
    assert it.call("ReduceScatter", mine, into, count, FLOAT32, SUM) == 0 and set(into) == {it.rank * total}
    assert it.call("Broadcast", own, into, count, FLOAT32, 1) == 0 and set(into) == {2.0}
    before = (it.rank - 1) % it.size
    it.library.ncclGroupStart()
    assert it.call("Send", own, count, FLOAT32, (it.rank + 1) % it.size) == 0
    assert it.call("Recv", into, count, FLOAT32, before) == 0
    assert it.library.ncclGroupEnd() == 0 and set(into) == {before + 1.0}
    part, rank, size = c_void_p(), c_int(), c_int()
    assert it.library.ncclCommSplit(it.comm, it.rank % 2, -it.rank, byref(part), None) == 0
    it.library.ncclCommUserRank(part, byref(rank))
    it.library.ncclCommCount(part, byref(size))
    assert (rank.value, size.value) == ((1 - it.rank // 2, 2) if it.rank % 2 == 0 else (0, 1))


def other_count(it: Rank) -> None:
    assert it.all_reduce(5 + it.rank % 2) != 0


def one_more(it: Rank) -> None:
    assert it.all_reduce(5) == 0
    if it.rank == 0:
        assert it.all_reduce(6) != 0


def aborted(it: Rank) -> None:
    if it.rank:
        assert it.all_reduce(5) != 0
    else:
        it.library.ncclCommAbort(it.comm)
        it.comm.value = None


def too_late(it: Rank) -> None:
    if it.rank == 0:
        assert it.all_reduce(5) != 0
    else:
        time.sleep(2)


def memory_of_host(it: Rank) -> None:
    values = (c_float * 5)()
    assert it.call("AllReduce", values, values, c_size_t(5), FLOAT32, SUM) != 0


def other_sizes(it: Rank) -> None:
    if it.rank == 0:
        assert it.call("Send", it.memory(1.0, count=5), c_size_t(5), FLOAT32, 1) != 0
    elif it.rank == 1:
        assert it.call("Recv", it.memory(1.0, count=6), c_size_t(6), FLOAT32, 0) != 0


def one_gpu(it: Rank) -> None:
    assert it.code != 0


def work(what: Callable[[Rank], None], size: int) -> None:
    """Be so many ranks, in forks of this process."""
    library = CDLL(None)
    library.ncclGetLastError.restype = c_char_p
    library.ncclCommInitRank.argtypes = [c_void_p, c_int, _Id, c_int]
    ident = _Id()
    assert library.ncclGetUniqueId(byref(ident)) == 0
    ranks = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                it = Rank(library, ident, rank, size, 0 if what is one_gpu else rank)
                assert it.code == 0 or what is one_gpu
                what(it)
                if it.comm:
                    library.ncclCommDestroy(it.comm)
                code = 0
            finally:
                os._exit(code)
        ranks.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in ranks] == [0] * size


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (moves_data, ""),
        (other_count, "call 1 of a communicator is AllReduce(5 float32, sum) on rank 0, but AllReduce(6"),
        (one_more, "rank 0 waited in call 2, AllReduce(6 float32, sum), for rank 1, which has left the communicator"),
        (aborted, "rank 1 waited in call 1, AllReduce(5 float32, sum): rank 0 aborted the communicator"),
        (too_late, "rank 0 waited too long in call 1, AllReduce(5 float32, sum), for rank 1, whose last call was none"),
        (memory_of_host, "AllReduce(5 float32, sum) gets memory of device -1"),
        (other_sizes, "rank 0 sends 20 bytes of float32, but rank 1 receives 24 bytes of float32"),
        (one_gpu, "Duplicate GPU detected : rank 0 and rank 1 both on card 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_are_told_what_is_wrong(what: Callable[[Rank], None], told: str) -> None:
    size = 3 if what is moves_data else 2
    added = standin.environment(size) | {"STANDIN_PATIENCE": "1" if what is too_late else "30"}
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.cuda import test_nccl as t; t.work(t.{what.__name__}, {size})"],
        env=os.environ | added, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and (told in done.stderr if told else not done.stderr), done.stderr
