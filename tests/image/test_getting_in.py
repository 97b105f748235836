"""People get in: past connections that say nothing, and past files in the home folder that let nobody in."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from conftest import Station, Terminal

from tests.waiting import eventually


@pytest.fixture
def crowd(station: Station) -> Iterator[list[socket.socket]]:
    """Sixty connections to sshd's port that never say a word."""
    station.make("ssh-command")
    with ExitStack() as held:
        yield [
            held.enter_context(socket.create_connection(("127.0.0.1", station.ssh_port), timeout=20)) for _ in range(60)
        ]
    eventually("sshd has let them go", lambda: "sshd: [accepted]" not in station.root("ps", "-eo", "args").stdout)


def test_sixty_silent_connections_lock_nobody_out_and_health_stays(
    station: Station, crowd: list[socket.socket]
) -> None:
    banners = [connection.recv(64) for connection in crowd]  # each of them was let in
    assert {banner[:8] for banner in banners} == {b"SSH-2.0-"}
    for _ in range(5):
        assert station.ssh("id -un").stdout == "dev\n"
        assert station.health() == "healthy"


def test_health_notices_an_sshd_that_takes_no_connections(station: Station) -> None:
    pid = str(station.service_pid("sshd"))
    station.root("kill", "-STOP", pid)
    try:
        done = station.root("station-health", check=False)
        assert done.returncode == 1
        assert done.stdout.startswith("sshd does not")
    finally:
        station.root("kill", "-CONT", pid)
    station.wait_healthy()


def test_a_person_at_a_terminal_is_greeted_and_a_command_is_not(station: Station) -> None:
    greeting = station.root("cat", "/etc/trainstation/greeting").stdout
    assert len(greeting.splitlines()) == 3
    words = station.ssh_words
    for ways in ((words[0], "-tt", *words[1:]), ("make", "-s", "shell")):
        with Terminal(*ways, cwd=station.folder, env=station.env) as terminal:
            terminal.wait_for("$ ")
            assert greeting in terminal.read().replace("\r\n", "\n")
            terminal.type("tmux -L greeting new-session 'bash --login'")
            terminal.wait_for("0:bash")
            terminal.type("exit")
            assert terminal.read().count("Trainstation:") == 1
    assert station.ssh("echo only this").stdout == "only this\n"
    assert station.ssh("bash -lc 'echo only this'").stdout == "only this\n"


def test_make_shell_gets_in_whatever_bashrc_does(station: Station) -> None:
    write = "cp -n ~/.bashrc ~/.kept; mkdir -p ~/.ssh; echo exit >~/.bashrc; echo exit >~/.ssh/rc"
    station.dev("sh", "-c", write)
    try:
        with Terminal("make", "-s", "shell", "ARGS=--noprofile", cwd=station.folder, env=station.env) as terminal:
            terminal.wait_for("$ ")
            terminal.type("echo I am $(id -un), $((40 + 2))")
            terminal.wait_for("I am dev, 42")
    finally:
        station.dev("sh", "-c", "mv -f ~/.kept ~/.bashrc; rm -f ~/.ssh/rc")
