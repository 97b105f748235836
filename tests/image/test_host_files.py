"""What the host's scripts read and write in a checkout: .env as docker compose reads it, secrets never through a link,
and nothing half made."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import OWNER, ROOT, Station, copy_checkout, run

SETTINGS = """
. scripts/station-settings.sh
die() { echo "error: $*" >&2; exit 2; }
say() { echo "$*"; }
"""

LINES = [
    "X=plain",
    "X=windows\r",
    "\ufeffX=a byte order mark",
    "export X=exported",
    "  X=indented",
    "X = around",
    "X: like yaml",
    "X=trailing   ",
    "X=with # a comment",
    "X=with#none",
    "X='single # quotes' # a comment",
    'X="double # quotes"\t# a comment',
    'X="a \\"quote\\" and a back\\\\slash"',
    "X='$HOME'",
    "X=$HOME/x",
    'X="${HOME}/x"',
    "X=~/x",
    "X=",
    "X=first\nX=last",
    "#X=a comment\nXY=another\nX=this",
    "X=no end of line",
]


@pytest.mark.parametrize("text", LINES)
def test_env_is_read_as_docker_compose_reads_it(text: str, tmp_path: Path) -> None:
    ends = "" if text.endswith("no end of line") else "\n"
    (tmp_path / ".env").write_text(text + ends)
    (tmp_path / "docker-compose.yml").write_text("services: {s: {image: i, environment: {X: '${X:-}'}}}\n")
    env = {key: value for key, value in os.environ.items() if key != "X"}
    done = run("docker", "compose", "config", "--format", "json", cwd=tmp_path, env=env)
    expected = json.loads(done.stdout)["services"]["s"]["environment"]["X"].replace("$$", "$")
    script = f"{SETTINGS}\ncd {tmp_path}\nsetting X"
    assert run("bash", "-euo", "pipefail", "-c", script, cwd=ROOT, env=env).stdout == expected


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


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    "name",
    [".env", ".secrets", *(f".secrets/{n}" for n in ("jupyter_token", "authorized_keys", "known_hosts", "id_ed25519"))],
)
def test_a_link_is_refused_by_name_and_not_followed(fresh: Station, name: str, there: bool, tmp_path: Path) -> None:
    secrets_in(fresh)
    path, target = fresh.folder / name, tmp_path / "target"
    if name == ".secrets":
        shutil.rmtree(path)
        if there:
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


def test_a_second_name_of_a_secret_is_refused(fresh: Station, tmp_path: Path) -> None:
    secrets_in(fresh)
    os.link(fresh.folder / ".secrets" / "jupyter_token", tmp_path / "other")
    assert "jupyter_token is known under another name too" in refused(fresh, "up")


def test_secrets_are_closed_to_others_whoever_made_them(tmp_path: Path) -> None:
    folder = tmp_path / ".secrets"
    folder.mkdir()
    (folder / "grafana_password").write_text("hush")
    for path, mode in ((folder, 0o755), (folder / "grafana_password", 0o644)):
        path.chmod(mode)
        os.chown(path, OWNER, OWNER)
    script = f"{SETTINGS}\ncd {tmp_path}\nclose_secrets; close_secrets"
    done = run("bash", "-euo", "pipefail", "-c", script, cwd=ROOT)
    assert done.stdout.count("was open to others") == 1
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "grafana_password")] == [0o700, 0o600]


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
    named = [line.removeprefix("warning: ").partition(" reads")[0] for line in printed.splitlines()]
    assert named == [".env: WANDB_API_KEY", ".env: HTTP_PROXY", ".git/config: remote.origin.url"]
    assert "hush" not in printed


def test_in_roots_checkout_dev_has_a_number_that_the_host_does_not_know(tmp_path: Path) -> None:
    """The usual one is a user's here and the next a group's, in a mount namespace of this test's own."""
    checkout = copy_checkout(tmp_path / "trainstation", owner=None)
    (checkout / ".env").write_text("TZ=UTC\n")
    for name, line in (("passwd", "ann:x:52761:52761::/:/bin/sh\n"), ("group", "crew:x:52762:\n")):
        (tmp_path / name).write_text(Path("/etc", name).read_text() + line)
    mounts = "; ".join(f"mount --bind {tmp_path}/{name} /etc/{name}" for name in ("passwd", "group"))
    script = f"{mounts}; cd {checkout}; {SETTINGS}\nchoose_unknown_user; choose_unknown_user"
    done = run("unshare", "--mount", "bash", "-euo", "pipefail", "-c", script)
    line = "this checkout belongs to root: inside, work is done as user 52763, whom this machine does not know\n"
    assert done.stdout == 2 * line
    assert (checkout / ".env").read_text() == "TZ=UTC\nDEV_UID=52763\nDEV_GID=52763\n"


@pytest.mark.parametrize("name", ["runs", "datasets"])
def test_a_folder_of_the_checkout_that_became_a_link_is_not_mounted(fresh: Station, name: str) -> None:
    """Dev could have put it there, and it could lead to the root of the host."""
    shutil.rmtree(fresh.folder / name, ignore_errors=True)
    (fresh.folder / name).symlink_to("/")
    assert f"./{name} is a link to /" in refused(fresh, "up")
    assert f"{name} is a link to /" in refused(fresh, "up", **{f"{name.upper()}_DIR": f"./{name}/etc"})


