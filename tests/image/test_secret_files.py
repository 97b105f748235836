"""The folder with token and keys: made where there is none, and nothing in it is followed to another file."""

import os
from pathlib import Path

import pytest
from conftest import run, until

SECRETS = "/etc/trainstation/private/secrets"


def start(workspace: Path, *options: str, mounted: bool) -> tuple[int, str]:
    """The services, in a container as compose starts it, or with nothing but the workspace mounted."""
    words = ["-v", f"{workspace}:/workspace"]
    if mounted:
        words += ["-v", f"{workspace}/.secrets:{SECRETS}", "--tmpfs", "/workspace/.secrets:mode=500"]
    done = run("docker", "run", "--rm", *words, *options, "trainstation:runtime", check=False)
    return done.returncode, done.stderr


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    (folder / ".secrets").mkdir(parents=True)
    for path in (folder, folder / ".secrets"):
        os.chown(path, 4321, 4321)
    (folder / ".secrets").chmod(0o700)
    return folder


TARGETS = ("/etc/ld.so.preload", "/etc/shadow", "/etc/trainstation/hostkeys/ssh_host_ed25519_key", "/workspace/.env")


@pytest.mark.parametrize("mounted", [True, False])
@pytest.mark.parametrize("name", ["jupyter_token", "authorized_keys", "id_ed25519", "id_ed25519.pub", "known_hosts"])
def test_a_link_among_the_secrets_is_refused_by_name(workspace: Path, name: str, mounted: bool) -> None:
    for target in TARGETS[:: 1 if mounted else 2]:
        link = workspace / ".secrets" / name
        link.symlink_to(target)
        code, said = start(workspace, mounted=mounted)
        assert (code, said.count("\n")) == (2, 1), said
        assert f".secrets/{name} is a link" in said
        link.unlink()
    assert sorted(path.name for path in workspace.rglob("*")) == [".secrets"]


def test_a_folder_of_secrets_that_is_a_link_is_refused(workspace: Path) -> None:
    (workspace / ".secrets").rmdir()
    (workspace / ".secrets").symlink_to("/root")
    code, said = start(workspace, mounted=False)
    assert (code, said.count("\n")) == (2, 1), said
    assert ".secrets has to be a folder, and no link" in said


def test_a_pipe_or_a_second_name_among_the_secrets_is_refused(workspace: Path) -> None:
    os.mkfifo(workspace / ".secrets" / "jupyter_token")
    code, said = start(workspace, mounted=True)
    assert (code, said.count("\n")) == (2, 1), said
    (workspace / ".secrets" / "jupyter_token").unlink()
    (workspace / "file").write_text("0123456789abcdef0123456789\n")
    os.chown(workspace / "file", 4321, 4321)
    (workspace / ".secrets" / "jupyter_token").hardlink_to(workspace / "file")
    code, said = start(workspace, mounted=True)
    assert (code, said.count("\n")) == (2, 1), said
    assert "is a second name of another file" in said


@pytest.mark.parametrize("mounted", [True, False])
def test_token_and_keys_are_made_where_there_are_none(workspace: Path, mounted: bool) -> None:
    """As docker compose without make finds it: a folder that the engine made, or none at all."""
    name = f"station-test-{os.getpid()}-fresh"
    options = ("-d", "--name", name)
    if mounted:
        os.chown(workspace / ".secrets", 0, 0)
    else:
        (workspace / ".secrets").rmdir()
    try:
        start(workspace, *options, mounted=mounted)
        files = [
            workspace / ".secrets" / f for f in ("authorized_keys", "id_ed25519", "id_ed25519.pub", "jupyter_token")
        ]
        until("they are made", lambda: all(path.exists() for path in files))
        assert {path.stat().st_uid for path in [workspace / ".secrets", *files]} == {4321}
        assert {path.stat().st_mode & 0o077 for path in [workspace / ".secrets", *files]} == {0}
        assert files[0].read_text() == files[2].read_text()
    finally:
        run("docker", "rm", "-f", name)
