"""sshd on 2222: keys only, dev only, and a run outlives the connection that launched it."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from conftest import ROOT, Station, Terminal, run, steps_on

from tests.ports import free_port
from tests.waiting import eventually

pytestmark = pytest.mark.never_forgiven

BATCH = ["-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-o", "ConnectTimeout=20"]


def attempt(station: Station, *options: str, user: str = "dev", **settings: object) -> subprocess.CompletedProcess[str]:
    """An ssh attempt that knows the host but has no key unless the options give one."""
    known = f"UserKnownHostsFile={station.folder}/.secrets/known_hosts"
    where = ["-p", str(station.ssh_port), "-o", known, "-o", "IdentityFile=none", "-F", "none"]
    return run("ssh", *BATCH, *where, *options, f"{user}@127.0.0.1", "id -un", check=False, **settings)


@pytest.fixture
def known(station: Station) -> Station:
    station.make("ssh-command")  # writes the host key where ssh looks
    return station


def test_another_key_is_refused(known: Station, tmp_path: Path) -> None:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other"))
    done = attempt(known, "-i", str(tmp_path / "other"))
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


def test_root_is_refused_with_the_right_key(known: Station) -> None:
    done = attempt(known, "-i", f"{known.folder}/.secrets/id_ed25519", user="root")
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


def test_passwords_are_not_even_asked_for(known: Station, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    helper = tmp_path / "askpass"
    helper.write_text(f"#!/bin/sh\ntouch {asked}\necho dev\n")
    helper.chmod(0o755)
    env = {**os.environ, "SSH_ASKPASS": str(helper), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}
    ways = "PreferredAuthentications=password,keyboard-interactive"
    done = attempt(known, "-o", "BatchMode=no", "-o", ways, env=env)
    assert done.returncode == 255
    assert not asked.exists()


def test_ssh_audit_finds_no_weak_algorithm(station: Station) -> None:
    done = run("ssh-audit", "--json", "-p", str(station.ssh_port), "127.0.0.1", check=False)
    found = json.loads(done.stdout)
    weak = [
        f"{kind} {entry['algorithm']}: {entry['notes']['fail']}"
        for kind in ("kex", "key", "enc", "mac")
        for entry in found[kind]
        if entry.get("notes", {}).get("fail")
    ]
    assert not weak
    assert all(found[kind] for kind in ("kex", "key", "enc", "mac"))
    assert done.returncode in (0, 2), done.stdout  # 2: warnings; 3: failures


def test_the_host_key_stays_the_same_when_image_and_container_are_made_anew(station: Station) -> None:
    def host_key() -> str:
        done = run("ssh-keyscan", "-t", "ed25519", "-p", str(station.ssh_port), "127.0.0.1")
        return done.stdout.split()[-1]

    before = host_key()
    station.make("down")
    station.make("rebuild")
    assert host_key() == before


def test_sftp_puts_and_gets_files(known: Station, tmp_path: Path) -> None:
    sent, back = tmp_path / "sent", tmp_path / "back"
    sent.write_text("over sftp\n")
    words = known.ssh_words
    options = [w if w != "-p" else "-P" for w in words[1:]]
    there = "/workspace/runs/over-sftp"
    run("sftp", "-b", "-", *options, input=f"put {sent} {there}\nget {there} {back}\nrm {there}\n")
    assert back.read_text() == "over sftp\n"


def test_a_command_begins_where_a_login_does_and_files_are_named_from_home(known: Station) -> None:
    assert known.ssh("pwd").stdout == "/workspace\n"
    assert known.ssh("cd && bash -c pwd").stdout == "/home/dev\n"
    options = [word if word != "-p" else "-P" for word in known.ssh_words[1:]]
    assert run("sftp", "-b", "-", *options, input="pwd\n").stdout.endswith("directory: /home/dev\n")
    here, there = f"{known.folder}/pyproject.toml", options.pop()
    for program in (["scp"], ["scp", "-O"]):
        run(*program, *options, here, f"{there}:copied")
        assert known.ssh("mv ~/copied ~/moved && ls ~/moved").stdout == "/home/dev/moved\n"
        for folder in ("projects", "notebooks", "runs", "datasets"):
            run(*program, *options, here, f"{there}:{folder}/")
            (known.folder / folder / "pyproject.toml").unlink()


def test_tcp_forwarding_works_as_editors_need_it(known: Station) -> None:
    port = free_port()
    words = known.ssh_words
    tunnel = subprocess.Popen([words[0], "-N", "-L", f"{port}:127.0.0.1:8888", *words[1:]], stderr=subprocess.DEVNULL)
    try:

        def answers() -> bool:
            done = run("curl", "-s", "-I", "-X", "GET", f"http://127.0.0.1:{port}/login", check=False)
            return " 200 " in done.stdout

        eventually("JupyterLab answers through the tunnel", answers)
    finally:
        tunnel.terminate()
        tunnel.wait()


def test_a_run_goes_on_after_the_connection_is_cut_and_attach_finds_it(station: Station) -> None:
    name = "outlives-ssh"
    words = station.ssh_words
    command = f"train launch digits --name {name} --nproc 1 --epochs 100000 --log.every_steps 50 --follow"
    with Terminal(words[0], "-tt", *words[1:], command):
        eventually("the run makes steps", lambda: int(station.show(name).get("step") or 0) > 0)
    steps_on(station, name)  # the connection is gone

    with Terminal(words[0], "-tt", *words[1:], f"TERM=xterm train attach {name}") as attached:
        attached.wait_for("loss")
    steps_on(station, name)
    station.dev("train", "stop", name)
    assert station.show(name)["state"] == "stopped"


@pytest.mark.turns
def test_a_root_owned_checkout_works_as_a_user_the_host_does_not_know(make_station: Callable[..., Station]) -> None:
    if os.getuid() != 0:
        pytest.fail("this test makes a checkout that belongs to root: run make test-image as root")
    mine = make_station("rootowned", owner=None)
    for path in [mine.folder, *mine.folder.rglob("*")]:
        os.chown(path, 0, 0, follow_symlinks=False)
    printed = mine.make("up").stdout
    assert "inside, dev is user 52761, which this machine does not know" in printed
    assert mine.ssh("id -u").stdout == "52761\n"
    mine.ssh("touch /workspace/runs/made")
    assert (mine.folder / "runs" / "made").stat().st_uid == 52761
    assert "/workspace belongs to root: dev is user 52761, which now owns runs/, notebooks/ and projects/" in mine.log
    # what JupyterLab's launcher does where it opens
    session = requests.Session()
    session.headers["Authorization"] = f"token {mine.token}"
    opens = session.get(f"{mine.url}/lab").text.partition('"preferredPath": "')[2].partition('"')[0]
    made = session.post(f"{mine.url}/api/contents/{opens}", json={"type": "notebook"})
    assert made.ok, made.text
    assert (mine.folder / opens / "Untitled.ipynb").stat().st_uid == 52761
    # a person works in copies of the course, and in notebooks of their own
    name, contents = "01-the-station.ipynb", f"{mine.url}/api/contents"
    content = session.get(f"{contents}/{opens}/{name}").json()["content"]
    assert not any(cell.get("outputs") for cell in content["cells"]), "they would look like the person's own"
    body = {"type": "notebook", "format": "json", "content": content}
    content["cells"][0]["source"] += " mine"
    assert session.put(f"{contents}/{opens}/{name}", json=body).ok
    copy, original = mine.folder / opens / name, mine.folder / "notebooks" / name
    assert " mine" in copy.read_text() and copy.stat().st_uid == 52761
    for folder in ("", "zh/"):
        refused = session.put(f"{contents}/notebooks/{folder}{name}", json=body)
        expected = f"notebooks/{folder}{name} is the original: open your copy, projects/course/{folder}{name}"
        assert refused.status_code == 403 and expected in refused.json()["message"]
        assert (mine.folder / "projects" / "course" / folder / name).is_file()
    assert " mine" not in original.read_text()
    assert session.put(f"{contents}/notebooks/01-start-here.ipynb", json=body).ok
    # a person's coding agents find a page, which a person may change
    pages = [mine.folder / "projects" / "AGENTS.md", Path("/home/dev/AGENTS.md")]
    assert pages[0].stat().st_uid == 52761 and pages[0].read_text().startswith("# For coding agents")
    assert mine.ssh(f"cat {pages[1]}").stdout == pages[0].read_text()
    mine.ssh(f"echo mine >{pages[1]}; echo mine >/workspace/projects/AGENTS.md")
    mine.make("down", "up")
    assert mine.ssh(f"cat {pages[1]} /workspace/projects/AGENTS.md").stdout == "mine\nmine\n"
    assert " mine" in copy.read_text(), "a start has replaced a person's file"
    assert not (mine.folder / opens / "01-start-here.ipynb").exists(), "it is no part of the course"
    for path in (f"{opens}/{name}", "notebooks/01-start-here.ipynb"):
        ignored = run("git", "check-ignore", "--no-index", path, cwd=ROOT).stdout
        assert ignored.strip() == path  # git pull and records of runs do not see it
    assert (mine.folder / "train" / "__init__.py").stat().st_uid == 0
    mine.make("down")