def test_only_public_keys_of_a_file_may_log_in(tmp_path: Path) -> None:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "pair"))
    key, private = (tmp_path / "pair.pub").read_text().strip(), (tmp_path / "pair").read_text()
    (tmp_path / "mixed").write_text(
        f"# mine\r\n{private}nonsense\n\n{key}\r\nrestrict,pty {key}\nssh-ed25519 AAAA\n{key}"
    )
    done = run("bash", "-euo", "pipefail", "-c", f"{SETTINGS}\npublic_keys <{tmp_path}/mixed", cwd=ROOT)
    assert done.stdout.splitlines() == [key, f"restrict,pty {key}", key]


@pytest.mark.parametrize("value", ["maybe", "True", "0"])
def test_a_setting_that_is_true_or_false(fresh: Station, value: str) -> None:
    assert f"PROTECT_CHECKOUT={value}: it is true or false" in refused(fresh, "up", PROTECT_CHECKOUT=value)


def test_an_env_that_compose_cannot_read(fresh: Station) -> None:
    (fresh.folder / ".env").write_text("TZ=UTC\nthis is nothing\n")
    assert "docker compose cannot read the settings" in refused(fresh, "up")
    assert not (fresh.folder / ".secrets").exists()


def with_apt(*words: str) -> subprocess.CompletedProcess[str]:
    return run("bash", "-c", '. scripts/apt.sh; with_apt "$@"', "-", *words, cwd=ROOT, check=False)


def test_what_installs_waits_for_another_apt_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "archives" / "partial").mkdir(parents=True)
    with (tmp_path / "archives" / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        threading.Timer(3, fcntl.lockf, (lock, fcntl.LOCK_UN)).start()
        begun = time.monotonic()
        done = with_apt("apt-get", "-o", f"Dir::Cache={tmp_path}", "clean")
        assert time.monotonic() - begun > 2.5
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("another apt is at work (process ") and done.stderr.count("\n") == 1


def test_what_cannot_be_installed_is_said_in_apts_words() -> None:
    done = with_apt("apt-get", "install", "no-such-package-anywhere")
    assert done.returncode == 1
    assert done.stderr == "apt-get: E: Unable to locate package no-such-package-anywhere\n"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.fail("a small disk takes root: run make test-image as root")
    disk = tmp_path / "disk"
    disk.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk))
    yield disk
    run("umount", str(disk))


@pytest.mark.parametrize("left", [0, 4096, 8192, 16384])
def test_a_full_disk_leaves_nothing_half_made(small: Path, left: int, tmp_path: Path) -> None:
    """Full from the start, or once one, two or four small files are written."""
    full = Station(copy_checkout(small / "trainstation"), f"station-test-{os.getpid()}-small")
    before = sorted(path.name for path in full.folder.iterdir())
    with (small / "fill").open("wb") as file:
        written = 0
        try:
            while True:
                written += os.write(file.fileno(), b"0" * 4096)
        except OSError:
            file.truncate(written - left)
    runs = tmp_path / "runs"
    runs.mkdir()
    said = refused(full, "up", RUNS_DIR=str(runs))
    assert "cannot be written: No space left on device" in said or "is full" in said
    assert sorted(path.name for path in full.folder.iterdir()) == before


def test_runs_on_a_disk_that_is_read_only(fresh: Station, small: Path) -> None:
    run("mount", "-o", "remount,ro", str(small))
    assert f"{small} is read-only" in refused(fresh, "up", RUNS_DIR=str(small))


def test_without_buildx_one_line_says_so(fresh: Station, tmp_path: Path) -> None:
    """Asked for when something has to be built: the plugin is hidden in a mount namespace of this test's own."""
    (fresh.folder / "docker" / "rootfs" / "etc" / "tmux.conf").write_text(f"# {tmp_path}\n")
    places = ("/usr/libexec/docker", "/usr/lib/docker", "/usr/local/lib/docker", "/usr/local/libexec/docker")
    plugins = [Path(place) / "cli-plugins" / "docker-buildx" for place in places]
    assert any(path.exists() for path in plugins)
    (tmp_path / "no-plugin").touch()
    hide = " && ".join(f"mount --bind {tmp_path}/no-plugin {path}" for path in plugins if path.exists())
    env = {**fresh.env, "DOCKER_CONFIG": str(tmp_path / "config")}
    command = ["unshare", "--mount", "bash", "-c", f"{hide} && make -s up"]
    done = run(*command, cwd=fresh.folder, env=env, check=False)
    assert done.returncode != 0
    assert "Docker's buildx plugin is missing" in done.stderr


def test_a_proxy_has_no_say_in_the_health_check(station: Station) -> None:
    proxy = [f"{name}=http://127.0.0.1:9" for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy")]
    done = station.root("env", "-u", "no_proxy", "-u", "NO_PROXY", *proxy, "station-health", check=False)
    assert (done.returncode, done.stdout) == (0, "healthy\n")
