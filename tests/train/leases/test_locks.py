"""A lease belongs to processes: whoever inherits it holds it, and the kernel frees it when the last one dies."""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from train.errors import Refused
from train.leases import devices, locks, tickets
from train.leases.devices import CORE, Wants
from train.leases.locks import Holder, Unusable
from train.leases.tickets import Ticket


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "shared"
    monkeypatch.setenv(locks.FOLDER, str(folder))
    monkeypatch.setenv(devices.SLOTS, "2")
    yield folder


def _forked(function: Callable[[], object]) -> int:
    """Call a function in a process of its own. Returns its id."""
    pid = os.fork()
    if not pid:
        try:
            function()
        finally:
            os._exit(0)
    return pid


def _cores(count: int) -> Wants:
    return Wants(CORE, devices.cores_here(2), count)


def test_a_lease_is_passed_on_and_freed_by_any_death() -> None:
    lease, _ = devices.take(_cores(1), Holder.of("first"))
    assert lease is not None
    pid = _forked(lambda: time.sleep(60))  # a rank, which inherits it
    lease.release()
    found = lease.devices[0].holder()
    assert found is not None and found.run == "first" and found.user
    both, obstacles = devices.take(_cores(2), Holder.of("second"))
    assert both is None and obstacles[0].startswith("core 0 is held by ") and "(first, since " in obstacles[0]
    assert devices.cores_here(2)[1].holder() is None  # what was taken in vain is given back
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    both, _ = devices.take(_cores(2), Holder.of("second"))
    assert both is not None and len(both.fds) == 2
    both.release()


def test_files_belong_to_everybody_and_are_used_with_care(shared: Path) -> None:
    fd = locks.hold(locks.folder() / "one", Holder.of("a"))
    assert fd is not None
    assert shared.stat().st_mode & 0o7777 == 0o1777 and (shared / "one").stat().st_mode & 0o777 == 0o666
    assert locks.hold(shared / "one", Holder.of("b")) is None
    (shared / "one").unlink()  # by its owner, or by root
    assert locks.holder(shared / "one") is None
    other = locks.hold(shared / "one", Holder.of("b"))
    assert other is not None
    os.close(fd)
    os.close(other)
    (shared / "link").symlink_to(shared / "elsewhere")
    with pytest.raises(OSError):
        locks.hold(shared / "link", Holder.of("a"))
    assert not (shared / "elsewhere").exists()
    os.mkfifo(shared / "pipe")
    assert locks.holder(shared / "pipe") is None


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"\xff\x00", b'{"user": 3, "run": ["x"]}', b'{"user": "\\u001b[31m"}']
)
def test_a_note_of_anybody_is_read_without_harm(content: bytes) -> None:
    found = Holder.from_bytes(content)
    assert found.run == "" and "\x1b" not in found.user
    assert devices.held("GPU 0", found).startswith("GPU 0 is held by ")


def test_on_a_full_disk_a_lease_holds_without_its_note() -> None:
    ready, is_ready = os.pipe()

    def hold_forever() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        assert devices.take(_cores(1), Holder.of("full"))[0] is not None
        os.write(is_ready, b"1")
        time.sleep(60)

    (locks.folder() / "core-0").touch()
    pid = _forked(hold_forever)
    os.close(is_ready)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    both, obstacles = devices.take(_cores(2), Holder.of("other"))
    assert both is None and obstacles == ["core 0 is held by somebody"]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(locks.FOLDER, str(tmp_path / "file"))
    with pytest.raises(Unusable, match="no GPU or core can be reserved"):
        locks.folder()
    monkeypatch.setenv(devices.SLOTS, "none")
    with pytest.raises(Refused, match="TRAIN_SLOTS=none"):
        devices.cores_here(2)


def test_tickets_order_and_a_waiter_that_does_not_look_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Ticket(CORE, 20, Path("/runs/late"), note=Holder.of("late", wants="1 core"))
    early = Ticket(CORE, 10, Path("/runs/early"), note=Holder.of("early", wants="2 cores"))
    assert [one.holder.run for one in late.look()] == ["early"] and early.look() == []
    assert [one.holder.run for one in tickets.waiting()] == ["early", "late"] and tickets.waiting("gpu") == []
    before = time.time() - 60
    os.utime(early.file, (before, before))  # as after SIGSTOP
    assert late.look() == []
    early.look()
    assert [one.holder.run for one in late.look()] == ["early"]
    early.file.unlink()
    assert not early.is_there() and late.is_there()
    early.leave()
    late.leave()
    assert tickets.waiting() == []


def test_a_ticket_of_a_dead_waiter_does_not_count(shared: Path) -> None:
    os.waitpid(_forked(lambda: Ticket(CORE, 1, Path("/runs/dead"), note=Holder.of("dead", wants="1 core"))), 0)
    assert list(shared.glob("ticket-*"))
    assert tickets.waiting() == [] and not list(shared.glob("ticket-*"))


def test_many_waiters_get_their_turns_in_order_and_never_too_many_at_once(tmp_path: Path) -> None:
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    chance, pids = random.Random(3), []

    def live(number: int, wanted: int, pause: float) -> None:
        ticket = Ticket(CORE, number, Path(f"/runs/{number}"), note=Holder.of(str(number)))
        time.sleep(0.3)  # until all are there
        while ticket.look() or (lease := devices.take(_cores(wanted), Holder.of(str(number)))[0]) is None:
            time.sleep(0.002)
        os.write(log, f"+ {number} {wanted}\n".encode())
        ticket.leave()
        time.sleep(pause)
        os.write(log, f"- {number} {wanted}\n".encode())
        lease.release()

    for number in range(24):
        wanted, pause = 2 if number % 5 == 0 else 1, chance.random() / 20
        pids.append(_forked(functools.partial(live, number, wanted, pause)))
    for pid in pids:
        os.waitpid(pid, 0)
    lines, held, order = (tmp_path / "log").read_text().splitlines(), 0, []
    for line in lines:
        sign, number, wanted = line.split()
        held += int(wanted) if sign == "+" else -int(wanted)
        order += [int(number)] if sign == "+" else []
        assert held <= 2, lines
    assert order == [*range(24)]
