"""What the host's scripts read and write in a checkout: .env as docker compose reads it, secrets never through a link,
and nothing half made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import OWNER, ROOT, Station, copy_checkout, run

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

SETTINGS = """
. scripts/station-settings.sh
die() { echo "error: $*" >&2; exit 2; }
say() { echo "$*"; }
"""


@pytest.fixture
def fresh(tmp_path: Path) -> Station:
    return Station(copy_checkout(tmp_path / "trainstation"), f"station-test-{os.getpid()}-files")


def refused(station: Station, *words: str, **settings: str) -> str:
    done = run("make", "-s", *words, cwd=station.folder, env={**station.env, **settings}, check=False)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    return line


def secrets_in(station: Station) -> Path:
    folder = station.folder / ".secrets"
    folder.mkdir(mode=0o700)
    (folder / "jupyter_token").write_text("0123456789abcdef")
    (station.folder / ".env").write_text("TZ=UTC\n")
    if os.getuid() == 0:
        for path in (folder, folder / "jupyter_token", station.folder / ".env"):
            os.chown(path, OWNER, OWNER)
    return folder


def state(folder: Path) -> dict[str, tuple[int, int, str]]:
    found = [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_uid, str(path.lstat().st_ino)) for path in found}


@pytest.mark.parametrize(("name", "there"), [(".env", True), (".secrets", True), (".secrets/jupyter_token", False)])
def test_a_link_is_refused_by_name_and_not_followed(fresh: Station, name: str, there: bool, tmp_path: Path) -> None:
    secrets_in(fresh)
    path, target = fresh.folder / name, tmp_path / "target"
    if name == ".secrets":
        shutil.rmtree(path)
        target.mkdir()
    else:
        path.unlink(missing_ok=True)
        if there:
            target.write_text("somebody's file\n")
    path.symlink_to(target)
    before = state(tmp_path)
    for words in (["up"], ["url"], ["ssh-command"], ["rebuild"]):
        assert refused(fresh, *words).startswith(f"error: {name} is a link, which is not followed")
    assert state(tmp_path) == before
    assert target.exists() == there


LOWERS = (
    SETTINGS
    + """
