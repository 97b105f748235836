"""The folder with token and keys: made where there is none, and nothing in it is followed to another file."""

import os
from pathlib import Path

import pytest
from conftest import run

from tests.waiting import eventually

pytestmark = pytest.mark.never_forgiven

SECRETS = "/etc/trainstation/private/secrets"
HIDDEN = ("--tmpfs", "/workspace/.secrets:mode=500")


def start(workspace: Path, *options: str, mounted: bool = True) -> tuple[int, str]:
    """Starts the services as compose does, or with nothing but the workspace mounted."""
    words = ["-v", f"{workspace}:/workspace"]
    if mounted:
        words += ["-v", f"{workspace}/.secrets:{SECRETS}", *HIDDEN]
    done = run("docker", "run", "--rm", *words, *options, "trainstation:runtime", check=False)
    return done.returncode, done.stderr


def refused(workspace: Path, said: str, mounted: bool = True) -> None:
    code, stderr = start(workspace, mounted=mounted)
    assert (code, stderr.count("\n")) == (2, 1), stderr
    assert said in stderr


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    (folder / ".secrets").mkdir(parents=True)
    for path in (folder, folder / ".secrets"):
        os.chown(path, 4321, 4321)
    (folder / ".secrets").chmod(0o700)
    return folder


@pytest.mark.parametrize(
    ("name", "target", "mounted"),
    [
        ("jupyter_token", "/etc/shadow", True),
        ("authorized_keys", "/workspace/.env", True),
        ("id_ed25519", "/etc/trainstation/hostkeys/ssh_host_ed25519_key", True),
        ("jupyter_token", "/etc/ld.so.preload", False),
        ("notify", "/etc/shadow", True),
    ],
)
def test_a_link_among_the_secrets_is_refused_by_name(workspace: Path, name: str, target: str, mounted: bool) -> None:
    (workspace / ".secrets" / name).symlink_to(target)
    refused(workspace, f".secrets/{name} is a link", mounted)
    assert sorted(path.name for path in workspace.rglob("*")) == [".secrets", name]


def test_what_is_no_plain_file_or_folder_is_refused(workspace: Path) -> None:
    secrets = workspace / ".secrets"
    os.mkfifo(secrets / "jupyter_token")
    refused(workspace, "jupyter_token")
    (secrets / "jupyter_token").unlink()
    (workspace / "file").write_text("0123456789abcdef0123456789\n")
    os.chown(workspace / "file", 4321, 4321)
    (secrets / "jupyter_token").hardlink_to(workspace / "file")
    refused(workspace, "is a second name of another file")
    (secrets / "jupyter_token").unlink()
    secrets.rmdir()
    secrets.symlink_to("/root")
    refused(workspace, ".secrets must be a folder and no link", mounted=False)


def test_files_that_cannot_be_meant_are_refused(workspace: Path) -> None:
    for name, text, said in (
        ("jupyter_token", "short", "must be 16 or more"),
        ("authorized_keys", "not a key\n", "holds no public key"),
    ):
        path = workspace / ".secrets" / name
        path.write_text(text)
        os.chown(path, 4321, 4321)
        refused(workspace, said)
        path.unlink()


@pytest.mark.parametrize("mounted", [True, False])
def test_token_and_keys_are_made_where_there_are_none(workspace: Path, mounted: bool) -> None:
    """As docker compose without make finds it: a folder that the engine made, or none at all."""
    name = f"station-test-{os.getpid()}-fresh"
    secrets = workspace / ".secrets"
    if mounted:
        os.chown(secrets, 0, 0)
        secrets.chmod(0o755)
    else:
        secrets.rmdir()
    try:
        start(workspace, "-d", "--name", name, mounted=mounted)
        files = [secrets / f for f in ("authorized_keys", "id_ed25519", "id_ed25519.pub", "jupyter_token")]
        eventually("they are made", lambda: all(path.exists() for path in files))
        assert {path.stat().st_uid for path in [secrets, *files]} == {4321}
        assert {path.stat().st_mode & 0o077 for path in [secrets, *files]} == {0}
        assert files[0].read_text() == files[2].read_text()
    finally:
        run("docker", "rm", "-f", name)


def test_secrets_are_closed_to_others_whoever_made_them(workspace: Path) -> None:
    name, secrets = f"station-test-{os.getpid()}-open", workspace / ".secrets"
    (secrets / "grafana_password").write_text("hush")
    secrets.chmod(0o755)
    (secrets / "grafana_password").chmod(0o644)
    os.chown(secrets / "grafana_password", 4321, 4321)
    try:
        start(workspace, "-d", "--name", name)
        eventually("it is closed", lambda: not secrets.stat().st_mode & 0o077)
        eventually("so is the file", lambda: (secrets / "grafana_password").stat().st_mode & 0o777 == 0o600)
        assert run("docker", "logs", name).stderr.count("was open to others") == 1
    finally:
        run("docker", "rm", "-f", name)


def test_two_stations_that_start_at_once_share_key_and_token(workspace: Path) -> None:
    volume = run("docker", "volume", "create").stdout.strip()
    names = [f"{volume[:12]}-{number}" for number in range(3)]
    shared = ("-v", f"{volume}:/etc/trainstation/hostkeys", "-v", f"{workspace}/.secrets:{SECRETS}", *HIDDEN)

    def fingerprints(name: str) -> str:
        files = "/etc/trainstation/hostkeys/ssh_host_ed25519_key /run/trainstation/jupyter_token"
        line = f"sha256sum {files} && /usr/local/lib/trainstation/authorized-keys | sha256sum"
        return run("docker", "exec", name, "bash", "-c", line, check=False).stdout

    try:
        # A third one holds what the two need to make them, until both stand before it.
        held = ("--entrypoint", "flock", "trainstation:runtime", "/etc/trainstation/hostkeys", "sleep", "infinity")
        run("docker", "run", "-d", "--init", "--name", names[0], *shared, *held)
        for name in names[1:]:
            run("docker", "run", "-d", "--name", name, *shared, "trainstation:runtime")
            eventually("it waits", lambda name=name: "flock" in run("docker", "top", name).stdout)
        assert not any(fingerprints(name) for name in names[1:])
        run("docker", "rm", "-f", names[0])
        for name in names[1:]:
            eventually("it has started", lambda name=name: fingerprints(name).count("\n") == 3)
        assert len({fingerprints(name) for name in names[1:]}) == 1
    finally:
        run("docker", "rm", "-f", *names, check=False)
        run("docker", "volume", "rm", volume, check=False)
