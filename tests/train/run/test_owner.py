"""Code that lies in a run folder runs as the user whose folder it is, and as nobody else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import train
from tests.train.conftest import Station
from train.errors import Refused
from train.run import owner, states
from train.run.owner import TrustedRun
from train.run.record import FORMAT
from train.run.run_folder import Run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give files to another user")
OTHER = 4242
"""A user without a name."""
EXECUTING = (
    ("resume", "a"), ("resume", "a", "--steps", "9"), ("fork", "a", "--name", "b"), ("eval", "a"),
    ("export", "a", "--to", "a.pt"),
)  # fmt: skip


def give(path: Path, uid: int = OTHER) -> None:
    """Give a file or folder, with all that is in it, to another user."""
    for one in (path, *path.rglob("*")):
        os.chown(one, uid, uid, follow_symlinks=False)


@pytest.fixture
def seen(station: Station) -> Path:
    """A stopped run `a`, whose task leaves this file when it is executed."""
    seen, run = station.folder / "seen", station.runs / "a"
    step = run / "checkpoints" / "step-00000003"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    task = (Path(train.__file__).parent / "tasks" / "digits.py").read_text()
    (run / "task.py").write_text(f"open({str(seen)!r}, 'a').close()\n{task}")
    for name in ("config.toml", "modules.zip", "environment.json", "lock"):
        (run / name).touch()
    record = {
        "format": FORMAT,
        "state": states.STOPPED,
        "stopped_by": "user",
        "attempts": [],
        "step": 3,
        "epoch": 1,
        "world_size": 1,
    }
    record |= {"name": "a", "task": "task.py", "task_source": str(station.folder / "task.py"), "total_steps": 9}
    (run / "run.json").write_text(json.dumps(record))
    return seen


def is_refused(station: Station, *command: str, who: str = f"uid {OTHER}", way: str = "--runs") -> None:
    before = sorted(station.folder.rglob("*"))
    done = station(*command)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert who in done.stderr and way in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert sorted(station.folder.rglob("*")) == before


def test_root_looks_at_runs_of_another_user_and_neither_runs_nor_changes_them(station: Station, seen: Path) -> None:
    give(station.runs)
    beside = (
        ("launch", "digits"),
        ("run", "digits"),
        ("rm", "a"),
        ("mv", "a", "b"),
        ("stop", "a"),
        ("keeper", "--once"),
    )
    for command in (*EXECUTING, *beside):
        is_refused(station, *command)
    for command in (("ls",), ("show", "a"), ("ls", "--json"), ("show", "a", "--json")):
        assert f"uid {OTHER}" in station.ok(*command).stdout
    (station.folder / "scripts").mkdir()
    (station.folder / "scripts" / "station.sh").touch()
    is_refused(station, "resume", "a", way="scripts/train")
    assert not seen.exists()


@pytest.mark.parametrize(
    "which", ["", "task.py", "run.json", "config.toml", "modules.zip", "environment.json", "checkpoints"]
)
def test_what_another_user_has_put_into_a_shared_folder_of_runs_is_not_run(
    station: Station, seen: Path, which: str
) -> None:
    os.chown(station.runs / "a" / which, OTHER, OTHER)
    for command in EXECUTING if not which else EXECUTING[:1]:
        is_refused(station, *command)
    assert not seen.exists()
    copy = station.folder / "mine"
    shutil.copytree(station.runs / "a", copy / "a")  # as the line says
    TrustedRun(Run(copy / "a"))


def test_a_checkpoint_in_which_another_user_has_put_a_file_is_not_read(station: Station, seen: Path) -> None:
    folder = Run(station.runs / "a").checkpoint(3)
    owner.check_checkpoint(folder)
    os.chown(folder / ".metadata", OTHER, OTHER)
    with pytest.raises(Refused, match=f"metadata belongs to uid {OTHER}"):
        owner.check_checkpoint(folder)


def test_a_swap_between_the_look_and_the_use_gains_nothing(station: Station, seen: Path) -> None:
    run, theirs = station.runs / "a", station.runs / "theirs"
    shutil.copytree(run, theirs)
    (theirs / "task.py").write_text("theirs")
    give(theirs)
    mine, held = (run / "task.py").read_bytes(), TrustedRun(Run(run))
    station.runs.chmod(0o777)  # where they may rename
    run.rename(station.runs / "away")
    run.symlink_to(theirs)
    assert held.code("task.py") == mine
    assert held.place_to_import("task.py").read_bytes() == mine
    with pytest.raises(Refused, match=f"uid {OTHER}"):
        TrustedRun(Run(run))
    (held.folder / "task.py").unlink()
    (held.folder / "task.py").symlink_to(theirs / "task.py")
    os.chown(station.runs / "away" / "task.py", OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(Refused, match=f"uid {OTHER}"):
        held.code("task.py")


def test_root_runs_no_program_that_the_users_of_a_station_can_change(station: Station) -> None:
    projects = station.folder / "projects"
    projects.mkdir()
    shutil.copy(Path(train.__file__).parent / "tasks" / "digits.py", projects / "x.py")
    os.chown(projects / "x.py", OTHER, OTHER)
    owner.check_program(projects / "x.py")  # no station: who types the path means it
    (station.folder / "scripts").mkdir()
    (station.folder / "scripts" / "station.sh").touch()
    for command in (("launch", "projects/x.py"), ("run", "projects/x.py"), ("launch", "--script", "projects/x.py")):
        is_refused(station, *command, way="scripts/train")
    os.chown(projects / "x.py", 0, 0)
    owner.check_program(projects / "x.py")
    os.chown(projects, OTHER, OTHER)  # whose modules it would import
    with pytest.raises(Refused, match="scripts/train"):
        owner.check_program(projects / "x.py")
    for place, target in (("folder", projects), ("file.py", projects / "x.py"), ("link", station.folder / "folder")):
        (station.folder / place).symlink_to(target)
    outside = station.folder.parent / "outside"
    outside.symlink_to(station.folder)
    for path in ("folder/x.py", "file.py", "link/x.py", "folder/../projects/x.py"):
        with pytest.raises(Refused, match="scripts/train"):
            owner.check_program(outside / path)
    outside.unlink()