. scripts/env.sh
load_settings
take_back_lowered SHM_SIZE
take_back_lowered PIDS_LIMIT
[ "$1" = - ] || lower SHM_SIZE "$1" "is too much"
[ "$2" = - ] || lower PIDS_LIMIT "$2" "is too much"
say_what_rises
remember STATION_LOWERED "" ${lowered[@]+"${lowered[@]}"}
"""
)


def test_a_setting_that_was_lowered_rises_when_its_reason_is_gone(fresh: Station) -> None:
    """As with SHM_SIZE, which is at most half of MEMORY: at the next make up MEMORY may be another one."""
    env = {name: value for name, value in fresh.env.items() if name not in ("SHM_SIZE", "PIDS_LIMIT")}
    path = fresh.folder / ".env"
    path.write_text("SHM_SIZE=32g\n")
    for shm, pids, said, left in [
        ("1024m", "100", "lowered", {"SHM_SIZE=1024m", "PIDS_LIMIT=100"}),
        ("1024m", "100", "", {"SHM_SIZE=1024m", "PIDS_LIMIT=100"}),
        ("-", "100", "SHM_SIZE is 32g again", {"SHM_SIZE=32g", "PIDS_LIMIT=100"}),
        ("-", "-", "PIDS_LIMIT is the default again", {"SHM_SIZE=32g"}),
        ("512m", "-", "lowered", {"SHM_SIZE=512m"}),
    ]:
        done = run("bash", "-euo", "pipefail", "-c", LOWERS, "-", shm, pids, cwd=fresh.folder, env=env)
        assert (said in done.stdout) if said else not done.stdout
        lines = path.read_text().split()
        assert {line for line in lines if not line.startswith("STATION_LOWERED=")} == left
    path.write_text(path.read_text().replace("SHM_SIZE=512m", "SHM_SIZE=2g"))  # by hand: that is what counts now
    run("bash", "-euo", "pipefail", "-c", LOWERS, "-", "-", "-", cwd=fresh.folder, env=env)
    assert path.read_text().split() == ["SHM_SIZE=2g"]


def test_a_second_name_of_a_secret_is_refused(fresh: Station, tmp_path: Path) -> None:
    secrets_in(fresh)
    os.link(fresh.folder / ".secrets" / "jupyter_token", tmp_path / "other")
    assert "jupyter_token is no file, or known under another name too" in refused(fresh, "up")


def test_credentials_that_dev_could_read_are_named_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".env").write_text(
        'export WANDB_API_KEY="hush"\r\nHTTP_PROXY=http://me:hush@proxy:3128\nHF_TOKEN=\n#MY_SECRET=hush\n'
        "SSH_PUBLIC_KEY=~/.ssh/id.pub\nNO_PROXY=localhost\n"
    )
    (tmp_path / ".git" / "config").write_text(
        '[remote "origin"]\n\turl = https://me:hush@host/x.git\n[remote "b"]\n\turl = ssh://git@host:22/x.git\n'
    )
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, OWNER, OWNER)
    script = f"{SETTINGS}\ncd {tmp_path}\nwarn_of_credentials"
    printed = run("bash", "-euo", "pipefail", "-c", script, cwd=ROOT).stdout
    named = [line.removeprefix("warning: line ").partition(" reads")[0] for line in printed.splitlines()]
    assert named == ["1 of .env", "2 of .env", "2 of .git/config"]
    assert "hush" not in printed


def test_in_roots_checkout_dev_is_nobody_of_this_machine(tmp_path: Path) -> None:
    """The usual number is a user's here, in a mount namespace of this test's own."""
    checkout = copy_checkout(tmp_path / "trainstation", owner=None)
    (tmp_path / "passwd").write_text(Path("/etc/passwd").read_text() + "ann:x:52761:52761::/:/bin/sh\n")
    command = f"mount --bind {tmp_path}/passwd /etc/passwd; cd {checkout}; make -s up"
    done = run("unshare", "--mount", "bash", "-c", command, env={**os.environ, "GPUS": "none"}, check=False)
    assert done.returncode != 0
    assert "52761, also exists on this machine: set DEV_UID and DEV_GID in .env" in done.stderr


@pytest.mark.parametrize("name", ["runs", "datasets"])
def test_a_folder_of_the_checkout_that_became_a_link_is_not_mounted(fresh: Station, name: str) -> None:
    """Dev could have put it there, and it could lead to the root of the host."""
    shutil.rmtree(fresh.folder / name, ignore_errors=True)
    (fresh.folder / name).symlink_to("/")
    assert f"./{name} is a link to /" in refused(fresh, "up")
    assert f"{name} is a link to /" in refused(fresh, "up", **{f"{name.upper()}_DIR": f"./{name}/etc"})


def test_an_env_that_compose_cannot_read(fresh: Station) -> None:
    (fresh.folder / ".env").write_text("TZ=UTC\nthis is nothing\n")
    assert "docker compose cannot read the settings" in refused(fresh, "up")
    assert not (fresh.folder / ".secrets").exists()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.fail("a small disk takes root: run make test-image as root")
    disk = tmp_path / "disk"
    disk.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk))
    yield disk
    run("umount", str(disk))


def test_a_full_disk_leaves_nothing_half_made(small: Path, tmp_path: Path) -> None:
    """It is full once two small files are written."""
    full = Station(copy_checkout(small / "trainstation"), f"station-test-{os.getpid()}-small")
    with (small / "fill").open("wb") as file:
        written = 0
        try:
            while True:
                written += os.write(file.fileno(), b"0" * 4096)
        except OSError:
            file.truncate(written - 8192)
    runs = tmp_path / "runs"
    runs.mkdir()
    message = refused(full, "up", RUNS_DIR=str(runs))
    assert "No space left on device" in message or "is full" in message
    made = [path for path in (full.folder / ".secrets").glob("*") if path.is_file()]
    assert all(path.stat().st_size for path in made)


def test_a_proxy_has_no_say_in_the_health_check(station: Station) -> None:
    proxy = [f"{name}=http://127.0.0.1:9" for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy")]
    done = station.root("env", "-u", "no_proxy", "-u", "NO_PROXY", *proxy, "station-health", check=False)
    assert (done.returncode, done.stdout) == (0, "healthy\n")
