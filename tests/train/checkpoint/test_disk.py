"""Real disks that fail: full, read-only, gone, with errors. What was saved stays; training continues while it can."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.checkpoint.test_snapshots import COPY, Kept
from tests.train.conftest import Station
from tests.train.tiers import later
from tests.train.training import Engine
from tests.waiting import eventually
from train.checkpoint import manifest, writer
from train.checkpoint.writer import DurableFile
from train.run.metrics import Lines

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

SYNC = {"checkpoint__every_steps": 2, "checkpoint__asynchronous": "false"}
ASYNC = {"checkpoint__every_steps": 2, "checkpoint__asynchronous": "true"}


def sh(command: str) -> None:
    subprocess.run(command, shell=True, check=True, capture_output=True)


Mount = Callable[[str, Path], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts something in a folder, until the test ends."""
    made: list[Path] = []

    def do(options: str, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(f"mount {options} {folder}", shell=True, capture_output=True, text=True, check=False)
        if done.returncode:
            why = f"mounting needs root and its capabilities: {done.stderr.strip()}"
            pytest.fail(why) if os.environ.get("CI") and os.geteuid() == 0 else pytest.skip(why)
        made.append(folder)
        return folder

    yield do
    for folder in reversed(made):
        subprocess.run(["umount", "-l", folder], check=False)


def elsewhere(engine: Engine, folder: Path) -> Engine:
    """The same, with its runs in another folder."""
    station = Station(folder.parent)
    station.runs = folder
    return type(engine)(station)


@pytest.fixture(scope="session")
def wanted(engine: Engine) -> tuple[Any, ...]:
    """How the test task ends undisturbed on two ranks."""
    engine.run("wanted", 2)
    return engine.outcome("wanted")


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, writer._BUFFER, writer._BUFFER + 1, 3 * writer._BUFFER + 12345])
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_durable_file_holds_what_was_written_whatever_the_sizes(
    mount: Mount, tmp_path: Path, size: int, place: str
) -> None:
    folder = tmp_path if place == "disk" else mount("-t ramfs none", tmp_path / "memory")  # ramfs knows no O_DIRECT
    content = os.urandom(size)
    with DurableFile(folder / "file") as file:
        position = 0
        for length in (0, 1, 63, 4096, writer._BUFFER // 2, size):
            file.write(memoryview(content)[position : position + length])
            position = min(position + length, size)
            assert file.tell() == position
    assert (folder / "file").read_bytes() == content
    assert file.entry == {"size": size, "sha256": hashlib.sha256(content).hexdigest()}


def test_a_full_disk_is_an_error_of_the_write_and_of_the_close(mount: Mount, tmp_path: Path) -> None:
    small = mount("-t tmpfs -o size=1m none", tmp_path / "small")
    file = DurableFile(small / "file")
    with pytest.raises(OSError, match="No space left"):
        for _ in range(5):
            file.write(bytes(writer._BUFFER))
    with pytest.raises(OSError, match="No space left"):
        file.close()
    assert file.closed and not file.entry
    assert not [name for name in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{name}") == small]


@pytest.mark.parametrize(("ranks", "keep", "stay"), [(2, 9, {6, 7, 10}), (1, 2, {10})])
def test_on_a_disk_that_is_full_at_the_end_older_checkpoints_make_room_for_the_last(
    mount: Mount, tmp_path: Path, engine: Engine, ranks: int, keep: int, stay: set[int]
) -> None:
    small = elsewhere(engine, mount("-t tmpfs -o size=16m none", tmp_path / "small"))
    flags = {"task__width": 250, "eval__every_epochs": 0, "checkpoint__keep": keep, "checkpoint__every_steps": 2}
    assert small.run("full", ranks, ["7 0 SIGTERM"], **flags)["state"] == "stopped"
    fill = f"2 0 sh cat /dev/zero > {small.station.runs}/ballast || true"  # in step 9, to the last byte
    record = small.resume("full", ranks, [fill], checkpoint__every_steps=100)
    assert record["state"] == "finished", record["reason"]
    said = small.said("full")
    assert "No space left on device" in said and "was removed for that of step 10" in said
    run = small.station.run("full")
    assert set(run.steps_saved()) == stay and manifest.newest_valid(run)[0] == 10


def test_a_checkpoint_does_not_know_where_it_lies(engine: Engine, wanted: Any) -> None:
    run = engine.station.run("wanted")
    for path in run.checkpoint(10).iterdir():
        assert str(run.folder).encode() not in path.read_bytes(), path.name


@pytest.fixture
def volume(mount: Mount, engine: Engine, tmp_path: Path) -> Engine:
    """The engine with its runs on an ext4 of their own, in the file `image`."""
    image, folder = tmp_path / "image", tmp_path / "runs"
    sh(f"truncate -s 24M {image} && mkfs.ext4 -q {image}")
    return elsewhere(engine, mount(f"-o loop,errors=remount-ro {image}", folder))


def unmount(image: Path, folder: Path) -> None:
    """Returns when nobody holds the file system any more: a container that starts meanwhile has a copy of all mounts
    for a moment, and who mounts the image then gets the file system of before, not what is on the disk."""
    sh(f"umount {folder}")
    in_use = ("losetup", "-j", image)
    eventually(f"{image} is free", lambda: not subprocess.run(in_use, check=True, capture_output=True).stdout)


def repair(image: Path, folder: Path) -> None:
    """What an administrator does with a file system that has given up."""
    unmount(image, folder)
    sh(f"fsck.ext4 -fy {image} >/dev/null; mount -o loop {image} {folder}")


@pytest.mark.parametrize("flags", [ASYNC, *later(SYNC)], ids=["async", "sync"])
def test_when_the_disk_turns_read_only_training_goes_on_and_a_resume_ends_as_undisturbed(
    volume: Engine, wanted: Any, flags: dict[str, Any]
) -> None:
    folder = volume.station.runs
    # `abort` does what the kernel does when it meets an error in the file system
    record = volume.run("a", 2, [f"6 0 sh sync -f {folder} && mount -o remount,abort {folder}"], **flags)
    assert volume.code == 3
    assert record["state"] == "interrupted"  # nobody could write down more
    repair(folder.parent / "image", folder)
    newest = manifest.newest_valid(volume.station.run("a"))
    assert newest[0] >= record["saved_step"] >= 2 and not newest[2]
    assert volume.resume("a", 2)["state"] == "finished"
    assert volume.outcome("a") == wanted


@pytest.mark.parametrize("flags", [ASYNC, *later(SYNC)], ids=["async", "sync"])
def test_a_folder_that_vanishes_ends_the_run_with_a_line_and_what_comes_back_is_used(
    engine: Engine, wanted: Any, flags: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"vanishing-{flags['checkpoint__asynchronous']}"
    run = engine.station.run(name)
    folder = run.folder
    away = engine.station.folder / f"{name}-away"
    # a run is followed to where it is renamed, so it is copied, its record first, and removed
    copy = f"mkdir {away} && cp -a {folder}/run.json {away}; cp -an {folder}/. {away}; mv {folder} {away}-doomed"
    take = f"{copy}; until rm -rf {away}-doomed; do :; done"
    engine.run(name, 2, [f"6 0 sh {take}; touch {folder}"], **flags)
    assert engine.code == 3
    folder.unlink()
    away.rename(folder)
    said = capfd.readouterr().err
    assert "could not be saved" in said and "Traceback" not in said
    newest = manifest.newest_valid(run)
    assert newest[0] >= run.read()["saved_step"] >= 2
    assert engine.resume(name, 2)["state"] == "finished"
    assert engine.outcome(name) == wanted


def test_an_unmounted_disk_is_one_line_and_exit_code_3_on_the_command_line(volume: Engine, wanted: Any) -> None:
    station, folder = volume.station, volume.station.runs
    flags = [part for key, value in volume.flags.items() for part in (f"--{key}", str(value))]
    task = station.folder / "task.py"
    text = volume.task.read_text().replace(
        'Path(__spec__.origin).with_name("script")', f'Path("{station.folder}/script")'
    )
    task.write_text(text)
    (station.folder / "script").write_text(f"6 0 sh sync -f {folder} && mount -o remount,abort {folder}\n")
    done = station("run", task, "--name", "a", "--checkpoint.every_steps", 2, *flags)
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines()[-1].startswith("train: the checkpoint of step 10 could not be saved")
    assert done.stderr.count("training continues") >= 2 and "Traceback" not in done.stderr


def test_lines_whose_fsync_failed_are_written_again(mount: Mount, tmp_path: Path) -> None:
    # a disk on a file without room to grow: writes succeed, their fsync does not, as on a thin volume that is full
    below, folder = mount("-t tmpfs -o size=4m none", tmp_path / "below"), tmp_path / "folder"
    sh(f"truncate -s 16M {below}/image && mkfs.ext4 -q -O ^has_journal {below}/image")
    mount(f"-o loop {below}/image", folder)
    path = folder / "lines"
    path.touch()
    lines = Lines(path)
    lines.add("first" * 2000)
    assert lines.sync()
    sh(f"head -c 16M /dev/zero > {below}/filler || true")
    lines.add("second" * 20000)
    assert lines.flush() and not lines.sync() and lines.problem
    assert not lines.sync()
    (below / "filler").unlink()
    lines.add("third")
    assert lines.sync()
    lines.close()
    unmount(below / "image", folder)  # what is on the disk, not in the cache
    sh(f"mount -o loop {below}/image {folder}")
    assert path.read_text().splitlines() == ["first" * 2000, "second" * 20000, "third"]


def test_a_death_on_a_full_disk_ends_the_run_and_a_resume_goes_on(volume: Engine, engine: Engine) -> None:
    long = {"epochs": 15, "checkpoint__every_steps": 20}  # sixty steps, of which the disk takes the lines of some
    engine.run("wanted-after-a-death", 2, **long)
    ballast = volume.station.runs / "ballast"
    once, fill = f"mkdir {ballast.parents[1]}/once", f"dd if=/dev/zero of={ballast} bs=1k oflag=append"
    # twice: what the first time met half written is cleared away
    fills = [f"{step} 0 sh {once}{step} && {fill} conv=notrunc; true" for step in (3, 6)]
    with pytest.raises(OSError, match="No space left"):  # which its agent says in a line, and ends
        Kept(volume).run("a", 2, [COPY, *fills, "56 1 SIGKILL"], **long)
    assert volume.station.run("a").state() == "interrupted"
    ballast.unlink()
    assert volume.resume("a", 2)["state"] == "finished"
    assert volume.outcome("a") == engine.outcome("wanted-after-a-death")
