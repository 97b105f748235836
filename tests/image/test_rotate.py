"""Who may come in changes while runs go on: keys by themselves, and `make rotate` when somebody leaves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from conftest import Station, run, steps_on
from jupyter import Client

from tests.waiting import eventually

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

BACKDOORS = {
    ".jupyter/jupyter_server_config.py": "print('TOKEN', open('/run/trainstation/jupyter_token').read(), flush=True)",
    ".local/lib/python3.11/site-packages/usercustomize.py": "open('/tmp/token', 'a').write('x')",
    ".local/bin/evil": "",
    ".local/share/jupyter/kernels/evil/kernel.json": "{}",
    ".ipython/profile_default/startup/00.py": "",
    ".config/git/config": "",
    ".ssh/rc": "",
    ".bashrc": "touch /tmp/token",
    ".tmux.conf": "",
    "bin/evil": "",
}


DISGUISED = {
    "exec -a": "exec -a 'train-rank 1 of 2: on' bash -c 'while :; do sleep 1; : 24681; done'",
    "a tmux server": "tmux -f /dev/null -L train-0 new-session -d -s train.launcher.agent 'sleep 24682'",
    "a child of a run": "exec -a train-zygote bash -c '(exec -a train-rank sleep 24683) & wait'",
    "a keeper": "exec -a 'python3 service.py keeper ' sleep 24684",
    "what ignores signals": "trap '' TERM HUP; while :; do sleep 1 & wait; : 24685; done",
}
"""Processes of who leaves that look like those of runs."""


@pytest.fixture(scope="module")
def mine(make_station: Callable[..., Station]) -> Iterator[Station]:
    station = make_station("rotate", BIND_ADDRESS="0.0.0.0")
    station.first_up = station.make("up")  # type: ignore[attr-defined]
    station.dev("train", "launch", "digits", "--name", "on", "--nproc", "2", "--epochs", "1000000")
    yield station
    station.dev("train", "stop", "on", "--now", check=False)


def log_in(station: Station, key: Path) -> int:
    words = [word for word in station.ssh_words if word != "-i" and not word.endswith("/id_ed25519")]
    options = ("-i", str(key), "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes")
    return run(words[0], *options, *words[1:], "true", check=False).returncode


def attempts(station: Station) -> tuple[int, object]:
    shown = station.show("on")
    return len(shown["attempts"]), shown["state"]  # type: ignore[arg-type]


def ps(station: Station) -> str:
    return station.root("ps", "-eo", "args").stdout


def pids_of_dev(station: Station) -> set[str]:
    return set(station.root("ps", "-u", "dev", "-o", "pid=").stdout.split())


def test_a_key_counts_from_the_moment_that_it_is_added_and_no_longer_than_it_is_there(
    mine: Station, tmp_path: Path
) -> None:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other"))
    keys, before = mine.folder / ".secrets" / "authorized_keys", attempts(mine)
    kept = keys.read_text()
    assert log_in(mine, tmp_path / "other") == 255
    keys.write_text(kept + (tmp_path / "other.pub").read_text())
    assert log_in(mine, tmp_path / "other") == 0
    keys.write_text(kept)
    assert log_in(mine, tmp_path / "other") == 255
    assert mine.ssh("id -un").stdout == "dev\n"
    assert attempts(mine) == before


def test_who_has_left_is_out_and_runs_go_on(mine: Station, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text((mine.folder / ".secrets" / "id_ed25519").read_text())
    old.chmod(0o600)
    token, before = mine.token, attempts(mine)
    for name, text in BACKDOORS.items():
        line = f'mkdir -p "$(dirname ~/{name})" && cat >~/{name}'
        who = ("--interactive", "--user", "dev", "--env", "HOME=/home/dev")
        run("docker", "exec", *who, mine.container, "bash", "-c", line, input=text)
    client = Client(mine)
    kernel = client.request("POST", "/api/kernels").json()["id"]
    client.request("POST", "/api/terminals")
    mine.dev("bash", "-c", "setsid nohup sleep 98765 >/dev/null 2>&1 & touch ~/kept.txt")
    mine.dev("rm", "-f", "/tmp/token")
    for line in DISGUISED.values():
        run("docker", "exec", "--detach", "--user", "dev", mine.container, "bash", "-c", line)
    eventually("they all run", lambda: set("12345") <= set(re.findall(r"\b2468(\d)", ps(mine))))
    old_processes = pids_of_dev(mine)

    printed = mine.make("rotate").stdout
    for name in (".jupyter", ".local/lib", ".local/bin", ".ipython", ".config", ".ssh", ".bashrc", ".tmux.conf", "bin"):
        assert f" {name}" in printed
        assert mine.dev("bash", "-c", f"cat ~/set-aside-*/{name} || ls ~/set-aside-*/{name}").returncode == 0
    assert "saved, and resumed by the keeper with the code in their folders: on" in printed
    assert "/?token=" in printed

    assert mine.token != token
    assert mine.token not in mine.log
    assert requests.get(f"{mine.url}/api/kernels?token={token}", timeout=60).status_code == 403
    assert Client(mine).request("GET", "/api/kernels").json() == []
    assert Client(mine).request("GET", "/api/terminals").json() == []
    running = ps(mine)
    assert kernel not in running
    assert "98765" not in running and "2468" not in running
    assert not pids_of_dev(mine) & old_processes
    assert log_in(mine, old) == 255
    assert mine.ssh("id -un; ls ~/kept.txt").stdout == "dev\n/home/dev/kept.txt\n"
    assert mine.dev("ls", "/tmp/token", check=False).returncode != 0
    eventually("the keeper resumes the run", lambda: attempts(mine) == (before[0] + 1, "running"))
    steps_on(mine, "on")
    mine.wait_healthy()


def test_who_reads_one_line_of_the_status_gets_no_error(mine: Station) -> None:
    for line in ("make -s status | head -n 1", "make -s logs | head -n 1", "make -s status | (sleep 1; true)"):
        piped = run("bash", "-c", f"{line}; echo ${{PIPESTATUS[0]}}", cwd=mine.folder, env=mine.env)
        assert piped.stdout.splitlines()[-1] == "0" and piped.stderr == "", piped.stderr


STEERS = "import sys; print(chr(27) + '[31m' + chr(155) + '2J', file=sys.stderr); print(chr(27) + ']0;mine' + chr(7))"


def test_what_dev_prints_does_not_steer_the_terminal_of_the_host(mine: Station) -> None:
    site = "/home/dev/.local/lib/python3.11/site-packages"
    mine.dev("bash", "-c", f'mkdir -p {site} && echo "{STEERS}" >{site}/usercustomize.py')
    try:
        assert "\x1b[31m" in mine.dev("train", "ls").stderr
        listed = run("scripts/train", "ls", cwd=mine.folder, env=mine.env)
        for text in (mine.make("status").stdout, mine.make("logs").stdout, listed.stdout, listed.stderr):
            assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", text)
        assert "\non " in listed.stdout
        assert run("scripts/train", "show", "none", cwd=mine.folder, env=mine.env, check=False).returncode == 2
    finally:
        mine.dev("rm", f"{site}/usercustomize.py")


def test_addresses_that_a_colleague_can_open(mine: Station) -> None:
    address = run("ip", "-o", "-4", "route", "get", "192.0.2.1").stdout.partition("src ")[2].split()[0]
    for printed in (mine.first_up.stdout, mine.make("url").stdout):  # type: ignore[attr-defined]
        assert "plain HTTP" in printed
        assert f"http://{address}:{mine.jupyter_port}/?token=" in printed
        assert f"ssh -p {mine.ssh_port} dev@{address}" in printed
    found = re.findall(r"http://([0-9.]+):\d+/\?", mine.make("url").stdout)
    for one in found:
        assert requests.get(f"http://{one}:{mine.jupyter_port}/login", timeout=60).ok


def test_a_station_takes_half_of_the_processes_that_the_machine_can_have_at_most(mine: Station) -> None:
    numbers = [int(Path(f"/proc/sys/kernel/{name}").read_text()) for name in ("pid_max", "threads-max")]
    assert int(mine.inspect("{{.HostConfig.PidsLimit}}")) == min(32768, min(numbers) // 2)
